//! OCI image layouts: pulling, reading, verifying, unpacking, creating.
//!
//! A layout is untrusted input: the size and digest of every blob are verified
//! before use, and layers are unpacked relative to directory descriptors, so that
//! no link can escape the target directory.
#![forbid(unsafe_code)]

mod blob;
mod error;
mod image;
mod make;
pub mod pull;
mod tree;
mod unpack;

pub use error::OciError;
pub use image::Image;
pub use make::{File, NewImage};
