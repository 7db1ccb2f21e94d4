//! A container's bundle: `config.json`, and `rootfs` if a storage is mounted there.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use rustix::mount::UnmountFlags;

use crate::error::{Error, Result};
use crate::{hooks, oci_config};

fn io<'a>(path: &'a Path, what: &'a str) -> impl Fn(std::io::Error) -> Error + 'a {
    move |error| Error::internal(format!("{what} {}: {error}", path.display()))
}

/// Mount point of storages that are a container's root.
#[must_use]
fn rootfs(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

/// Creates the directory and writes the configuration, with a complete environment. Accesses the
/// bundle only, so it does not block on the host: the runtime checks the container's root.
///
/// # Errors
/// A system call fails.
pub fn create(bundle: &Path, spec: &mut Spec) -> Result<()> {
    // Root only: configurations contain environments.
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(bundle).map_err(io(bundle, "failed to create"))?;
    if let Some(process) = spec.process_mut() {
        oci_config::set_home(process.env_mut().get_or_insert_default());
    }
    if let Some(hooks) = spec.hooks_mut()
        && let Some(own) = hooks::split_runtime_hooks(hooks, bundle)?
    {
        write(&bundle.join(firstlight_runtime::HOOKS_FILE), &own)?;
    }
    write(&bundle.join("config.json"), spec)
}

/// Replaces a file atomically.
///
/// # Errors
/// A system call fails.
pub fn replace<T: serde::Serialize>(path: &Path, value: &T) -> Result<()> {
    let new = path.with_extension("new");
    write(&new, value)?;
    fs::rename(&new, path).map_err(io(path, "failed to replace"))
}

/// Writes a file that only root may read.
///
/// # Errors
/// A system call fails.
pub fn write<T: serde::Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_vec(value).map_err(|error| Error::internal(format!("{}: {error}", path.display())))?;
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(&text)).map_err(io(path, "failed to write"))
}

/// Removes the bundle. Files are removed by name and directories only if empty: mounts in them may
/// be the host's.
pub fn remove(bundle: &Path) {
    let root = rootfs(bundle);
    // In a loop: a repeated create may have stacked mounts.
    while rustix::mount::unmount(&root, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    let _ = fs::remove_dir(&root);
    for entry in fs::read_dir(bundle).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let _ = fs::remove_file(entry.path());
        }
    }
    if let Err(error) = fs::remove_dir(bundle)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        log::warn!("failed to remove bundle {}: {error}", bundle.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn removal_leaves_foreign_content() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join("c1");
        fs::create_dir_all(bundle.join("rootfs/precious")).unwrap();
        write(&bundle.join("config.json"), &1).unwrap();
        assert_eq!(fs::metadata(bundle.join("config.json")).unwrap().permissions().mode() & 0o777, 0o600);
        remove(&bundle);
        assert!(bundle.join("rootfs/precious").exists() && !bundle.join("config.json").exists());
        fs::remove_dir(bundle.join("rootfs/precious")).unwrap();
        remove(&bundle);
        assert!(!bundle.exists());
        remove(&bundle);
    }
}
