//! Builds guest images from a manifest.
//!
//! A manifest lists a kernel package, the requested modules and the files of the image;
//! [`image::build`] turns it into a kernel, an initial RAM file system or a disk, and `image.json`,
//! which lists every package and every file with its hash. Builds are reproducible and do not need
//! root.
//!
//! Each module uses only modules above it in this list (`cargo xtask check` verifies it):
//!
//! | module | contents | uses |
//! |---|---|---|
//! | [`cache`] | cache directory, digests of cached files | |
//! | [`packages`] | apt, `.deb` files, lock file, store, programs from packages | `cache` |
//! | [`kernel`] | kernels and modules from packages or source, their configuration | `cache`, `packages` |
//! | [`tree`] | the files of an image, and the check that their dependencies are in it | `cache`, `kernel` |
//! | [`driver`] | NVIDIA driver: kernel modules, user-space files | all above |
//! | [`format`](mod@format) | cpio, tar, erofs, ext4 and disks with dm-verity: writing and reading | `cache`, `packages`, `tree` |
//! | [`image`] | manifest, build, and record: verification, differences, sizes, SBOM | all above |
#![forbid(unsafe_code)]

pub mod cache;
pub mod driver;
pub mod format;
pub mod image;
pub mod kernel;
pub mod packages;
pub mod tree;
