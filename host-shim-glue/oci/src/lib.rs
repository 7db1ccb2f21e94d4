//! OCI image layouts: read, checked, unpacked, made.
//!
//! Everything in a layout is somebody else's: every blob's size and digest are
//! checked before it is used, and layers are unpacked by directory
//! descriptors, so that no link in one can lead out of the target directory.
#![forbid(unsafe_code)]

mod blob;
mod error;
mod image;
mod make;
mod tree;
mod unpack;

pub use error::OciError;
pub use image::Image;
pub use make::{File, NewImage};
