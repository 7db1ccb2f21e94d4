//! What is on the host's PCI bus: functions, their groups and their drivers.

use std::fs;
use std::path::Path;

use firstlight_pci::{Address, Kind, ScanError, driver, scan};

/// A PCI function of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, sub-class and programming interface.
    pub class: u32,
    /// What it is to Firstlight.
    pub kind: Option<Kind>,
    /// Its IOMMU group; none where no IOMMU is switched on.
    pub group: Option<u32>,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// What the host has it as: network interfaces and disks.
    pub names: Vec<String>,
}

impl Function {
    /// Whether it is a bridge to another bus, a PCIe port for one. These stay the host's.
    #[must_use]
    pub fn is_port(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// Vendor and device id as they are written: `10de:22a3`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{:04x}:{:04x}", self.vendor, self.device)
    }

    /// What it is, in a word or two.
    #[must_use]
    pub fn what(&self) -> &'static str {
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

/// The functions of a host, sorted by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// All of them.
    pub functions: Vec<Function>,
    /// Groups that are made up, because devices are used without an IOMMU.
    pub unprotected: Vec<u32>,
}

/// The name of such a group.
const NO_IOMMU: &str = "vfio-noiommu";

/// What a directory of a function holds the names of.
const NAMED: &[&str] = &["net", "nvme", "block"];

fn group(dir: &Path) -> Option<u32> {
    fs::read_link(dir.join("iommu_group")).ok()?.file_name()?.to_str()?.parse().ok()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = |name: &&str| fs::read_dir(dir.join(name)).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        NAMED.iter().flat_map(entries).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

impl Topology {
    /// Reads `sysfs`, normally `/sys`. Takes the VPD of each Mellanox function.
    ///
    /// # Errors
    /// The bus cannot be read.
    pub fn read(sysfs: &Path) -> Result<Self, ScanError> {
        let mut topology = Self::default();
        for found in scan(sysfs)? {
            let dir = sysfs.join("bus/pci/devices").join(found.address.to_string());
            topology.functions.push(Function {
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
        let made_up = groups
            .filter(|entry| fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == NO_IOMMU));
        topology.unprotected = made_up.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        topology.unprotected.sort_unstable();
        Ok(topology)
    }

    /// The function at an address.
    #[must_use]
    pub fn at(&self, address: Address) -> Option<&Function> {
        self.functions.iter().find(|function| function.address == address)
    }

    /// The functions of a group.
    pub fn group(&self, group: u32) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(move |function| function.group == Some(group))
    }

    /// The functions of a kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(move |function| function.kind == Some(kind))
    }
}
