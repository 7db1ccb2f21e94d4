//! NVML, NVIDIA's management library, opened at run time.
//!
//! `nvml-wrapper-sys` has the function types and structure layouts. This module
//! converts them to plain values without interpreting them. A function that the
//! driver's library lacks is an error of that call only.
//!
//! Every call goes through [`ask`]; its safety condition holds for this whole
//! module: pointers passed to NVML are to live locals of the type in the
//! function's signature, or to buffers whose length is passed along.

mod gpu;
mod mig;

use std::ffi::{CStr, CString, OsStr};
use std::fmt;

use libc::{c_char, c_uint};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlConfComputeSystemState_t, nvmlDevice_t, nvmlSystemConfComputeSettings_t,
};

pub use gpu::{ComputeMode, Gpu};
pub use mig::{ComputeInstance, ComputeProfile, GpuInstance, MigMode, Placement, Profile};

/// `NVML_SUCCESS`.
const SUCCESS: c_uint = 0;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_uint = 7;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const FUNCTION_NOT_FOUND: c_uint = 13;

/// Calls NVML: `ask!(library, function(arguments))`; an error unless it succeeds.
macro_rules! ask {
    ($library:expr, $function:ident($($argument:expr),*)) => {
        match &$library.raw.$function {
            // SAFETY: the library is initialised and stays open while `$library` is borrowed. The
            // compiler checks the arguments' types against NVML's interface; what they point to is
            // live and large enough, see the module's documentation.
            Ok(function) => $crate::nvml::check($library, stringify!($function), unsafe { function($($argument),*) }),
            Err(_) => Err($crate::nvml::NvmlError::missing(stringify!($function))),
        }
    };
}
use ask;

/// An NVML call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct NvmlError {
    /// The function.
    pub call: &'static str,
    /// `nvmlReturn_t`.
    pub code: u32,
    /// NVML's text for the code.
    pub text: String,
}

impl fmt::Display for NvmlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.code)
    }
}

impl NvmlError {
    /// `NVML_ERROR_INVALID_ARGUMENT`: also returned for an object that does not exist.
    pub const INVALID_ARGUMENT: u32 = 2;
    /// `NVML_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 3;
    /// `NVML_ERROR_RESET_REQUIRED`.
    pub const RESET_REQUIRED: u32 = 16;
    /// `NVML_ERROR_IN_USE`.
    pub const IN_USE: u32 = 19;

    fn missing(call: &'static str) -> Self {
        Self { call, code: FUNCTION_NOT_FOUND, text: "this driver's NVML lacks the function".to_owned() }
    }

    /// Returns whether the driver's library is too old to have the function.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.code == FUNCTION_NOT_FOUND
    }

    /// Returns whether this GPU does not support the call or lacks the object.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        [Self::INVALID_ARGUMENT, Self::NOT_SUPPORTED].contains(&self.code)
    }
}

/// Why NVML could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The library was not found.
    #[error("failed to open libnvidia-ml.so.1 (NVML): {0}; add the driver's libraries to the image")]
    Library(String),
    /// `nvmlInit` failed.
    #[error("failed to initialise NVML: {0}; is the driver loaded, and of the same version as its libraries?")]
    Init(NvmlError),
}

/// The initialised NVML library.
pub struct Library {
    raw: NvmlLib,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library")
    }
}

fn check(library: &Library, call: &'static str, code: c_uint) -> Result<(), NvmlError> {
    if code == SUCCESS { Ok(()) } else { Err(library.refused(call, code)) }
}

/// Converts a NUL-terminated text of NVML.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads a list of unknown length: `call` fills a buffer, which grows until the list fits.
fn list<T: Clone>(
    empty: &T,
    mut call: impl FnMut(*mut c_uint, *mut T) -> Result<(), NvmlError>,
) -> Result<Vec<T>, NvmlError> {
    // Larger than any list expected; NVML reports if not.
    let mut capacity: c_uint = 512;
    loop {
        let mut items = vec![empty.clone(); usize::try_from(capacity).unwrap_or_default()];
        let mut count = capacity;
        match call(&raw mut count, items.as_mut_ptr()) {
            Ok(()) => {
                items.truncate(usize::try_from(count).unwrap_or_default());
                return Ok(items);
            }
            Err(error) if error.code == INSUFFICIENT_SIZE && capacity < 1 << 20 => {
                capacity = capacity.max(count).saturating_mul(2);
            }
            Err(error) => return Err(error),
        }
    }
}

impl Library {
    /// Opens NVML at the first of these paths that exists, and initialises it.
    ///
    /// # Errors
    /// It is at none of them, or fails to initialise.
    pub fn open(paths: &[&OsStr]) -> Result<Self, OpenError> {
        let mut first_error = None;
        for path in paths {
            // SAFETY: opening a library runs its initialisers. The paths are those of the driver's
            // library, which is part of the image and as trusted as the driver.
            match unsafe { NvmlLib::new(*path) } {
                Ok(raw) => {
                    let library = Self { raw };
                    ask!(&library, nvmlInit_v2()).map_err(OpenError::Init)?;
                    return Ok(library);
                }
                // The first path is the usual one, so its error is reported.
                Err(error) => drop(first_error.get_or_insert_with(|| error.to_string())),
            }
        }
        Err(OpenError::Library(first_error.unwrap_or_else(|| "no path given".to_owned())))
    }

    fn refused(&self, call: &'static str, code: c_uint) -> NvmlError {
        let name = match &self.raw.nvmlErrorString {
            // SAFETY: takes any number, needs no initialisation, and returns a constant of the library.
            Ok(name_of) => unsafe { name_of(code) },
            Err(_) => std::ptr::null(),
        };
        let text = if name.is_null() {
            "unnamed error".to_owned()
        } else {
            // SAFETY: not null, and a NUL-terminated text that lives as long as the library.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        NvmlError { call, code, text }
    }

    /// Returns the driver's version.
    ///
    /// # Errors
    /// NVML's.
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        let mut buffer = [0; 96];
        ask!(self, nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// Returns the GPU with that PCI address.
    ///
    /// # Errors
    /// NVML's.
    pub fn gpu(&self, pci: &str) -> Result<Gpu<'_>, NvmlError> {
        // A text with a NUL names no GPU, nor does an empty one.
        let pci = CString::new(pci).unwrap_or_default();
        let mut handle: nvmlDevice_t = std::ptr::null_mut();
        ask!(self, nvmlDeviceGetHandleByPciBusId_v2(pci.as_ptr(), &raw mut handle))?;
        Ok(Gpu::new(self, handle))
    }

    /// Lists all GPUs that NVML sees.
    ///
    /// # Errors
    /// NVML's.
    pub fn gpus(&self) -> Result<Vec<Gpu<'_>>, NvmlError> {
        let mut count = 0;
        ask!(self, nvmlDeviceGetCount_v2(&raw mut count))?;
        let gpu = |index| {
            let mut handle: nvmlDevice_t = std::ptr::null_mut();
            ask!(self, nvmlDeviceGetHandleByIndex_v2(index, &raw mut handle))?;
            Ok(Gpu::new(self, handle))
        };
        (0..count).map(gpu).collect()
    }

    /// Returns whether confidential computing is on for the GPUs, in single-GPU or
    /// multi-GPU mode.
    ///
    /// # Errors
    /// NVML's.
    pub fn is_confidential(&self) -> Result<bool, NvmlError> {
        let mut settings = nvmlSystemConfComputeSettings_t {
            version: 0,
            environment: 0,
            ccFeature: 0,
            devToolsMode: 0,
            multiGpuMode: 0,
        };
        settings.version = version(&settings, 1);
        let asked = ask!(self, nvmlSystemGetConfComputeSettings(&raw mut settings));
        if asked.is_ok() {
            return Ok(settings.ccFeature != 0 || settings.multiGpuMode != 0);
        }
        let mut state = nvmlConfComputeSystemState_t { environment: 0, ccFeature: 0, devToolsMode: 0 };
        ask!(self, nvmlSystemGetConfComputeState(&raw mut state))?;
        Ok(state.ccFeature != 0)
    }

    /// Returns the GPU ready state under confidential computing.
    ///
    /// # Errors
    /// NVML's.
    pub fn is_ready(&self) -> Result<bool, NvmlError> {
        let mut ready = 0;
        ask!(self, nvmlSystemGetConfComputeGpusReadyState(&raw mut ready))?;
        Ok(ready != 0)
    }

    /// Sets the GPU ready state.
    ///
    /// # Errors
    /// NVML's.
    pub fn set_ready(&self, ready: bool) -> Result<(), NvmlError> {
        ask!(self, nvmlSystemSetConfComputeGpusReadyState(c_uint::from(ready)))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // A failed shutdown has no effect beyond the process.
        let _ = ask!(self, nvmlShutdown());
    }
}

/// Encodes a structure's version for NVML: size and number.
fn version<T>(_of: &T, number: c_uint) -> c_uint {
    c_uint::try_from(std::mem::size_of::<T>()).unwrap_or_default() | number << 24
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_wrong_libraries_are_named_in_the_error() {
        let error = Library::open(&[OsStr::new("/nowhere/libnvidia-ml.so.1")]).unwrap_err().to_string();
        assert!(
            error.contains("/nowhere/libnvidia-ml.so.1") && error.contains("add the driver's libraries"),
            "{error}"
        );
        let error = Library::open(&[OsStr::new("libc.so.6")]).unwrap_err();
        assert!(matches!(error, OpenError::Init(NvmlError { code: FUNCTION_NOT_FOUND, .. })), "{error}");
    }

    #[test]
    fn texts_end_at_the_first_nul() {
        assert_eq!(text(&[65, 66, 0, 67]), "AB");
        assert_eq!(text(&[65]), "A");
    }

    #[test]
    fn list_buffer_grows_until_the_list_fits() {
        let refused = |code| NvmlError { call: "x", code, text: String::new() };
        let mut calls = 0;
        let all = list(&0u32, |count, items| {
            calls += 1;
            // SAFETY: `count` is a live number.
            let room = unsafe { *count };
            if room < 1000 {
                // SAFETY: as above.
                unsafe { *count = 1000 };
                return Err(refused(INSUFFICIENT_SIZE));
            }
            // SAFETY: there is room for `room` items, which is more than one.
            unsafe {
                *items = 7;
                *count = 1;
            }
            Ok(())
        });
        assert_eq!((all, calls), (Ok(vec![7]), 2));
        let never = list(&0u32, |_, _| Err(refused(INSUFFICIENT_SIZE)));
        assert_eq!(never.unwrap_err().code, INSUFFICIENT_SIZE);
    }
}
