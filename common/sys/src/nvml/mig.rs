//! How a GPU is divided: MIG mode, GPU instances and the compute instances in them.

use libc::c_uint;
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_st,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_v2_t,
};

use super::{Gpu, Library, Refused, ask, list, text, version};

/// More kinds of instances than any driver knows; there are gaps between those that a GPU has.
const MOST_KINDS: c_uint = 32;

/// MIG mode: as it is, and as it will be after a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// Now.
    pub current: bool,
    /// After a reset.
    pub pending: bool,
}

/// A kind of GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Its number, as nvidia-smi shows it.
    pub id: u32,
    /// Its name, as nvidia-smi shows it, but without "MIG " before it.
    pub name: String,
    /// How many the whole GPU holds.
    pub most: u32,
    /// Slices of processors that one has.
    pub slices: u32,
}

/// Slices of memory that an instance has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    /// The first.
    pub start: u32,
    /// How many.
    pub size: u32,
}

/// A kind of compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeProfile {
    /// Its number.
    pub id: u32,
    /// Slices of processors that one has.
    pub slices: u32,
    /// Multiprocessors that one has.
    pub multiprocessors: u32,
}

/// A GPU instance.
#[derive(Debug)]
pub struct Instance<'a> {
    library: &'a Library,
    handle: nvmlGpuInstance_t,
    /// Its number on its GPU.
    pub id: u32,
    /// The number of its kind.
    pub profile: u32,
}

/// A compute instance.
#[derive(Debug)]
pub struct Compute<'a> {
    library: &'a Library,
    handle: nvmlComputeInstance_t,
    /// Its number in its GPU instance.
    pub id: u32,
    /// The number of its kind.
    pub profile: u32,
}

/// What a GPU does not have is no error.
fn kind(asked: Result<(), Refused>) -> Result<bool, Refused> {
    match asked {
        Ok(()) => Ok(true),
        Err(error) if error.is_unsupported() => Ok(false),
        Err(error) => Err(error),
    }
}

impl<'a> Gpu<'a> {
    /// Its MIG mode; not supported on GPUs that have none.
    ///
    /// # Errors
    /// NVML's.
    pub fn mig_mode(&self) -> Result<MigMode, Refused> {
        let (mut current, mut pending) = (0, 0);
        ask!(self.library, nvmlDeviceGetMigMode(self.handle, &raw mut current, &raw mut pending))?;
        Ok(MigMode { current: current != 0, pending: pending != 0 })
    }

    /// Turns its MIG mode on or off.
    ///
    /// # Errors
    /// NVML's; those of the mode's activation too: then the mode is pending.
    pub fn set_mig_mode(&self, on: bool) -> Result<(), Refused> {
        let mut activation = 0;
        ask!(self.library, nvmlDeviceSetMigMode(self.handle, c_uint::from(on), &raw mut activation))?;
        if activation == 0 { Ok(()) } else { Err(self.library.refused("nvmlDeviceSetMigMode, activation", activation)) }
    }

    /// The kinds of instances that it can have.
    ///
    /// # Errors
    /// NVML's.
    pub fn profiles(&self) -> Result<Vec<Profile>, Refused> {
        let mut found = Vec::new();
        for number in 0..MOST_KINDS {
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
            let asked = ask!(self.library, nvmlDeviceGetGpuInstanceProfileInfoV(self.handle, number, &raw mut info));
            if kind(asked)? {
                let name = text(&info.name);
                let name = name.strip_prefix("MIG ").unwrap_or(&name).to_owned();
                found.push(Profile { id: info.id, name, most: info.instanceCount, slices: info.sliceCount });
            }
        }
        Ok(found)
    }

    /// Where instances of a kind can be, if no other is in the way.
    ///
    /// # Errors
    /// NVML's.
    pub fn placements(&self, profile: u32) -> Result<Vec<Placement>, Refused> {
        let empty = nvmlGpuInstancePlacement_t { start: 0, size: 0 };
        let found = list(&empty, |count, places| {
            ask!(self.library, nvmlDeviceGetGpuInstancePossiblePlacements_v2(self.handle, profile, places, count))
        })?;
        Ok(found.iter().map(|place| Placement { start: place.start, size: place.size }).collect())
    }

    /// How many more of a kind it holds, beside those that are there.
    ///
    /// # Errors
    /// NVML's.
    pub fn room(&self, profile: u32) -> Result<u32, Refused> {
        let mut count = 0;
        ask!(self.library, nvmlDeviceGetGpuInstanceRemainingCapacity(self.handle, profile, &raw mut count))?;
        Ok(count)
    }

    /// Its instances of a kind.
    ///
    /// # Errors
    /// NVML's.
    pub fn instances(&self, profile: u32) -> Result<Vec<Instance<'a>>, Refused> {
        let found = list(&(std::ptr::null_mut() as nvmlGpuInstance_t), |count, handles| {
            ask!(self.library, nvmlDeviceGetGpuInstances(self.handle, profile, handles, count))
        })?;
        found.into_iter().map(|handle| Instance::new(self.library, handle)).collect()
    }

    /// Makes an instance.
    ///
    /// # Errors
    /// NVML's.
    pub fn make_instance(&self, profile: u32, place: Placement) -> Result<Instance<'a>, Refused> {
        let place = nvmlGpuInstancePlacement_t { start: place.start, size: place.size };
        let mut handle: nvmlGpuInstance_t = std::ptr::null_mut();
        let made = ask!(
            self.library,
            nvmlDeviceCreateGpuInstanceWithPlacement(self.handle, profile, &raw const place, &raw mut handle)
        );
        made?;
        Instance::new(self.library, handle)
    }
}

impl<'a> Instance<'a> {
    fn new(library: &'a Library, handle: nvmlGpuInstance_t) -> Result<Self, Refused> {
        let mut info = nvmlGpuInstanceInfo_t {
            device: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        ask!(library, nvmlGpuInstanceGetInfo(handle, &raw mut info))?;
        Ok(Self { library, handle, id: info.id, profile: info.profileId })
    }

    /// The kinds of compute instances that it can have.
    ///
    /// # Errors
    /// NVML's.
    pub fn compute_profiles(&self) -> Result<Vec<ComputeProfile>, Refused> {
        let mut found = Vec::new();
        for number in 0..MOST_KINDS {
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
            // Engines are shared: there is no other kind.
            let asked = ask!(
                self.library,
                nvmlGpuInstanceGetComputeInstanceProfileInfoV(self.handle, number, 0, &raw mut info)
            );
            if kind(asked)? {
                let multiprocessors = info.multiprocessorCount;
                found.push(ComputeProfile { id: info.id, slices: info.sliceCount, multiprocessors });
            }
        }
        Ok(found)
    }

    /// Its compute instances of a kind.
    ///
    /// # Errors
    /// NVML's.
    pub fn computes(&self, profile: u32) -> Result<Vec<Compute<'a>>, Refused> {
        let found = list(&(std::ptr::null_mut() as nvmlComputeInstance_t), |count, handles| {
            ask!(self.library, nvmlGpuInstanceGetComputeInstances(self.handle, profile, handles, count))
        })?;
        found.into_iter().map(|handle| Compute::new(self.library, handle)).collect()
    }

    /// Makes a compute instance.
    ///
    /// # Errors
    /// NVML's.
    pub fn make_compute(&self, profile: u32) -> Result<Compute<'a>, Refused> {
        let mut handle: nvmlComputeInstance_t = std::ptr::null_mut();
        ask!(self.library, nvmlGpuInstanceCreateComputeInstance(self.handle, profile, &raw mut handle))?;
        Compute::new(self.library, handle)
    }

    /// Unmakes it. No compute instance may be left in it.
    ///
    /// # Errors
    /// NVML's; it is still there then.
    pub fn destroy(self) -> Result<(), Refused> {
        ask!(self.library, nvmlGpuInstanceDestroy(self.handle))
    }
}

impl<'a> Compute<'a> {
    fn new(library: &'a Library, handle: nvmlComputeInstance_t) -> Result<Self, Refused> {
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

    /// Unmakes it. Nobody may be using it.
    ///
    /// # Errors
    /// NVML's; it is still there then.
    pub fn destroy(self) -> Result<(), Refused> {
        ask!(self.library, nvmlComputeInstanceDestroy(self.handle))
    }
}
