//! Identity, clocks, power limit and compute mode of a GPU.

use libc::c_uint;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlPciInfo_t, nvmlProcessInfo_t};

use super::{Library, NvmlError, ask, list, text};

/// `NVML_DEVICE_ARCH_AMPERE`.
const AMPERE: c_uint = 7;

/// A GPU's compute mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes may compute.
    Default,
    /// One process at a time may compute.
    ExclusiveProcess,
    /// No process may compute.
    Prohibited,
    /// Another mode, by its number.
    Other(u32),
}

/// A GPU handle of NVML.
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

    /// Returns its PCI address in Linux's format.
    ///
    /// # Errors
    /// NVML's.
    pub fn pci(&self) -> Result<String, NvmlError> {
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

    /// Returns its module id on the baseboard.
    ///
    /// # Errors
    /// NVML's.
    pub fn module_id(&self) -> Result<u32, NvmlError> {
        let mut id = 0;
        ask!(self.library, nvmlDeviceGetModuleId(self.handle, &raw mut id))?;
        Ok(id)
    }

    /// Returns its UUID, as nvidia-smi prints it.
    ///
    /// # Errors
    /// NVML's.
    pub fn uuid(&self) -> Result<String, NvmlError> {
        let mut buffer = [0; 96];
        ask!(self.library, nvmlDeviceGetUUID(self.handle, buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Returns its serial number.
    ///
    /// # Errors
    /// NVML's.
    pub fn serial(&self) -> Result<String, NvmlError> {
        let mut buffer = [0; 96];
        ask!(self.library, nvmlDeviceGetSerial(self.handle, buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Returns its product name.
    ///
    /// # Errors
    /// NVML's.
    pub fn name(&self) -> Result<String, NvmlError> {
        let mut buffer = [0; 96];
        ask!(self.library, nvmlDeviceGetName(self.handle, buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Returns whether it is an Ampere GPU, whose MIG mode changes only by a reset.
    ///
    /// # Errors
    /// NVML's.
    pub fn is_ampere(&self) -> Result<bool, NvmlError> {
        let mut number = 0;
        ask!(self.library, nvmlDeviceGetArchitecture(self.handle, &raw mut number))?;
        Ok(number == AMPERE)
    }

    /// Returns its compute mode.
    ///
    /// # Errors
    /// NVML's.
    pub fn compute_mode(&self) -> Result<ComputeMode, NvmlError> {
        let mut mode = 0;
        ask!(self.library, nvmlDeviceGetComputeMode(self.handle, &raw mut mode))?;
        Ok(match mode {
            0 => ComputeMode::Default,
            2 => ComputeMode::Prohibited,
            3 => ComputeMode::ExclusiveProcess,
            other => ComputeMode::Other(other),
        })
    }

    /// Sets its compute mode.
    ///
    /// # Errors
    /// NVML's.
    pub fn set_compute_mode(&self, mode: ComputeMode) -> Result<(), NvmlError> {
        let mode = match mode {
            ComputeMode::Default => 0,
            ComputeMode::Prohibited => 2,
            ComputeMode::ExclusiveProcess => 3,
            ComputeMode::Other(number) => number,
        };
        ask!(self.library, nvmlDeviceSetComputeMode(self.handle, mode))
    }

    /// Returns the minimum and maximum of its power limit, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn power_limits(&self) -> Result<(u32, u32), NvmlError> {
        let (mut min, mut max) = (0, 0);
        ask!(self.library, nvmlDeviceGetPowerManagementLimitConstraints(self.handle, &raw mut min, &raw mut max))?;
        Ok((min, max))
    }

    /// Returns its default power limit, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn default_power_limit(&self) -> Result<u32, NvmlError> {
        let mut limit = 0;
        ask!(self.library, nvmlDeviceGetPowerManagementDefaultLimit(self.handle, &raw mut limit))?;
        Ok(limit)
    }

    /// Returns its power limit, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn power_limit(&self) -> Result<u32, NvmlError> {
        let mut limit = 0;
        ask!(self.library, nvmlDeviceGetPowerManagementLimit(self.handle, &raw mut limit))?;
        Ok(limit)
    }

    /// Sets its power limit, milliwatts.
    ///
    /// # Errors
    /// NVML's.
    pub fn set_power_limit(&self, limit: u32) -> Result<(), NvmlError> {
        ask!(self.library, nvmlDeviceSetPowerManagementLimit(self.handle, limit))
    }

    /// Lists its supported memory clocks, MHz.
    ///
    /// # Errors
    /// NVML's.
    pub fn memory_clocks(&self) -> Result<Vec<u32>, NvmlError> {
        list(&0, |count, clocks| ask!(self.library, nvmlDeviceGetSupportedMemoryClocks(self.handle, count, clocks)))
    }

    /// Lists its supported graphics clocks at that memory clock, MHz.
    ///
    /// # Errors
    /// NVML's.
    pub fn clocks(&self, memory: u32) -> Result<Vec<u32>, NvmlError> {
        list(&0, |count, clocks| {
            ask!(self.library, nvmlDeviceGetSupportedGraphicsClocks(self.handle, memory, count, clocks))
        })
    }

    /// Locks its graphics clocks to a range, MHz, or resets them.
    ///
    /// # Errors
    /// NVML's.
    pub fn lock_clocks(&self, range: Option<(u32, u32)>) -> Result<(), NvmlError> {
        match range {
            Some((low, high)) => ask!(self.library, nvmlDeviceSetGpuLockedClocks(self.handle, low, high)),
            None => ask!(self.library, nvmlDeviceResetGpuLockedClocks(self.handle)),
        }
    }

    /// Locks its memory clock to a range, MHz, or resets it.
    ///
    /// # Errors
    /// NVML's.
    pub fn lock_memory_clock(&self, range: Option<(u32, u32)>) -> Result<(), NvmlError> {
        match range {
            Some((low, high)) => ask!(self.library, nvmlDeviceSetMemoryLockedClocks(self.handle, low, high)),
            None => ask!(self.library, nvmlDeviceResetMemoryLockedClocks(self.handle)),
        }
    }

    /// Lists the ids of processes that compute on it, as NVML reports them.
    ///
    /// # Errors
    /// NVML's.
    pub fn processes(&self) -> Result<Vec<u32>, NvmlError> {
        let empty = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        let found = list(&empty, |count, infos| {
            ask!(self.library, nvmlDeviceGetComputeRunningProcesses_v3(self.handle, count, infos))
        })?;
        Ok(found.iter().map(|process| process.pid).collect())
    }
}
