//! Extracts the configuration of a kernel package without unpacking the kernel.

use std::fs;
use std::path::{Path, PathBuf};

use firstlight_progress::Progress;

use super::{Error, Package, is_kernel_package, only_child};
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::debian::{self, Candidate, PackageRequest};

/// Downloads a kernel package, unless cached, and returns the package and the path of its configuration in the
/// cache.
///
/// # Errors
/// The package is unknown, the download fails, or the package has no `/boot/config-*`.
pub fn package_config(cache: &Path, source: &Package, progress: Progress) -> Result<(Candidate, PathBuf), Error> {
    let mut packages = Packages::new(cache, None, progress);
    let version = source.series.as_deref().map_or(PackageRequest::Newest, PackageRequest::Series);
    let pinned = packages.find_through(&source.suite, &source.package, version, is_kernel_package)?;
    let candidate = pinned.candidate();
    let dir = cache.join("kernels").join(format!("{}-config", &candidate.sha256[..16]));
    cache::publish(&dir, &progress, |half| {
        let incomplete = |what| Error::Incomplete { package: candidate.file_name(), what };
        let label = format!("kernel {}", candidate.upstream_version());
        let deb = packages.fetch_one(&label, &pinned)?;
        let tree = half.join("package");
        fs::create_dir_all(&tree).map_err(io_error("create directory", &tree))?;
        debian::unpack(&deb, &tree, |path| path == Path::new("boot") || is_config(path))?;
        let config = only_child(&tree.join("boot")).ok_or_else(|| incomplete("single boot/config-RELEASE"))?;
        fs::rename(&config, half.join("config")).map_err(io_error("move", &config))?;
        fs::remove_dir_all(&tree).map_err(io_error("remove", &tree))?;
        Ok::<(), Error>(())
    })?;
    Ok((candidate, dir.join("config")))
}

fn is_config(path: &Path) -> bool {
    path.parent() == Some(Path::new("boot"))
        && path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"config-"))
}
