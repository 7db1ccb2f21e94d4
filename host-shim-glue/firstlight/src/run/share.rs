//! The directory that a guest sees, and everything else a run puts on disk.

use std::fs;
use std::path::{Path, PathBuf};

use firstlight_oci::Image;
use tempfile::TempDir;

use super::RunError;

/// The directories of one run; gone when dropped.
#[derive(Debug)]
pub(super) struct Directories {
    root: TempDir,
}

impl Directories {
    /// Short paths below the system's directory for temporary files: Unix sockets
    /// allow 107 bytes.
    pub(super) fn make() -> Result<Self, RunError> {
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

    /// Sockets and logs of the machine.
    pub(super) fn machine(&self) -> PathBuf {
        self.root.path().join("vm")
    }

    /// What the guest mounts.
    pub(super) fn shared(&self) -> PathBuf {
        self.root.path().join("shared")
    }

    /// Unpacks `image` as the root of container `id`.
    pub(super) fn unpack(&self, image: &Image, id: &str) -> Result<(), RunError> {
        let path = self.shared().join(id).join("rootfs");
        fs::create_dir_all(&path).map_err(|source| RunError::File { path: path.clone(), source })?;
        Ok(image.unpack(Path::new(&path))?)
    }
}
