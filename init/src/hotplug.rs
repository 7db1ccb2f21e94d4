//! GPU hotplug: compares snapshots of the PCI bus.
//!
//! uevents only trigger a scan; sysfs is the only source of truth. So a lost, late
//! or stale uevent does no harm.

use firstlight_pci::{Address, Function, Kind, ScanError};

use crate::nodes;
use crate::root::Root;

/// The driver's name in sysfs.
pub const DRIVER: &str = "nvidia";

/// The driver state of a known GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverState {
    /// On the bus and bound to the driver.
    Driven,
    /// On the bus, not bound yet.
    Waiting,
    /// On the bus, unbound from the driver.
    Released,
    /// Not on the bus.
    Absent,
}

/// A change of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It appeared on the bus, or is bound again after an unbind.
    Added {
        /// The PCI address.
        pci: Address,
        /// Its PCI device id.
        device: u16,
        /// Whether the driver has bound it.
        bound: bool,
    },
    /// The driver has bound a waiting GPU.
    Bound(Address),
    /// The driver was unbound.
    Unbound(Address),
    /// It left the bus.
    Removed(Address),
}

/// A snapshot of the PCI bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BusSnapshot {
    /// The functions on the bus.
    pub functions: Vec<Function>,
    /// GPUs that the driver has files for. The kernel sets the `driver` link before
    /// the probe function runs, so only these are bound.
    pub taken: Vec<Address>,
}

impl BusSnapshot {
    /// Reads the bus.
    ///
    /// # Errors
    /// The bus could not be read.
    pub fn read(root: &Root) -> Result<Self, ScanError> {
        let functions = firstlight_pci::scan(&root.path("/sys"))?;
        let gpus = functions.iter().filter(|function| bound(function)).map(|function| function.address);
        let taken = gpus.filter(|gpu| nodes::is_taken(root, *gpu)).collect();
        Ok(Self { functions, taken })
    }
}

/// Returns whether sysfs links the function to the driver.
fn bound(function: &Function) -> bool {
    function.driver.as_deref() == Some(DRIVER)
}

/// Compares the known GPUs with a snapshot. Removals come before additions.
#[must_use]
pub fn changes(known: &[(Address, DriverState)], snapshot: &BusSnapshot) -> Vec<Change> {
    let there: Vec<&Function> =
        snapshot.functions.iter().filter(|function| function.kind() == Some(Kind::Gpu)).collect();
    let mut changes = Vec::new();
    for (pci, driver_state) in known {
        let function = there.iter().find(|function| function.address == *pci);
        match (driver_state, function) {
            (DriverState::Absent, _) | (DriverState::Waiting | DriverState::Released, Some(_)) => {}
            (_, None) => changes.push(Change::Removed(*pci)),
            (DriverState::Driven, Some(function)) if !bound(function) => changes.push(Change::Unbound(*pci)),
            (DriverState::Driven, Some(_)) => {}
        }
    }
    for function in there {
        let (pci, device) = (function.address, function.device);
        let bound = bound(function) && snapshot.taken.contains(&pci);
        match known.iter().find(|(known, _)| *known == pci).map(|(_, driver_state)| *driver_state) {
            None | Some(DriverState::Absent) => changes.push(Change::Added { pci, device, bound }),
            Some(DriverState::Released) if bound => changes.push(Change::Added { pci, device, bound }),
            Some(DriverState::Waiting) if bound => changes.push(Change::Bound(pci)),
            Some(_) => {}
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pci(bus: u8) -> Address {
        format!("0000:{bus:02x}:00.0").parse().unwrap()
    }

    fn gpu(bus: u8, driver: Option<&str>) -> Function {
        Function {
            address: pci(bus),
            vendor: 0x10de,
            device: 0x2330,
            class: 0x03_0200,
            driver: driver.map(str::to_owned),
            nvlink_bridge: false,
        }
    }

    /// A snapshot in which every linked driver has finished its probe.
    fn look(functions: &[Function]) -> BusSnapshot {
        let taken = functions.iter().filter(|function| bound(function)).map(|function| function.address).collect();
        BusSnapshot { functions: functions.to_vec(), taken }
    }

    #[test]
    fn gpu_in_driver_probe_is_not_bound_yet() {
        let probing = BusSnapshot { functions: vec![gpu(1, Some(DRIVER))], taken: vec![] };
        assert_eq!(changes(&[], &probing), [Change::Added { pci: pci(1), device: 0x2330, bound: false }]);
        assert_eq!(changes(&[(pci(1), DriverState::Waiting)], &probing), []);
        assert_eq!(changes(&[(pci(1), DriverState::Released)], &probing), []);
        // On unbind the driver link disappears before the driver's file.
        assert_eq!(changes(&[(pci(1), DriverState::Driven)], &probing), []);
        assert_eq!(changes(&[(pci(1), DriverState::Waiting)], &look(&probing.functions)), [Change::Bound(pci(1))]);
    }

    #[test]
    fn snapshot_lists_gpus_with_driver_files() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (bus, files) in [(1, true), (2, false)] {
            let device = root.path(&format!("/sys/bus/pci/devices/{}", pci(bus)));
            std::fs::create_dir_all(&device).unwrap();
            let modalias = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n";
            std::fs::write(device.join("modalias"), modalias).unwrap();
            std::os::unix::fs::symlink("../../../bus/pci/drivers/nvidia", device.join("driver")).unwrap();
            let information = root.path(&format!("/proc/driver/nvidia/gpus/{}", pci(bus)));
            std::fs::create_dir_all(&information).unwrap();
            if files {
                std::fs::write(information.join("information"), "").unwrap();
            }
        }
        let snapshot = BusSnapshot::read(&root).unwrap();
        assert_eq!(snapshot.functions.len(), 2);
        assert_eq!(snapshot.taken, [pci(1)]);
    }

    #[test]
    fn changes_of_every_driver_state_and_bus_state() {
        use DriverState::{Absent, Driven, Released, Waiting};
        let came = |bound| Some(Change::Added { pci: pci(1), device: 0x2330, bound });
        let (free, bound, gone) = (vec![gpu(1, None)], vec![gpu(1, Some("nvidia"))], vec![]);
        let rows: [(Option<DriverState>, &[Function], Option<Change>); 15] = [
            (None, &free, came(false)),
            (None, &bound, came(true)),
            (None, &gone, None),
            (Some(Driven), &free, Some(Change::Unbound(pci(1)))),
            (Some(Driven), &bound, None),
            (Some(Driven), &gone, Some(Change::Removed(pci(1)))),
            (Some(Waiting), &free, None),
            (Some(Waiting), &bound, Some(Change::Bound(pci(1)))),
            (Some(Waiting), &gone, Some(Change::Removed(pci(1)))),
            (Some(Released), &free, None),
            (Some(Released), &bound, came(true)),
            (Some(Released), &gone, Some(Change::Removed(pci(1)))),
            (Some(Absent), &free, came(false)),
            (Some(Absent), &bound, came(true)),
            (Some(Absent), &gone, None),
        ];
        for (driver_state, bus, expected) in rows {
            let known: Vec<_> = driver_state.map(|driver_state| (pci(1), driver_state)).into_iter().collect();
            assert_eq!(changes(&known, &look(bus)), Vec::from_iter(expected), "{driver_state:?} {bus:?}");
        }
    }

    #[test]
    fn other_functions_and_other_drivers_are_ignored() {
        let mut nic = gpu(2, None);
        nic.vendor = 0x15b3;
        assert_eq!(changes(&[], &look(&[nic])), []);
        let vfio = look(&[gpu(1, Some("vfio-pci"))]);
        assert_eq!(changes(&[(pci(1), DriverState::Waiting)], &vfio), []);
        assert_eq!(changes(&[(pci(1), DriverState::Driven)], &vfio), [Change::Unbound(pci(1))]);
    }

    proptest! {
        /// Applying the changes between any snapshots yields the state of the bus.
        #[test]
        fn applied_changes_match_bus(
            looks in prop::collection::vec(prop::collection::vec((1u8..5, any::<bool>()), 0..5), 1..20)
        ) {
            let mut known: Vec<(Address, DriverState)> = Vec::new();
            for seen in looks {
                let mut bus: Vec<Function> = Vec::new();
                for (at, bound) in seen {
                    if bus.iter().all(|function| function.address != pci(at)) {
                        bus.push(gpu(at, bound.then_some(DRIVER)));
                    }
                }
                for change in changes(&known, &look(&bus)) {
                    let (pci, driver_state) = match change {
                        Change::Added { pci, bound, .. } => (pci, if bound { DriverState::Driven } else { DriverState::Waiting }),
                        Change::Bound(pci) => (pci, DriverState::Driven),
                        Change::Unbound(pci) => (pci, DriverState::Released),
                        Change::Removed(pci) => (pci, DriverState::Absent),
                    };
                    known.retain(|(other, _)| *other != pci);
                    known.push((pci, driver_state));
                }
                for (pci, driver_state) in &known {
                    let function = bus.iter().find(|function| function.address == *pci);
                    let bound = function.map(|function| function.driver.is_some());
                    prop_assert!(matches!(
                        (driver_state, bound),
                        (DriverState::Driven, Some(true))
                            | (DriverState::Waiting | DriverState::Released, Some(false))
                            | (DriverState::Absent, None)
                    ), "{driver_state:?} {bound:?}");
                }
                prop_assert!(bus.iter().all(|function| known.iter().any(|(pci, _)| *pci == function.address)));
                prop_assert_eq!(changes(&known, &look(&bus)), vec![]);
            }
        }
    }
}
