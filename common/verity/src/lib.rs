//! What guests and those who build their images say to each other about disks
//! with dm-verity: the parameters of a hash tree, and the names of extensions.
#![forbid(unsafe_code)]

pub mod extension;
mod params;

pub use params::{LONGEST_SALT, Params, ParamsError, bytes_of, hex};

/// Bytes of a block, of data and of hashes.
pub const BLOCK: usize = 4096;
/// Bytes of a hash.
pub const DIGEST: usize = 32;

/// A hash.
pub type Hash = [u8; DIGEST];
