//! Where the guest's own files are, and the root mount itself.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use rustix::mount::{mount_bind, mount_move};

/// The root below which all paths are looked up: `/`, or a test's directory.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    /// The guest's own root.
    #[must_use]
    pub fn real() -> Self {
        Self(PathBuf::from("/"))
    }

    /// A directory that stands for it.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// An absolute path below this root.
    #[must_use]
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.0.join(absolute.trim_start_matches('/'))
    }
}

/// `ramfs` and `tmpfs`, which an unpacked initramfs is one of.
const RAM_FILE_SYSTEMS: &[u64] = &[0x8584_58f6, 0x0102_1994];

/// A directory that exists for a moment.
const STEP: &str = "/.firstlight-root";

/// Why the root could not be made a mount of its own.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}; containers will not start, as pivot_root fails on the kernel's first root")]
pub struct RootError {
    what: &'static str,
    source: io::Error,
}

/// Gives an initramfs root a mount below it. `true` when that was needed.
///
/// `pivot_root` refuses to leave the kernel's first root, which has no parent
/// mount, and every container runtime pivots. So the root is bound to a directory
/// of itself, and that mount is moved over it: the files stay where they are.
/// This has to come before all other mounts, which would stay behind.
///
/// # Errors
/// A step failed; it is named.
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
    // An empty directory that stays behind would do no harm.
    let _ = rustix::fs::rmdir(STEP);
    Ok(true)
}
