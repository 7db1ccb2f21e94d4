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

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_pci::{Address, PciPath, ResolvedFunction};
use tokio::time::{Instant, timeout_at};

use self::block::Disk;
pub use self::listener::Uevents;
use self::node::Check;
pub use self::node::Number;
use self::scsi::Scsi;
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
        let (place, at, path) = (place(path)?, self.clone(), path.to_owned());
        let what = format!("disk at PCI path {path}");
        self.wait(&what, move || {
            let ResolvedFunction { address, dir } = match place.resolve(&at.sysfs) {
                Ok(found) => found,
                Err(missing) => return Ok(Look::NotYet(missing.to_string())),
            };
            match block::behind(&at.sysfs, &dir).as_slice() {
                [] => {
                    let driver = block::driver(&dir);
                    Ok(Look::NotYet(format!("function {address} is there ({driver}) and has no disk")))
                }
                [disk] => Ok(at.usable(disk)),
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
        let (scsi, at): (Scsi, Self) = (address.parse()?, self.clone());
        let mut scanned: Vec<String> = Vec::new();
        self.wait(&format!("disk at SCSI address {scsi}"), move || {
            for host in scsi::hosts(&at.sysfs) {
                if scsi::at(&at.sysfs, scsi).is_empty() && !scanned.contains(&host) {
                    scsi::scan(&at.sysfs, &host, scsi)
                        .map_err(|error| Error::internal(format!("{host} cannot look for it: {error}")))?;
                    scanned.push(host);
                }
            }
            match scsi::at(&at.sysfs, scsi).as_slice() {
                [] if scanned.is_empty() => {
                    Ok(Look::NotYet("the guest has no SCSI host; is virtio_scsi in its kernel?".to_owned()))
                }
                [] => Ok(Look::NotYet(format!("{} looked for it and found none", scanned.join(", ")))),
                [disk] => Ok(at.usable(disk)),
                several => Err(ambiguous(&format!("SCSI address {scsi}"), several)),
            }
        })
        .await
    }

    /// The disk with that node, `/dev/NAME`.
    ///
    /// # Errors
    /// It is no such path, or did not come in time.
    pub async fn block_by_node(&self, node: &str) -> Result<PathBuf> {
        let (name, at) = (node_name(node)?.to_owned(), self.clone());
        self.wait(&format!("disk {node}"), move || match block::named(&at.sysfs, &name) {
            Some(disk) => Ok(at.usable(&disk)),
            None => Ok(Look::NotYet(format!("the kernel has no block device {name}"))),
        })
        .await
    }

    /// The name of the network interface at a PCI path.
    ///
    /// # Errors
    /// It is no PCI path, the function has several interfaces, or none came in time.
    pub async fn net_by_pci(&self, path: &str) -> Result<String> {
        let (place, at, path) = (place(path)?, self.clone(), path.to_owned());
        let what = format!("network interface at PCI path {path}");
        self.wait(&what, move || {
            let ResolvedFunction { address, dir } = match place.resolve(&at.sysfs) {
                Ok(found) => found,
                Err(missing) => return Ok(Look::NotYet(missing.to_string())),
            };
            let mut found = block::names(&dir.join("net"), "");
            for virtio in block::names(&dir, "virtio") {
                found.extend(block::names(&dir.join(virtio).join("net"), ""));
            }
            match found.as_slice() {
                [] => {
                    let driver = block::driver(&dir);
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
        let (place, sysfs) = (place(path)?, self.sysfs.clone());
        self.wait(&format!("PCI function at {path}"), move || match place.resolve(&sysfs) {
            Ok(found) => Ok(Look::Found(found.address)),
            Err(missing) => Ok(Look::NotYet(missing.to_string())),
        })
        .await
    }

    /// Waits for a node that the kernel makes, such as one below `/dev/vfio`.
    ///
    /// # Errors
    /// It did not come in time.
    pub async fn node(&self, node: &Path, what: &str) -> Result<()> {
        let node = node.to_owned();
        self.wait(what, move || match node.exists() {
            true => Ok(Look::Found(())),
            false => Ok(Look::NotYet(format!("there is no {}", node.display()))),
        })
        .await
    }

    fn usable(&self, disk: &Disk) -> Look<PathBuf> {
        let node = self.dev.join(&disk.name);
        (self.check)(&node, disk.number).map_or_else(Look::NotYet, |()| Look::Found(node))
    }

    /// Looks until it is found or the deadline has passed.
    async fn wait<T, L>(&self, what: &str, look: L) -> Result<T>
    where
        T: Send + 'static,
        L: FnMut() -> Result<Look<T>> + Send + 'static,
    {
        let begin = Instant::now();
        let during = |error: Error| error.during(what);
        let (mut look, seen) = beside(look).await?;
        if let Look::Found(found) = seen.map_err(during)? {
            return Ok(found);
        }
        let unheard = |error: std::io::Error| {
            Error::internal(format!("{what}: it is not there, and the kernel's messages cannot be heard: {error}"))
        };
        let mut events = Uevents::open().map_err(unheard)?;
        loop {
            let seen;
            (look, seen) = beside(look).await?;
            let missing = match seen.map_err(during)? {
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

/// One look, beside the server: a disk that is opened and a host that scans block.
async fn beside<T, L>(mut look: L) -> Result<(L, Result<Look<T>>)>
where
    T: Send + 'static,
    L: FnMut() -> Result<Look<T>> + Send + 'static,
{
    work::blocking(move || {
        let seen = look();
        Ok((look, seen))
    })
    .await
}

fn place(path: &str) -> Result<PciPath> {
    path.parse().map_err(|error: firstlight_pci::ParsePciPathError| Error::invalid(error.to_string()))
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
