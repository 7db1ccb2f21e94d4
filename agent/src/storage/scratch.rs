//! Temporary directories for container data, in the agent's own tmpfs.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::safe_path::{self, Kind, MountPoint};
use crate::error::{Error, Result};

/// A created directory; removed with its content on drop.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory below `run`. One that existed, or that is on another file system, must
    /// not be removed: then returns `None`.
    ///
    /// # Errors
    /// The path is outside `run`, or contains a link.
    pub fn make(run: &Path, path: &Path) -> Result<Option<Self>> {
        let place = MountPoint::create(run, path, Kind::Directory)?;
        let failed = |error: std::io::Error| Error::internal(format!("{}: {error}", path.display()));
        let ours = std::fs::metadata(run).map_err(failed)?.dev();
        let device = rustix::fs::fstat(&place).map_err(|error| failed(error.into()))?.st_dev;
        let (path, _, made) = place.into_parts();
        // Not then_some: a value that is not returned would be dropped, and the directory with it.
        Ok(if made && device == ours { Some(Self(path)) } else { None })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The content is written by a container; `remove_dir_all` does not follow links.
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            log::warn!("failed to remove {}: {error}", self.0.display());
        }
    }
}

/// Returns an unused path, for a layer.
#[must_use]
pub(super) fn fresh(run: &Path, what: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    run.join(format!("sandbox/layers/{}-{what}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Opens or creates a directory in one of our mounts, whose content is untrusted.
///
/// # Errors
/// It is not a directory, or a component of the path is a link.
pub(super) fn inside(mount: &Path, name: &str) -> Result<MountPoint> {
    MountPoint::create(mount, &mount.join(name), Kind::Directory)
}

/// Checks that a directory exists in one of our mounts.
///
/// # Errors
/// It does not exist, or a component of the path is a link.
pub(super) fn required(mount: &Path, name: &str) -> Result<()> {
    safe_path::open_below(mount, &mount.join(name), rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY)
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_created_directories_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/upper");
        let scratch = Scratch::make(root.path(), &path).unwrap().unwrap();
        std::fs::write(path.join("x"), "y").unwrap();
        assert!(Scratch::make(root.path(), &path).unwrap().is_none());
        assert!(path.join("x").exists());
        drop(scratch);
        assert!(!path.exists() && root.path().join("a").exists());
        assert_ne!(fresh(root.path(), "upper"), fresh(root.path(), "upper"));
    }
}
