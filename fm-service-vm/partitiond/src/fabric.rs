//! The interface to the fabric manager (FM).

use std::path::PathBuf;
use std::time::Duration;

use firstlight_sys::nvfm::{Address, Error, Library, Partition};

/// A fabric manager. Each call may block without a bound, and may have done what it reports as failed.
pub trait Fabric {
    /// Returns all partitions, and which are active.
    ///
    /// # Errors
    /// See [`Error`].
    fn partitions(&mut self) -> Result<Vec<Partition>, Error>;
    /// Activates a partition.
    ///
    /// # Errors
    /// See [`Error`]; whether it was activated is then unknown.
    fn activate(&mut self, id: u32) -> Result<(), Error>;
    /// Deactivates a partition.
    ///
    /// # Errors
    /// See [`Error`]; whether it was deactivated is then unknown.
    fn deactivate(&mut self, id: u32) -> Result<(), Error>;
    /// Sends the list of active partitions; only to an FM that was restarted with `--restart`.
    ///
    /// # Errors
    /// See [`Error`].
    fn set_activated(&mut self, ids: &[u32]) -> Result<(), Error>;
}

/// Any fabric manager.
pub type BoxedFabric = Box<dyn Fabric + Send>;

impl Fabric for BoxedFabric {
    fn partitions(&mut self) -> Result<Vec<Partition>, Error> {
        (**self).partitions()
    }

    fn activate(&mut self, id: u32) -> Result<(), Error> {
        (**self).activate(id)
    }

    fn deactivate(&mut self, id: u32) -> Result<(), Error> {
        (**self).deactivate(id)
    }

    fn set_activated(&mut self, ids: &[u32]) -> Result<(), Error> {
        (**self).set_activated(ids)
    }
}

/// FM through libnvfm, with one connection per call: FM may have been restarted since the last one.
#[derive(Debug)]
pub struct Nvfm {
    library: Library,
    address: Address,
    timeout: Duration,
}

impl Nvfm {
    /// Opens the library at `path`, or where the loader finds it, for the FM at `address`.
    ///
    /// # Errors
    /// The library cannot be opened.
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
