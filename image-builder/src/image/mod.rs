//! Images: the manifest, the build, and what a built image is inspected with.

pub mod archive;
mod build;
mod content;
pub mod diff;
pub mod locked;
pub mod manifest;
mod output;
pub mod sbom;
pub mod sizes;
pub mod verify;

pub use build::{Error, Image, build, build_from, build_with};
