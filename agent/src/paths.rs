//! Paths. Those visible to shims, images and users equal Kata's.

use std::path::{Path, PathBuf};

/// The agent's paths; below `/` except in tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// Bundles, and the host's share.
    pub run: PathBuf,
    /// The sandbox's namespaces.
    pub namespaces: PathBuf,
    /// The runtime's state.
    pub state: PathBuf,
    /// CDI specifications.
    pub cdi: PathBuf,
    /// sysfs.
    pub sysfs: PathBuf,
    /// procfs.
    pub proc: PathBuf,
    /// The cgroup hierarchy.
    pub cgroups: PathBuf,
    /// The image's policy.
    pub policy: PathBuf,
    /// Root of all other paths, such as device nodes.
    pub root: PathBuf,
}

impl Paths {
    /// Returns the paths below `root`.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            run: root.join("run/kata-containers"),
            namespaces: root.join("run/sandbox-ns"),
            state: root.join("run/firstlight/containers"),
            cdi: root.join(firstlight_cdi::SPEC_DIR.trim_start_matches('/')),
            sysfs: root.join("sys"),
            proc: root.join("proc"),
            cgroups: root.join("sys/fs/cgroup"),
            policy: root.join("etc/kata-opa/default-policy.rego"),
            root: root.to_owned(),
        }
    }

    /// Returns the only directory into which the host may copy files.
    #[must_use]
    pub fn share(&self) -> PathBuf {
        self.run.join("shared/containers")
    }

    /// Returns a container's bundle.
    #[must_use]
    pub fn bundle(&self, container: &str) -> PathBuf {
        self.run.join(container)
    }
}
