//! The fabric manager, as the daemon asks it.

use std::path::PathBuf;
use std::time::Duration;

use firstlight_sys::nvfm::{Address, Error, Library, Partition};

/// Whoever connects GPUs. Each call may take as long as it likes, and may have
/// done what it says it has not.
pub trait Fabric {
    /// All partitions, and which are active.
    ///
    /// # Errors
    /// As [`Error`] says.
    fn partitions(&mut self) -> Result<Vec<Partition>, Error>;
    /// Activates one.
    ///
    /// # Errors
    /// As [`Error`] says; what was done is not known then.
    fn activate(&mut self, id: u32) -> Result<(), Error>;
    /// Deactivates one.
    ///
    /// # Errors
    /// As [`Error`] says; what was done is not known then.
    fn deactivate(&mut self, id: u32) -> Result<(), Error>;
    /// Says which are active; only to one that was restarted beside running tenants.
    ///
    /// # Errors
    /// As [`Error`] says.
    fn set_activated(&mut self, ids: &[u32]) -> Result<(), Error>;
}

/// FM through libnvfm, with a connection for each call: the next call may meet another FM.
#[derive(Debug)]
pub struct Nvfm {
    library: Library,
    address: Address,
    timeout: Duration,
}

impl Nvfm {
    /// FM at `address`, through the library at `path` or where the loader finds it.
    ///
    /// # Errors
    /// There is no library.
    pub fn open(
        path: Option<&PathBuf>,
        address: Address,
        timeout: Duration,
    ) -> Result<Self, firstlight_sys::nvfm::OpenError> {
        Ok(Self { library: Library::open(path.map(PathBuf::as_path))?, address, timeout })
    }
}

impl Fabric for Nvfm {
    fn partitions(&mut self) -> Result<Vec<Partition>, Error> {
        self.library.connect(&self.address, self.timeout)?.partitions()
    }

    fn activate(&mut self, id: u32) -> Result<(), Error> {
        self.library.connect(&self.address, self.timeout)?.activate(id)
    }

    fn deactivate(&mut self, id: u32) -> Result<(), Error> {
        self.library.connect(&self.address, self.timeout)?.deactivate(id)
    }

    fn set_activated(&mut self, ids: &[u32]) -> Result<(), Error> {
        self.library.connect(&self.address, self.timeout)?.set_activated(ids)
    }
}
