//! Storages: what has to be mounted before a container can use it.
//!
//! A [`Driver`] makes one kind of storage; [`table::Table`] keeps count of who uses
//! which. Mount points and sources are reached by descriptor ([`place`]), mounts
//! are complete before anybody sees them ([`mount`]), and what a driver has
//! [`Made`] goes away with the last user, last part first.

mod bind;
mod block;
mod device;
mod dir;
mod group;
mod huge_pages;
mod layers;
mod made;
mod memory;
pub mod mount;
pub mod mountinfo;
mod nfs;
pub mod options;
mod overlay;
pub mod place;
mod scratch;
mod share;
mod shared_mounts;
mod stale;
mod table;
mod update;
mod volume;
mod watch;
mod watched;

use std::path::PathBuf;

use firstlight_agent_api::agent::Storage;
use ttrpc::Code;

use crate::error::{Error, Result};
use crate::paths::Paths;

pub use made::{Made, Part};
pub use options::Options;
pub use shared_mounts::{Names, check as check_shared};
pub use stale::look as look_for_stale;
pub use table::Table;
pub use volume::stats;

/// How a driver finds the device that it mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// There is none, or it is no device.
    Given,
    /// `/dev/...`, or a path of PCI slots from the root.
    Pci,
    /// `/dev/...`, which may still be on its way.
    Node,
    /// `id:lun`.
    Scsi,
}

/// What a driver works on.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) storage: &'a Storage,
    pub(crate) options: Options,
    /// The device, where the driver wants one.
    pub(crate) device: Option<PathBuf>,
    pub(crate) paths: &'a Paths,
}

/// How one kind of storage is made.
pub(crate) struct Driver {
    /// The name that shims send.
    pub(crate) name: &'static str,
    pub(crate) source: Source,
    /// May block.
    pub(crate) make: fn(&Job<'_>) -> Result<Made>,
}

const fn driver(name: &'static str, source: Source, make: fn(&Job<'_>) -> Result<Made>) -> Driver {
    Driver { name, source, make }
}

/// All drivers.
const DRIVERS: &[Driver] = &[
    driver("blk", Source::Pci, block::make),
    driver("mmioblk", Source::Node, block::make),
    driver("scsi", Source::Scsi, block::make),
    driver("nvdimm", Source::Node, block::make),
    driver("virtio-fs", Source::Given, share::make),
    driver("overlayfs", Source::Given, overlay::make),
    driver("ephemeral", Source::Given, memory::make),
    driver("local", Source::Given, dir::make),
    driver("bind", Source::Given, bind::make),
    driver("watchable-bind", Source::Given, watch::make),
    // Several storages at once: see the table.
    driver(layers::NAME, Source::Pci, layers::alone),
    driver("nfs", Source::Given, nfs::make),
];

/// What other agents have and this one does not, with the way out.
const ABSENT: &[(&str, &str)] = &[
    (
        "image_guest_pull",
        "images are not pulled in the guest: let the host pull them (a snapshotter other than nydus in guest-pull mode, and no experimental_force_guest_pull)",
    ),
    ("blk-ccw", "channel devices are of s390x, which this agent is not built for: use virtio-blk-pci"),
    ("9p", "use virtio-fs"),
];

/// The drivers' names, as the guest's details list them.
pub fn drivers() -> impl Iterator<Item = &'static str> {
    DRIVERS.iter().map(|driver| driver.name)
}

/// The driver of that name.
pub(crate) fn find(name: &str) -> Result<&'static Driver> {
    if let Some(driver) = DRIVERS.iter().find(|driver| driver.name == name) {
        return Ok(driver);
    }
    if let Some((_, way)) = ABSENT.iter().find(|(absent, _)| *absent == name) {
        return Err(Error::new(Code::UNIMPLEMENTED, format!("storage handler {name} is not implemented: {way}")));
    }
    let known: Vec<&str> = drivers().collect();
    let name: String = name.chars().take(80).collect();
    Err(Error::internal(format!("Failed to find the storage handler {name}: this agent has {}", known.join(", "))))
}

/// What messages call a storage.
pub(crate) fn called(storage: &Storage) -> String {
    let Storage { mount_point, driver, source, .. } = storage;
    let short = |text: &str| text.chars().take(200).collect::<String>();
    format!("storage {} ({} {})", short(mount_point), short(driver), short(source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_named() {
        let error = find("vfat-over-pigeon").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("Failed to find the storage handler vfat-over-pigeon"), "{error}");
        assert!(error.contains("virtio-fs") && error.contains("nfs"), "{error}");
    }

    #[test]
    fn what_is_not_there_yet_says_what_to_do() {
        let error = find("image_guest_pull").map(|_| ()).unwrap_err();
        assert_eq!(error.code, Code::UNIMPLEMENTED);
        assert!(error.message.contains("let the host pull"), "{error}");
        assert!(!drivers().any(|name| name == "image_guest_pull"));
    }
}
