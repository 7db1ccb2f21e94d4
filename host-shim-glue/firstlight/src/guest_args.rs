//! Command-line options of a guest, for `run` and `boot`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use firstlight::guest::Guest;
use firstlight::run::Deadlines;
use firstlight_image::{BootFiles, CONSOLE};
use firstlight_vm::{Accelerator, Device, Machine, Tool};

#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// Output directory of `image-builder build`: the guest's kernel and image.
    #[arg(long, value_name = "DIR", required_unless_present = "kernel", conflicts_with = "kernel")]
    guest: Option<PathBuf>,
    /// Output directory of an opener, for a disk with dm-verity on a kernel without CONFIG_DM_INIT.
    #[arg(long, value_name = "DIR", requires = "guest", conflicts_with = "kernel")]
    opener: Option<PathBuf>,
    /// Output directory of an extension, such as the NVIDIA driver; may be repeated.
    #[arg(long = "extension", value_name = "DIR", requires = "guest", conflicts_with = "kernel")]
    extensions: Vec<PathBuf>,
    /// Uncompressed kernel with a PVH entry, instead of --guest.
    #[arg(long, value_name = "FILE", requires = "initrd")]
    kernel: Option<PathBuf>,
    /// Guest image (initramfs), with --kernel.
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Additional kernel parameters.
    #[arg(long, value_name = "PARAMETERS", default_value = "", allow_hyphen_values = true)]
    append: String,
    /// Attach the device of this vfio-user socket; may be repeated.
    #[arg(long = "vfio-user", value_name = "SOCKET")]
    vfio_user: Vec<PathBuf>,
    /// Pass through this host device by vfio-pci; may be repeated.
    #[arg(long = "vfio", value_name = "PCI-ADDRESS")]
    vfio: Vec<String>,
    /// QEMU, 10.1 or newer for vfio-user.
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// vhost-device-vsock.
    #[arg(long, value_name = "FILE", default_value = "vhost-device-vsock")]
    vhost_device_vsock: PathBuf,
    /// virtiofsd.
    #[arg(long, value_name = "FILE", default_value = "/usr/libexec/virtiofsd")]
    virtiofsd: PathBuf,
    /// Guest memory, MiB.
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory: u32,
    /// Virtual processors.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Limit of a step: boot (60 s), create (the container, with its wait for GPUs: 150 s), container (none), call (30
    /// s), power-off (30 s); may be repeated.
    #[arg(long = "deadline", value_name = "STEP=SECONDS", value_parser = deadline)]
    deadlines: Vec<Deadline>,
    /// List skipped units in the boot profile.
    #[arg(long)]
    pub(crate) all: bool,
    /// Directory for boot-record.json, boot.svg and console.log.
    #[arg(long, value_name = "DIR", default_value = "out")]
    pub(crate) out: PathBuf,
}

/// The steps that have a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deadline {
    Boot(Duration),
    Create(Duration),
    Container(Duration),
    Call(Duration),
    PowerOff(Duration),
}

fn deadline(text: &str) -> Result<Deadline, String> {
    let (step, seconds) = text.split_once('=').ok_or("expected STEP=SECONDS")?;
    let limit = seconds.parse().map(Duration::from_secs).map_err(|error| format!("{seconds:?}: {error}"))?;
    match step {
        "boot" => Ok(Deadline::Boot(limit)),
        "create" => Ok(Deadline::Create(limit)),
        "container" => Ok(Deadline::Container(limit)),
        "call" => Ok(Deadline::Call(limit)),
        "power-off" => Ok(Deadline::PowerOff(limit)),
        _ => Err(format!("unknown step {step:?}; there are boot, create, container, call, power-off")),
    }
}

impl GuestArgs {
    /// Returns the number of attached devices, the upper limit of the number of GPUs.
    pub(crate) fn devices(&self) -> usize {
        self.vfio_user.len() + self.vfio.len()
    }

    /// Returns the virtual machine, after checking that it can boot.
    pub(crate) fn machine(&self) -> anyhow::Result<Machine> {
        let user = self.vfio_user.iter().map(|socket| Device::VfioUser { socket: socket.clone() });
        let host = self.vfio.iter().map(|host| Device::Vfio { host: host.clone() });
        let accelerator = Accelerator::detect();
        if accelerator != Accelerator::Kvm {
            eprintln!("firstlight: no KVM on this machine: the guest is emulated, which is slow");
        }
        let guest = Guest {
            files: self.files()?,
            memory_mib: self.memory,
            cpus: self.cpus,
            accelerator,
            qemu: Tool::plain(&self.qemu),
            vhost_vsock: Tool::plain(&self.vhost_device_vsock),
            virtiofsd: Tool::plain(&self.virtiofsd),
            devices: user.chain(host).collect(),
        };
        Ok(guest.machine()?)
    }

    fn files(&self) -> anyhow::Result<BootFiles> {
        let mut files = match (&self.guest, &self.kernel) {
            (Some(dir), _) => BootFiles::open(dir, self.opener.as_deref(), &self.extensions)?,
            (None, Some(kernel)) => BootFiles {
                kernel: kernel.clone(),
                initrd: self.initrd.clone(),
                disk: None,
                verity: false,
                extensions: Vec::new(),
                command_line: CONSOLE.to_owned(),
            },
            (None, None) => anyhow::bail!("either --guest, or --kernel and --initrd are required"),
        };
        files.append(&self.append);
        Ok(files)
    }

    /// Returns the deadlines: the defaults, no limit for the container, and those of `--deadline`.
    pub(crate) fn deadlines(&self) -> Deadlines {
        let mut all = Deadlines { container: None, ..Deadlines::default() };
        for deadline in &self.deadlines {
            match *deadline {
                Deadline::Boot(limit) => all.boot = limit,
                Deadline::Create(limit) => all.create = limit,
                Deadline::Container(limit) => all.container = Some(limit),
                Deadline::Call(limit) => all.call = limit,
                Deadline::PowerOff(limit) => all.power_off = limit,
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_names_a_step_and_seconds() {
        assert_eq!(deadline("boot=7"), Ok(Deadline::Boot(Duration::from_secs(7))));
        assert_eq!(deadline("power-off=0"), Ok(Deadline::PowerOff(Duration::ZERO)));
        assert_eq!(deadline("boot"), Err("expected STEP=SECONDS".to_owned()));
        assert!(deadline("boot=x").unwrap_err().contains("\"x\""));
        assert!(deadline("bot=1").unwrap_err().contains("there are boot, create"));
    }
}
