//! What a driver has made, so that it can be taken away again.

use std::os::fd::{AsFd, OwnedFd};

use super::huge_pages::HugePages;
use super::mount::Mounted;
use super::scratch::Scratch;
use super::watch::Watcher;
use crate::error::{Error, Result};

/// One thing that goes away when it is dropped.
#[derive(Debug)]
pub enum Part {
    /// A mount.
    Mount(Mounted),
    /// Huge pages that the kernel set aside.
    Pages(HugePages),
    /// A directory in memory.
    Scratch(Scratch),
    /// A copy that follows its source.
    Watch(Watcher),
}

/// The parts of a storage. Dropping them may block: unmounting can wait for the host.
#[derive(Debug, Default)]
pub struct Made(Vec<Part>);

impl Made {
    /// Adds a part that was made after the others.
    pub fn add(&mut self, part: Part) {
        self.0.push(part);
    }

    /// The root of the last mount.
    ///
    /// # Errors
    /// There is no mount, or no descriptor left.
    pub fn root(&self) -> Result<OwnedFd> {
        let mount = self.0.iter().rev().find_map(|part| if let Part::Mount(mount) = part { Some(mount) } else { None });
        let mount = mount.ok_or_else(|| Error::invalid("is no mount"))?;
        mount.as_fd().try_clone_to_owned().map_err(|error| Error::internal(error.to_string()))
    }
}

impl From<Mounted> for Made {
    fn from(mount: Mounted) -> Self {
        Self(vec![Part::Mount(mount)])
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // What was made last may lie on what was made first.
        while self.0.pop().is_some() {}
    }
}
