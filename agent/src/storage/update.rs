//! UpdateEphemeralMounts: the size of memory that is mounted already.

use std::os::fd::OwnedFd;

use firstlight_agent_api::agent::Storage;

use super::mount::reconfigure;
use super::options::Options;
use super::{Table, called, group, memory};
use crate::error::{Error, Result};
use crate::work;

/// Options that a tmpfs can change while it is used. Others were settled when it
/// was mounted and stay as they are.
const CHANGEABLE: &[&str] = &["size", "nr_blocks", "nr_inodes"];

impl Table {
    /// Changes storages of memory that this agent has mounted.
    ///
    /// # Errors
    /// `NOT_FOUND`: the agent has no such mount. Or a storage is of another
    /// kind, or more is in it than the new size.
    pub async fn update(&self, storages: Vec<Storage>) -> Result<()> {
        for storage in storages {
            let name = called(&storage);
            self.update_one(storage).await.map_err(|error| error.during(&name))?;
        }
        Ok(())
    }

    async fn update_one(&self, storage: Storage) -> Result<()> {
        if storage.driver != "ephemeral" || memory::kind(&storage.fstype)? != "tmpfs" {
            return Err(Error::invalid("only ephemeral storages of tmpfs can change their size"));
        }
        let mount = self.look(&storage.mount_point, |driver, made| {
            if driver != "ephemeral" {
                return Err(Error::invalid(format!("the mount point is of the driver {driver}")));
            }
            made.root()
        })?;
        let options = Options::of(&storage.options)?;
        work::blocking(move || change(&mount, &options)).await
    }
}

fn change(mount: &OwnedFd, options: &Options) -> Result<()> {
    let data: Vec<_> = options.data.iter().filter(|(name, _)| CHANGEABLE.contains(&name.as_str())).cloned().collect();
    if !data.is_empty() {
        reconfigure(mount, "tmpfs", &data)?;
    }
    group::root(mount, options.group)
}
