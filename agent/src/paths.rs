//! Where things are. Names that shims, images and users know are Kata's.

use std::path::{Path, PathBuf};

/// The agent's directories; all below `/` but for tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// Bundles, and the host's share.
    pub run: PathBuf,
    /// The sandbox's namespaces.
    pub namespaces: PathBuf,
    /// The runtime's own notes.
    pub state: PathBuf,
    /// CDI specifications.
    pub cdi: PathBuf,
    /// The kernel's device tree.
    pub sysfs: PathBuf,
    /// The kernel's figures.
    pub proc: PathBuf,
    /// The kernel's resource groups.
    pub cgroups: PathBuf,
    /// The policy that the image brings.
    pub policy: PathBuf,
    /// What device nodes are looked up below.
    pub root: PathBuf,
}

impl Paths {
    /// The directories below `root`.
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

    /// The one directory into which the host may copy files.
    #[must_use]
    pub fn share(&self) -> PathBuf {
        self.run.join("shared/containers")
    }

    /// A container's bundle.
    #[must_use]
    pub fn bundle(&self, container: &str) -> PathBuf {
        self.run.join(container)
    }
}
