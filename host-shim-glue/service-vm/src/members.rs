//! Selects the host's PCI functions for the service VM, or reports why it cannot.

use std::collections::BTreeSet;

use firstlight_pci::{Address, Kind};

use firstlight_devices::vfio::{self, list};
use firstlight_devices::{PciFunction, Problem, Topology};

/// The NVLink generation, which determines what the fabric manager drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// NVSwitches on the PCI bus.
    NvLink4,
    /// Management bridges in front of the NVSwitches.
    NvLink5,
}

/// An NVSwitch model.
struct Switch {
    device: u16,
    boards: &'static str,
    /// The number of switches on one board; `None` if service VMs are not supported.
    count: Option<usize>,
}

/// Before NVLink 4 of the H100, the fabric manager needs the GPUs in the same VM while it starts.
const SWITCHES: &[Switch] = &[
    Switch { device: 0x1ac2, boards: "HGX-2", count: None },
    Switch { device: 0x1af1, boards: "HGX A100", count: None },
    Switch { device: 0x22a3, boards: "HGX H100 and H200", count: Some(4) },
];

/// Number of functions of a management bridge.
const BRIDGE_FUNCTIONS: usize = 4;

/// The management endpoint of the board's PCIe switch: vendor, device, function.
const SWITCH_ENDPOINT: (u16, u16, u8) = (0x11f8, 0x4128, 1);

/// Which functions to select.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Only these switches or bridges; all if empty.
    pub only: Vec<Address>,
    /// The functions are bound to vfio-pci externally, not by libvirt.
    pub unmanaged: bool,
}

/// The functions of a service VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassthroughSet {
    /// The NVLink generation.
    pub generation: Generation,
    /// The functions that the domain has, sorted by address.
    pub passed: Vec<PciFunction>,
    /// Other functions of their groups, which no host driver may use meanwhile.
    pub idle: Vec<PciFunction>,
    /// The IOMMU groups of all of them.
    pub groups: BTreeSet<u32>,
}

/// Selects the functions of the service VM.
///
/// # Errors
/// All problems that prevent it.
pub fn select(topology: &Topology, selection: &Selection) -> Result<PassthroughSet, Vec<Problem>> {
    let mut problems = Vec::new();
    let (generation, mut passed) =
        find_switches(topology, &selection.only, &mut problems).ok_or_else(|| problems.clone())?;
    let (groups, without_group) = vfio::groups(topology, &passed);
    problems.extend(without_group);
    let mut idle = Vec::new();
    for function in groups.iter().flat_map(|group| topology.group(*group)) {
        if passed.contains(function) || function.is_port() {
            continue;
        }
        if (function.vendor, function.device, function.address.function) == SWITCH_ENDPOINT {
            passed.push(function.clone());
            continue;
        }
        problems.extend(conflict(function));
        idle.push(function.clone());
    }
    passed.sort_by_key(|function| function.address);
    for function in passed.iter().filter(|_| selection.unmanaged) {
        problems.extend(vfio::not_bound(function));
    }
    if problems.is_empty() { Ok(PassthroughSet { generation, passed, idle, groups }) } else { Err(problems) }
}

fn find_switches(
    topology: &Topology,
    only: &[Address],
    problems: &mut Vec<Problem>,
) -> Option<(Generation, Vec<PciFunction>)> {
    for address in only {
        let remedy = "lspci -D shows which there are; NVSwitches are 10de with class 0680, bridges of NVLink 5 are \
                      15b3 whose VPD says SMDL=SW_MNG";
        match topology.at(*address).map(|function| (function.kind, function.kind_name())) {
            Some((Some(Kind::NvSwitch | Kind::NvLinkBridge), _)) => {}
            Some((_, what)) => problems.push(Problem::new(format!("{address} is a {what}, not an NVSwitch"), remedy)),
            None => problems.push(Problem::new(format!("{address} is not on this host's PCI bus"), remedy)),
        }
    }
    let is_selected = |function: &&PciFunction| only.is_empty() || only.contains(&function.address);
    let switches: Vec<PciFunction> = topology.of_kind(Kind::NvSwitch).filter(is_selected).cloned().collect();
    let bridges: Vec<PciFunction> = topology.of_kind(Kind::NvLinkBridge).filter(is_selected).cloned().collect();
    match (switches.is_empty(), bridges.is_empty()) {
        (true, true) => {
            problems.push(Problem::new(
                "this host has no NVSwitch and no NVLink bridge on its PCI bus",
                "a service VM is for HGX baseboards; if this is one, look for its switches with lspci -d 10de::0680 \
                 and for bridges that do not give out their VPD (only root can read it)",
            ));
            None
        }
        (false, false) => {
            problems.push(Problem::new(
                format!("there are NVSwitches ({}) and NVLink bridges ({})", list(&switches), list(&bridges)),
                "no board has both: say with --device which ones this service VM is for",
            ));
            None
        }
        (false, true) => {
            problems.extend(check_switch_count(&switches));
            Some((Generation::NvLink4, switches))
        }
        (true, false) => Some((Generation::NvLink5, all_bridge_functions(topology, &bridges, problems))),
    }
}

/// Checks that these are all switches of one board.
fn check_switch_count(switches: &[PciFunction]) -> Option<Problem> {
    let first = switches.first()?;
    if let Some(other) = switches.iter().find(|switch| switch.device != first.device) {
        return Some(Problem::new(
            format!(
                "NVSwitches {} ({}) and {} ({}) are of two boards",
                first.address,
                first.id(),
                other.address,
                other.id()
            ),
            "a service VM is for one board: say with --device which switches, each by its address",
        ));
    }
    // The number of switches is unknown for later models.
    let model = SWITCHES.iter().find(|model| model.device == first.device)?;
    let Some(count) = model.count else {
        return Some(Problem::new(
            format!("NVSwitch {} ({}) is of {}", first.address, first.id(), model.boards),
            "its fabric manager has to have the GPUs beside it while it starts, which is not supported: boards from \
             HGX H100 on are",
        ));
    };
    let found = switches.len();
    let what = format!("{found} NVSwitches {}, and a board of {} has {count}", list(switches), model.boards);
    match found.cmp(&count) {
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Less => Some(Problem::new(
            what,
            "the fabric needs all of them: look for the others in the host's kernel log (AER, link down), and turn \
             the host off and on if they are gone from lspci",
        )),
        std::cmp::Ordering::Greater => Some(Problem::new(
            what,
            "a service VM is for one board: say with --device which switches, each by its address",
        )),
    }
}

/// Returns all functions of the devices that these bridges belong to.
fn all_bridge_functions(topology: &Topology, bridges: &[PciFunction], problems: &mut Vec<Problem>) -> Vec<PciFunction> {
    let device = |address: Address| (address.domain, address.bus, address.device);
    let devices: BTreeSet<_> = bridges.iter().map(|bridge| device(bridge.address)).collect();
    let of_them = |function: &&PciFunction| devices.contains(&device(function.address));
    let whole: Vec<PciFunction> = topology.functions.iter().filter(of_them).cloned().collect();
    if devices.len() > 1 {
        problems.push(Problem::new(
            format!("there are NVLink bridges of {} boards: {}", devices.len(), list(bridges)),
            "a service VM is for one board: say with --device which functions, each by its address",
        ));
    } else if whole.len() != BRIDGE_FUNCTIONS {
        problems.push(Problem::new(
            format!("the NVLink bridge has {} functions ({}), not {BRIDGE_FUNCTIONS}", whole.len(), list(&whole)),
            "the subnet manager needs all of them: look for the others in the host's kernel log, and turn the host \
             off and on if they are gone from lspci",
        ));
    }
    whole
}

/// Returns why another function prevents passthrough of its group.
fn conflict(function: &PciFunction) -> Option<Problem> {
    let group = function.group.unwrap_or_default();
    let shared = format!("IOMMU group {group} also has {} {}", function.kind_name(), function.address);
    match function.kind {
        Some(Kind::Gpu) => Some(Problem::new(
            shared,
            "no tenant could have that GPU: switch ACS on in the firmware, or ask the server's maker how the board's \
             PCIe switches have to be set up",
        )),
        Some(Kind::NvSwitch | Kind::NvLinkBridge) => Some(Problem::new(
            format!("{shared}, which was not selected"),
            "a group cannot be shared: name it with --device as well",
        )),
        _ => vfio::host_use(function),
    }
}
