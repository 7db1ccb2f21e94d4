//! Where the host shows itself.

use std::path::PathBuf;

/// The roots of what the kernel shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Normally `/sys`.
    pub sysfs: PathBuf,
    /// Normally `/proc`.
    pub proc: PathBuf,
    /// Normally `/dev`.
    pub dev: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self { sysfs: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}
