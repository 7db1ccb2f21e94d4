//! Temporary directories of a run, including the guest's shared directory.

use std::fs;
use std::path::{Path, PathBuf};

use firstlight_oci::Image;
use tempfile::TempDir;

use super::RunError;

/// The directories of one run, removed on drop.
#[derive(Debug)]
pub(super) struct Directories {
    root: TempDir,
}

impl Directories {
    /// Creates them with short paths below the system's temporary directory: Unix
    /// socket paths are limited to 107 bytes.
    pub(super) fn create() -> Result<Self, RunError> {
        let root = tempfile::Builder::new()
            .prefix("firstlight-")
            .tempdir()
            .map_err(|source| RunError::File { path: std::env::temp_dir(), source })?;
        let dirs = Self { root };
        for path in [dirs.machine(), dirs.shared()] {
            fs::create_dir(&path).map_err(|source| RunError::File { path, source })?;
        }
        Ok(dirs)
    }

    /// Returns the directory of the machine's sockets and logs.
    pub(super) fn machine(&self) -> PathBuf {
        self.root.path().join("vm")
    }

    /// Returns the directory shared with the guest.
    pub(super) fn shared(&self) -> PathBuf {
        self.root.path().join("shared")
    }

    /// Unpacks `image` as the root file system of container `id`.
    pub(super) fn unpack(&self, image: &Image, id: &str) -> Result<(), RunError> {
        let path = self.shared().join(id).join("rootfs");
        fs::create_dir_all(&path).map_err(|source| RunError::File { path: path.clone(), source })?;
        Ok(image.unpack(Path::new(&path))?)
    }
}
