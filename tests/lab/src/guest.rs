//! A guest of the lab: its configuration, and its virtual machine.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use firstlight_synthetic_gpu::{Device as Gpu, PROFILES, profile};
use firstlight_vm::{Accelerator, Device, Machine, Nvdimm, Share};
use tempfile::TempDir;

use crate::gpus::{GpuError, SyntheticGpus};
use crate::lab::Lab;

/// Kernel parameters of every guest: console, exit of QEMU on panic, and no
/// probing for absent hardware. With `earlyprintk` a kernel that panics early
/// prints to the serial port.
const COMMAND_LINE: &str = "console=hvc0 earlyprintk=ttyS0 quiet panic=-1 reboot=t mitigations=off tsc=reliable \
    no_timer_check audit=0 apparmor=0 8250.nr_uarts=1 cryptomgr.notests random.trust_cpu=on cgroup_no_v1=all";

/// Configuration of a guest.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Its GPUs and other devices, in bus order.
    pub devices: Vec<Gpu>,
    /// GPUs that can be hot-plugged, on the root ports after `devices`.
    pub spare_gpus: Vec<Gpu>,
    /// Other devices, on the root ports after the GPUs'.
    pub hardware: Vec<Device>,
    /// Persistent memory (NVDIMMs).
    pub persistent: Vec<Nvdimm>,
    /// Whether it has a virtual IOMMU.
    pub iommu: bool,
    /// Shared directories of the host.
    pub shares: Vec<Share>,
    /// Appended to the kernel command line.
    pub parameters: Vec<String>,
    /// The initramfs; that of the lab's own image if none is given.
    pub initrd: Option<PathBuf>,
    /// The kernel; that of the lab's own image if none is given.
    pub kernel: Option<PathBuf>,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Processors that can be hot-plugged.
    pub spare_cpus: u32,
    /// Memory that can be hot-plugged, MiB.
    pub spare_memory_mib: u32,
    /// Uses a serial console limited to this many bytes per second; otherwise the console is not limited.
    pub slow_console: Option<u32>,
    /// Count instructions instead of time; limits the guest to one processor.
    pub counting: bool,
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            spare_gpus: Vec::new(),
            hardware: Vec::new(),
            persistent: Vec::new(),
            iommu: false,
            shares: Vec::new(),
            parameters: Vec::new(),
            initrd: None,
            kernel: None,
            memory_mib: 1024,
            cpus: 2,
            spare_cpus: 0,
            spare_memory_mib: 0,
            slow_console: None,
            counting: false,
        }
    }
}

impl Guest {
    /// Creates a guest with `count` H100s whose attach takes `attach` each.
    #[must_use]
    pub fn with_gpus(count: usize, attach: Duration) -> Self {
        let devices = vec![h100(attach); count];
        Self { devices, ..Self::default() }
    }

    /// Adds a kernel parameter.
    #[must_use]
    pub fn parameter(mut self, parameter: impl Into<String>) -> Self {
        self.parameters.push(parameter.into());
        self
    }
}

/// Creates an H100 whose attach takes `attach`.
#[must_use]
pub fn h100(attach: Duration) -> Gpu {
    let mut gpu = Gpu::new(profile("h100").unwrap_or(&PROFILES[0]));
    gpu.attach_ms = Some(u32::try_from(attach.as_millis()).unwrap_or(u32::MAX));
    gpu
}

/// Makes a GPU's attach fail with the adapter status `code`.
pub fn fail_with(gpu: &mut Gpu, code: u32) {
    gpu.fail = NonZeroU32::new(code);
}

/// Returns the accelerator of guests on this machine.
#[must_use]
pub fn accelerator() -> Accelerator {
    Accelerator::detect()
}

/// A virtual machine that is ready to start, with the resources that it needs while it runs.
#[derive(Debug)]
pub struct Prepared {
    /// The machine.
    pub machine: Machine,
    /// Devices that can be hot-plugged, each with its port.
    pub spare: Vec<(usize, Device)>,
    _gpus: SyntheticGpus,
    _directory: TempDir,
}

impl Lab {
    /// Starts the guest's synthetic GPUs and returns its virtual machine.
    ///
    /// # Errors
    /// The GPUs' server does not start.
    pub fn guest(&self, guest: &Guest) -> Result<Prepared, GpuError> {
        let dir = tempfile::Builder::new()
            .prefix("firstlight-gpus-")
            .tempdir()
            .map_err(|source| GpuError::Spawn { program: std::env::temp_dir(), source })?;
        let all: Vec<Gpu> = guest.devices.iter().chain(&guest.spare_gpus).cloned().collect();
        let gpus = SyntheticGpus::start(&self.binaries.synthetic_gpu, dir.path(), &all)?;
        let gpu = |socket: &PathBuf| Device::VfioUser { socket: socket.clone() };
        let there = guest.devices.len();
        let spare = gpus.sockets().iter().enumerate().skip(there).map(|(at, socket)| (at, gpu(socket))).collect();
        let plugged = gpus.sockets().iter().take(there).map(gpu);
        let ports = guest.spare_gpus.iter().map(|_| Device::EmptyGpuPort);
        let devices = plugged.chain(ports).chain(guest.hardware.iter().cloned()).collect();
        let slow = guest.slow_console.map(|_| "console=ttyS0".to_owned());
        let accelerator = if guest.counting { Accelerator::TcgCounting } else { accelerator() };
        let mut command_line = COMMAND_LINE.to_owned();
        for parameter in slow.iter().chain(&guest.parameters) {
            command_line.push(' ');
            command_line.push_str(parameter);
        }
        let machine = Machine {
            qemu: self.toolbox.qemu.clone(),
            vhost_vsock: self.toolbox.vhost_device_vsock.clone(),
            virtiofsd: self.toolbox.virtiofsd.clone(),
            kernel: guest.kernel.clone().unwrap_or_else(|| self.image.kernel.clone()),
            initrd: Some(guest.initrd.clone().unwrap_or_else(|| self.image.initrd.clone())),
            command_line,
            memory_mib: guest.memory_mib,
            cpus: if guest.counting { 1 } else { guest.cpus },
            spare_cpus: guest.spare_cpus,
            spare_memory_mib: guest.spare_memory_mib,
            accelerator,
            devices,
            persistent: guest.persistent.clone(),
            iommu: guest.iommu,
            shares: guest.shares.clone(),
            cid: 3,
            slow_console: guest.slow_console,
        };
        Ok(Prepared { machine, spare, _gpus: gpus, _directory: dir })
    }
}
