//! The host's PCI functions with their IOMMU groups and drivers.

use std::fs;
use std::path::Path;

use firstlight_pci::{Address, Kind, ScanError, driver, scan};

/// A PCI function of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciFunction {
    /// Its address.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, sub-class and programming interface.
    pub class: u32,
    /// Its kind, if Firstlight knows it.
    pub kind: Option<Kind>,
    /// Its IOMMU group; none without an enabled IOMMU.
    pub group: Option<u32>,
    /// The bound driver.
    pub driver: Option<String>,
    /// The names of its network interfaces and disks.
    pub names: Vec<String>,
}

impl PciFunction {
    /// Whether it is a PCI-to-PCI bridge, such as a PCIe port. These stay with the host.
    #[must_use]
    pub fn is_port(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// Returns vendor and device id: `10de:22a3`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{:04x}:{:04x}", self.vendor, self.device)
    }

    /// Returns the kind as text.
    #[must_use]
    pub fn kind_name(&self) -> &'static str {
        match (self.kind, self.class >> 16) {
            (Some(Kind::Gpu), _) => "GPU",
            (Some(Kind::NvSwitch), _) => "NVSwitch",
            (Some(Kind::NvLinkBridge), _) => "NVLink bridge",
            (Some(Kind::Mellanox), _) | (None, 0x02) => "NIC",
            (None, 0x01) => "storage controller",
            (None, 0x06) => "bridge",
            (None, _) => "PCI function",
        }
    }
}

/// The host's PCI functions, sorted by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// All of them.
    pub functions: Vec<PciFunction>,
    /// IOMMU groups of vfio's no-IOMMU mode.
    pub no_iommu_groups: Vec<u32>,
}

/// The name of such a group.
const NO_IOMMU: &str = "vfio-noiommu";

/// Subdirectories of a function that contain interface and disk names.
const NAME_DIRECTORIES: &[&str] = &["net", "nvme", "block"];

fn group(dir: &Path) -> Option<u32> {
    fs::read_link(dir.join("iommu_group")).ok()?.file_name()?.to_str()?.parse().ok()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = |name: &&str| fs::read_dir(dir.join(name)).into_iter().flatten().flatten();
    let mut names: Vec<String> = NAME_DIRECTORIES
        .iter()
        .flat_map(entries)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

impl Topology {
    /// Reads `sysfs`, normally `/sys`, including the VPD of Mellanox functions.
    ///
    /// # Errors
    /// The bus cannot be read.
    pub fn read(sysfs: &Path) -> Result<Self, ScanError> {
        let mut topology = Self::default();
        for found in scan(sysfs)? {
            let dir = sysfs.join("bus/pci/devices").join(found.address.to_string());
            topology.functions.push(PciFunction {
                address: found.address,
                vendor: found.vendor,
                device: found.device,
                class: found.class,
                kind: found.kind(),
                group: group(&dir),
                driver: driver(sysfs, found.address),
                names: names(&dir),
            });
        }
        let groups = fs::read_dir(sysfs.join("kernel/iommu_groups")).into_iter().flatten().flatten();
        let no_iommu = groups
            .filter(|entry| fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == NO_IOMMU));
        topology.no_iommu_groups = no_iommu.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        topology.no_iommu_groups.sort_unstable();
        Ok(topology)
    }

    /// Returns the function at an address.
    #[must_use]
    pub fn at(&self, address: Address) -> Option<&PciFunction> {
        self.functions.iter().find(|function| function.address == address)
    }

    /// Returns the functions of a group.
    pub fn group(&self, group: u32) -> impl Iterator<Item = &PciFunction> {
        self.functions.iter().filter(move |function| function.group == Some(group))
    }

    /// Returns the functions of a kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &PciFunction> {
        self.functions.iter().filter(move |function| function.kind == Some(kind))
    }
}
