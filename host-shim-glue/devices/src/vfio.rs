//! Whether PCI functions can be passed through by vfio-pci.

use std::collections::BTreeSet;

use firstlight_pci::Address;

use crate::{PciFunction, Problem, Topology};

/// The driver of functions that are passed through.
pub const VFIO_PCI: &str = "vfio-pci";

/// Drivers that do not use a function, so that others of its IOMMU group can be passed through.
const STUB_DRIVERS: &[&str] = &[VFIO_PCI, "pci-stub"];

/// Returns the addresses of functions, comma-separated.
#[must_use]
pub fn list<'a>(functions: impl IntoIterator<Item = &'a PciFunction>) -> String {
    functions.into_iter().map(|function| function.address.to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns libvirt's node device name of a function.
#[must_use]
pub fn nodedev(address: Address) -> String {
    let Address { domain, bus, device, function } = address;
    format!("pci_{domain:04x}_{bus:02x}_{device:02x}_{function:x}")
}

/// Returns the IOMMU groups of functions, and why functions have no usable group.
#[must_use]
pub fn groups(topology: &Topology, functions: &[PciFunction]) -> (BTreeSet<u32>, Vec<Problem>) {
    let mut problems = Vec::new();
    let without: Vec<&PciFunction> = functions.iter().filter(|function| function.group.is_none()).collect();
    if !without.is_empty() {
        let verb = if without.len() == 1 { "is" } else { "are" };
        problems.push(Problem::new(
            format!("{} {verb} in no IOMMU group", list(without)),
            "switch the IOMMU on: VT-d or AMD-Vi in the firmware, and intel_iommu=on among the host's kernel \
             parameters on Intel",
        ));
    }
    let groups: BTreeSet<u32> = functions.iter().filter_map(|function| function.group).collect();
    for group in groups.iter().filter(|group| topology.no_iommu_groups.contains(group)) {
        problems.push(Problem::new(
            format!("IOMMU group {group} is a no-IOMMU group: vfio runs without an IOMMU"),
            "a VM could then write to all of the host's memory: switch the IOMMU on, and take \
             enable_unsafe_noiommu_mode from vfio's parameters",
        ));
    }
    (groups, problems)
}

/// Returns why a function that the host uses prevents passthrough of its IOMMU group.
#[must_use]
pub fn host_use(function: &PciFunction) -> Option<Problem> {
    let PciFunction { address, driver, names, group, .. } = function;
    let driver = driver.as_deref().filter(|driver| !STUB_DRIVERS.contains(driver))?;
    let used = if names.is_empty() { String::new() } else { format!(" as {}", names.join(", ")) };
    Some(Problem::new(
        format!(
            "IOMMU group {} also has {} {address}, which the host uses{used} with driver {driver}",
            group.unwrap_or_default(),
            function.kind_name()
        ),
        format!(
            "move what uses it elsewhere and unbind it (virsh nodedev-detach {}), or switch ACS on in the firmware so \
             that it has a group of its own",
            nodedev(*address)
        ),
    ))
}

/// Returns why a function that was to be bound in advance cannot be passed through.
#[must_use]
pub fn not_bound(function: &PciFunction) -> Option<Problem> {
    let PciFunction { address, driver, .. } = function;
    let bound = match driver.as_deref() {
        Some(VFIO_PCI) => return None,
        Some(driver) => format!("driver {driver}, not {VFIO_PCI}"),
        None => format!("no driver, not {VFIO_PCI}"),
    };
    Some(Problem::new(
        format!("{} {address} has {bound}", function.kind_name()),
        format!(
            "virsh nodedev-detach {} binds it, and without --unmanaged libvirt does that by itself",
            nodedev(*address)
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(address: &str, group: Option<u32>, driver: Option<&str>) -> PciFunction {
        PciFunction {
            address: address.parse().unwrap(),
            vendor: 0x15b3,
            device: 0x1021,
            class: 0x02_0000,
            kind: None,
            group,
            driver: driver.map(str::to_owned),
            names: Vec::new(),
        }
    }

    #[test]
    fn functions_without_a_protected_group_are_problems() {
        let functions = [function("0000:01:00.0", Some(7), None), function("0000:02:00.1", None, None)];
        let topology = Topology { functions: functions.to_vec(), no_iommu_groups: vec![7] };
        let (groups, problems) = groups(&topology, &functions);
        assert_eq!(groups, BTreeSet::from([7]));
        let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(texts[0].starts_with("0000:02:00.1 is in no IOMMU group"), "{texts:?}");
        assert!(texts[1].starts_with("IOMMU group 7 is a no-IOMMU group"), "{texts:?}");
    }

    #[test]
    fn driver_decides_whether_a_function_is_in_use() {
        let nic = PciFunction { names: vec!["eth0".into()], ..function("0000:01:00.0", Some(7), Some("mlx5_core")) };
        let text = host_use(&nic).unwrap().to_string();
        assert!(text.contains("NIC 0000:01:00.0, which the host uses as eth0 with driver mlx5_core"), "{text}");
        assert!(text.contains("virsh nodedev-detach pci_0000_01_00_0"), "{text}");
        for driver in [None, Some(VFIO_PCI), Some("pci-stub")] {
            assert_eq!(host_use(&function("0000:01:00.0", Some(7), driver)), None);
        }
        assert_eq!(not_bound(&function("0000:01:00.0", Some(7), Some(VFIO_PCI))), None);
        let text = not_bound(&function("0000:01:00.0", Some(7), None)).unwrap().to_string();
        assert!(text.starts_with("NIC 0000:01:00.0 has no driver, not vfio-pci"), "{text}");
    }
}
