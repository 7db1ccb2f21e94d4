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

/// A directory of the host, shared by virtio-fs.
#[derive(Debug, Clone)]
pub struct Share {
    /// The tag by which the guest mounts it.
    pub tag: String,
    /// The directory.
    pub dir: PathBuf,
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
    /// The initramfs; none where the kernel mounts a disk by itself.
    pub initrd: Option<PathBuf>,
    /// The kernel command line, console included.
    pub command_line: String,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Processors that can be plugged in while it runs, beside those.
    pub spare_cpus: u32,
    /// Memory that can be plugged in while it runs, beside that, MiB; in at most
    /// four pieces. Not on a microvm.
    pub spare_memory_mib: u32,
    /// How instructions are run.
    pub accelerator: Accelerator,
    /// Devices; those of PCI in the order of their root ports.
    pub devices: Vec<Device>,
    /// Memory that keeps its content.
    pub persistent: Vec<Memory>,
    /// Whether the guest has an IOMMU for its devices.
    pub iommu: bool,
    /// Shared directories.
    pub shares: Vec<Share>,
    /// The guest's vsock context id, 3 or more.
    pub cid: u32,
    /// The console is a serial port that takes so many bytes a second, instead
    /// of a virtual one that takes all; the command line has to say `console=ttyS0`.
    pub slow_console: Option<u32>,
}

/// Names of the files of a machine inside its directory.
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

/// Places for memory that is plugged in. A vhost-user daemon may take no more
/// than eight regions, of which the guest's own memory is two.
const SPARE_SLOTS: usize = 4;

/// Linux believes in spare processors only under a hypervisor that it knows, and
/// it knows no QEMU that translates. This serial number has it ask for VMware,
/// where QEMU answers (vmport), unless the processor says that it is virtual.
const HYPERVISOR: &str = "type=1,serial=VMware-translated";

/// QEMU's board without anything that is older than ACPI's short form, which it
/// describes itself by. Linux does not set up an interval timer and an old
/// interrupt controller there, so the first tick of one would be taken for a
/// division by zero: there are none.
const MICRO: &str = "microvm,acpi=on,pcie=on,pit=off,pic=off,memory-backend=mem";

/// Ticks of the time-stamp counter per millisecond when instructions are counted.
const COUNTING_KHZ: u64 = 1_000_000;

impl Machine {
    /// Whether it has to be QEMU's microvm.
    fn micro(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, Device::MmioDisk { .. }))
    }

    /// The board with its bus.
    fn board(&self) -> &'static str {
        match (self.micro(), self.persistent.is_empty()) {
            (true, _) => MICRO,
            (false, true) => "q35,memory-backend=mem",
            (false, false) => "q35,memory-backend=mem,nvdimm=on",
        }
    }

    /// The kernel's command line. A microvm has no clock by which a kernel could
    /// find out how fast the processor counts, and KVM alone tells it.
    fn kernel_command_line(&self) -> String {
        let khz = match (self.micro(), self.accelerator) {
            (false, _) | (_, Accelerator::Kvm) => return self.command_line.clone(),
            (true, Accelerator::TcgCounting) => COUNTING_KHZ,
            (true, Accelerator::Tcg) => firstlight_sys::tsc::khz(),
        };
        format!("{} tsc_early_khz={khz}", self.command_line)
    }

    /// The guest's memory and the room beside it.
    fn memory(&self) -> String {
        let persistent = self.persistent.iter().map(|memory| memory.mib);
        let most = persistent.chain([self.spare_memory_mib]).fold(self.memory_mib, u32::saturating_add);
        let slots = self.persistent.len() + if self.spare_memory_mib > 0 { SPARE_SLOTS } else { 0 };
        let room = if slots > 0 { format!(",slots={slots},maxmem={most}M") } else { String::new() };
        format!("{}M{room}", self.memory_mib)
    }

    /// QEMU's arguments for this machine with its sockets in `directory` and the
    /// serial port's text in `serial`.
    #[must_use]
    pub fn arguments(&self, dir: &Path, serial: &Path) -> Vec<OsString> {
        let files = Files(dir);
        let mut line = Arguments::default();
        line.flags(&["-nodefaults", "-no-user-config", "-no-reboot"]);
        line.pair("-display", "none");
        line.pair("-machine", self.board());
        if self.micro() {
            // The other form is one that the specification has left behind.
            line.pair("-global", "virtio-mmio.force-legacy=off");
        }
        line.pair("-object", format!("memory-backend-memfd,id=mem,size={}M,share=on", self.memory_mib));
        line.pair("-m", self.memory());
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
        if let Some(initrd) = &self.initrd {
            line.pair("-initrd", initrd);
        }
        line.pair("-append", self.kernel_command_line());
        line.pair("-chardev", "stdio,id=console,signal=off");
        line.pair("-device", "virtio-serial-pci");
        if self.slow_console.is_some() {
            line.pair("-serial", "chardev:console");
        } else {
            line.pair("-device", "virtconsole,chardev=console");
            line.pair("-chardev", option("file,id=serial,path=", serial));
            line.pair("-serial", "chardev:serial");
        }
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
            initrd: Some("/i".into()),
            command_line: "console=hvc0 quiet".into(),
            memory_mib: 512,
            cpus: 2,
            spare_cpus: 0,
            spare_memory_mib: 0,
            accelerator: Accelerator::Tcg,
            devices: (0..9).map(|n| Device::VfioUser { socket: format!("/s/{n}.sock").into() }).collect(),
            persistent: Vec::new(),
            iommu: false,
            shares: vec![Share { tag: "kataShared".into(), dir: "/f".into() }],
            cid: 3,
            slow_console: None,
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
    fn spare_memory_is_room_beside_all_other() {
        let mut machine = machine();
        assert!(text(&machine).contains("-m 512M -smp"));
        machine.spare_memory_mib = 256;
        assert!(text(&machine).contains("-m 512M,slots=4,maxmem=768M "));
        machine.persistent = vec![Memory { file: "/p".into(), mib: 64 }];
        assert!(text(&machine).contains("-m 512M,slots=5,maxmem=832M "));
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
    fn a_disk_without_pci_is_on_a_board_that_has_places_for_it() {
        let mut machine = machine();
        assert!(!text(&machine).contains("microvm") && !text(&machine).contains("tsc_early_khz"));
        machine.devices.push(Device::MmioDisk { file: "/d".into() });
        assert!(
            text(&machine).contains("-machine microvm,acpi=on,") && text(&machine).contains("quiet tsc_early_khz=")
        );
        machine.accelerator = Accelerator::TcgCounting;
        assert!(text(&machine).contains("tsc_early_khz=1000000 "));
        machine.accelerator = Accelerator::Kvm;
        assert!(!text(&machine).contains("tsc_early_khz"));
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
