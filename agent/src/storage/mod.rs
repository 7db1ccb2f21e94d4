//! Storages (Kata's `Storage` messages): mounts that containers use.
//!
//! A [`Driver`] creates one kind of storage; [`table::Table`] counts references. Mount points and
//! sources are opened by descriptor ([`safe_path`]), mounts are fully configured before they are
//! attached ([`mount`]), and the [`Resources`] of a driver are released with the last
//! reference, in reverse order.

mod bind;
mod block;
mod device;
mod ephemeral;
mod fs_group;
mod huge_pages;
mod layers;
mod local;
pub mod mount;
pub mod mountinfo;
mod nfs;
pub mod options;
mod overlay;
mod resources;
pub mod safe_path;
mod scratch;
mod stale;
mod table;
mod tree_sync;
mod update;
mod virtio_fs;
mod volume;
mod watchable_bind;

use std::path::PathBuf;

use firstlight_agent_api::agent::Storage;
use ttrpc::Code;

use crate::error::{Error, Result};
use crate::paths::Paths;

pub use options::Options;
pub use resources::{Resource, Resources};
pub use stale::refresh as refresh_stale;
pub use table::Table;
pub use volume::stats;

/// How a driver resolves the device that it mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// No device.
    Given,
    /// `/dev/...`, or a PCI path.
    Pci,
    /// `/dev/...`, which may be hot-plugged later.
    Node,
    /// `id:lun`.
    Scsi,
}

/// The input of a driver.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) storage: &'a Storage,
    pub(crate) options: Options,
    /// The device, if the driver has one.
    pub(crate) device: Option<PathBuf>,
    pub(crate) paths: &'a Paths,
}

/// A driver of one kind of storage.
pub(crate) struct Driver {
    /// The name that shims send.
    pub(crate) name: &'static str,
    pub(crate) source: Source,
    /// May block.
    pub(crate) make: fn(&Job<'_>) -> Result<Resources>,
}

const fn driver(name: &'static str, source: Source, make: fn(&Job<'_>) -> Result<Resources>) -> Driver {
    Driver { name, source, make }
}

/// All drivers.
const DRIVERS: &[Driver] = &[
    driver("blk", Source::Pci, block::make),
    driver("mmioblk", Source::Node, block::make),
    driver("scsi", Source::Scsi, block::make),
    driver("nvdimm", Source::Node, block::make),
    driver("virtio-fs", Source::Given, virtio_fs::make),
    driver("overlayfs", Source::Given, overlay::make),
    driver("ephemeral", Source::Given, ephemeral::make),
    driver("local", Source::Given, local::make),
    driver("bind", Source::Given, bind::make),
    driver("watchable-bind", Source::Given, watchable_bind::make),
    // Several storages form one mount: see the table.
    driver(layers::NAME, Source::Pci, layers::alone),
    driver("nfs", Source::Given, nfs::make),
];

/// Drivers of Kata's agent that this one does not implement, with alternatives.
const UNSUPPORTED: &[(&str, &str)] = &[
    (
        "image_guest_pull",
        "images are not pulled in the guest: let the host pull them (a snapshotter other than nydus in guest-pull mode, and no experimental_force_guest_pull)",
    ),
    ("blk-ccw", "channel devices exist on s390x only: use virtio-blk-pci"),
    ("9p", "use virtio-fs"),
];

/// Returns the drivers' names, as GetGuestDetails lists them.
pub fn drivers() -> impl Iterator<Item = &'static str> {
    DRIVERS.iter().map(|driver| driver.name)
}

/// Returns the driver with this name.
/// : this agent has {}
pub(crate) fn find(name: &str) -> Result<&'static Driver> {
    if let Some(driver) = DRIVERS.iter().find(|driver| driver.name == name) {
        return Ok(driver);
    }
    if let Some((_, alternative)) = UNSUPPORTED.iter().find(|(unsupported, _)| *unsupported == name) {
        return Err(Error::new(
            Code::UNIMPLEMENTED,
            format!("storage handler {name} is not implemented: {alternative}"),
        ));
    }
    let known: Vec<&str> = drivers().collect();
    let name: String = name.chars().take(80).collect();
    Err(Error::internal(format!("Failed to find the storage handler {name}: this agent has {}", known.join(", "))))
}

/// Returns the name of a storage for messages.
pub(crate) fn describe(storage: &Storage) -> String {
    let Storage { mount_point, driver, source, .. } = storage;
    let short = |text: &str| text.chars().take(200).collect::<String>();
    format!("storage {} ({} {})", short(mount_point), short(driver), short(source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_driver_is_reported_with_the_supported_ones() {
        let error = find("vfat-over-pigeon").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("Failed to find the storage handler vfat-over-pigeon"), "{error}");
        assert!(error.contains("virtio-fs") && error.contains("nfs"), "{error}");
    }

    #[test]
    fn unimplemented_driver_is_reported_with_an_alternative() {
        let error = find("image_guest_pull").map(|_| ()).unwrap_err();
        assert_eq!(error.code, Code::UNIMPLEMENTED);
        assert!(error.message.contains("let the host pull"), "{error}");
        assert!(!drivers().any(|name| name == "image_guest_pull"));
    }
}
