//! The root directories of the host's kernel interfaces.

use std::path::PathBuf;

/// The root directories of the host's kernel interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoots {
    /// Normally `/sys`.
    pub sysfs: PathBuf,
    /// Normally `/proc`.
    pub proc: PathBuf,
    /// Normally `/dev`.
    pub dev: PathBuf,
}

impl Default for HostRoots {
    fn default() -> Self {
        Self { sysfs: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}
