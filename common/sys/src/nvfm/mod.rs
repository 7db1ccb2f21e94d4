//! Binding of libnvfm, the client library of NVIDIA's fabric manager (FM).
//!
//! The library is distributed with FM only, so it is loaded at run time, and the layouts are declared here. Callers
//! interpret its return codes. It is not documented as thread-safe: a [`Library`] is used by one thread.

mod abi;
mod code;
mod reply;

use std::ffi::{OsStr, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use code::Code;
pub use reply::{Failed, FailedDevice, Gpu, Partition, Unsupported};

/// Library names to load, the versioned one first.
pub const NAMES: &[&str] = &["libnvfm.so.1", "libnvfm.so"];

/// Maximum number of partitions in one call.
pub const MAX_PARTITIONS: usize = abi::MAX_PARTITIONS;

/// A connection handle of the library.
type Handle = *mut c_void;

type NoArguments = unsafe extern "C" fn() -> i32;
type Connect = unsafe extern "C" fn(*mut abi::Connect, *mut Handle) -> i32;
type OfHandle = unsafe extern "C" fn(Handle) -> i32;
type WithId = unsafe extern "C" fn(Handle, u32) -> i32;
type With<T> = unsafe extern "C" fn(Handle, *mut T) -> i32;

/// Why the library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It was not found.
    #[error(
        "failed to open libnvfm: {0}; it comes with the fabric manager, of the same version, and belongs into the image"
    )]
    Library(String),
    /// It lacks a function: another library, or too old.
    #[error("libnvfm has no function {function}: {what}")]
    Function {
        /// The function.
        function: &'static str,
        /// The loader's message.
        what: String,
    },
    /// Its initialisation failed.
    #[error("fmLibInit: {0}")]
    Init(Code),
}

/// A failed call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// FM or the library refused.
    #[error("{call}: {code}")]
    Refused {
        /// The function.
        call: &'static str,
        /// Its return code.
        code: Code,
    },
    /// The reply is invalid.
    #[error("{call}: invalid reply: {what}; are libnvfm and the fabric manager of one version?")]
    Reply {
        /// The function.
        call: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// The library does not have the function.
    #[error("{call}: this libnvfm does not have it")]
    Missing {
        /// The function.
        call: &'static str,
    },
    /// The address cannot be passed to the library.
    #[error("the address {address:?} is too long, or has a NUL in it")]
    Address {
        /// The address.
        address: String,
    },
}

impl Error {
    /// Returns the return code, if there was one.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Where FM listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// An IPv4 address, with a port after a colon if it is not 6666.
    Inet(String),
    /// A Unix socket.
    Unix(String),
    /// `CID:PORT`; libraries from 580 on.
    Vsock(String),
}

impl Address {
    fn parts(&self) -> (&str, u32) {
        match self {
            Self::Inet(text) => (text, 1),
            Self::Unix(text) => (text, 2),
            Self::Vsock(text) => (text, 3),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inet(text) => write!(f, "{text}"),
            Self::Unix(text) => write!(f, "unix:{text}"),
            Self::Vsock(text) => write!(f, "vsock:{text}"),
        }
    }
}

/// The loaded and initialised library.
pub struct Library {
    connect: Connect,
    disconnect: OfHandle,
    shutdown: NoArguments,
    list: With<abi::Partitions>,
    activate: WithId,
    deactivate: WithId,
    set_activated: With<abi::Activated>,
    failed: Option<With<abi::FailedDevices>>,
    unsupported: Option<With<abi::Unsupported>>,
    /// The library supports the older address layout only.
    is_old: AtomicBool,
    /// It was initialised here, and has to be shut down.
    is_begun: bool,
    /// Dropped last: the function pointers above point into it.
    _library: libloading::Library,
    /// Not `Sync`: the library is not documented as thread-safe.
    _not_sync: PhantomData<std::cell::Cell<()>>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("is_old", &self.is_old).finish_non_exhaustive()
    }
}

impl Library {
    /// Loads and initialises the library at `path`, or the first of [`NAMES`] that the loader finds.
    ///
    /// # Errors
    /// The library was not found, lacks a function, or its initialisation failed.
    pub fn open(path: Option<&Path>) -> Result<Self, OpenError> {
        let names: Vec<&OsStr> = match path {
            Some(path) => vec![path.as_os_str()],
            None => NAMES.iter().map(OsStr::new).collect(),
        };
        let mut first = None;
        for name in names {
            // SAFETY: what a library does when it is loaded cannot be checked. This one is the image's
            // own, on a verified disk, and configured by the daemon's operator.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Self::of(library),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(OpenError::Library(first.map(|error| error.to_string()).unwrap_or_default()))
    }

    fn of(library: libloading::Library) -> Result<Self, OpenError> {
        /// Looks up a function by name.
        ///
        /// # Safety
        /// The function has to be of the type `T`.
        unsafe fn find<T: Copy>(library: &libloading::Library, function: &'static str) -> Result<T, OpenError> {
            let missing = |error: libloading::Error| OpenError::Function { function, what: error.to_string() };
            // SAFETY: the caller says which type it has.
            unsafe { library.get::<T>(function.as_bytes()) }.map(|symbol| *symbol).map_err(missing)
        }
        // SAFETY: the types are those of the functions of these names, the same from 575 to 610. They are
        // called while the library is open: it is in the value beside them.
        let (mut opened, code) = unsafe {
            let init: NoArguments = find(&library, "fmLibInit")?;
            let opened = Self {
                connect: find(&library, "fmConnect")?,
                disconnect: find(&library, "fmDisconnect")?,
                shutdown: find(&library, "fmLibShutdown")?,
                list: find(&library, "fmGetSupportedFabricPartitions")?,
                activate: find(&library, "fmActivateFabricPartition")?,
                deactivate: find(&library, "fmDeactivateFabricPartition")?,
                set_activated: find(&library, "fmSetActivatedFabricPartitions")?,
                failed: find(&library, "fmGetNvlinkFailedDevices").ok(),
                unsupported: find(&library, "fmGetUnsupportedFabricPartitions").ok(),
                is_old: AtomicBool::new(false),
                is_begun: false,
                _library: library,
                _not_sync: PhantomData,
            };
            (opened, Code(init()))
        };
        opened.is_begun = code == Code::SUCCESS;
        if opened.is_begun { Ok(opened) } else { Err(OpenError::Init(code)) }
    }

    /// Connects to FM. A library that rejects the newer address layout gets the older one from then on.
    ///
    /// # Errors
    /// The address is invalid, or the library failed.
    pub fn connect(&self, address: &Address, timeout: Duration) -> Result<Connection<'_>, Error> {
        let (text, kind) = address.parts();
        let mut bytes = [0; abi::ADDRESS];
        let room = bytes.get_mut(..text.len()).filter(|room| room.len() < abi::ADDRESS && !text.contains('\0'));
        room.ok_or_else(|| Error::Address { address: text.to_owned() })?.copy_from_slice(text.as_bytes());
        let mut parameters = abi::Connect {
            version: abi::CONNECT,
            address: bytes,
            timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
            is_unix: u32::from(kind == 2),
            kind,
        };
        let mut attempt = |version| {
            parameters.version = version;
            let mut handle = ptr::null_mut();
            // SAFETY: both point to live locals; the address ends with a NUL, and the layout is of the
            // size that its first word says, or longer.
            match Code(unsafe { (self.connect)(&raw mut parameters, &raw mut handle) }) {
                Code::SUCCESS => Ok(Connection { library: self, handle }),
                code => Err(Error::Refused { call: "fmConnect", code }),
            }
        };
        if !self.is_old.load(Ordering::Relaxed) {
            match attempt(abi::CONNECT) {
                Err(Error::Refused { code: Code::VERSION_MISMATCH, .. }) => {}
                other => return other,
            }
        }
        let connected = attempt(abi::CONNECT_OLD);
        if connected.is_ok() {
            self.is_old.store(true, Ordering::Relaxed);
        }
        connected
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if self.is_begun {
            // SAFETY: it was initialised by us, and no connection outlives it.
            let _ = unsafe { (self.shutdown)() };
        }
    }
}

/// A connection to FM, for one operation: FM may have been restarted before the next.
pub struct Connection<'a> {
    library: &'a Library,
    handle: Handle,
}

impl fmt::Debug for Connection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connection")
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        // SAFETY: the library gave this handle and has not taken it back.
        let _ = unsafe { (self.library.disconnect)(self.handle) };
    }
}

fn done(call: &'static str, code: i32) -> Result<(), Error> {
    match Code(code) {
        Code::SUCCESS => Ok(()),
        code => Err(Error::Refused { call, code }),
    }
}

impl Connection<'_> {
    /// Returns all partitions of this baseboard, active or not.
    ///
    /// # Errors
    /// FM's error, or an invalid reply.
    pub fn partitions(&self) -> Result<Vec<Partition>, Error> {
        const CALL: &str = "fmGetSupportedFabricPartitions";
        let mut list = abi::Partitions::empty();
        // SAFETY: the handle is connected; the list is live, and of the layout that its first word says.
        done(CALL, unsafe { (self.library.list)(self.handle, &raw mut *list) })?;
        reply::partitions(&list).map_err(|what| Error::Reply { call: CALL, what })
    }

    /// Activates a partition.
    ///
    /// # Errors
    /// FM's error. Only its list then tells what it has done.
    pub fn activate(&self, id: u32) -> Result<(), Error> {
        // SAFETY: the handle is connected.
        done("fmActivateFabricPartition", unsafe { (self.library.activate)(self.handle, id) })
    }

    /// Deactivates a partition.
    ///
    /// # Errors
    /// As [`Connection::activate`].
    pub fn deactivate(&self, id: u32) -> Result<(), Error> {
        // SAFETY: the handle is connected.
        done("fmDeactivateFabricPartition", unsafe { (self.library.deactivate)(self.handle, id) })
    }

    /// Sends the list of active partitions to a restarted FM; it deactivates all others.
    ///
    /// # Errors
    /// FM's error; more than [`MAX_PARTITIONS`] is a bad parameter without a call.
    pub fn set_activated(&self, ids: &[u32]) -> Result<(), Error> {
        const CALL: &str = "fmSetActivatedFabricPartitions";
        let mut list = abi::Activated::empty();
        let (Some(room), Ok(count)) = (list.id.get_mut(..ids.len()), u32::try_from(ids.len())) else {
            return Err(Error::Refused { call: CALL, code: Code::BAD_PARAMETER });
        };
        room.copy_from_slice(ids);
        list.partitions = count;
        // SAFETY: the handle is connected; the list is live, and of the layout that its first word says.
        done(CALL, unsafe { (self.library.set_activated)(self.handle, &raw mut list) })
    }

    /// Returns devices with failed NVLinks.
    ///
    /// # Errors
    /// As [`Connection::partitions`]; the function may be missing.
    pub fn failed(&self) -> Result<Failed, Error> {
        const CALL: &str = "fmGetNvlinkFailedDevices";
        let call = self.library.failed.ok_or(Error::Missing { call: CALL })?;
        let mut list = abi::FailedDevices::empty();
        // SAFETY: the handle is connected; the list is live, and of the layout that its first word says.
        done(CALL, unsafe { call(self.handle, &raw mut *list) })?;
        reply::failed(&list).map_err(|what| Error::Reply { call: CALL, what })
    }

    /// Returns partitions that the state of the hardware does not allow.
    ///
    /// # Errors
    /// As [`Connection::partitions`]; the function may be missing.
    pub fn unsupported(&self) -> Result<Vec<Unsupported>, Error> {
        const CALL: &str = "fmGetUnsupportedFabricPartitions";
        let call = self.library.unsupported.ok_or(Error::Missing { call: CALL })?;
        let mut list = abi::Unsupported::empty();
        // SAFETY: the handle is connected; the list is live, and of the layout that its first word says.
        done(CALL, unsafe { call(self.handle, &raw mut *list) })?;
        reply::unsupported(&list).map_err(|what| Error::Reply { call: CALL, what })
    }
}
