//! Builds guest images from a manifest.
//!
//! A manifest lists a kernel package, the requested modules and the
//! files of the image; [`build::build`] turns it into a kernel, an initial
//! RAM file system and `image.json`, which lists every package and every file
//! with its hash. Builds are reproducible and do not need root.
#![forbid(unsafe_code)]

pub mod archive;
pub mod build;
pub mod cache;
pub mod closure;
pub mod content;
pub mod cpio;
mod date;
pub mod debian;
pub mod diff;
pub mod digests;
pub mod driver;
pub mod format;
pub mod kernel;
pub mod list;
pub mod lock;
pub mod locked;
pub mod manifest;
pub mod output;
pub mod packages;
pub mod sbom;
pub mod sizes;
pub mod store;
mod tar_names;
pub mod tools;
pub mod tree;
pub mod verify;
