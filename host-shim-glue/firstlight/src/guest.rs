//! A guest of a built image, checked before it boots.

use std::fs;
use std::io;
use std::path::PathBuf;

use firstlight_image::BootFiles;
use firstlight_vm::{Accelerator, Device, Machine, Tool};

/// The guest's vsock context id. Each machine has a vhost-device-vsock of its own, so it need not be unique.
const CID: u32 = 3;

/// Memory that a kernel, PID 1 and the agent need beside the initramfs, MiB.
const MIN_MEMORY_MIB: u64 = 64;

/// A guest: image, resources, devices, and the programs that run it.
#[derive(Debug, Clone)]
pub struct Guest {
    /// The image.
    pub files: BootFiles,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// QEMU's accelerator.
    pub accelerator: Accelerator,
    /// QEMU, 10.1 or newer for vfio-user.
    pub qemu: Tool,
    /// vhost-device-vsock.
    pub vhost_vsock: Tool,
    /// virtiofsd.
    pub virtiofsd: Tool,
    /// Devices beside the image's disks.
    pub devices: Vec<Device>,
}

/// Why a guest cannot boot.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A file of the image cannot be read.
    #[error("cannot boot: failed to read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A file of the image is a directory, a device or empty.
    #[error("cannot boot: {} is not a file with content", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The guest would run out of memory while it boots.
    #[error(
        "cannot boot with {memory_mib} MiB of memory: this image needs at least {needed_mib} MiB (the initramfs twice \
         while it is unpacked, and {MIN_MEMORY_MIB} MiB)"
    )]
    Memory {
        /// The requested size.
        memory_mib: u32,
        /// The smallest size that can work.
        needed_mib: u64,
    },
}

impl Guest {
    /// Returns the virtual machine, after checking what would otherwise be found out by a boot that fails.
    ///
    /// # Errors
    /// A file of the image cannot be read, or the memory does not suffice.
    pub fn machine(&self) -> Result<Machine, GuestError> {
        for path in self.files.files() {
            let failed = |source| GuestError::File { path: path.to_owned(), source };
            let data = fs::File::open(path).and_then(|file| file.metadata()).map_err(failed)?;
            if !data.is_file() || data.len() == 0 {
                return Err(GuestError::NotAFile { path: path.to_owned() });
            }
        }
        let initrd = self.files.initrd.as_ref().and_then(|path| fs::metadata(path).ok()).map_or(0, |data| data.len());
        let needed_mib = MIN_MEMORY_MIB + 2 * initrd.div_ceil(1 << 20);
        if u64::from(self.memory_mib) < needed_mib {
            return Err(GuestError::Memory { memory_mib: self.memory_mib, needed_mib });
        }
        // The image's disk is the first: the kernel command line names it.
        let disk = self.files.disk.clone().map(|file| Device::ReadOnlyDisk { file });
        let extensions = self.files.extensions.iter();
        let extensions =
            extensions.map(|disk| Device::Extension { file: disk.file.clone(), serial: disk.serial.clone() });
        Ok(Machine {
            qemu: self.qemu.clone(),
            vhost_vsock: self.vhost_vsock.clone(),
            virtiofsd: self.virtiofsd.clone(),
            kernel: self.files.kernel.clone(),
            initrd: self.files.initrd.clone(),
            command_line: self.files.command_line.clone(),
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            spare_cpus: 0,
            spare_memory_mib: 0,
            accelerator: self.accelerator,
            devices: disk.into_iter().chain(self.devices.iter().cloned()).chain(extensions).collect(),
            persistent: Vec::new(),
            iommu: false,
            shares: Vec::new(),
            cid: CID,
            slow_console: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image::ExtensionDisk;

    fn guest(dir: &std::path::Path) -> Guest {
        Guest {
            files: BootFiles {
                kernel: dir.join("vmlinux"),
                initrd: None,
                disk: Some(dir.join("rootfs.img")),
                verity: true,
                extensions: vec![ExtensionDisk { file: dir.join("gpu.img"), serial: "extension-gpu".into() }],
                command_line: "root=/dev/vda1".into(),
            },
            memory_mib: 512,
            cpus: 1,
            accelerator: Accelerator::Tcg,
            qemu: Tool::plain("qemu"),
            vhost_vsock: Tool::plain("vsock"),
            virtiofsd: Tool::plain("virtiofsd"),
            devices: vec![Device::Watchdog],
        }
    }

    #[test]
    fn disk_of_the_image_is_first_and_extensions_are_last() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["vmlinux", "rootfs.img", "gpu.img"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let machine = guest(dir.path()).machine().unwrap();
        let extension = Device::Extension { file: dir.path().join("gpu.img"), serial: "extension-gpu".into() };
        let disk = Device::ReadOnlyDisk { file: dir.path().join("rootfs.img") };
        assert_eq!(machine.devices, [disk, Device::Watchdog, extension]);
        assert_eq!((machine.initrd, machine.command_line.as_str()), (None, "root=/dev/vda1"));
    }

    #[test]
    fn guest_that_cannot_boot_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = guest(dir.path()).machine().unwrap_err().to_string();
        assert!(error.contains("vmlinux: No such file"), "{error}");
        for name in ["vmlinux", "gpu.img"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        fs::create_dir(dir.path().join("rootfs.img")).unwrap();
        assert!(
            matches!(guest(dir.path()).machine(), Err(GuestError::NotAFile { path }) if path.ends_with("rootfs.img"))
        );

        let initrd = dir.path().join("initrd.cpio");
        fs::File::create(&initrd).unwrap().set_len(10 << 20).unwrap();
        let mut small = guest(dir.path());
        small.files.disk = None;
        small.files.initrd = Some(initrd);
        small.memory_mib = 83;
        let error = small.machine().unwrap_err().to_string();
        assert!(error.contains("with 83 MiB") && error.contains("at least 84 MiB"), "{error}");
        small.memory_mib = 84;
        assert!(small.machine().is_ok());
    }
}
