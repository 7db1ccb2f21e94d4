//! What is wrong with a domain that is defined, on the host as it is now.

use std::path::{Path, PathBuf};

use firstlight_pci::{Address, Kind};

use crate::definition::Definition;
use crate::members::{self, VFIO, Wish};
use crate::topology::Topology;
use crate::{Host, Problem, holder};

/// What keeps a domain from being started.
pub(crate) fn before_start(host: &Host, topology: &Topology, definition: &Definition) -> Vec<Problem> {
    let mut problems = around(host, definition);
    if definition.huge_pages {
        problems.extend(too_few_huge_pages(host, definition.memory_kib));
    }
    if !definition.lab {
        problems
            .extend(gone(topology, definition).map_or_else(|| functions(host, topology, definition), |it| vec![it]));
    }
    problems
}

/// What is wrong with a domain that runs. Whether its functions are a whole board is not
/// asked again: a bridge that a guest has need not tell the host what it is.
pub(crate) fn running(host: &Host, topology: &Topology, definition: &Definition) -> Vec<Problem> {
    let mut problems = around(host, definition);
    problems.extend(gone(topology, definition));
    for function in definition.passed.iter().filter_map(|passed| topology.at(passed.address)) {
        if function.driver.as_deref() != Some(VFIO) {
            let driver = function.driver.as_deref().map_or("no driver".to_owned(), |driver| format!("driver {driver}"));
            problems.push(Problem::new(
                format!(
                    "the domain runs, and its {} {} has {driver} and not {VFIO}",
                    function.what(),
                    function.address
                ),
                "somebody has taken it from the VM: firstlight service-vm destroy, then start",
            ));
        }
    }
    problems
}

/// What is beside the functions.
fn around(host: &Host, definition: &Definition) -> Vec<Problem> {
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
    (!node.exists()).then(|| Problem::new(format!("{} is not there", node.display()), remedy))
}

fn missing_files(definition: &Definition) -> Vec<Problem> {
    let gone = definition.files.iter().filter(|file| !file.is_file());
    let problem = |file: &PathBuf| {
        let remedy = "put the image or the disk back, or name another one: firstlight service-vm define --image ..";
        Problem::new(format!("{} is not there", file.display()), remedy)
    };
    gone.map(problem).collect()
}

/// A function that is not on the bus any more.
fn gone(topology: &Topology, definition: &Definition) -> Option<Problem> {
    let gone = definition.passed.iter().find(|passed| topology.at(passed.address).is_none())?;
    Some(Problem::new(
        format!("{}, which the domain has, is not on this host's PCI bus", gone.address),
        "if boards or cards were moved, firstlight service-vm define writes the domain anew; else look at the host's \
         kernel log",
    ))
}

/// Whether the functions are what the board has, and nobody else has them.
fn functions(host: &Host, topology: &Topology, definition: &Definition) -> Vec<Problem> {
    let mut then: Vec<Address> = definition.passed.iter().map(|passed| passed.address).collect();
    let of_fabric = |address: &&Address| {
        let kind = topology.at(**address).and_then(|function| function.kind);
        matches!(kind, Some(Kind::NvSwitch | Kind::NvLinkBridge))
    };
    let wish = Wish {
        only: then.iter().filter(of_fabric).copied().collect(),
        unmanaged: definition.passed.iter().any(|passed| !passed.managed),
    };
    let members = match members::choose(topology, &wish) {
        Ok(members) => members,
        Err(problems) => return problems,
    };
    let mut problems = Vec::new();
    let now: Vec<Address> = members.passed.iter().map(|function| function.address).collect();
    then.sort();
    if now != then {
        let list = |all: &[Address]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        problems.push(Problem::new(
            format!("the domain has {}, and its board is {}", list(&then), list(&now)),
            "firstlight service-vm define writes the domain anew",
        ));
    }
    for group in members.groups {
        for holder in holder::of_groups(&host.proc, [group]) {
            problems.push(Problem::new(
                format!("IOMMU group {group} is in use by {} (process {})", holder.name, holder.pid),
                "a group is one VM's: stop that one first",
            ));
        }
    }
    problems
}

/// Whether as many huge pages are free as it takes, of the size that Linux has without being told.
fn too_few_huge_pages(host: &Host, memory_kib: u64) -> Option<Problem> {
    let text = std::fs::read_to_string(host.proc.join("meminfo")).unwrap_or_default();
    let number = |key: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(key))?.split_ascii_whitespace().next()?.parse().ok()
    };
    let (free, size) = (number("HugePages_Free:")?, number("Hugepagesize:")?.max(1));
    let wanted = memory_kib.div_ceil(size);
    let what = format!("{free} huge pages of {size} KiB are free, and it takes {wanted}");
    (free < wanted).then(|| Problem::new(what, format!("sysctl vm.nr_hugepages={wanted}, or more if others have some")))
}
