//! Resources that a driver has created, released on drop.

use std::os::fd::{AsFd, OwnedFd};

use super::huge_pages::HugePages;
use super::mount::Mounted;
use super::scratch::Scratch;
use super::watchable_bind::Watcher;
use crate::error::{Error, Result};

/// One resource, released on drop.
#[derive(Debug)]
pub enum Resource {
    /// A mount.
    Mount(Mounted),
    /// Reserved huge pages.
    Pages(HugePages),
    /// A temporary directory.
    Scratch(Scratch),
    /// A directory copy that is updated from its source.
    Watch(Watcher),
}

/// The resources of a storage. Drop may block: unmounting can wait for the host.
#[derive(Debug, Default)]
pub struct Resources(Vec<Resource>);

impl Resources {
    /// Adds a resource; those added later are released first.
    pub fn add(&mut self, part: Resource) {
        self.0.push(part);
    }

    /// Returns a descriptor of the root of the last mount.
    ///
    /// # Errors
    /// There is no mount, or no free descriptor.
    pub fn root(&self) -> Result<OwnedFd> {
        let mount =
            self.0.iter().rev().find_map(|part| if let Resource::Mount(mount) = part { Some(mount) } else { None });
        let mount = mount.ok_or_else(|| Error::invalid("is not a mount"))?;
        mount.as_fd().try_clone_to_owned().map_err(|error| Error::internal(error.to_string()))
    }
}

impl From<Mounted> for Resources {
    fn from(mount: Mounted) -> Self {
        Self(vec![Resource::Mount(mount)])
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        // Later resources may depend on earlier ones.
        while self.0.pop().is_some() {}
    }
}
