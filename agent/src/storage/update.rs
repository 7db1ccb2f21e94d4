//! UpdateEphemeralMounts: changes the size of mounted tmpfs storages.

use std::os::fd::OwnedFd;

use firstlight_agent_api::agent::Storage;

use super::mount::reconfigure;
use super::options::Options;
use super::{Table, describe, ephemeral, fs_group};
use crate::background;
use crate::error::{Error, Result};

/// Options that tmpfs can change on remount. Others retain their values from the mount.
const CHANGEABLE: &[&str] = &["size", "nr_blocks", "nr_inodes"];

impl Table {
    /// Changes tmpfs storages that this agent has mounted.
    ///
    /// # Errors
    /// `NOT_FOUND`: the agent has no such mount. Or a storage has another type, or uses more than
    /// the new size.
    pub async fn update(&self, storages: Vec<Storage>) -> Result<()> {
        for storage in storages {
            let name = describe(&storage);
            self.update_one(storage).await.map_err(|error| error.during(&name))?;
        }
        Ok(())
    }

    async fn update_one(&self, storage: Storage) -> Result<()> {
        if storage.driver != "ephemeral" || ephemeral::fs_type(&storage.fstype)? != "tmpfs" {
            return Err(Error::invalid("only ephemeral tmpfs storages can be resized"));
        }
        let mount = self.inspect(&storage.mount_point, |driver, made| {
            if driver != "ephemeral" {
                return Err(Error::invalid(format!("the mount point belongs to the driver {driver}")));
            }
            made.root()
        })?;
        let options = Options::of(&storage.options)?;
        background::blocking(move || change(&mount, &options)).await
    }
}

fn change(mount: &OwnedFd, options: &Options) -> Result<()> {
    let data: Vec<_> = options.data.iter().filter(|(name, _)| CHANGEABLE.contains(&name.as_str())).cloned().collect();
    if !data.is_empty() {
        reconfigure(mount, "tmpfs", &data)?;
    }
    fs_group::apply_to_root(mount, options.group)
}
