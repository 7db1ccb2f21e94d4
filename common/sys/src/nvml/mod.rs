//! NVML, NVIDIA's library for looking after GPUs, found when it is needed.
//!
//! `nvml-wrapper-sys` has the interface's text: the functions' types and the
//! layouts of what they fill in. Here is the way from there to plain values;
//! what they mean is decided elsewhere. A function that the driver's library
//! does not have is an error of the call, not of the program.
//!
//! Every call goes through [`ask`]; its promise holds for this module as a
//! whole: pointers that are handed to NVML are to live locals of the type that
//! the function's signature names, or to buffers whose length goes along.

mod gpu;
mod mig;

use std::ffi::{CStr, CString, OsStr};
use std::fmt;

use libc::{c_char, c_uint};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlConfComputeSystemState_t, nvmlDevice_t, nvmlSystemConfComputeSettings_t,
};

pub use gpu::{ComputeMode, Gpu};
pub use mig::{Compute, ComputeProfile, Instance, MigMode, Placement, Profile};

/// `NVML_SUCCESS`.
const SUCCESS: c_uint = 0;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_uint = 7;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const FUNCTION_NOT_FOUND: c_uint = 13;

/// Asks NVML: `ask!(library, function(arguments))`, an error unless it succeeds.
macro_rules! ask {
    ($library:expr, $function:ident($($argument:expr),*)) => {
        match &$library.raw.$function {
            // SAFETY: the library is initialised and stays open while `$library` is borrowed. The
            // compiler checks the arguments' types against NVML's interface; what they point to is
            // live and large enough, see the module's documentation.
            Ok(function) => $crate::nvml::check($library, stringify!($function), unsafe { function($($argument),*) }),
            Err(_) => Err($crate::nvml::Refused::missing(stringify!($function))),
        }
    };
}
use ask;

/// NVML did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Refused {
    /// The function.
    pub call: &'static str,
    /// `nvmlReturn_t`.
    pub code: u32,
    /// What NVML calls that.
    pub text: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.code)
    }
}

impl Refused {
    /// `NVML_ERROR_INVALID_ARGUMENT`: also what there is none of.
    pub const INVALID_ARGUMENT: u32 = 2;
    /// `NVML_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 3;
    /// `NVML_ERROR_RESET_REQUIRED`.
    pub const RESET_REQUIRED: u32 = 16;
    /// `NVML_ERROR_IN_USE`.
    pub const IN_USE: u32 = 19;

    fn missing(call: &'static str) -> Self {
        Self { call, code: FUNCTION_NOT_FOUND, text: "this driver's NVML does not have it".to_owned() }
    }

    /// Whether the driver's library is too old to have the function.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.code == FUNCTION_NOT_FOUND
    }

    /// Whether there is no such thing on this GPU.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        [Self::INVALID_ARGUMENT, Self::NOT_SUPPORTED].contains(&self.code)
    }
}

/// Why there is no NVML.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is nowhere.
    #[error("cannot open libnvidia-ml.so.1, NVML: {0}; add the driver's libraries to the image")]
    Library(String),
    /// It does not work.
    #[error("NVML does not begin: {0}; is the driver loaded, and of the same version as its libraries?")]
    Init(Refused),
}

/// NVML, initialised.
pub struct Library {
    raw: NvmlLib,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library")
    }
}

fn check(library: &Library, call: &'static str, code: c_uint) -> Result<(), Refused> {
    if code == SUCCESS { Ok(()) } else { Err(library.refused(call, code)) }
}

/// A text that NVML wrote, without what is behind its end.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A list of which NVML says the length: `call` is given room and fills it in.
fn list<T: Clone>(
    empty: &T,
    mut call: impl FnMut(*mut c_uint, *mut T) -> Result<(), Refused>,
) -> Result<Vec<T>, Refused> {
    // More than there is of anything; NVML says so if not.
    let mut room: c_uint = 512;
    loop {
        let mut items = vec![empty.clone(); usize::try_from(room).unwrap_or_default()];
        let mut count = room;
        match call(&raw mut count, items.as_mut_ptr()) {
            Ok(()) => {
                items.truncate(usize::try_from(count).unwrap_or_default());
                return Ok(items);
            }
            Err(error) if error.code == INSUFFICIENT_SIZE && room < 1 << 20 => room = room.max(count).saturating_mul(2),
            Err(error) => return Err(error),
        }
    }
}

impl Library {
    /// Opens NVML at the first of these places where there is one, and begins.
    ///
    /// # Errors
    /// It is at none of them, or does not begin.
    pub fn open(places: &[&OsStr]) -> Result<Self, OpenError> {
        let mut error = "there is no place to look".to_owned();
        for place in places {
            // SAFETY: opening a library runs its initialisers. Places are those of the driver's own
            // library, which the image vouches for as it does for the driver.
            match unsafe { NvmlLib::new(*place) } {
                Ok(raw) => {
                    let library = Self { raw };
                    ask!(&library, nvmlInit_v2()).map_err(OpenError::Init)?;
                    return Ok(library);
                }
                // The first place is where it is looked for as a rule.
                Err(other) if error.starts_with("there") => error = other.to_string(),
                Err(_) => {}
            }
        }
        Err(OpenError::Library(error))
    }

    fn refused(&self, call: &'static str, code: c_uint) -> Refused {
        let words = match &self.raw.nvmlErrorString {
            // SAFETY: takes any number, needs no initialisation, and returns a constant of the library.
            Ok(words) => unsafe { words(code) },
            Err(_) => std::ptr::null(),
        };
        let text = if words.is_null() {
            "an error without a name".to_owned()
        } else {
            // SAFETY: not null, and a text with its end that lives as long as the library.
            unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
        };
        Refused { call, code, text }
    }

    /// The driver's version.
    ///
    /// # Errors
    /// NVML's.
    pub fn driver_version(&self) -> Result<String, Refused> {
        let mut buffer = [0; 96];
        ask!(self, nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), 96))?;
        Ok(text(&buffer))
    }

    /// The GPU with that PCI address.
    ///
    /// # Errors
    /// NVML's.
    pub fn gpu(&self, pci: &str) -> Result<Gpu<'_>, Refused> {
        // A text with a zero byte in it names no GPU, and neither does an empty one.
        let pci = CString::new(pci).unwrap_or_default();
        let mut handle: nvmlDevice_t = std::ptr::null_mut();
        ask!(self, nvmlDeviceGetHandleByPciBusId_v2(pci.as_ptr(), &raw mut handle))?;
        Ok(Gpu::new(self, handle))
    }

    /// All GPUs that NVML sees.
    ///
    /// # Errors
    /// NVML's.
    pub fn gpus(&self) -> Result<Vec<Gpu<'_>>, Refused> {
        let mut count = 0;
        ask!(self, nvmlDeviceGetCount_v2(&raw mut count))?;
        let gpu = |index| {
            let mut handle: nvmlDevice_t = std::ptr::null_mut();
            ask!(self, nvmlDeviceGetHandleByIndex_v2(index, &raw mut handle))?;
            Ok(Gpu::new(self, handle))
        };
        (0..count).map(gpu).collect()
    }

    /// Whether confidential computing is on for the GPUs: for each by itself, or
    /// for all together with their links.
    ///
    /// # Errors
    /// NVML's.
    pub fn is_confidential(&self) -> Result<bool, Refused> {
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

    /// Whether the GPUs accept work under confidential computing.
    ///
    /// # Errors
    /// NVML's.
    pub fn is_ready(&self) -> Result<bool, Refused> {
        let mut ready = 0;
        ask!(self, nvmlSystemGetConfComputeGpusReadyState(&raw mut ready))?;
        Ok(ready != 0)
    }

    /// Tells the GPUs whether to accept work.
    ///
    /// # Errors
    /// NVML's.
    pub fn set_ready(&self, ready: bool) -> Result<(), Refused> {
        ask!(self, nvmlSystemSetConfComputeGpusReadyState(c_uint::from(ready)))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // A library that cannot end ends with the process.
        let _ = ask!(self, nvmlShutdown());
    }
}

/// NVML's number of a structure's version.
fn version<T>(_of: &T, number: c_uint) -> c_uint {
    c_uint::try_from(std::mem::size_of::<T>()).unwrap_or_default() | number << 24
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_nowhere_or_another_is_told() {
        let error = Library::open(&[OsStr::new("/nowhere/libnvidia-ml.so.1")]).unwrap_err().to_string();
        assert!(
            error.contains("/nowhere/libnvidia-ml.so.1") && error.contains("add the driver's libraries"),
            "{error}"
        );
        let error = Library::open(&[OsStr::new("libc.so.6")]).unwrap_err();
        assert!(matches!(error, OpenError::Init(Refused { code: FUNCTION_NOT_FOUND, .. })), "{error}");
    }

    #[test]
    fn texts_end_where_they_end() {
        assert_eq!(text(&[65, 66, 0, 67]), "AB");
        assert_eq!(text(&[65]), "A");
    }

    #[test]
    fn lists_grow_until_they_hold_everything() {
        let refused = |code| Refused { call: "x", code, text: String::new() };
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
