//! What a virtual machine is made of, and its QEMU command line.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Device, Tool};

/// How guest instructions are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor's own virtualisation.
    Kvm,
    /// Translation, for machines without it.
    Tcg,
    /// Translation with one virtual nanosecond per instruction: the guest's
    /// clock then counts instructions. One processor only.
    TcgCounting,
}

impl Accelerator {
    /// KVM where the processor has it. The presence of `/dev/kvm` alone proves
    /// nothing: paravirtual KVM opens there and runs no stock kernel.
    #[must_use]
    pub fn detect() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let writable = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        Self::choose(&cpuinfo, writable)
    }

    fn choose(cpuinfo: &str, kvm_opens: bool) -> Self {
        let has = cpuinfo.split_ascii_whitespace().any(|flag| flag == "vmx" || flag == "svm");
        if has && kvm_opens { Self::Kvm } else { Self::Tcg }
    }
}

/// A folder of the host, shared by virtio-fs.
#[derive(Debug, Clone)]
pub struct Share {
    /// The tag by which the guest mounts it.
    pub tag: String,
    /// The folder.
    pub folder: PathBuf,
}

/// A file as persistent memory (NVDIMM).
#[derive(Debug, Clone)]
pub struct Memory {
    /// The file, of at least that size.
    pub file: PathBuf,
    /// Its size, MiB; a multiple of 2.
    pub mib: u32,
}

/// Everything that a virtual machine is made of.
#[derive(Debug, Clone)]
pub struct Machine {
    /// QEMU, 10.1 or newer for vfio-user.
    pub qemu: Tool,
    /// vhost-device-vsock.
    pub vhost_vsock: Tool,
    /// virtiofsd; needed if anything is shared.
    pub virtiofsd: Tool,
    /// An uncompressed kernel with a PVH entry.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// The kernel command line, console included.
    pub command_line: String,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Processors that can be plugged in while it runs, beside those.
    pub spare_cpus: u32,
    /// How instructions are run.
    pub accelerator: Accelerator,
    /// PCI devices, in the order of their root ports.
    pub devices: Vec<Device>,
    /// Memory that keeps its content.
    pub persistent: Vec<Memory>,
    /// Whether the guest has an IOMMU for its devices.
    pub iommu: bool,
    /// Shared folders.
    pub shares: Vec<Share>,
    /// The guest's vsock context id, 3 or more.
    pub cid: u32,
}

/// Names of the files of a machine inside its folder.
pub(crate) struct Files<'a>(pub(crate) &'a Path);

impl Files<'_> {
    /// vhost-user socket between QEMU and vhost-device-vsock.
    pub(crate) fn vsock_backend(&self) -> PathBuf {
        self.0.join("vsock-backend.sock")
    }

    /// The socket on which the host speaks to guest ports.
    pub(crate) fn vsock(&self) -> PathBuf {
        self.0.join("vsock.sock")
    }

    /// QEMU's monitor.
    pub(crate) fn monitor(&self) -> PathBuf {
        self.0.join("monitor.sock")
    }

    /// vhost-user socket of a share.
    pub(crate) fn share(&self, at: usize) -> PathBuf {
        self.0.join(format!("fs{at}.sock"))
    }
}

/// For devices in other processes: notify of every buffer. Without KVM, about
/// one boot in forty had a vsock that stayed silent for ever while the agent
/// listened; with event indices off it has not been seen again. The likely
/// cause is a lost interrupt, which the next buffer's now makes up for.
const EVERY_EVENT: &str = "event_idx=off";

/// 46 bits of address hold eight BARs of 256 GiB; the default of 40 does not.
/// Translated `cmpxchg16b` has been seen to corrupt flags, and the kernel, which
/// uses it in its allocator, to die of that.
const TCG_CPU: &str = "max,phys-bits=46,-cx16";

/// Linux believes in spare processors only under a hypervisor that it knows, and
/// it knows no QEMU that translates. This serial number has it ask for VMware,
/// where QEMU answers (vmport), unless the processor says that it is virtual.
const HYPERVISOR: &str = "type=1,serial=VMware-translated";

impl Machine {
    /// QEMU's arguments for this machine with its sockets in `folder` and the
    /// serial port's text in `serial`.
    #[must_use]
    pub fn arguments(&self, folder: &Path, serial: &Path) -> Vec<OsString> {
        let files = Files(folder);
        let mut line = Arguments::default();
        line.flags(&["-nodefaults", "-no-user-config", "-no-reboot"]);
        line.pair("-display", "none");
        let persistent: u32 = self.persistent.iter().map(|memory| memory.mib).sum();
        line.pair(
            "-machine",
            if persistent > 0 { "q35,memory-backend=mem,nvdimm=on" } else { "q35,memory-backend=mem" },
        );
        line.pair("-object", format!("memory-backend-memfd,id=mem,size={}M,share=on", self.memory_mib));
        let room = format!(",slots={},maxmem={}M", self.persistent.len(), self.memory_mib.saturating_add(persistent));
        line.pair("-m", format!("{}M{}", self.memory_mib, if persistent > 0 { &room } else { "" }));
        let most = self.cpus.saturating_add(self.spare_cpus);
        // A socket for each, as Kata has it: new sockets are what Linux expects.
        let sockets = format!(",maxcpus={most},sockets={most},cores=1,threads=1");
        let room = if self.spare_cpus > 0 { sockets } else { String::new() };
        line.pair("-smp", format!("{}{room}", self.cpus));
        let translated = if self.spare_cpus > 0 { format!("{TCG_CPU},-hypervisor") } else { TCG_CPU.to_owned() };
        if self.spare_cpus > 0 && self.accelerator != Accelerator::Kvm {
            line.pair("-smbios", HYPERVISOR);
        }
        match self.accelerator {
            Accelerator::Kvm => {
                line.pair("-accel", "kvm");
                line.pair("-cpu", "host,host-phys-bits=on");
            }
            Accelerator::Tcg => {
                line.pair("-accel", "tcg,thread=multi");
                line.pair("-cpu", &translated);
            }
            Accelerator::TcgCounting => {
                line.pair("-accel", "tcg,thread=single");
                line.pair("-icount", "shift=0,sleep=off");
                line.pair("-cpu", &translated);
            }
        }
        line.pair("-kernel", &self.kernel);
        line.pair("-initrd", &self.initrd);
        line.pair("-append", &self.command_line);
        line.pair("-chardev", "stdio,id=console,signal=off");
        line.pair("-device", "virtio-serial-pci");
        line.pair("-device", "virtconsole,chardev=console");
        line.pair("-chardev", option("file,id=serial,path=", serial));
        line.pair("-serial", "chardev:serial");
        line.pair("-chardev", option("socket,id=vsock,path=", &files.vsock_backend()));
        line.pair("-device", format!("vhost-user-vsock-pci,chardev=vsock,{EVERY_EVENT}"));
        for (at, share) in self.shares.iter().enumerate() {
            line.pair("-chardev", option(&format!("socket,id=fs{at},path="), &files.share(at)));
            line.pair("-device", format!("vhost-user-fs-pci,chardev=fs{at},tag={},{EVERY_EVENT}", share.tag));
        }
        let mut monitor = option("unix:", &files.monitor());
        monitor.push(",server=on,wait=off");
        line.pair("-qmp", monitor);
        if self.iommu {
            // Without its caching mode QEMU aborts when the guest enables it.
            line.pair("-device", "intel-iommu,intremap=on,caching-mode=on");
        }
        for (at, Memory { file, mib }) in self.persistent.iter().enumerate() {
            line.pair(
                "-object",
                option(&format!("memory-backend-file,id=pmem{at},share=on,size={mib}M,mem-path="), file),
            );
            line.pair("-device", format!("nvdimm,id=nvdimm{at},memdev=pmem{at}"));
        }
        for (at, device) in self.devices.iter().enumerate() {
            for (option, value) in device.arguments(at) {
                line.pair(option, value);
            }
        }
        line.0
    }
}

/// `head` and a path, with the commas of the path doubled as QEMU wants them.
fn option(head: &str, path: &Path) -> OsString {
    format!("{head}{}", path.to_string_lossy().replace(',', ",,")).into()
}

#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn flags(&mut self, flags: &[&str]) {
        self.0.extend(flags.iter().map(OsString::from));
    }

    fn pair(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.push(name.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            qemu: Tool::plain("qemu"),
            vhost_vsock: Tool::plain("v"),
            virtiofsd: Tool::plain("f"),
            kernel: "/k".into(),
            initrd: "/i".into(),
            command_line: "console=hvc0 quiet".into(),
            memory_mib: 512,
            cpus: 2,
            spare_cpus: 0,
            accelerator: Accelerator::Tcg,
            devices: (0..9).map(|n| Device::VfioUser { socket: format!("/s/{n}.sock").into() }).collect(),
            persistent: Vec::new(),
            iommu: false,
            shares: vec![Share { tag: "kataShared".into(), folder: "/f".into() }],
            cid: 3,
        }
    }

    fn text(machine: &Machine) -> String {
        let words: Vec<_> = machine
            .arguments(Path::new("/d,x"), Path::new("/d,x/serial.log"))
            .iter()
            .map(|a| a.to_string_lossy().into_owned())
            .collect();
        words.join(" ")
    }

    #[test]
    fn every_device_has_a_root_port_of_its_own() {
        let text = text(&machine());
        assert_eq!(text.matches("pcie-root-port").count(), 9);
        assert!(text.contains("addr=10.7,multifunction=on"), "{text}");
        assert!(text.contains("addr=11.0,multifunction=on"), "{text}");
        assert!(
            text.contains(
                r#""bus":"port8","driver":"vfio-user-pci","id":"device8","socket":{"path":"/s/8.sock","type":"unix"}"#
            ),
            "{text}"
        );
    }

    #[test]
    fn persistent_memory_has_room_beside_the_guests_own() {
        let mut machine = machine();
        machine.persistent = vec![Memory { file: "/p".into(), mib: 64 }];
        let text = text(&machine);
        assert!(text.contains("nvdimm=on") && text.contains("-m 512M,slots=1,maxmem=576M"), "{text}");
    }

    #[test]
    fn spare_processors_are_room_and_no_processors() {
        let mut machine = machine();
        assert!(text(&machine).contains("-smp 2 "));
        machine.spare_cpus = 3;
        assert!(text(&machine).contains("-smp 2,maxcpus=5,sockets=5,") && text(&machine).contains("-smbios"));
        machine.accelerator = Accelerator::Kvm;
        assert!(!text(&machine).contains("-smbios"));
    }

    #[test]
    fn commas_in_paths_are_doubled() {
        assert!(text(&machine()).contains("path=/d,,x/serial.log"));
    }

    #[test]
    fn kvm_needs_the_processor_and_the_device() {
        assert_eq!(Accelerator::choose("flags : fpu vmx sse", true), Accelerator::Kvm);
        assert_eq!(Accelerator::choose("flags : fpu svm", false), Accelerator::Tcg);
        assert_eq!(Accelerator::choose("flags : fpu vmxoff", true), Accelerator::Tcg);
    }
}
