//! Devices that come when they come.
//!
//! A request names a device by its place (PCI path, SCSI address, node). It may
//! be there since boot, be on its way, or never come. So every lookup hears the
//! kernel's messages first, then looks into sysfs, and looks again at every
//! message until the deadline: nothing can slip through between the two. A
//! device that is there costs one look and no socket.

mod block;
mod listener;
mod node;
mod scsi;
mod uevent;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_pci::{Address, Found, Place};
use tokio::time::{Instant, timeout_at};

use self::block::Disk;
pub use self::listener::Uevents;
use self::node::Check;
pub use self::node::Number;
use self::scsi::Scsi;
pub use self::uevent::Uevent;
use crate::error::{Error, Result};
use crate::paths::Paths;
use crate::work;

/// Finds devices, waiting for those that are on their way.
#[derive(Debug, Clone)]
pub struct Hotplug {
    sysfs: PathBuf,
    dev: PathBuf,
    timeout: Duration,
    check: Check,
}

/// What a look found.
enum Look<T> {
    Found(T),
    /// How far it got.
    NotYet(String),
}

impl Hotplug {
    /// Looks below these paths, for at most `timeout` (`agent.hotplug_timeout`).
    #[must_use]
    pub fn new(paths: &Paths, timeout: Duration) -> Self {
        Self { sysfs: paths.sysfs.clone(), dev: paths.root.join("dev"), timeout, check: node::can_be_used }
    }

    /// The disk at a PCI path such as `02/03`: virtio-blk or NVMe.
    ///
    /// # Errors
    /// It is no PCI path, the function has several disks, or none came in time.
    pub async fn block_by_pci(&self, path: &str) -> Result<PathBuf> {
        let place = place(path)?;
        self.wait(&format!("disk at PCI path {path}"), async || {
            let Found { address, folder } = match place.find(&self.sysfs) {
                Ok(found) => found,
                Err(missing) => return Ok(Look::NotYet(missing.to_string())),
            };
            match block::behind(&self.sysfs, &folder).as_slice() {
                [] => {
                    let driver = block::driver(&folder);
                    Ok(Look::NotYet(format!("function {address} is there ({driver}) and has no disk")))
                }
                [disk] => self.usable(disk).await,
                several => Err(ambiguous(&format!("PCI path {path} (function {address})"), several)),
            }
        })
        .await
    }

    /// The disk at a SCSI address `ID:LUN`; has the hosts look for it.
    ///
    /// # Errors
    /// It is no such address, several hosts have a disk there, or none came in time.
    pub async fn block_by_scsi(&self, address: &str) -> Result<PathBuf> {
        let scsi: Scsi = address.parse()?;
        let mut scanned: Vec<String> = Vec::new();
        self.wait(&format!("disk at SCSI address {address}"), async || {
            for host in scsi::hosts(&self.sysfs) {
                if scsi::at(&self.sysfs, scsi).is_empty() && !scanned.contains(&host) {
                    self.scan(&host, scsi).await?;
                    scanned.push(host);
                }
            }
            match scsi::at(&self.sysfs, scsi).as_slice() {
                [] if scanned.is_empty() => {
                    Ok(Look::NotYet("the guest has no SCSI host; is virtio_scsi in its kernel?".to_owned()))
                }
                [] => Ok(Look::NotYet(format!("{} looked for it and found none", scanned.join(", ")))),
                [disk] => self.usable(disk).await,
                several => Err(ambiguous(&format!("SCSI address {address}"), several)),
            }
        })
        .await
    }

    async fn scan(&self, host: &str, scsi: Scsi) -> Result<()> {
        let (sysfs, name) = (self.sysfs.clone(), host.to_owned());
        work::blocking(move || {
            scsi::scan(&sysfs, &name, scsi)
                .map_err(|error| Error::internal(format!("{name} cannot look for SCSI disk {scsi}: {error}")))
        })
        .await
    }

    /// The disk with that node, `/dev/NAME`.
    ///
    /// # Errors
    /// It is no such path, or did not come in time.
    pub async fn block_by_node(&self, node: &str) -> Result<PathBuf> {
        let name = node_name(node)?;
        self.wait(&format!("disk {node}"), async || match block::named(&self.sysfs, name) {
            Some(disk) => self.usable(&disk).await,
            None => Ok(Look::NotYet(format!("the kernel has no block device {name}"))),
        })
        .await
    }

    /// The name of the network interface at a PCI path.
    ///
    /// # Errors
    /// It is no PCI path, the function has several interfaces, or none came in time.
    pub async fn net_by_pci(&self, path: &str) -> Result<String> {
        let place = place(path)?;
        self.wait(&format!("network interface at PCI path {path}"), async || {
            let Found { address, folder } = match place.find(&self.sysfs) {
                Ok(found) => found,
                Err(missing) => return Ok(Look::NotYet(missing.to_string())),
            };
            let mut found = block::names(&folder.join("net"), "");
            for virtio in block::names(&folder, "virtio") {
                found.extend(block::names(&folder.join(virtio).join("net"), ""));
            }
            match found.as_slice() {
                [] => {
                    let driver = block::driver(&folder);
                    Ok(Look::NotYet(format!("function {address} is there ({driver}) and has no interface")))
                }
                [name] => Ok(Look::Found(name.clone())),
                several => {
                    let all = several.join(", ");
                    Err(Error::invalid(format!("PCI path {path} (function {address}) has several interfaces: {all}")))
                }
            }
        })
        .await
    }

    /// The address of the function at a PCI path.
    ///
    /// # Errors
    /// It is no PCI path, or no function came in time.
    pub async fn pci_function(&self, path: &str) -> Result<Address> {
        let place = place(path)?;
        self.wait(&format!("PCI function at {path}"), async || match place.find(&self.sysfs) {
            Ok(found) => Ok(Look::Found(found.address)),
            Err(missing) => Ok(Look::NotYet(missing.to_string())),
        })
        .await
    }

    async fn usable(&self, disk: &Disk) -> Result<Look<PathBuf>> {
        let (node, number, check) = (self.dev.join(&disk.name), disk.number, self.check);
        work::blocking(move || Ok(check(&node, number).map_or_else(Look::NotYet, |()| Look::Found(node)))).await
    }

    /// Looks until it is found or the deadline has passed.
    async fn wait<T>(&self, what: &str, mut look: impl AsyncFnMut() -> Result<Look<T>>) -> Result<T> {
        let begin = Instant::now();
        let during = |error: Error| error.during(what);
        if let Look::Found(found) = look().await.map_err(during)? {
            return Ok(found);
        }
        let unheard = |error: std::io::Error| {
            Error::internal(format!("{what}: it is not there, and the kernel's messages cannot be heard: {error}"))
        };
        let mut events = Uevents::open().map_err(unheard)?;
        loop {
            let missing = match look().await.map_err(during)? {
                Look::Found(found) => return Ok(found),
                Look::NotYet(missing) => missing,
            };
            match timeout_at(begin + self.timeout, events.news()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(unheard(error)),
                Err(_) => {
                    return Err(Error::internal(format!(
                        "{what}: not there after {} ms: {missing}; see whether the VMM plugged it in at that place, \
                         or give it longer (agent.hotplug_timeout={})",
                        begin.elapsed().as_millis(),
                        self.timeout.as_secs().saturating_mul(2).max(1)
                    )));
                }
            }
        }
    }
}

fn place(path: &str) -> Result<Place> {
    path.parse().map_err(|error: firstlight_pci::ParsePlaceError| Error::invalid(error.to_string()))
}

/// The name of a node directly below `/dev`.
fn node_name(node: &str) -> Result<&str> {
    let name = node.strip_prefix("/dev/").filter(|name| {
        let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
        plain && (1..=64).contains(&name.len())
    });
    name.ok_or_else(|| {
        let node: String = node.chars().take(80).collect();
        Error::invalid(format!("{node:?} is not the path of a block device such as /dev/vda or /dev/pmem0"))
    })
}

fn ambiguous(what: &str, disks: &[Disk]) -> Error {
    let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
    Error::invalid(format!("{what} has several disks: {}; name one by its node", names.join(", ")))
}

/// Whether a path could be one that [`Hotplug::block_by_node`] takes.
#[must_use]
pub fn is_node(path: &Path) -> bool {
    path.to_str().is_some_and(|text| node_name(text).is_ok())
}
