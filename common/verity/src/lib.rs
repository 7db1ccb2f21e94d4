//! Formats shared by guests and image builders for dm-verity disks: the
//! parameters of a hash tree, and the names of extensions.
#![forbid(unsafe_code)]

pub mod extension;
mod params;

pub use params::{MAX_SALT, Params, ParamsError};

/// Block size of data and hashes, bytes.
pub const BLOCK: usize = 4096;
/// Size of a hash, bytes.
pub const DIGEST: usize = 32;

/// A SHA-256 hash.
pub type Hash = [u8; DIGEST];
