//! The root of all paths, and the root mount.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use rustix::mount::{mount_bind, mount_move};

/// The root below which all paths are resolved: `/`, or a test's directory.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    /// Returns the guest's own root.
    #[must_use]
    pub fn real() -> Self {
        Self(PathBuf::from("/"))
    }

    /// Returns a directory as root, for tests.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// Returns the path of an absolute path below this root.
    #[must_use]
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.0.join(absolute.trim_start_matches('/'))
    }
}

/// Magic numbers of `ramfs` and `tmpfs`; an unpacked initramfs is one of them.
const RAM_FILE_SYSTEMS: &[u64] = &[0x8584_58f6, 0x0102_1994];

/// A temporary mount point.
const STEP: &str = "/.firstlight-root";

/// Why the root could not be moved to a mount of its own.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}; containers will not start, as pivot_root fails on the kernel's first root")]
pub struct RootError {
    what: &'static str,
    source: io::Error,
}

/// Mounts an initramfs root on itself; returns whether that was necessary.
///
/// `pivot_root` fails with EINVAL on the kernel's first root, which has no parent mount, and every
/// container runtime pivots. So the root is bind-mounted to a directory of itself, and that mount
/// is moved to `/`: the files stay where they are. This has to precede all other mounts, which
/// would stay below the old root.
///
/// # Errors
/// A step failed; the error names it.
pub fn leave_first_root() -> Result<bool, RootError> {
    let step = |what| move |source: rustix::io::Errno| RootError { what, source: source.into() };
    let kind = statfs("/").map_err(step("look at the root file system"))?.f_type;
    if !RAM_FILE_SYSTEMS.contains(&u64::from_ne_bytes(kind.to_ne_bytes())) {
        return Ok(false);
    }
    rustix::fs::mkdir(STEP, rustix::fs::Mode::RWXU).map_err(step("make /.firstlight-root"))?;
    mount_bind("/", STEP).map_err(step("bind the root to /.firstlight-root"))?;
    rustix::process::chdir(STEP).map_err(step("enter /.firstlight-root"))?;
    mount_move(".", "/").map_err(step("move the root's bind mount over the root"))?;
    rustix::process::chroot(".").map_err(step("change to the new root"))?;
    rustix::process::chdir("/").map_err(step("enter the new root"))?;
    // A remaining empty directory has no effect.
    let _ = rustix::fs::rmdir(STEP);
    Ok(true)
}
