//! Waits for hot-plugged devices.
//!
//! A request names a device by PCI path, SCSI address or node. It may be present since boot, appear
//! later, or never. So every lookup subscribes to uevents first, then checks sysfs, and checks
//! again at every uevent until the deadline: no event is missed. A device that is present costs one
//! check and no socket.

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
use self::scsi::ScsiAddress;
use crate::background;
use crate::error::{Error, Result};
use crate::paths::Paths;

/// Looks up devices, with a timeout for those that are not present yet.
#[derive(Debug, Clone)]
pub struct Hotplug {
    sysfs: PathBuf,
    dev: PathBuf,
    timeout: Duration,
    check: Check,
}

/// Result of one check.
enum Lookup<T> {
    Found(T),
    /// Why it was not found.
    NotYet(String),
}

impl Hotplug {
    /// Creates a lookup below these paths with `timeout` (`agent.hotplug_timeout`).
    #[must_use]
    pub fn new(paths: &Paths, timeout: Duration) -> Self {
        Self { sysfs: paths.sysfs.clone(), dev: paths.root.join("dev"), timeout, check: node::check_usable }
    }

    /// Waits for the disk at a PCI path such as `02/03`: virtio-blk or NVMe.
    ///
    /// # Errors
    /// The PCI path is invalid, the function has several disks, or none appeared in time.
    pub async fn block_by_pci(&self, path: &str) -> Result<PathBuf> {
        let (place, at, path) = (parse_path(path)?, self.clone(), path.to_owned());
        let what = format!("disk at PCI path {path}");
        self.wait(&what, move || {
            let ResolvedFunction { address, dir } = match place.resolve(&at.sysfs) {
                Ok(found) => found,
                Err(missing) => return Ok(Lookup::NotYet(missing.to_string())),
            };
            match block::behind(&at.sysfs, &dir).as_slice() {
                [] => {
                    let driver = block::driver(&dir);
                    Ok(Lookup::NotYet(format!("function {address} is there ({driver}) and has no disk")))
                }
                [disk] => Ok(at.usable(disk)),
                several => Err(ambiguous(&format!("PCI path {path} (function {address})"), several)),
            }
        })
        .await
    }

    /// Waits for the disk at a SCSI address `ID:LUN`, after a scan by the SCSI hosts.
    ///
    /// # Errors
    /// The address is invalid, several hosts have a disk there, or none appeared in time.
    pub async fn block_by_scsi(&self, address: &str) -> Result<PathBuf> {
        let (scsi, at): (ScsiAddress, Self) = (address.parse()?, self.clone());
        let mut scanned: Vec<String> = Vec::new();
        self.wait(&format!("disk at SCSI address {scsi}"), move || {
            for host in scsi::hosts(&at.sysfs) {
                if scsi::at(&at.sysfs, scsi).is_empty() && !scanned.contains(&host) {
                    scsi::scan(&at.sysfs, &host, scsi)
                        .map_err(|error| Error::internal(format!("{host} failed to scan for it: {error}")))?;
                    scanned.push(host);
                }
            }
            match scsi::at(&at.sysfs, scsi).as_slice() {
                [] if scanned.is_empty() => {
                    Ok(Lookup::NotYet("the guest has no SCSI host; check that its kernel has virtio_scsi".to_owned()))
                }
                [] => Ok(Lookup::NotYet(format!("{} scanned for it and found none", scanned.join(", ")))),
                [disk] => Ok(at.usable(disk)),
                several => Err(ambiguous(&format!("SCSI address {scsi}"), several)),
            }
        })
        .await
    }

    /// Waits for the disk with the node `/dev/NAME`.
    ///
    /// # Errors
    /// The path is invalid, or the disk did not appear in time.
    pub async fn block_by_node(&self, node: &str) -> Result<PathBuf> {
        let (name, at) = (node_name(node)?.to_owned(), self.clone());
        self.wait(&format!("disk {node}"), move || match block::named(&at.sysfs, &name) {
            Some(disk) => Ok(at.usable(&disk)),
            None => Ok(Lookup::NotYet(format!("the kernel has no block device {name}"))),
        })
        .await
    }

    /// Waits for the network interface at a PCI path; returns its name.
    ///
    /// # Errors
    /// The PCI path is invalid, the function has several interfaces, or none appeared in time.
    pub async fn net_by_pci(&self, path: &str) -> Result<String> {
        let (place, at, path) = (parse_path(path)?, self.clone(), path.to_owned());
        let what = format!("network interface at PCI path {path}");
        self.wait(&what, move || {
            let ResolvedFunction { address, dir } = match place.resolve(&at.sysfs) {
                Ok(found) => found,
                Err(missing) => return Ok(Lookup::NotYet(missing.to_string())),
            };
            let mut found = block::names(&dir.join("net"), "");
            for virtio in block::names(&dir, "virtio") {
                found.extend(block::names(&dir.join(virtio).join("net"), ""));
            }
            match found.as_slice() {
                [] => {
                    let driver = block::driver(&dir);
                    Ok(Lookup::NotYet(format!("function {address} is there ({driver}) and has no interface")))
                }
                [name] => Ok(Lookup::Found(name.clone())),
                several => {
                    let all = several.join(", ");
                    Err(Error::invalid(format!("PCI path {path} (function {address}) has several interfaces: {all}")))
                }
            }
        })
        .await
    }

    /// Waits for the function at a PCI path; returns its address.
    ///
    /// # Errors
    /// The PCI path is invalid, or no function appeared in time.
    pub async fn pci_function(&self, path: &str) -> Result<Address> {
        let (place, sysfs) = (parse_path(path)?, self.sysfs.clone());
        self.wait(&format!("PCI function at {path}"), move || match place.resolve(&sysfs) {
            Ok(found) => Ok(Lookup::Found(found.address)),
            Err(missing) => Ok(Lookup::NotYet(missing.to_string())),
        })
        .await
    }

    /// Waits for a node that the kernel creates, such as one below `/dev/vfio`.
    ///
    /// # Errors
    /// It did not appear in time.
    pub async fn node(&self, node: &Path, what: &str) -> Result<()> {
        let node = node.to_owned();
        self.wait(what, move || match node.exists() {
            true => Ok(Lookup::Found(())),
            false => Ok(Lookup::NotYet(format!("{} does not exist", node.display()))),
        })
        .await
    }

    fn usable(&self, disk: &Disk) -> Lookup<PathBuf> {
        let node = self.dev.join(&disk.name);
        (self.check)(&node, disk.number).map_or_else(Lookup::NotYet, |()| Lookup::Found(node))
    }

    /// Checks until it is found or the deadline has passed.
    async fn wait<T, L>(&self, what: &str, check: L) -> Result<T>
    where
        T: Send + 'static,
        L: FnMut() -> Result<Lookup<T>> + Send + 'static,
    {
        let begin = Instant::now();
        let during = |error: Error| error.during(what);
        let (mut check, seen) = run_blocking(check).await?;
        if let Lookup::Found(found) = seen.map_err(during)? {
            return Ok(found);
        }
        let no_uevents = |error: std::io::Error| {
            Error::internal(format!("{what}: not present, and uevents cannot be received: {error}"))
        };
        let mut events = Uevents::open().map_err(no_uevents)?;
        loop {
            let seen;
            (check, seen) = run_blocking(check).await?;
            let missing = match seen.map_err(during)? {
                Lookup::Found(found) => return Ok(found),
                Lookup::NotYet(missing) => missing,
            };
            match timeout_at(begin + self.timeout, events.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(no_uevents(error)),
                Err(_) => {
                    return Err(Error::internal(format!(
                        "{what}: not present after {} ms: {missing}; check that the VMM plugged it in there, \
                         or raise agent.hotplug_timeout (to {} s)",
                        begin.elapsed().as_millis(),
                        self.timeout.as_secs().saturating_mul(2).max(1)
                    )));
                }
            }
        }
    }
}

/// Runs one check in the blocking pool: opening a disk and a SCSI scan block.
async fn run_blocking<T, L>(mut check: L) -> Result<(L, Result<Lookup<T>>)>
where
    T: Send + 'static,
    L: FnMut() -> Result<Lookup<T>> + Send + 'static,
{
    background::blocking(move || {
        let seen = check();
        Ok((check, seen))
    })
    .await
}

fn parse_path(path: &str) -> Result<PciPath> {
    path.parse().map_err(|error: firstlight_pci::ParsePciPathError| Error::invalid(error.to_string()))
}

/// Returns the name of a node directly below `/dev`.
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
    Error::invalid(format!("{what} has several disks: {}; request one by its node", names.join(", ")))
}

/// Returns whether [`Hotplug::block_by_node`] accepts a path.
#[must_use]
pub fn is_node(path: &Path) -> bool {
    path.to_str().is_some_and(|text| node_name(text).is_ok())
}
