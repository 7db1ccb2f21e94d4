//! Errors of images.

use std::io;
use std::path::PathBuf;

/// Why an image is unusable.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// A file could not be read or written.
    #[error("image: {path}: {source}")]
    File {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The directory is not an image layout.
    #[error(
        "image: {path} is not an OCI image layout: {reason}; expected a directory with oci-layout, index.json and blobs/, as `firstlight pull` and `skopeo copy ... oci:DIR` write"
    )]
    NotALayout {
        /// The directory.
        path: PathBuf,
        /// The missing file.
        reason: String,
    },
    /// A JSON document of the image is malformed.
    #[error("image: {path}: malformed {kind}: {reason}")]
    Document {
        /// The file.
        path: PathBuf,
        /// The kind of document.
        kind: &'static str,
        /// The parser's error.
        reason: String,
    },
    /// A blob does not match its descriptor.
    #[error("image: blob {digest}: {reason}; the layout is damaged or was tampered with: copy it again")]
    Blob {
        /// Its digest.
        digest: String,
        /// The mismatch.
        reason: String,
    },
    /// The layout has no image for this platform.
    #[error("image: {path} has no image for linux/amd64; it has {found}")]
    Platform {
        /// The layout.
        path: PathBuf,
        /// Its platforms.
        found: String,
    },
    /// A layer cannot be unpacked.
    #[error("image: layer {digest}: entry {entry:?}: {reason}")]
    Entry {
        /// The layer.
        digest: String,
        /// The path inside the layer.
        entry: String,
        /// Why it cannot be unpacked.
        reason: String,
    },
}

impl OciError {
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
