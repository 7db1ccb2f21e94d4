//! Which functions of the host the service VM is given, or why it cannot be.

use std::collections::BTreeSet;

use firstlight_pci::{Address, Kind};

use crate::Problem;
use crate::topology::{Function, Topology};

/// The generation of the fabric, which decides what its manager drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fabric {
    /// NVSwitches on the PCI bus.
    NvLink4,
    /// Management bridges that lead to NVSwitches.
    NvLink5,
}

/// A model of NVSwitch.
struct Switch {
    device: u16,
    boards: &'static str,
    /// How many there are on one board, if a service VM can have them.
    count: Option<usize>,
}

/// Before NVLink 4 of the H100, GPUs have to be beside the fabric manager while it starts.
const SWITCHES: &[Switch] = &[
    Switch { device: 0x1ac2, boards: "HGX-2", count: None },
    Switch { device: 0x1af1, boards: "HGX A100", count: None },
    Switch { device: 0x22a3, boards: "HGX H100 and H200", count: Some(4) },
];

/// Functions of one management bridge.
const BRIDGE_FUNCTIONS: usize = 4;

/// The management endpoint of the board's PCIe switch: vendor, device, function.
const SWITCH_ENDPOINT: (u16, u16, u8) = (0x11f8, 0x4128, 1);

/// Drivers that leave a function to whoever has its group.
const FREE_DRIVERS: &[&str] = &["vfio-pci", "pci-stub"];

/// The driver of functions that are given to a VM.
pub const VFIO: &str = "vfio-pci";

/// What is wished for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    /// These switches or bridges and no others; all if there are none.
    pub only: Vec<Address>,
    /// Whether somebody else binds the functions to vfio-pci, and not libvirt.
    pub unmanaged: bool,
}

/// What a service VM is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Members {
    /// The fabric's generation.
    pub fabric: Fabric,
    /// The functions that the domain has, sorted by address.
    pub passed: Vec<Function>,
    /// Others of their groups, which no driver of the host may use meanwhile.
    pub idle: Vec<Function>,
    /// The groups of all of them.
    pub groups: BTreeSet<u32>,
}

/// Chooses what the service VM is given.
///
/// # Errors
/// Everything that is in the way.
pub fn choose(topology: &Topology, wish: &Wish) -> Result<Members, Vec<Problem>> {
    let mut problems = Vec::new();
    let (fabric, mut passed) = fabric(topology, &wish.only, &mut problems).ok_or_else(|| problems.clone())?;
    let groups = groups(topology, &passed, &mut problems);
    let mut idle = Vec::new();
    for function in groups.iter().flat_map(|group| topology.group(*group)) {
        if passed.contains(function) || function.is_port() {
            continue;
        }
        if (function.vendor, function.device, function.address.function) == SWITCH_ENDPOINT {
            passed.push(function.clone());
            continue;
        }
        problems.extend(in_the_way(function));
        idle.push(function.clone());
    }
    passed.sort_by_key(|function| function.address);
    for function in passed.iter().filter(|_| wish.unmanaged) {
        problems.extend(unbound(function));
    }
    if problems.is_empty() { Ok(Members { fabric, passed, idle, groups }) } else { Err(problems) }
}

fn list<'a>(functions: impl IntoIterator<Item = &'a Function>) -> String {
    functions.into_iter().map(|function| function.address.to_string()).collect::<Vec<_>>().join(", ")
}

fn fabric(topology: &Topology, only: &[Address], problems: &mut Vec<Problem>) -> Option<(Fabric, Vec<Function>)> {
    for address in only {
        let remedy = "lspci -D shows which there are; NVSwitches are 10de with class 0680, bridges of NVLink 5 are \
                      15b3 whose VPD says SMDL=SW_MNG";
        match topology.at(*address).map(|function| (function.kind, function.what())) {
            Some((Some(Kind::NvSwitch | Kind::NvLinkBridge), _)) => {}
            Some((_, what)) => problems.push(Problem::new(format!("{address} is a {what} and no NVSwitch"), remedy)),
            None => problems.push(Problem::new(format!("{address} is not on this host's PCI bus"), remedy)),
        }
    }
    let wanted = |function: &&Function| only.is_empty() || only.contains(&function.address);
    let switches: Vec<Function> = topology.of_kind(Kind::NvSwitch).filter(wanted).cloned().collect();
    let bridges: Vec<Function> = topology.of_kind(Kind::NvLinkBridge).filter(wanted).cloned().collect();
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
            problems.extend(board_of_switches(&switches));
            Some((Fabric::NvLink4, switches))
        }
        (true, false) => Some((Fabric::NvLink5, whole_bridges(topology, &bridges, problems))),
    }
}

/// Whether these are the switches of one board.
fn board_of_switches(switches: &[Function]) -> Option<Problem> {
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
    // Of a model that came later nobody here knows how many there are.
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

/// All functions of the devices that the bridges are functions of.
fn whole_bridges(topology: &Topology, bridges: &[Function], problems: &mut Vec<Problem>) -> Vec<Function> {
    let device = |address: Address| (address.domain, address.bus, address.device);
    let devices: BTreeSet<_> = bridges.iter().map(|bridge| device(bridge.address)).collect();
    let of_them = |function: &&Function| devices.contains(&device(function.address));
    let whole: Vec<Function> = topology.functions.iter().filter(of_them).cloned().collect();
    if devices.len() > 1 {
        problems.push(Problem::new(
            format!("there are NVLink bridges of {} boards: {}", devices.len(), list(bridges)),
            "a service VM is for one board: say with --device which functions, each by its address",
        ));
    } else if whole.len() != BRIDGE_FUNCTIONS {
        problems.push(Problem::new(
            format!("the NVLink bridge has {} functions ({}) and not {BRIDGE_FUNCTIONS}", whole.len(), list(&whole)),
            "the subnet manager needs all of them: look for the others in the host's kernel log, and turn the host \
             off and on if they are gone from lspci",
        ));
    }
    whole
}

fn groups(topology: &Topology, passed: &[Function], problems: &mut Vec<Problem>) -> BTreeSet<u32> {
    let alone: Vec<&Function> = passed.iter().filter(|function| function.group.is_none()).collect();
    if !alone.is_empty() {
        problems.push(Problem::new(
            format!(
                "{} {} in no IOMMU group",
                list(alone.iter().copied()),
                if alone.len() == 1 { "is" } else { "are" }
            ),
            "switch the IOMMU on: VT-d or AMD-Vi in the firmware, and intel_iommu=on among the host's kernel \
             parameters on Intel",
        ));
    }
    let groups: BTreeSet<u32> = passed.iter().filter_map(|function| function.group).collect();
    for group in groups.iter().filter(|group| topology.unprotected.contains(group)) {
        problems.push(Problem::new(
            format!("IOMMU group {group} is made up: vfio runs without an IOMMU"),
            "a VM could then write to all of the host's memory: switch the IOMMU on, and take \
             enable_unsafe_noiommu_mode from vfio's parameters",
        ));
    }
    groups
}

/// Why another function of a group keeps the group from a VM.
fn in_the_way(function: &Function) -> Option<Problem> {
    let Function { address, driver, names, group, .. } = function;
    let what = function.what();
    let group = group.unwrap_or_default();
    let place = format!("IOMMU group {group} also has {what} {address}");
    match (function.kind, driver) {
        (Some(Kind::Gpu), _) => Some(Problem::new(
            place,
            "no tenant could have that GPU: switch ACS on in the firmware, or ask the server's maker how the board's \
             PCIe switches have to be set up",
        )),
        (Some(Kind::NvSwitch | Kind::NvLinkBridge), _) => Some(Problem::new(
            format!("{place}, which was not asked for"),
            "a group cannot be shared: name it with --device as well",
        )),
        (_, Some(driver)) if !FREE_DRIVERS.contains(&driver.as_str()) => {
            let used = if names.is_empty() { String::new() } else { format!(" as {}", names.join(", ")) };
            Some(Problem::new(
                format!("{place}, which the host uses{used} with driver {driver}"),
                format!(
                    "move what uses it elsewhere and unbind it (virsh nodedev-detach {}), or switch ACS on in the \
                     firmware so that it has a group of its own",
                    nodedev(*address)
                ),
            ))
        }
        _ => None,
    }
}

/// Why a function that nobody binds for us cannot be given away.
fn unbound(function: &Function) -> Option<Problem> {
    let Function { address, driver, .. } = function;
    let bound = match driver.as_deref() {
        Some(VFIO) => return None,
        Some(driver) => format!("driver {driver} and not {VFIO}"),
        None => format!("no driver and not {VFIO}"),
    };
    Some(Problem::new(
        format!("{} {address} has {bound}", function.what()),
        format!(
            "virsh nodedev-detach {} binds it, and without --unmanaged libvirt does that by itself",
            nodedev(*address)
        ),
    ))
}

/// libvirt's name for a function.
fn nodedev(address: Address) -> String {
    let Address { domain, bus, device, function } = address;
    format!("pci_{domain:04x}_{bus:02x}_{device:02x}_{function:x}")
}
