//! Programs and files that every lab run needs, from Debian, in the cache.
//!
//! Nothing is installed: packages are unpacked into private trees and run
//! through the loader of their own tree, so the host's libraries neither
//! matter nor change. What is prepared stays as it is until its recipe
//! changes; a warm [`Toolbox::prepare`] opens no connection.

mod boot;
mod disks;
mod file_server;
mod host_qemu;
mod host_tree;
mod packet_filter;
mod registry;
mod server;
mod tree;

use std::path::{Path, PathBuf};

use firstlight_image_builder::kernel::{self, Kernel, KernelHeaders};
use firstlight_image_builder::progress::Progress;
use firstlight_image_builder::{cache, debian, manifest};
use firstlight_vm::Tool;

pub use disks::{DiskTools, FileSystem};
pub use file_server::{EXPORT, FileServer};
pub use registry::{BASIC, Registry, registry};
pub use tree::Origin;

use tree::{Members, Recipe, Tree};

/// Why the toolbox could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A package could not be had.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The kernel could not be had.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The lab's manifest is wrong.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A disk could not be made or read.
    #[error("{program} on {}: {what}", image.display())]
    Disk {
        /// The program that did it.
        program: &'static str,
        /// The disk.
        image: PathBuf,
        /// What it said.
        what: String,
    },
    /// A server does not serve.
    #[error("{name} on port {port} of the loopback does not serve:\n{what}")]
    Server {
        /// Which.
        name: &'static str,
        /// Its port.
        port: u16,
        /// The end of its log, or its answer.
        what: String,
    },
    /// A prepared tree lacks a file it must have.
    #[error("{} is missing: remove the directory {} and prepare again", file.display(), tree.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// The tree it should be in.
        tree: PathBuf,
    },
}

/// Everything the lab runs, ready.
#[derive(Debug, Clone)]
pub struct Toolbox {
    /// `qemu-system-x86_64`, 10.1 or newer, with `vfio-user-pci`.
    pub qemu: Tool,
    /// The vsock back end in user space.
    pub vhost_device_vsock: Tool,
    /// The virtio-fs back end.
    pub virtiofsd: Tool,
    /// A static busybox, for images and container root file systems.
    pub busybox: PathBuf,
    /// The kernel of the lab's image.
    pub kernel: Kernel,
    /// What an out-of-tree module of that kernel is built with.
    pub headers: KernelHeaders,
    /// Names, versions and hashes of what was unpacked.
    pub origins: Vec<Origin>,
    /// Where all this lies, and where builds with it may keep results.
    pub cache: PathBuf,
    /// Where long steps are announced.
    pub progress: Progress,
}

/// QEMU with its firmware. Only 10.1 and newer have `vfio-user-pci`, and only
/// sid has those.
const QEMU: Recipe = Recipe {
    label: "qemu",
    suite: "sid",
    packages: &["qemu-system-x86", "seabios", "virtiofsd", "vhost-device-vsock"],
    members: Members::WithDependencies,
    keep: keep_programs,
};

/// The same without QEMU, for hosts whose own is new enough.
const HELPERS: Recipe = Recipe {
    label: "virtiofsd",
    suite: "sid",
    packages: &["virtiofsd", "vhost-device-vsock"],
    members: Members::WithDependencies,
    keep: keep_programs,
};

const BUSYBOX: Recipe = Recipe {
    label: "busybox",
    suite: "trixie",
    packages: &["busybox-static"],
    members: Members::Alone,
    keep: |path| path == Path::new("usr/bin/busybox") || path == Path::new("bin/busybox"),
};

/// The container runtimes that the agent is measured beside.
const RUNTIMES: Recipe = Recipe {
    label: "crun",
    suite: "trixie",
    packages: &["crun", "runc"],
    members: Members::WithDependencies,
    keep: |path| {
        const FILES: &[&str] = &["usr/bin/crun", "usr/bin/runc", "usr/sbin/runc"];
        let library = path.starts_with("usr/lib/x86_64-linux-gnu")
            && path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so"));
        library || path.starts_with("usr/lib64") || FILES.iter().any(|file| path == Path::new(file))
    },
};

/// Programs, libraries, firmware; no documentation, no other programs.
fn keep_programs(path: &Path) -> bool {
    const DIRECTORIES: &[&str] = &[
        "lib",
        "lib64",
        "usr/lib/x86_64-linux-gnu",
        "usr/lib64",
        "usr/lib/ipxe",
        "usr/libexec",
        "usr/share/qemu",
        "usr/share/seabios",
    ];
    const FILES: &[&str] = &["usr/bin/qemu-system-x86_64", "usr/bin/vhost-device-vsock"];
    DIRECTORIES.iter().any(|dir| path.starts_with(dir)) || FILES.iter().any(|file| path == Path::new(file))
}

/// Where QEMU finds firmware, relative to its tree.
const FIRMWARE: &[&str] = &["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];
/// Where QEMU finds its loadable parts, relative to its tree.
const QEMU_MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";

/// A static busybox alone, for what needs no guest.
///
/// # Errors
/// The package cannot be had, or a failed file operation.
pub fn busybox(cache: &Path, progress: Progress) -> Result<PathBuf, Error> {
    Tree::prepare(cache, &BUSYBOX, progress)?.file(&["usr/bin/busybox", "bin/busybox"])
}

impl Toolbox {
    /// Prepares what is missing under the directory `cache`.
    ///
    /// # Errors
    /// A package that cannot be had, or a failed file operation. What was
    /// complete before stays so.
    pub fn prepare(cache: &Path, progress: Progress) -> Result<Self, Error> {
        let host_qemu = host_qemu::find();
        let recipe = if host_qemu.is_some() { &HELPERS } else { &QEMU };
        let programs = Tree::prepare(cache, recipe, progress)?;
        let busybox_tree = Tree::prepare(cache, &BUSYBOX, progress)?;
        let kernel = Kernel::prepare(cache, &manifest::lab_kernel()?, progress)?;
        let headers = KernelHeaders::prepare(cache, &kernel.facts, progress)?;
        let qemu = match host_qemu {
            Some(program) => Tool::plain(program),
            None => own_qemu(&programs)?,
        };
        Ok(Self {
            qemu,
            vhost_device_vsock: programs.tool(&["usr/bin/vhost-device-vsock", "usr/libexec/vhost-device-vsock"])?,
            virtiofsd: programs.tool(&["usr/libexec/virtiofsd"])?,
            busybox: busybox_tree.file(&["usr/bin/busybox", "bin/busybox"])?,
            origins: [programs.origins, busybox_tree.origins].concat(),
            kernel,
            headers,
            cache: cache.to_owned(),
            progress,
        })
    }
}

impl Toolbox {
    /// A directory with crun, runc and their libraries at their usual places below it.
    ///
    /// # Errors
    /// A package that cannot be had, or a failed file operation.
    pub fn runtimes(&self) -> Result<PathBuf, Error> {
        let tree = Tree::prepare(&self.cache, &RUNTIMES, self.progress)?;
        tree.file(&["usr/bin/crun"])?;
        tree.file(&["usr/sbin/runc", "usr/bin/runc"])?;
        Ok(tree.root)
    }
}

fn own_qemu(tree: &Tree) -> Result<Tool, Error> {
    let mut tool = tree.tool(&["usr/bin/qemu-system-x86_64"])?;
    for dir in FIRMWARE {
        // The directories compiled into QEMU are those of a real system.
        tool.args.extend(["-L".into(), tree.root.join(dir).into()]);
    }
    tool.env.push(("QEMU_MODULE_DIR".into(), tree.root.join(QEMU_MODULES).into()));
    Ok(tool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_runs_is_kept() {
        for (path, kept) in [
            ("usr/bin/qemu-system-x86_64", true),
            ("usr/bin/perl", false),
            ("usr/lib/x86_64-linux-gnu/libc.so.6", true),
            ("usr/lib/systemd/systemd", false),
            ("usr/share/doc/qemu/copyright", false),
            ("usr/share/seabios/bios-256k.bin", true),
        ] {
            assert_eq!(keep_programs(Path::new(path)), kept, "{path}");
        }
    }
}
