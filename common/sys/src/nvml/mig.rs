//! MIG mode, GPU instances and their compute instances.

use libc::c_uint;
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_st,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_v2_t,
};

use super::{Gpu, Library, NvmlError, ask, list, text, version};

/// Profile numbers to query, more than any driver has; those of a GPU are not contiguous.
const MAX_PROFILES: c_uint = 32;

/// Current and pending MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// The current mode.
    pub current: bool,
    /// The mode after a reset.
    pub pending: bool,
}

/// A GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Profile id, as nvidia-smi shows it.
    pub id: u32,
    /// Name as nvidia-smi shows it, without the prefix "MIG ".
    pub name: String,
    /// Maximum number of instances per GPU.
    pub most: u32,
    /// Compute slices per instance.
    pub slices: u32,
}

/// The placement of an instance in memory slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    /// The first slice.
    pub start: u32,
    /// Number of slices.
    pub size: u32,
}

/// A compute instance profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeProfile {
    /// Profile id.
    pub id: u32,
    /// Compute slices per instance.
    pub slices: u32,
    /// Multiprocessors per instance.
    pub multiprocessors: u32,
}

/// A GPU instance.
#[derive(Debug)]
pub struct GpuInstance<'a> {
    library: &'a Library,
    handle: nvmlGpuInstance_t,
    /// Instance id on its GPU.
    pub id: u32,
    /// Its profile id.
    pub profile: u32,
}

/// A compute instance.
#[derive(Debug)]
pub struct ComputeInstance<'a> {
    library: &'a Library,
    handle: nvmlComputeInstance_t,
    /// Instance id in its GPU instance.
    pub id: u32,
    /// Its profile id.
    pub profile: u32,
}

/// Returns whether the GPU has the profile; its absence is not an error.
fn has_profile(result: Result<(), NvmlError>) -> Result<bool, NvmlError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.is_unsupported() => Ok(false),
        Err(error) => Err(error),
    }
}

impl<'a> Gpu<'a> {
    /// Returns its MIG mode; not supported on GPUs without MIG.
    ///
    /// # Errors
    /// NVML's.
    pub fn mig_mode(&self) -> Result<MigMode, NvmlError> {
        let (mut current, mut pending) = (0, 0);
        ask!(self.library, nvmlDeviceGetMigMode(self.handle, &raw mut current, &raw mut pending))?;
        Ok(MigMode { current: current != 0, pending: pending != 0 })
    }

    /// Enables or disables MIG mode.
    ///
    /// # Errors
    /// NVML's, including those of the activation; then the mode is pending.
    pub fn set_mig_mode(&self, on: bool) -> Result<(), NvmlError> {
        let mut activation = 0;
        ask!(self.library, nvmlDeviceSetMigMode(self.handle, c_uint::from(on), &raw mut activation))?;
        if activation == 0 { Ok(()) } else { Err(self.library.refused("nvmlDeviceSetMigMode, activation", activation)) }
    }

    /// Lists its GPU instance profiles.
    ///
    /// # Errors
    /// NVML's.
    pub fn profiles(&self) -> Result<Vec<Profile>, NvmlError> {
        let mut found = Vec::new();
        for number in 0..MAX_PROFILES {
            let mut info = nvmlGpuInstanceProfileInfo_v2_t {
                version: 0,
                id: 0,
                isP2pSupported: 0,
                sliceCount: 0,
                instanceCount: 0,
                multiprocessorCount: 0,
                copyEngineCount: 0,
                decoderCount: 0,
                encoderCount: 0,
                jpegCount: 0,
                ofaCount: 0,
                memorySizeMB: 0,
                name: [0; 96],
            };
            info.version = version(&info, 2);
            let result = ask!(self.library, nvmlDeviceGetGpuInstanceProfileInfoV(self.handle, number, &raw mut info));
            if has_profile(result)? {
                let name = text(&info.name);
                let name = name.strip_prefix("MIG ").unwrap_or(&name).to_owned();
                found.push(Profile { id: info.id, name, most: info.instanceCount, slices: info.sliceCount });
            }
        }
        Ok(found)
    }

    /// Lists the possible placements of a profile, regardless of existing instances.
    ///
    /// # Errors
    /// NVML's.
    pub fn placements(&self, profile: u32) -> Result<Vec<Placement>, NvmlError> {
        let empty = nvmlGpuInstancePlacement_t { start: 0, size: 0 };
        let found = list(&empty, |count, placements| {
            ask!(self.library, nvmlDeviceGetGpuInstancePossiblePlacements_v2(self.handle, profile, placements, count))
        })?;
        Ok(found.iter().map(|place| Placement { start: place.start, size: place.size }).collect())
    }

    /// Returns how many more instances of a profile can be created.
    ///
    /// # Errors
    /// NVML's.
    pub fn remaining_capacity(&self, profile: u32) -> Result<u32, NvmlError> {
        let mut count = 0;
        ask!(self.library, nvmlDeviceGetGpuInstanceRemainingCapacity(self.handle, profile, &raw mut count))?;
        Ok(count)
    }

    /// Lists its instances of a profile.
    ///
    /// # Errors
    /// NVML's.
    pub fn instances(&self, profile: u32) -> Result<Vec<GpuInstance<'a>>, NvmlError> {
        let found = list(&(std::ptr::null_mut() as nvmlGpuInstance_t), |count, handles| {
            ask!(self.library, nvmlDeviceGetGpuInstances(self.handle, profile, handles, count))
        })?;
        found.into_iter().map(|handle| GpuInstance::new(self.library, handle)).collect()
    }

    /// Creates a GPU instance.
    ///
    /// # Errors
    /// NVML's.
    pub fn create_instance(&self, profile: u32, placement: Placement) -> Result<GpuInstance<'a>, NvmlError> {
        let placement = nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
        let mut handle: nvmlGpuInstance_t = std::ptr::null_mut();
        let result = ask!(
            self.library,
            nvmlDeviceCreateGpuInstanceWithPlacement(self.handle, profile, &raw const placement, &raw mut handle)
        );
        result?;
        GpuInstance::new(self.library, handle)
    }
}

impl<'a> GpuInstance<'a> {
    fn new(library: &'a Library, handle: nvmlGpuInstance_t) -> Result<Self, NvmlError> {
        let mut info = nvmlGpuInstanceInfo_t {
            device: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        ask!(library, nvmlGpuInstanceGetInfo(handle, &raw mut info))?;
        Ok(Self { library, handle, id: info.id, profile: info.profileId })
    }

    /// Lists its compute instance profiles.
    ///
    /// # Errors
    /// NVML's.
    pub fn compute_profiles(&self) -> Result<Vec<ComputeProfile>, NvmlError> {
        let mut found = Vec::new();
        for number in 0..MAX_PROFILES {
            let mut info = nvmlComputeInstanceProfileInfo_v2_t {
                version: 0,
                id: 0,
                sliceCount: 0,
                instanceCount: 0,
                multiprocessorCount: 0,
                sharedCopyEngineCount: 0,
                sharedDecoderCount: 0,
                sharedEncoderCount: 0,
                sharedJpegCount: 0,
                sharedOfaCount: 0,
                name: [0; 96],
            };
            info.version = version(&info, 2);
            // 0: shared engines, the only engine profile.
            let result = ask!(
                self.library,
                nvmlGpuInstanceGetComputeInstanceProfileInfoV(self.handle, number, 0, &raw mut info)
            );
            if has_profile(result)? {
                let multiprocessors = info.multiprocessorCount;
                found.push(ComputeProfile { id: info.id, slices: info.sliceCount, multiprocessors });
            }
        }
        Ok(found)
    }

    /// Lists its compute instances of a profile.
    ///
    /// # Errors
    /// NVML's.
    pub fn compute_instances(&self, profile: u32) -> Result<Vec<ComputeInstance<'a>>, NvmlError> {
        let found = list(&(std::ptr::null_mut() as nvmlComputeInstance_t), |count, handles| {
            ask!(self.library, nvmlGpuInstanceGetComputeInstances(self.handle, profile, handles, count))
        })?;
        found.into_iter().map(|handle| ComputeInstance::new(self.library, handle)).collect()
    }

    /// Creates a compute instance.
    ///
    /// # Errors
    /// NVML's.
    pub fn create_compute_instance(&self, profile: u32) -> Result<ComputeInstance<'a>, NvmlError> {
        let mut handle: nvmlComputeInstance_t = std::ptr::null_mut();
        ask!(self.library, nvmlGpuInstanceCreateComputeInstance(self.handle, profile, &raw mut handle))?;
        ComputeInstance::new(self.library, handle)
    }

    /// Destroys the instance, which must have no compute instance.
    ///
    /// # Errors
    /// NVML's; the instance still exists then.
    pub fn destroy(self) -> Result<(), NvmlError> {
        ask!(self.library, nvmlGpuInstanceDestroy(self.handle))
    }
}

impl<'a> ComputeInstance<'a> {
    fn new(library: &'a Library, handle: nvmlComputeInstance_t) -> Result<Self, NvmlError> {
        let mut info = nvmlComputeInstanceInfo_t {
            device: std::ptr::null_mut(),
            gpuInstance: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: nvmlComputeInstancePlacement_st { start: 0, size: 0 },
        };
        ask!(library, nvmlComputeInstanceGetInfo_v2(handle, &raw mut info))?;
        Ok(Self { library, handle, id: info.id, profile: info.profileId })
    }

    /// Destroys the instance, which must not be in use.
    ///
    /// # Errors
    /// NVML's; the instance still exists then.
    pub fn destroy(self) -> Result<(), NvmlError> {
        ask!(self.library, nvmlComputeInstanceDestroy(self.handle))
    }
}
