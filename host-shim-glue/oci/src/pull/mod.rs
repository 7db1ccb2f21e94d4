//! Container images, from wherever they are, as OCI image layouts.
//!
//! An image is chosen for one platform, every byte of it is verified while it
//! goes to the disk, and the directory with it has its name only when all of it
//! is there. Where an image comes from, and all that it says of itself, is not
//! trusted: see `limits` and `document`.

mod archive;
mod choose;
pub mod docker;
mod document;
mod entry_name;
mod error;
mod layout;
mod limits;
mod origin;
mod platform;
mod reference;
mod registry;
mod staging;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use firstlight_progress::{Bar, Progress, megabytes};
use serde::Serialize;

pub use document::{Descriptor, Digest};
pub use error::Error;
pub use platform::Platform;
pub use reference::{Remote, Source, Which};
pub use registry::{Credentials, Patience};

use choose::Chosen;
use document::{Config, REF_NAME};
use layout::Layout;
use origin::Origin;
use registry::Registry;
use staging::Staging;

/// What is wanted.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Where the image is.
    pub source: &'a Source,
    /// The directory that it becomes.
    pub out: &'a Path,
    /// For which machine.
    pub platform: &'a Platform,
    /// Whether a registry may be asked without TLS. One on the loopback may always.
    pub plain_http: bool,
    /// Who we are to registries.
    pub credentials: &'a Credentials,
    /// How often a registry is asked again.
    pub patience: Patience,
    /// Where long steps are announced.
    pub progress: Progress,
}

/// An image that was pulled.
#[derive(Debug, Serialize)]
pub struct Pulled {
    /// The layout.
    pub out: PathBuf,
    /// Its manifest.
    pub digest: Digest,
    /// What the manifest is.
    pub media_type: String,
    /// For which machine it is.
    pub platform: Platform,
    /// Its configuration.
    pub config: Descriptor,
    /// Its layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// Bytes of all its blobs.
    pub bytes: u64,
    /// Blobs that were brought; none if all were there.
    pub fetched: usize,
}

/// Pulls an image.
///
/// # Errors
/// It cannot be had, is not what its digests say, is of a kind that is not
/// supported, or there is none for the platform. `out` then is as it was.
pub fn pull(wanted: &Wanted<'_>) -> Result<Pulled, Error> {
    let mut staging = Staging::begin(wanted.out, wanted.progress)?;
    let parts = staging.parts();
    match wanted.source {
        Source::Layout { path, reference } => {
            let mut layout = Layout::open(path, reference.as_deref(), &parts)?;
            bring(&mut layout, staging, wanted)
        }
        Source::Registry(remote) => {
            let mut registry = Registry::new(remote, wanted)?;
            bring(&mut registry, staging, wanted)
        }
        Source::DockerArchive { path, reference } => {
            let chosen = docker::import(path, reference.as_deref(), wanted.platform, &mut staging, wanted.progress)?;
            let fetched = chosen.manifest.layers.len() + 1;
            finish(chosen, fetched, staging, wanted, &path.display().to_string())
        }
    }
}

/// Brings what is missing of the image that is chosen.
fn bring(origin: &mut dyn Origin, mut staging: Staging, wanted: &Wanted<'_>) -> Result<Pulled, Error> {
    let chosen = choose::choose(origin, wanted.platform)?;
    let progress = wanted.progress;
    let object = origin.object(&chosen.descriptor);
    progress.say(format_args!("{object}: image {}", chosen.descriptor.digest));
    let manifest = &chosen.manifest;
    let mut fetched = 0;
    // The configuration first: it is small and says whether this is the right image.
    for (number, blob) in [&manifest.config].into_iter().chain(&manifest.layers).enumerate() {
        let what = match number {
            0 => "configuration".to_owned(),
            number => format!("layer {number} of {}", manifest.layers.len()),
        };
        if staging.has(blob)? {
            progress.say(format_args!("{what}: {} is there already", blob.digest.short()));
        } else {
            progress.say(format_args!("{what}: {} {}", blob.digest.short(), megabytes(blob.size)));
            staging.show(|| progress.bytes(format!("{what} {}", blob.digest.short()), blob.size));
            origin.fetch(blob, &mut staging)?;
            staging.show(Bar::none);
            fetched += 1;
        }
        if number == 0 {
            platform_of(&chosen, &staging, wanted, &object)?;
        }
    }
    staging.put(&chosen.bytes)?;
    finish(chosen, fetched, staging, wanted, &object)
}

/// For which machine the image says to be.
fn platform_of(chosen: &Chosen, staging: &Staging, wanted: &Wanted<'_>, object: &str) -> Result<Platform, Error> {
    let object = format!("{object}: {}", chosen.manifest.config.digest);
    let bytes = staging.read(&chosen.manifest.config.digest)?;
    let config = Config::read(&bytes, &object, chosen.manifest.layers.len())?;
    // Variants are often left out of one of the two.
    let same =
        |named: &&Platform| (&named.os, &named.architecture) == (&config.platform.os, &config.platform.architecture);
    let named = chosen.descriptor.platform.as_ref().filter(same);
    if let Some(named) = named.filter(|named| named.serves(wanted.platform)) {
        return Ok(named.clone());
    }
    if config.platform.serves(wanted.platform) {
        return Ok(config.platform);
    }
    Err(Error::Platform { object, wanted: wanted.platform.to_string(), found: config.platform.to_string() })
}

fn finish(
    mut chosen: Chosen,
    fetched: usize,
    staging: Staging,
    wanted: &Wanted<'_>,
    object: &str,
) -> Result<Pulled, Error> {
    let platform = platform_of(&chosen, &staging, wanted, object)?;
    // Of what others wrote about it only the name goes into our index.
    let name = chosen.descriptor.annotations.remove(REF_NAME).or_else(|| wanted.source.tag());
    chosen.descriptor.annotations = name.map(|name| (REF_NAME.to_owned(), name)).into_iter().collect();
    chosen.descriptor.platform = Some(platform.clone());
    let Chosen { descriptor, manifest, .. } = chosen;
    let blobs: BTreeSet<Digest> =
        [&manifest.config, &descriptor].into_iter().chain(&manifest.layers).map(|blob| blob.digest.clone()).collect();
    staging.finish(&descriptor, &blobs)?;
    let bytes = [&manifest.config, &descriptor].into_iter().chain(&manifest.layers).map(|blob| blob.size).sum();
    Ok(Pulled {
        out: wanted.out.to_owned(),
        digest: descriptor.digest,
        media_type: manifest.media_type,
        platform,
        config: manifest.config,
        layers: manifest.layers,
        bytes,
        fetched,
    })
}
