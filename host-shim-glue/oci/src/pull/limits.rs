//! Limits for untrusted images, archives and responses. Real images are far below all
//! of them.

/// Maximum size of an index, a manifest or a configuration in bytes.
pub(crate) const DOCUMENT: u64 = 4 << 20;
/// Maximum number of images of an index.
pub(crate) const MANIFESTS: usize = 1024;
/// Maximum number of layers of an image; overlayfs mounts at most 500.
pub(crate) const LAYERS: usize = 500;
/// Maximum size of a blob in bytes.
pub(crate) const BLOB: u64 = 64 << 30;
/// Maximum size of all blobs of an image in bytes.
pub(crate) const IMAGE: u64 = 128 << 30;
/// Maximum nesting depth of indexes.
pub(crate) const DEPTH: usize = 4;
/// Maximum number of entries of an archive.
pub(crate) const ENTRIES: usize = 65_536;
/// Maximum size of a decompressed archive in bytes.
pub(crate) const ARCHIVE: u64 = IMAGE;
/// Maximum size of the response of a token service in bytes.
pub(crate) const TOKEN: u64 = 256 << 10;
/// Maximum size of docker's configuration, which has credentials, in bytes.
pub(crate) const CONFIG: u64 = 1 << 20;
/// Maximum number of bytes that are read of a registry's error response.
pub(crate) const ERROR_RESPONSE: u64 = 16 << 10;
/// Maximum number of redirects of a request.
pub(crate) const REDIRECTS: u32 = 5;
