//! Fetches programs and files for the lab from Debian into the cache.
//!
//! Nothing is installed: packages are unpacked into private trees, and their
//! programs run with the loader and libraries of their tree, independent of the
//! host's. A tree is unchanged until its recipe changes; with a complete cache
//! [`Toolbox::prepare`] opens no connection.

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
use firstlight_image_builder::{cache, image::manifest, packages::debian};
use firstlight_progress::Progress;
use firstlight_vm::Tool;

pub use disks::{DiskTools, FileSystem};
pub use file_server::{EXPORT, FileServer};
pub use registry::{BASIC, Registry, registry};
pub use tree::Origin;

use tree::{Members, Recipe, Tree};

/// Errors of preparing or using the toolbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A package could not be fetched.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The kernel could not be prepared.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The lab's manifest is invalid.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A disk could not be created or read.
    #[error("{program} on {}: {what}", image.display())]
    Disk {
        /// The program that failed.
        program: &'static str,
        /// The disk.
        image: PathBuf,
        /// Its status and error output.
        what: String,
    },
    /// A server does not listen, or a request to it failed.
    #[error("{name} on port {port} of the loopback interface failed:\n{what}")]
    Server {
        /// Its name.
        name: &'static str,
        /// Its port.
        port: u16,
        /// The end of its log, or its response.
        what: String,
    },
    /// A prepared tree lacks a required file.
    #[error("{} is missing: remove the directory {} and prepare again", file.display(), tree.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// The tree that should contain it.
        tree: PathBuf,
    },
}

/// The prepared programs and files of the lab.
#[derive(Debug, Clone)]
pub struct Toolbox {
    /// `qemu-system-x86_64`, 10.1 or newer, with `vfio-user-pci`.
    pub qemu: Tool,
    /// The vhost-user back end of vsock.
    pub vhost_device_vsock: Tool,
    /// The virtio-fs back end.
    pub virtiofsd: Tool,
    /// A static busybox, for images and container root file systems.
    pub busybox: PathBuf,
    /// The kernel of the lab's image.
    pub kernel: Kernel,
    /// The headers for building out-of-tree modules of that kernel.
    pub headers: KernelHeaders,
    /// Names, versions and hashes of the unpacked packages.
    pub origins: Vec<Origin>,
    /// The cache directory of all this, and of results of builds with it.
    pub cache: PathBuf,
    /// Output for the progress of long steps.
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

/// The same without QEMU, for hosts whose own QEMU is suitable.
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

/// The container runtimes that the benchmark compares the agent with.
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

/// Selects programs, libraries and firmware; no documentation, no other programs.
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

/// QEMU's firmware directories, relative to its tree.
const FIRMWARE: &[&str] = &["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];
/// QEMU's module directory, relative to its tree.
const QEMU_MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";

/// Fetches only the static busybox, for uses without a guest.
///
/// # Errors
/// The package cannot be fetched, or a file operation failed.
pub fn busybox(cache: &Path, progress: Progress) -> Result<PathBuf, Error> {
    Tree::prepare(cache, &BUSYBOX, progress)?.file(&["usr/bin/busybox", "bin/busybox"])
}

impl Toolbox {
    /// Prepares the parts that are missing in the directory `cache`.
    ///
    /// # Errors
    /// A package cannot be fetched, or a file operation failed. Complete parts
    /// are not affected.
    pub fn prepare(cache: &Path, progress: Progress) -> Result<Self, Error> {
        let host_qemu = host_qemu::find();
        let recipe = if host_qemu.is_some() { &HELPERS } else { &QEMU };
        let programs = Tree::prepare(cache, recipe, progress)?;
        let busybox_tree = Tree::prepare(cache, &BUSYBOX, progress)?;
        let kernel = Kernel::prepare(cache, &crate::manifest::kernel()?, progress)?;
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
    /// Fetches crun, runc and their libraries; returns the root directory of their tree.
    ///
    /// # Errors
    /// A package cannot be fetched, or a file operation failed.
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
        // QEMU's built-in directories are those of an installed package.
        tool.args.extend(["-L".into(), tree.root.join(dir).into()]);
    }
    tool.env.push(("QEMU_MODULE_DIR".into(), tree.root.join(QEMU_MODULES).into()));
    Ok(tool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runtime_files_are_unpacked() {
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
