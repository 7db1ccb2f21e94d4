//! Checks of a defined domain against the host's current state.

use std::path::{Path, PathBuf};

use firstlight_devices::vfio::VFIO_PCI;
use firstlight_devices::{HostRoots, Problem, Topology, group_users};
use firstlight_pci::{Address, Kind};

use crate::definition::Definition;
use crate::members::{self, Selection};

/// Returns what prevents a start of the domain.
pub(crate) fn before_start(host: &HostRoots, topology: &Topology, definition: &Definition) -> Vec<Problem> {
    let mut problems = check_host(host, definition);
    if definition.huge_pages {
        problems.extend(too_few_huge_pages(host, definition.memory_kib));
    }
    if !definition.external_devices {
        problems.extend(
            missing_function(topology, definition)
                .map_or_else(|| check_functions(host, topology, definition), |it| vec![it]),
        );
    }
    problems
}

/// Returns problems of a running domain. Whether its functions are a complete board is not checked again: the VPD of
/// a bridge may be unreadable while a guest has it.
pub(crate) fn running(host: &HostRoots, topology: &Topology, definition: &Definition) -> Vec<Problem> {
    let mut problems = check_host(host, definition);
    problems.extend(missing_function(topology, definition));
    for function in definition.passed.iter().filter_map(|passed| topology.at(passed.address)) {
        if function.driver.as_deref() != Some(VFIO_PCI) {
            let driver = function.driver.as_deref().map_or("no driver".to_owned(), |driver| format!("driver {driver}"));
            problems.push(Problem::new(
                format!(
                    "the domain runs, and its {} {} has {driver}, not {VFIO_PCI}",
                    function.kind_name(),
                    function.address
                ),
                "another process has rebound it: firstlight service-vm destroy, then start",
            ));
        }
    }
    problems
}

/// Checks files and device nodes of the host.
fn check_host(host: &HostRoots, definition: &Definition) -> Vec<Problem> {
    let mut problems = missing_files(definition);
    if definition.kind == "kvm" {
        problems.extend(absent(&host.dev.join("kvm"), "switch VT-x or SVM on in the firmware"));
    }
    if definition.cid.is_some() {
        problems.extend(absent(&host.dev.join("vhost-vsock"), "modprobe vhost_vsock"));
    }
    problems
}

fn absent(node: &Path, remedy: &str) -> Option<Problem> {
    (!node.exists()).then(|| Problem::new(format!("{} does not exist", node.display()), remedy))
}

fn missing_files(definition: &Definition) -> Vec<Problem> {
    let gone = definition.files.iter().filter(|file| !file.is_file());
    let problem = |file: &PathBuf| {
        let remedy = "put the image or the disk back, or name another one: firstlight service-vm define --image ..";
        Problem::new(format!("{} does not exist", file.display()), remedy)
    };
    gone.map(problem).collect()
}

/// Returns a passed function that is no longer on the PCI bus.
fn missing_function(topology: &Topology, definition: &Definition) -> Option<Problem> {
    let gone = definition.passed.iter().find(|passed| topology.at(passed.address).is_none())?;
    Some(Problem::new(
        format!("{}, which the domain has, is not on this host's PCI bus", gone.address),
        "if boards or cards were moved, firstlight service-vm define redefines the domain; else look at the host's \
         kernel log",
    ))
}

/// Checks that the functions are a complete board, and that no other VM has their groups.
fn check_functions(host: &HostRoots, topology: &Topology, definition: &Definition) -> Vec<Problem> {
    let mut then: Vec<Address> = definition.passed.iter().map(|passed| passed.address).collect();
    let of_fabric = |address: &&Address| {
        let kind = topology.at(**address).and_then(|function| function.kind);
        matches!(kind, Some(Kind::NvSwitch | Kind::NvLinkBridge))
    };
    let selection = Selection {
        only: then.iter().filter(of_fabric).copied().collect(),
        unmanaged: definition.passed.iter().any(|passed| !passed.managed),
    };
    let passthrough = match members::select(topology, &selection) {
        Ok(passthrough) => passthrough,
        Err(problems) => return problems,
    };
    let mut problems = Vec::new();
    let now: Vec<Address> = passthrough.passed.iter().map(|function| function.address).collect();
    then.sort();
    if now != then {
        let list = |all: &[Address]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        problems.push(Problem::new(
            format!("the domain has {}, and its board is {}", list(&then), list(&now)),
            "firstlight service-vm define redefines the domain",
        ));
    }
    for group in passthrough.groups {
        for user in group_users::of_groups(&host.proc, [group]) {
            problems.push(Problem::new(
                format!("IOMMU group {group} is in use by {} (process {})", user.name, user.pid),
                "a group can have one VM only: stop that one first",
            ));
        }
    }
    problems
}

/// Checks for free huge pages of the default size.
fn too_few_huge_pages(host: &HostRoots, memory_kib: u64) -> Option<Problem> {
    let text = std::fs::read_to_string(host.proc.join("meminfo")).unwrap_or_default();
    let number = |key: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(key))?.split_ascii_whitespace().next()?.parse().ok()
    };
    let (free, size) = (number("HugePages_Free:")?, number("Hugepagesize:")?.max(1));
    let needed = memory_kib.div_ceil(size);
    let what = format!("{free} huge pages of {size} KiB are free, and {needed} are needed");
    (free < needed).then(|| Problem::new(what, format!("sysctl vm.nr_hugepages={needed}, or more if others use some")))
}
