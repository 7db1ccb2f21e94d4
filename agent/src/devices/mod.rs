//! Devices of a container: resolves those of the request, and builds the device cgroup rules.
//!
//! A request describes devices as the host knows them. Each is located in the guest, with a wait if
//! it is being hot-plugged, and written into the configuration with the guest's numbers. All are
//! located before anything is changed, and all changes are made at once: one device cannot
//! overwrite another's change.

mod allow;
mod apply;
mod environment;
mod vfio;

use std::collections::BTreeMap;
use std::path::PathBuf;

use firstlight_agent_api::agent::Device;
use firstlight_pci::Address;
use futures::future::try_join_all;
use oci_spec::runtime::Spec;

pub use self::allow::{allow, rules};
use self::apply::Node;
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;
use crate::paths::Paths;

/// Upper bound on devices per request (untrusted input).
const MAX_DEVICES: usize = 512;

/// How a device is located.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A disk whose id is its PCI path.
    PciDisk,
    /// A disk whose id is `ID:LUN`.
    ScsiDisk,
    /// A disk that the request names by its guest node.
    NamedDisk,
    /// A PCI function driven by a program in the container.
    Vfio,
    /// A PCI function driven by the guest's kernel.
    GuestDriven,
}

/// Device types by the names that shims send.
const KINDS: &[(&str, Kind)] = &[
    ("blk", Kind::PciDisk),
    ("mmioblk", Kind::NamedDisk),
    ("scsi", Kind::ScsiDisk),
    ("nvdimm", Kind::NamedDisk),
    ("vfio-pci", Kind::Vfio),
    ("vfio-pci-gk", Kind::GuestDriven),
];

/// Returns the names of the supported types.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|(name, _)| *name)
}

/// PCI functions of a container: host address to guest address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Functions(BTreeMap<Address, Address>);

/// One device of a request, as located in the guest.
#[derive(Debug, Default)]
struct Found {
    nodes: Vec<Node>,
    functions: Vec<(Address, Address)>,
    /// Whether the device may have brought nodes below `/dev/infiniband`.
    passed_through: bool,
}

/// Locates the devices of a request and writes them into the container's configuration: nodes,
/// numbers, rules, and addresses in its environment.
///
/// # Errors
/// A type is unknown, or a device is invalid or does not appear in time; then the configuration is
/// unchanged.
pub async fn attach(hotplug: &Hotplug, paths: &Paths, devices: &[Device], spec: &mut Spec) -> Result<Functions> {
    if devices.len() > MAX_DEVICES {
        return Err(Error::invalid(format!("{} devices in one request; {MAX_DEVICES} at most", devices.len())));
    }
    let found = try_join_all(devices.iter().map(|device| async move {
        let name: String = format!("device {:?} ({})", device.container_path, device.type_).chars().take(200).collect();
        find(hotplug, paths, device).await.map_err(|error| error.during(&name))
    }))
    .await?;
    let mut functions = Functions::default();
    let mut nodes = Vec::new();
    let passed_through = found.iter().any(|found| found.passed_through);
    for found in found {
        functions.0.extend(found.functions);
        nodes.extend(found.nodes);
    }
    if passed_through {
        nodes.extend(apply::infiniband(&paths.root));
    }
    apply::nodes(spec, nodes)?;
    if let Some(process) = spec.process_mut() {
        functions.translate(process);
    }
    Ok(functions)
}

async fn find(hotplug: &Hotplug, paths: &Paths, device: &Device) -> Result<Found> {
    let kind = KINDS.iter().find(|(name, _)| *name == device.type_).map(|(_, kind)| *kind);
    let kind = kind.ok_or_else(|| {
        let known: Vec<&str> = kinds().collect();
        Error::invalid(format!("unknown device type; supported: {}", known.join(", ")))
    })?;
    let disk = async |node: Result<PathBuf>| -> Result<Found> {
        let node = Node::disk(&node?, &device.container_path)?;
        Ok(Found { nodes: vec![node], ..Found::default() })
    };
    match kind {
        Kind::PciDisk if device.id.is_empty() => disk(hotplug.block_by_node(&device.vm_path).await).await,
        Kind::PciDisk => disk(hotplug.block_by_pci(&device.id).await).await,
        Kind::ScsiDisk => disk(hotplug.block_by_scsi(&device.id).await).await,
        Kind::NamedDisk => disk(hotplug.block_by_node(&device.vm_path).await).await,
        Kind::Vfio => {
            let functions = placed(hotplug, device).await?;
            let guests = functions.iter().map(|(_, guest)| *guest).collect();
            let nodes = vfio::bind_group(hotplug, paths, guests, &device.container_path).await?;
            Ok(Found { nodes, functions, passed_through: true })
        }
        Kind::GuestDriven => {
            let functions = placed(hotplug, device).await?;
            Ok(Found { nodes: Vec::new(), functions, passed_through: true })
        }
    }
}

/// Waits for the functions of a device's options, `HOST ADDRESS=GUEST PCI PATH` each, and returns
/// their addresses.
async fn placed(hotplug: &Hotplug, device: &Device) -> Result<Vec<(Address, Address)>> {
    let mut places = Vec::new();
    for option in device.options.iter().take(MAX_DEVICES) {
        let shown: String = option.chars().take(80).collect();
        let wrong = || Error::invalid(format!("option {shown:?} is not HOST-ADDRESS=GUEST-PCI-PATH"));
        let (host, path) = option.split_once('=').ok_or_else(wrong)?;
        let host: Address = host.parse().map_err(|_| wrong())?;
        if path.is_empty() {
            // The shim does not know where the VMM has plugged it in.
            log::warn!("host device {host}: the shim sent no PCI path; not waiting for it");
            continue;
        }
        places.push((host, path));
    }
    try_join_all(places.into_iter().map(|(host, path)| async move { Ok((host, hotplug.pci_function(path).await?)) }))
        .await
}

#[cfg(test)]
mod tests;
