//! A built image in QEMU, until its boot has ended.
//!
//! What the image is comes from its record, `image.json`: an initial RAM file
//! system is the kernel's, a disk is the first virtio-blk device, which the
//! kernel mounts by itself or an opener does for it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_boot_record::{BootRecord, State};
use firstlight_verity::extension::serial;
use firstlight_vm::{Accelerator, Device, Machine, Tool, Vm, VmError};
use tokio::time::timeout;

use crate::build::KERNEL;
use crate::record::{self, Contents};
use crate::verify::is_plain;

/// The console's kernel parameters. A guest that dies ends QEMU, and what the
/// kernel says before there is a console is on the serial port.
const CONSOLE: &str = "console=hvc0 quiet panic=-1";

/// The guest's address for vsock: each machine has a transport of its own.
const CID: u32 = 3;

/// What to boot, and how.
#[derive(Debug, Clone)]
pub struct Boot {
    /// The directory that build wrote.
    pub dir: PathBuf,
    /// The directory of an opener for it, where the kernel cannot open dm-verity by itself.
    pub opener: Option<PathBuf>,
    /// The directories of extensions of it.
    pub extensions: Vec<PathBuf>,
    /// More kernel parameters.
    pub append: String,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// How instructions are run.
    pub accelerator: Accelerator,
    /// QEMU.
    pub qemu: Tool,
    /// vhost-device-vsock.
    pub vhost_vsock: Tool,
    /// Other devices, beside the image's disk.
    pub devices: Vec<Device>,
}

/// Why there is no boot to report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image is not known.
    #[error(transparent)]
    Record(#[from] record::Error),
    /// It cannot be booted.
    #[error("cannot boot {}: {what}", dir.display())]
    NotBootable {
        /// The directory of results.
        dir: PathBuf,
        /// Why, and what would do.
        what: String,
    },
    /// QEMU or what it needs did not start.
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// How a boot ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// PID 1 has said how it went: the record's state.
    Told,
    /// The guest ended before PID 1 said so.
    Ended,
    /// Nothing of that in so much time.
    Silent(Duration),
}

/// A boot.
#[derive(Debug, Clone)]
pub struct Report {
    /// As far as the console told it; none if PID 1 said nothing.
    pub record: Option<BootRecord>,
    /// How it ended.
    pub end: End,
    /// From QEMU's start until then.
    pub lived: Duration,
    /// The console's last lines.
    pub last_words: String,
}

impl Report {
    /// Whether every unit of the boot ended well.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.end == End::Told && self.record.as_ref().is_some_and(|record| record.state == State::Ready)
    }
}

/// The one file among the results whose name says that it is of this kind.
fn output(contents: &Contents, is: impl Fn(&str) -> bool) -> Option<&str> {
    // From anybody's directory: a name that leads out of it is none.
    contents.outputs.keys().map(String::as_str).find(|name| is_plain(name) && is(name))
}

fn initrd(contents: &Contents) -> Option<&str> {
    output(contents, |name| name.starts_with("initrd."))
}

/// What a kernel is started with to have an image as its root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// An uncompressed kernel with a PVH entry.
    pub kernel: PathBuf,
    /// The initial RAM file system: the image, or an opener for it.
    pub initrd: Option<PathBuf>,
    /// The image's disk: it has to be the first virtio-blk device, and nobody writes to it.
    pub disk: Option<PathBuf>,
    /// Whether dm-verity watches over that disk.
    pub verity: bool,
    /// The kernel's parameters, the console's among them.
    pub command_line: String,
}

impl Start {
    /// How the image in `directory` is started, with the opener of a directory of its own
    /// where the kernel cannot open dm-verity by itself.
    ///
    /// # Errors
    /// There is no record, or what it describes is nothing that boots.
    pub fn read(dir: &Path, opener: Option<&Path>) -> Result<Self, Error> {
        Self::of(dir, opener, &Contents::read(dir)?)
    }

    fn of(dir: &Path, opener: Option<&Path>, contents: &Contents) -> Result<Self, Error> {
        let wrong = |what: String| Error::NotBootable { dir: dir.to_owned(), what };
        if let Some(name) = &contents.extension {
            return Err(wrong(format!(
                "it is the extension {name} of an image and no image by itself: boot the image that it extends, with \
                 --extension"
            )));
        }
        let kernel = output(contents, |name| name == KERNEL)
            .ok_or_else(|| wrong(format!("its record has no {KERNEL}: build it again")))?;
        let kernel = dir.join(kernel);
        let verity = contents.verity.is_some();
        match (initrd(contents), output(contents, |name| name.ends_with(".img"))) {
            (Some(_), _) if opener.is_some() => {
                Err(wrong("it is an initial RAM file system, and an opener is for disks".to_owned()))
            }
            (Some(initrd), _) => {
                let initrd = Some(dir.join(initrd));
                Ok(Self { kernel, initrd, disk: None, verity, command_line: CONSOLE.to_owned() })
            }
            (None, None) => Err(wrong("it has neither an initial RAM file system nor a disk".to_owned())),
            (None, Some(disk)) => {
                let told = contents.command_line.as_deref().unwrap_or_default();
                let command_line = format!("{CONSOLE} {told}");
                let initrd = opener.map(|opener| opener_of(opener, contents)).transpose()?;
                Ok(Self { kernel, initrd, disk: Some(dir.join(disk)), verity, command_line })
            }
        }
    }
}

impl Boot {
    /// The machine that boots the image.
    ///
    /// # Errors
    /// There is no record, or what it describes is nothing that boots.
    pub fn machine(&self) -> Result<Machine, Error> {
        let contents = Contents::read(&self.dir)?;
        let Start { kernel, initrd, disk, verity: _, mut command_line } =
            Start::of(&self.dir, self.opener.as_deref(), &contents)?;
        // First of all, as the kernel is told where its root is.
        let disk = disk.map(|file| Device::Disk { file });
        let mut devices: Vec<Device> = disk.into_iter().chain(self.devices.iter().cloned()).collect();
        for dir in &self.extensions {
            let (device, parameter) = extension(dir, &contents)?;
            devices.push(device);
            command_line = format!("{command_line} {parameter}");
        }
        if !self.append.is_empty() {
            command_line = format!("{command_line} {}", self.append);
        }
        Ok(Machine {
            qemu: self.qemu.clone(),
            vhost_vsock: self.vhost_vsock.clone(),
            // Nothing is shared.
            virtiofsd: Tool::plain("virtiofsd"),
            kernel,
            initrd,
            command_line,
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            spare_cpus: 0,
            spare_memory_mib: 0,
            accelerator: self.accelerator,
            devices,
            persistent: Vec::new(),
            iommu: false,
            shares: Vec::new(),
            cid: CID,
            slow_console: None,
        })
    }
}

/// An opener's initial RAM file system, if its modules are for the image's kernel.
fn opener_of(dir: &Path, image: &Contents) -> Result<PathBuf, Error> {
    let contents = Contents::read(dir)?;
    let wrong = |what| Error::NotBootable { dir: dir.to_owned(), what };
    if contents.kernel_release != image.kernel_release {
        let (own, others) = (&contents.kernel_release, &image.kernel_release);
        return Err(wrong(format!("its modules are for kernel {own}, and the image has {others}")));
    }
    let initrd = initrd(&contents).ok_or_else(|| wrong("an opener is an initial RAM file system".to_owned()))?;
    Ok(dir.join(initrd))
}

/// An extension's disk, and the kernel parameter that tells of it.
fn extension(dir: &Path, image: &Contents) -> Result<(Device, String), Error> {
    let contents = Contents::read(dir)?;
    let wrong = |what: String| Error::NotBootable { dir: dir.to_owned(), what };
    let Some(name) = &contents.extension else {
        return Err(wrong("it is no extension: its manifest has no image.extension".to_owned()));
    };
    if contents.kernel_release != image.kernel_release {
        let (own, others) = (&contents.kernel_release, &image.kernel_release);
        return Err(wrong(format!("its modules are for kernel {own}, and the image has {others}")));
    }
    let disk = output(&contents, |name| name.ends_with(".img"));
    let disk = disk.ok_or_else(|| wrong("its record has no disk: build it again".to_owned()))?;
    let parameter = contents.command_line.clone().unwrap_or_default();
    Ok((Device::Extension { file: dir.join(disk), serial: serial(name) }, parameter))
}

/// Boots, and waits until PID 1 has said how its boot went. The machine is
/// gone when this returns, and when it is dropped.
///
/// # Errors
/// QEMU or what it needs did not start. A boot that fails is no error.
pub async fn boot(machine: &Machine, patience: Duration, console_log: Option<&Path>) -> Result<Report, Error> {
    let dir = tempfile::Builder::new().prefix("firstlight-boot-").tempdir();
    let dir = dir.map_err(|source| VmError::File { path: std::env::temp_dir(), source })?;
    let own = dir.path().join("console.log");
    let mut vm = Vm::start(machine, dir.path(), console_log.unwrap_or(&own)).await?;
    let over = |record: &BootRecord| !matches!(record.state, State::Booting);
    let end = match timeout(patience, vm.console().wait_for(over)).await {
        Ok(true) => End::Told,
        Ok(false) => End::Ended,
        Err(_) => End::Silent(patience),
    };
    let lived = vm.uptime();
    if end == End::Ended {
        // What QEMU says of its own end is there when it has ended.
        vm.wait().await?;
    }
    let report = Report { record: vm.console().record(), end, lived, last_words: vm.console_tail() };
    vm.stop().await;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Bytes;

    fn written(contents: &Contents) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(record::RECORD), serde_json::to_vec(contents).unwrap()).unwrap();
        dir
    }

    fn with_outputs(names: &[&str]) -> Contents {
        let bytes = Bytes { size: 1, sha256: String::new() };
        let outputs = names.iter().map(|name| ((*name).to_owned(), bytes.clone())).collect();
        Contents { name: "x".into(), kernel_release: "6.12".into(), outputs, ..Contents::default() }
    }

    fn boot(dir: &Path) -> Boot {
        Boot {
            dir: dir.to_owned(),
            opener: None,
            extensions: Vec::new(),
            append: "firstlight.mode=cpu".into(),
            memory_mib: 512,
            cpus: 1,
            accelerator: Accelerator::Tcg,
            qemu: Tool::plain("qemu"),
            vhost_vsock: Tool::plain("vsock"),
            devices: vec![Device::Watchdog],
        }
    }

    #[test]
    fn an_initial_ram_file_system_is_the_kernels() {
        let dir = written(&with_outputs(&["initrd.cpio.zst", "kata.toml", "vmlinux"]));
        let machine = boot(dir.path()).machine().unwrap();
        assert_eq!(machine.kernel, dir.path().join("vmlinux"));
        assert_eq!(machine.initrd, Some(dir.path().join("initrd.cpio.zst")));
        assert_eq!(machine.command_line, "console=hvc0 quiet panic=-1 firstlight.mode=cpu");
        assert_eq!(machine.devices, [Device::Watchdog]);
    }

    #[test]
    fn a_disk_is_the_first_device_and_the_kernel_is_told_of_it() {
        let mut contents = with_outputs(&["rootfs.img", "vmlinux"]);
        contents.command_line = Some("root=/dev/vda1 ro".into());
        let dir = written(&contents);
        let mut boot = boot(dir.path());
        let machine = boot.machine().unwrap();
        assert_eq!(machine.initrd, None);
        assert_eq!(machine.devices, [Device::Disk { file: dir.path().join("rootfs.img") }, Device::Watchdog]);
        assert_eq!(machine.command_line, "console=hvc0 quiet panic=-1 root=/dev/vda1 ro firstlight.mode=cpu");

        let opener = written(&with_outputs(&["initrd.cpio", "vmlinux"]));
        boot.opener = Some(opener.path().to_owned());
        assert_eq!(boot.machine().unwrap().initrd, Some(opener.path().join("initrd.cpio")));
        let mut other = with_outputs(&["initrd.cpio"]);
        other.kernel_release = "6.13".into();
        let opener = written(&other);
        boot.opener = Some(opener.path().to_owned());
        let error = boot.machine().unwrap_err().to_string();
        assert!(error.contains("6.13") && error.contains("the image has 6.12"), "{error}");
    }

    #[test]
    fn an_extension_is_a_disk_that_the_command_line_names() {
        let parameter = "kata.extension.gpu.verity_params=root_hash=ab";
        let mut contents = with_outputs(&["extension-gpu.img", "vmlinux"]);
        contents.extension = Some("gpu".into());
        contents.command_line = Some(parameter.into());
        let (base, disk) = (written(&with_outputs(&["initrd.cpio", "vmlinux"])), written(&contents));
        let with = |dir: &Path| Boot { extensions: vec![dir.to_owned()], ..boot(base.path()) };
        let machine = with(disk.path()).machine().unwrap();
        let device = Device::Extension { file: disk.path().join("extension-gpu.img"), serial: "extension-gpu".into() };
        assert_eq!(machine.devices, [Device::Watchdog, device]);
        assert_eq!(machine.command_line, format!("console=hvc0 quiet panic=-1 {parameter} firstlight.mode=cpu"));

        let error = with(base.path()).machine().unwrap_err().to_string();
        assert!(error.contains("it is no extension"), "{error}");
        contents.kernel_release = "6.13".into();
        let error = with(written(&contents).path()).machine().unwrap_err().to_string();
        assert!(error.contains("for kernel 6.13, and the image has 6.12"), "{error}");
    }

    #[test]
    fn what_does_not_boot_is_refused_with_the_reason() {
        let extension = Contents { extension: Some("gpu".into()), ..with_outputs(&["extension-gpu.img", "vmlinux"]) };
        let rows = [
            (extension, "extension gpu"),
            (with_outputs(&["initrd.cpio"]), "no vmlinux"),
            (with_outputs(&["vmlinux"]), "neither"),
            (with_outputs(&["vmlinux", "initrd./../../x"]), "neither"),
        ];
        for (contents, word) in rows {
            let dir = written(&contents);
            let error = boot(dir.path()).machine().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(dir.path().to_str().unwrap()), "{error}");
        }
        let dir = written(&with_outputs(&["vmlinux", "initrd.cpio"]));
        let with_opener = Boot { opener: Some(dir.path().to_owned()), ..boot(dir.path()) };
        assert!(with_opener.machine().unwrap_err().to_string().contains("an opener is for disks"));
        let error = boot(Path::new("/nowhere")).machine().unwrap_err().to_string();
        assert!(error.contains("is this the directory that build wrote?"), "{error}");
    }
}
