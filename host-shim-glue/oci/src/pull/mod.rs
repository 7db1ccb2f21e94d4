//! Pulling container images as OCI image layouts.
//!
//! An image is read from a registry, an image layout or an archive of `docker save`. One
//! platform is selected, every blob is verified while it is written, and the layout gets
//! its name only when it is complete. Sources and images are untrusted: see `limits` for
//! their sizes, `document` for what is checked.

mod archive;
mod blob_source;
mod digest;
pub mod docker_archive;
mod document;
mod entry_name;
mod error;
mod layout;
mod limits;
mod platform;
mod reference;
mod registry;
mod select;
mod staging;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use firstlight_progress::{Bar, Progress, megabytes};
use oci_spec::image::{ANNOTATION_REF_NAME, Descriptor, Digest, MediaType};
use serde::Serialize;

pub use error::PullError;
pub use platform::Platform;
pub use reference::{Reference, RemoteImage, Source};
pub use registry::{Credentials, RetryPolicy};

use blob_source::BlobSource;
use digest::short;
use document::Config;
use layout::Layout;
use registry::Registry;
use select::{SelectedImage, annotation, select_image, set_name};
use staging::Staging;

/// A request to pull an image.
#[derive(Debug)]
pub struct PullRequest<'a> {
    /// The source of the image.
    pub source: &'a Source,
    /// The directory of the new layout.
    pub out: &'a Path,
    /// The requested platform.
    pub platform: &'a Platform,
    /// Permits HTTP without TLS; to loopback addresses it is always used.
    pub plain_http: bool,
    /// Credentials for registries.
    pub credentials: &'a Credentials,
    /// Retries of failed transfers.
    pub retry: RetryPolicy,
    /// Receives the progress of the pull.
    pub progress: Progress,
}

/// A pulled image.
#[derive(Debug, Serialize)]
pub struct PulledImage {
    /// The directory of the layout.
    pub out: PathBuf,
    /// The digest of the manifest.
    pub digest: Digest,
    /// The media type of the manifest.
    pub media_type: MediaType,
    /// The platform of the image.
    pub platform: Platform,
    /// The configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// The size of all blobs in bytes.
    pub bytes: u64,
    /// The number of blobs that were not yet available in `out` and had to be fetched.
    pub fetched: usize,
}

/// Pulls an image.
///
/// # Errors
/// The source cannot be read, the image does not match its digests, is not supported or
/// exceeds a limit, or there is none for the platform. `out` is unchanged then.
pub fn pull(request: &PullRequest<'_>) -> Result<PulledImage, PullError> {
    let mut staging = Staging::begin(request.out, request.progress)?;
    match request.source {
        Source::Layout { path, reference } => {
            let mut layout = Layout::open(path, reference.as_deref(), &staging.parts())?;
            fetch_missing(&mut layout, staging, request)
        }
        Source::Registry(remote) => {
            let mut registry = Registry::new(remote, request)?;
            fetch_missing(&mut registry, staging, request)
        }
        Source::DockerArchive { path, reference } => {
            let (reference, progress) = (reference.as_deref(), request.progress);
            let image = docker_archive::import(path, reference, request.platform, &mut staging, progress)?;
            let fetched = image.manifest.layers().len() + 1;
            finish(image, fetched, staging, request, &path.display().to_string())
        }
    }
}

/// Selects an image and fetches those of its blobs that are not available yet.
fn fetch_missing(
    source: &mut dyn BlobSource,
    mut staging: Staging,
    request: &PullRequest<'_>,
) -> Result<PulledImage, PullError> {
    let image = select_image(source, request.platform)?;
    let object = source.name();
    request.progress.say(format_args!("{object}: image {}", image.descriptor.digest()));
    let (config, layers) = (image.manifest.config(), image.manifest.layers());
    // The configuration first: it is small, and shows whether the platform is right.
    let mut fetched = usize::from(fetch_if_missing(source, config, "configuration", &mut staging, request.progress)?);
    check_platform(&image, &staging, request, &object)?;
    for (number, layer) in layers.iter().enumerate() {
        let what = format!("layer {} of {}", number + 1, layers.len());
        fetched += usize::from(fetch_if_missing(source, layer, &what, &mut staging, request.progress)?);
    }
    staging.put(&image.bytes)?;
    finish(image, fetched, staging, request, &object)
}

/// Fetches a blob that is not available yet; returns whether it was fetched.
fn fetch_if_missing(
    source: &mut dyn BlobSource,
    blob: &Descriptor,
    what: &str,
    staging: &mut Staging,
    progress: Progress,
) -> Result<bool, PullError> {
    let id = short(blob.digest());
    if staging.has(blob)? {
        progress.say(format_args!("{what}: {id} is already available"));
        return Ok(false);
    }
    progress.say(format_args!("{what}: {id} {}", megabytes(blob.size())));
    staging.show(|| progress.bytes(format!("{what} {id}"), blob.size()));
    source.fetch_blob(blob, staging)?;
    staging.show(Bar::none);
    Ok(true)
}

/// Compares the platform of the configuration with the requested one; returns the more
/// specific one of the index and the configuration.
fn check_platform(
    image: &SelectedImage,
    staging: &Staging,
    request: &PullRequest<'_>,
    object: &str,
) -> Result<Platform, PullError> {
    let digest = image.manifest.config().digest();
    let object = format!("{object}: {digest}");
    let config = Config::parse(&staging.read(digest)?, &object, image.manifest.layers().len())?;
    // Often only one of the two states the variant, so the index counts if it agrees otherwise.
    let stated = image.descriptor.platform().as_ref().map(Platform::from);
    let stated = stated.filter(|stated| stated.has_same_architecture(&config.platform));
    let found = config.platform.to_string();
    let mut candidates = stated.into_iter().chain([config.platform]);
    let matching = candidates.find(|platform| platform.satisfies(request.platform));
    matching.ok_or_else(|| PullError::Platform { object, requested: request.platform.to_string(), found })
}

/// Publishes the layout.
fn finish(
    image: SelectedImage,
    fetched: usize,
    staging: Staging,
    request: &PullRequest<'_>,
    object: &str,
) -> Result<PulledImage, PullError> {
    let platform = check_platform(&image, &staging, request, object)?;
    let name = annotation(&image.descriptor, ANNOTATION_REF_NAME).map(str::to_owned);
    let SelectedImage { descriptor: source, manifest, .. } = &image;
    // A new descriptor: URLs, embedded data and other annotations of the source are untrusted.
    let mut descriptor = Descriptor::new(source.media_type().clone(), source.size(), source.digest().clone());
    set_name(&mut descriptor, name.or_else(|| request.source.tag()));
    descriptor.set_platform(Some(platform.to_oci()));
    let blobs: HashSet<Digest> = image.blobs().map(|blob| blob.digest().clone()).collect();
    let bytes = image.blobs().map(Descriptor::size).sum();
    staging.finish(&descriptor, &blobs)?;
    Ok(PulledImage {
        out: request.out.to_owned(),
        digest: descriptor.digest().clone(),
        media_type: descriptor.media_type().clone(),
        platform,
        config: manifest.config().clone(),
        layers: manifest.layers().clone(),
        bytes,
        fetched,
    })
}
