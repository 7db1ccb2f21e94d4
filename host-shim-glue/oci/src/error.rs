//! What can be wrong with an image.

use std::io;
use std::path::PathBuf;

/// Why an image could not be used.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// A file could not be read or written.
    #[error("image: {path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The directory is no image layout.
    #[error(
        "image: {path} is not an OCI image layout: {reason}; expected a directory with oci-layout, index.json and blobs/, as `image-builder pull` and `skopeo copy ... oci:DIR` write"
    )]
    NotALayout {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A JSON document of the image is broken.
    #[error("image: {path}: not a valid {what}: {reason}")]
    Document {
        /// The file.
        path: PathBuf,
        /// What it should be.
        what: &'static str,
        /// What the parser said.
        reason: String,
    },
    /// A blob is not what its digest says.
    #[error("image: blob {digest}: {reason}; the layout is damaged or was tampered with: copy it again")]
    Blob {
        /// Its digest.
        digest: String,
        /// What differs.
        reason: String,
    },
    /// The image is for other machines.
    #[error("image: {path} has nothing for linux/amd64; it has {found}")]
    Platform {
        /// The layout.
        path: PathBuf,
        /// The platforms that it has.
        found: String,
    },
    /// A layer cannot be unpacked.
    #[error("image: layer {digest}: entry {entry:?}: {reason}")]
    Entry {
        /// The layer.
        digest: String,
        /// The path inside the layer.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl OciError {
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
