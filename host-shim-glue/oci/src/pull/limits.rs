//! How much of anything is believed. Everything in an image is somebody
//! else's; real images are far below all of these.

/// An index, a manifest, a configuration, in bytes.
pub(crate) const DOCUMENT: u64 = 4 << 20;
/// Images of an index.
pub(crate) const MANIFESTS: usize = 1024;
/// Layers of an image; overlay file systems mount at most 500.
pub(crate) const LAYERS: usize = 500;
/// One blob.
pub(crate) const BLOB: u64 = 64 << 30;
/// All blobs of an image.
pub(crate) const IMAGE: u64 = 128 << 30;
/// Indexes inside indexes, at most this deep.
pub(crate) const DEPTH: usize = 4;
/// Entries of an archive.
pub(crate) const ENTRIES: usize = 65_536;
/// A gzip-packed archive, unpacked.
pub(crate) const ARCHIVE: u64 = IMAGE;
/// The answer of a token service.
pub(crate) const TOKEN: u64 = 256 << 10;
/// Docker's configuration with credentials.
pub(crate) const CONFIG: u64 = 1 << 20;
/// What a registry says about an error.
pub(crate) const COMPLAINT: u64 = 16 << 10;
/// Redirects of one request.
pub(crate) const REDIRECTS: u32 = 5;
