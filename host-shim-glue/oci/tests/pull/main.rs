//! Images pulled from layouts, archives and a registry that misbehaves.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod image;
mod layouts;
mod registry;
mod saved;
mod server;

use std::path::Path;
use std::time::Duration;

use firstlight_oci::pull::{Credentials, Patience, Pulled, Wanted, pull};
use firstlight_progress::Progress;

/// Pulls `source` for linux/amd64 without credentials.
pub(crate) fn pulled(source: &str, out: &Path) -> Result<Pulled, String> {
    pulled_as(source, out, &Credentials::default(), "linux/amd64")
}

pub(crate) fn pulled_as(source: &str, out: &Path, credentials: &Credentials, platform: &str) -> Result<Pulled, String> {
    let patience = Patience { attempts: 3, wait: Duration::from_millis(5), longest: Duration::from_millis(20) };
    let wanted = Wanted {
        source: &source.parse().map_err(|error| format!("{error}"))?,
        out,
        platform: &platform.parse().unwrap(),
        plain_http: false,
        credentials,
        patience,
        progress: Progress::quiet(),
    };
    pull(&wanted).map_err(|error| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    })
}

/// What a directory has, without what is in it.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
