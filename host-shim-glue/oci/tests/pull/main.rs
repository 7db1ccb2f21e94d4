//! Pulls from layouts, archives and a registry with errors.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod image;
mod layouts;
mod registry;
mod saved;
mod server;

use std::path::Path;
use std::time::Duration;

use firstlight_oci::pull::{Credentials, PullRequest, PulledImage, RetryPolicy, pull};
use firstlight_progress::Progress;

/// Pulls `source` for linux/amd64 without credentials.
pub(crate) fn pulled(source: &str, out: &Path) -> Result<PulledImage, String> {
    pulled_as(source, out, &Credentials::default(), "linux/amd64")
}

/// Pulls `source`; an error has its causes.
pub(crate) fn pulled_as(
    source: &str,
    out: &Path,
    credentials: &Credentials,
    platform: &str,
) -> Result<PulledImage, String> {
    let (first_delay, max_delay) = (Duration::from_millis(5), Duration::from_millis(20));
    let request = PullRequest {
        source: &source.parse().map_err(|error| format!("{error}"))?,
        out,
        platform: &platform.parse().unwrap(),
        plain_http: false,
        credentials,
        retry: RetryPolicy { attempts: 3, first_delay, max_delay },
        progress: Progress::quiet(),
    };
    pull(&request).map_err(|error| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    })
}

/// Returns the sorted names of the entries of a directory.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
