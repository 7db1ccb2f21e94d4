//! Configuration of a virtual machine and its QEMU command line.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Device, Tool};

/// QEMU's accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// Hardware virtualisation.
    Kvm,
    /// Emulation by translation, for machines without hardware virtualisation.
    Tcg,
    /// Emulation with one virtual nanosecond per instruction (`-icount`): the
    /// guest's clock counts instructions. One CPU only.
    TcgCounting,
}

impl Accelerator {
    /// Selects KVM if the CPU supports it. `/dev/kvm` alone does not prove that:
    /// paravirtual KVM also provides it and runs no stock kernel.
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

/// A host directory shared by virtio-fs.
#[derive(Debug, Clone)]
pub struct Share {
    /// The tag by which the guest mounts it.
    pub tag: String,
    /// The directory.
    pub dir: PathBuf,
}

/// An NVDIMM backed by a file.
#[derive(Debug, Clone)]
pub struct Nvdimm {
    /// The file, at least `mib` large.
    pub file: PathBuf,
    /// Its size, MiB; a multiple of 2.
    pub mib: u32,
}

/// The configuration of a virtual machine.
#[derive(Debug, Clone)]
pub struct Machine {
    /// QEMU, 10.1 or newer for vfio-user.
    pub qemu: Tool,
    /// vhost-device-vsock.
    pub vhost_vsock: Tool,
    /// virtiofsd; needed for shared directories.
    pub virtiofsd: Tool,
    /// An uncompressed kernel with a PVH entry.
    pub kernel: PathBuf,
    /// The initramfs; `None` if the kernel mounts its root disk itself.
    pub initrd: Option<PathBuf>,
    /// The kernel command line, console included.
    pub command_line: String,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Additional CPUs available for hotplug.
    pub spare_cpus: u32,
    /// Additional memory available for hotplug, MiB, in at most four DIMMs. Not on a
    /// microvm.
    pub spare_memory_mib: u32,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// Devices; PCI devices in the order of their root ports.
    pub devices: Vec<Device>,
    /// NVDIMMs.
    pub persistent: Vec<Nvdimm>,
    /// Whether the guest has an IOMMU.
    pub iommu: bool,
    /// Shared directories.
    pub shares: Vec<Share>,
    /// The guest's vsock context id, 3 or more.
    pub cid: u32,
    /// Rate of a serial console, bytes per second, instead of an unlimited virtio
    /// console; requires `console=ttyS0` on the kernel command line.
    pub slow_console: Option<u32>,
}

/// Paths of a machine's files in its directory.
pub(crate) struct Files<'a>(pub(crate) &'a Path);

impl Files<'_> {
    /// vhost-user socket between QEMU and vhost-device-vsock.
    pub(crate) fn vsock_backend(&self) -> PathBuf {
        self.0.join("vsock-backend.sock")
    }

    /// The socket through which the host connects to guest ports.
    pub(crate) fn vsock(&self) -> PathBuf {
        self.0.join("vsock.sock")
    }

    /// QEMU's monitor socket.
    pub(crate) fn monitor(&self) -> PathBuf {
        self.0.join("monitor.sock")
    }

    /// vhost-user socket of a share.
    pub(crate) fn share(&self, at: usize) -> PathBuf {
        self.0.join(format!("fs{at}.sock"))
    }
}

/// Disables event indices of vhost-user devices, so every buffer is notified.
/// Without KVM, about one boot in forty had a vsock that hung while the agent
/// listened; this has not recurred with event indices off. The likely cause is a
/// lost interrupt, for which the next buffer's now compensates.
const NO_EVENT_INDEX: &str = "event_idx=off";

/// Eight BARs of 256 GiB fit in 46 address bits, not in the default of 40.
/// Emulated `cmpxchg16b` has been observed to corrupt flags, which crashes the
/// kernel's allocator.
const TCG_CPU: &str = "max,phys-bits=46,-cx16";

/// DIMM slots for memory hotplug. A vhost-user daemon may support no more than
/// eight regions, of which the guest's initial memory takes two.
const HOTPLUG_SLOTS: usize = 4;

/// SMBIOS serial number that makes Linux detect VMware, to which QEMU responds
/// (vmport), unless CPUID has the hypervisor bit. Linux enables CPU hotplug only
/// under a known hypervisor, and QEMU's emulation is none.
const VMWARE_SMBIOS: &str = "type=1,serial=VMware-translated";

/// QEMU's microvm machine type, which uses hardware-reduced ACPI. Linux does not
/// initialise PIT and PIC there, so the first PIT tick would arrive as the
/// divide-error exception: both are disabled.
const MICROVM: &str = "microvm,acpi=on,pcie=on,pit=off,pic=off,memory-backend=mem";

/// TSC frequency when instructions are counted, kHz.
const COUNTING_KHZ: u64 = 1_000_000;

impl Machine {
    /// Returns whether the machine type must be microvm.
    fn is_microvm(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, Device::MmioDisk { .. }))
    }

    /// Returns QEMU's machine type with its options.
    fn machine_type(&self) -> &'static str {
        match (self.is_microvm(), self.persistent.is_empty()) {
            (true, _) => MICROVM,
            (false, true) => "q35,memory-backend=mem",
            (false, false) => "q35,memory-backend=mem,nvdimm=on",
        }
    }

    /// Returns the kernel command line. A microvm has no clock to calibrate the TSC
    /// with, and only KVM reports the frequency.
    fn kernel_command_line(&self) -> String {
        let khz = match (self.is_microvm(), self.accelerator) {
            (false, _) | (_, Accelerator::Kvm) => return self.command_line.clone(),
            (true, Accelerator::TcgCounting) => COUNTING_KHZ,
            (true, Accelerator::Tcg) => firstlight_sys::tsc::khz(),
        };
        format!("{} tsc_early_khz={khz}", self.command_line)
    }

    /// Returns the guest's memory size and hotplug capacity.
    fn memory(&self) -> String {
        let persistent = self.persistent.iter().map(|memory| memory.mib);
        let most = persistent.chain([self.spare_memory_mib]).fold(self.memory_mib, u32::saturating_add);
        let slots = self.persistent.len() + if self.spare_memory_mib > 0 { HOTPLUG_SLOTS } else { 0 };
        let room = if slots > 0 { format!(",slots={slots},maxmem={most}M") } else { String::new() };
        format!("{}M{room}", self.memory_mib)
    }

    /// Returns QEMU's arguments with sockets in `dir` and the serial port's output
    /// in `serial`.
    #[must_use]
    pub fn arguments(&self, dir: &Path, serial: &Path) -> Vec<OsString> {
        let files = Files(dir);
        let mut line = Arguments::default();
        line.flags(&["-nodefaults", "-no-user-config", "-no-reboot"]);
        line.pair("-display", "none");
        line.pair("-machine", self.machine_type());
        if self.is_microvm() {
            // The legacy virtio-mmio interface is obsolete.
            line.pair("-global", "virtio-mmio.force-legacy=off");
        }
        line.pair("-object", format!("memory-backend-memfd,id=mem,size={}M,share=on", self.memory_mib));
        line.pair("-m", self.memory());
        let most = self.cpus.saturating_add(self.spare_cpus);
        // One socket per CPU, as in Kata: Linux expects hot-plugged CPUs in new sockets.
        let sockets = format!(",maxcpus={most},sockets={most},cores=1,threads=1");
        let room = if self.spare_cpus > 0 { sockets } else { String::new() };
        line.pair("-smp", format!("{}{room}", self.cpus));
        let translated = if self.spare_cpus > 0 { format!("{TCG_CPU},-hypervisor") } else { TCG_CPU.to_owned() };
        if self.spare_cpus > 0 && self.accelerator != Accelerator::Kvm {
            line.pair("-smbios", VMWARE_SMBIOS);
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
        line.pair("-device", format!("vhost-user-vsock-pci,chardev=vsock,{NO_EVENT_INDEX}"));
        for (at, share) in self.shares.iter().enumerate() {
            line.pair("-chardev", option(&format!("socket,id=fs{at},path="), &files.share(at)));
            line.pair("-device", format!("vhost-user-fs-pci,chardev=fs{at},tag={},{NO_EVENT_INDEX}", share.tag));
        }
        let mut monitor = option("unix:", &files.monitor());
        monitor.push(",server=on,wait=off");
        line.pair("-qmp", monitor);
        if self.iommu {
            // Without caching mode QEMU aborts when the guest enables the IOMMU.
            line.pair("-device", "intel-iommu,intremap=on,caching-mode=on");
        }
        for (at, Nvdimm { file, mib }) in self.persistent.iter().enumerate() {
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

/// Appends a path to `head`, with its commas doubled as QEMU requires.
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
        let arguments: Vec<_> = machine
            .arguments(Path::new("/d,x"), Path::new("/d,x/serial.log"))
            .iter()
            .map(|a| a.to_string_lossy().into_owned())
            .collect();
        arguments.join(" ")
    }

    #[test]
    fn every_device_has_its_own_root_port() {
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
    fn nvdimm_adds_a_slot_and_address_space() {
        let mut machine = machine();
        machine.persistent = vec![Nvdimm { file: "/p".into(), mib: 64 }];
        let text = text(&machine);
        assert!(text.contains("nvdimm=on") && text.contains("-m 512M,slots=1,maxmem=576M"), "{text}");
    }

    #[test]
    fn spare_memory_adds_slots_and_address_space() {
        let mut machine = machine();
        assert!(text(&machine).contains("-m 512M -smp"));
        machine.spare_memory_mib = 256;
        assert!(text(&machine).contains("-m 512M,slots=4,maxmem=768M "));
        machine.persistent = vec![Nvdimm { file: "/p".into(), mib: 64 }];
        assert!(text(&machine).contains("-m 512M,slots=5,maxmem=832M "));
    }

    #[test]
    fn spare_cpus_raise_the_maximum_only() {
        let mut machine = machine();
        assert!(text(&machine).contains("-smp 2 "));
        machine.spare_cpus = 3;
        assert!(text(&machine).contains("-smp 2,maxcpus=5,sockets=5,") && text(&machine).contains("-smbios"));
        machine.accelerator = Accelerator::Kvm;
        assert!(!text(&machine).contains("-smbios"));
    }

    #[test]
    fn mmio_disk_selects_the_microvm_machine_type() {
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
