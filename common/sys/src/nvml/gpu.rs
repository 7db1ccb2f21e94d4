//! One GPU: clocks, power, compute mode.

use libc::c_uint;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlPciInfo_t, nvmlProcessInfo_t};

use super::{Library, Refused, ask, list, text};

/// `NVML_DEVICE_ARCH_AMPERE`.
const AMPERE: c_uint = 7;

/// Who may compute on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// None.
    Prohibited,
    /// Another one, by its number.
    Other(u32),
}

/// One GPU.
#[derive(Debug, Clone, Copy)]
pub struct Gpu<'a> {
    pub(super) library: &'a Library,
    pub(super) handle: nvmlDevice_t,
}

// SAFETY: a handle is a name that NVML made and looks up in every call; NVML's documentation says
// that calls may be made by several threads at once.
unsafe impl Send for Gpu<'_> {}
// SAFETY: as above; nothing is changed through the handle itself.
unsafe impl Sync for Gpu<'_> {}

impl<'a> Gpu<'a> {
    pub(super) fn new(library: &'a Library, handle: nvmlDevice_t) -> Self {
        Self { library, handle }
    }

    /// Its PCI address, as Linux writes it.
    ///
    /// # Errors
    /// NVML's.
    pub fn pci(&self) -> Result<String, Refused> {
        let mut info = nvmlPciInfo_t {
            busIdLegacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            pciDeviceId: 0,
            pciSubSystemId: 0,
            busId: [0; 32],
        };
        ask!(self.library, nvmlDeviceGetPciInfo_v3(self.handle, &raw mut info))?;
        Ok(format!("{:04x}:{:02x}:{:02x}.0", info.domain, info.bus, info.device))
    }

    /// Which place of the baseboard it is in.
    ///
    /// # Errors
    /// NVML's.
    pub fn module_id(&self) -> Result<u32, Refused> {
        let mut id = 0;
        ask!(self.library, nvmlDeviceGetModuleId(self.handle, &raw mut id))?;
        Ok(id)
    }

    /// Its UUID, as nvidia-smi prints it.
    ///
    /// # Errors
    /// NVML's.
    pub fn uuid(&self) -> Result<String, Refused> {
        let mut buffer = [0; 96];
        ask!(self.library, nvmlDeviceGetUUID(self.handle, buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Its serial number.
    ///
    /// # Errors
    /// NVML's.
    pub fn serial(&self) -> Result<String, Refused> {
        let mut buffer = [0; 96];
        ask!(self.library, nvmlDeviceGetSerial(self.handle, buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Its model.
    ///
    /// # Errors
    /// NVML's.
    pub fn name(&self) -> Result<String, Refused> {
        let mut buffer = [0; 96];
        ask!(self.library, nvmlDeviceGetName(self.handle, buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Whether it is of the generation whose MIG mode changes only by a reset.
    ///
    /// # Errors
    /// NVML's.
    pub fn is_ampere(&self) -> Result<bool, Refused> {
        let mut number = 0;
        ask!(self.library, nvmlDeviceGetArchitecture(self.handle, &raw mut number))?;
        Ok(number == AMPERE)
    }

    /// Who may compute on it.
    ///
    /// # Errors
    /// NVML's.
    pub fn compute_mode(&self) -> Result<ComputeMode, Refused> {
        let mut mode = 0;
        ask!(self.library, nvmlDeviceGetComputeMode(self.handle, &raw mut mode))?;
        Ok(match mode {
            0 => ComputeMode::Default,
            2 => ComputeMode::Prohibited,
            3 => ComputeMode::ExclusiveProcess,
            other => ComputeMode::Other(other),
        })
    }

    /// Sets who may compute on it.
    ///
    /// # Errors
    /// NVML's.
    pub fn set_compute_mode(&self, mode: ComputeMode) -> Result<(), Refused> {
        let mode = match mode {
            ComputeMode::Default => 0,
            ComputeMode::Prohibited => 2,
            ComputeMode::ExclusiveProcess => 3,
            ComputeMode::Other(number) => number,
        };
        ask!(self.library, nvmlDeviceSetComputeMode(self.handle, mode))
    }

    /// The least and the most that its power limit can be, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn power_limits(&self) -> Result<(u32, u32), Refused> {
        let (mut least, mut most) = (0, 0);
        ask!(self.library, nvmlDeviceGetPowerManagementLimitConstraints(self.handle, &raw mut least, &raw mut most))?;
        Ok((least, most))
    }

    /// Its power limit as it comes, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn default_power_limit(&self) -> Result<u32, Refused> {
        let mut limit = 0;
        ask!(self.library, nvmlDeviceGetPowerManagementDefaultLimit(self.handle, &raw mut limit))?;
        Ok(limit)
    }

    /// Its power limit, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn power_limit(&self) -> Result<u32, Refused> {
        let mut limit = 0;
        ask!(self.library, nvmlDeviceGetPowerManagementLimit(self.handle, &raw mut limit))?;
        Ok(limit)
    }

    /// Sets its power limit, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn set_power_limit(&self, limit: u32) -> Result<(), Refused> {
        ask!(self.library, nvmlDeviceSetPowerManagementLimit(self.handle, limit))
    }

    /// The clocks that its memory can have, MHz.
    ///
    /// # Errors
    /// NVML's.
    pub fn memory_clocks(&self) -> Result<Vec<u32>, Refused> {
        list(&0, |count, clocks| ask!(self.library, nvmlDeviceGetSupportedMemoryClocks(self.handle, count, clocks)))
    }

    /// The clocks that its processors can have while its memory has that one, MHz.
    ///
    /// # Errors
    /// NVML's.
    pub fn clocks(&self, memory: u32) -> Result<Vec<u32>, Refused> {
        list(&0, |count, clocks| {
            ask!(self.library, nvmlDeviceGetSupportedGraphicsClocks(self.handle, memory, count, clocks))
        })
    }

    /// Holds its processors' clocks between these two, MHz, or lets them go.
    ///
    /// # Errors
    /// NVML's.
    pub fn lock_clocks(&self, between: Option<(u32, u32)>) -> Result<(), Refused> {
        match between {
            Some((low, high)) => ask!(self.library, nvmlDeviceSetGpuLockedClocks(self.handle, low, high)),
            None => ask!(self.library, nvmlDeviceResetGpuLockedClocks(self.handle)),
        }
    }

    /// Holds its memory's clock between these two, MHz, or lets it go.
    ///
    /// # Errors
    /// NVML's.
    pub fn lock_memory_clock(&self, between: Option<(u32, u32)>) -> Result<(), Refused> {
        match between {
            Some((low, high)) => ask!(self.library, nvmlDeviceSetMemoryLockedClocks(self.handle, low, high)),
            None => ask!(self.library, nvmlDeviceResetMemoryLockedClocks(self.handle)),
        }
    }

    /// Processes that compute on it, by their ids in NVML's view.
    ///
    /// # Errors
    /// NVML's.
    pub fn processes(&self) -> Result<Vec<u32>, Refused> {
        let empty = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        let found = list(&empty, |count, infos| {
            ask!(self.library, nvmlDeviceGetComputeRunningProcesses_v3(self.handle, count, infos))
        })?;
        Ok(found.iter().map(|process| process.pid).collect())
    }
}
