//! The root file system of a nested GPU host: unpacked Debian packages with libvirt and QEMU.

use std::path::{Path, PathBuf};

use firstlight_image_builder::cache;

use super::tree::{Members, Recipe, Tree};
use super::{Error, Toolbox};

/// Essential packages are listed, because no other package depends on them.
const HOST: Recipe = Recipe {
    label: "gpu-host",
    suite: "trixie",
    packages: &[
        "libvirt-daemon-system",
        "libvirt-daemon-system-sysv",
        "libvirt-daemon-driver-qemu",
        "libvirt-clients",
        "iptables",
        "qemu-system-x86",
        "seabios",
        "socat",
        "e2fsprogs",
        "kmod",
        "bash",
        "base-files",
        "coreutils",
        "dash",
        "grep",
        "libc-bin",
        "mount",
        "sed",
        "util-linux",
    ],
    members: Members::WithDependencies,
    keep: |path| {
        const LEFT_OUT: &[&str] = &[
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
            "usr/share/info",
            "usr/share/icons",
            "usr/share/perl",
            "usr/share/zoneinfo",
            "usr/lib/x86_64-linux-gnu/perl",
            "usr/lib/systemd",
            "boot",
        ];
        !LEFT_OUT.iter().any(|dir| path.starts_with(dir))
    },
};

/// Size of the disk, MiB; the file is sparse.
const SIZE: u64 = 2048;

impl Toolbox {
    /// Creates the disk of a nested GPU host with libvirt and QEMU: an ext4 file system that is only read.
    ///
    /// # Errors
    /// A package cannot be fetched, or a file operation failed.
    pub fn host_disk(&self) -> Result<PathBuf, Error> {
        let tree = Tree::prepare(&self.cache, &HOST, self.progress)?;
        let name = tree.root.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let dir = self.cache.join("toolbox").join(format!("{name}-disk"));
        let disk = |dir: &Path| dir.join("host.ext4");
        cache::publish(&dir, &self.progress, |half| self.disk_tools()?.pack(&tree.root, &disk(half), SIZE))?;
        Ok(disk(&dir))
    }
}
