//! GPUs that come and go while the guest runs: what a look at the bus changes.
//!
//! The kernel's messages only say that something may have changed; what is
//! there is always what sysfs lists. So a message that is lost, late, or about
//! something that is over already does no harm.

use firstlight_pci::{Address, Function, Kind, ScanError};

use crate::nodes;
use crate::root::Root;

/// The driver's name on the bus.
pub const DRIVER: &str = "nvidia";

/// How PID 1 stands to a GPU that it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// On the bus, and handled: at boot, or since the driver took it.
    Driven,
    /// On the bus; the driver has not taken it yet.
    Waiting,
    /// On the bus, but the driver was taken off it.
    Released,
    /// Not on the bus.
    Absent,
}

/// What has changed about a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It is on the bus and was not, or was not driven any more; whether the driver has it.
    Came {
        /// Which.
        pci: Address,
        /// Its PCI device id.
        device: u16,
        /// Whether the driver has taken it.
        bound: bool,
    },
    /// The driver has taken one that was waiting.
    Bound(Address),
    /// The driver was taken off it.
    LetGo(Address),
    /// It is not on the bus any more.
    Left(Address),
}

/// One look at the bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// What is there.
    pub functions: Vec<Function>,
    /// GPUs that the driver has files for. The kernel ties a driver to a
    /// function before the driver is asked, so only these have been taken.
    pub taken: Vec<Address>,
}

impl Look {
    /// Looks.
    ///
    /// # Errors
    /// The bus could not be read.
    pub fn at(root: &Root) -> Result<Self, ScanError> {
        let functions = firstlight_pci::scan(&root.path("/sys"))?;
        let gpus = functions.iter().filter(|function| bound(function)).map(|function| function.address);
        let taken = gpus.filter(|gpu| nodes::is_taken(root, *gpu)).collect();
        Ok(Self { functions, taken })
    }
}

/// Whether the kernel has tied the driver to it.
fn bound(function: &Function) -> bool {
    function.driver.as_deref() == Some(DRIVER)
}

/// Compares what is known with what is on the bus. Everything that leaves is
/// told before anything that comes.
#[must_use]
pub fn changes(known: &[(Address, Standing)], look: &Look) -> Vec<Change> {
    let there: Vec<&Function> = look.functions.iter().filter(|function| function.kind() == Some(Kind::Gpu)).collect();
    let mut changes = Vec::new();
    for (pci, standing) in known {
        let function = there.iter().find(|function| function.address == *pci);
        match (standing, function) {
            (Standing::Absent, _) | (Standing::Waiting | Standing::Released, Some(_)) => {}
            (_, None) => changes.push(Change::Left(*pci)),
            (Standing::Driven, Some(function)) if !bound(function) => changes.push(Change::LetGo(*pci)),
            (Standing::Driven, Some(_)) => {}
        }
    }
    for function in there {
        let (pci, device) = (function.address, function.device);
        let bound = bound(function) && look.taken.contains(&pci);
        match known.iter().find(|(known, _)| *known == pci).map(|(_, standing)| *standing) {
            None | Some(Standing::Absent) => changes.push(Change::Came { pci, device, bound }),
            Some(Standing::Released) if bound => changes.push(Change::Came { pci, device, bound }),
            Some(Standing::Waiting) if bound => changes.push(Change::Bound(pci)),
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

    /// A bus where the driver has taken all that it is tied to.
    fn look(functions: &[Function]) -> Look {
        let taken = functions.iter().filter(|function| bound(function)).map(|function| function.address).collect();
        Look { functions: functions.to_vec(), taken }
    }

    #[test]
    fn a_gpu_that_the_driver_is_being_asked_about_is_not_taken_yet() {
        let probing = Look { functions: vec![gpu(1, Some(DRIVER))], taken: vec![] };
        assert_eq!(changes(&[], &probing), [Change::Came { pci: pci(1), device: 0x2330, bound: false }]);
        assert_eq!(changes(&[(pci(1), Standing::Waiting)], &probing), []);
        assert_eq!(changes(&[(pci(1), Standing::Released)], &probing), []);
        // Its file goes when the driver has let go; the tie ends before.
        assert_eq!(changes(&[(pci(1), Standing::Driven)], &probing), []);
        assert_eq!(changes(&[(pci(1), Standing::Waiting)], &look(&probing.functions)), [Change::Bound(pci(1))]);
    }

    #[test]
    fn a_look_says_which_ones_the_driver_has_files_for() {
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
        let look = Look::at(&root).unwrap();
        assert_eq!(look.functions.len(), 2);
        assert_eq!(look.taken, [pci(1)]);
    }

    #[test]
    fn each_standing_meets_each_state_of_the_bus() {
        use Standing::{Absent, Driven, Released, Waiting};
        let came = |bound| Some(Change::Came { pci: pci(1), device: 0x2330, bound });
        let (free, bound, gone) = (vec![gpu(1, None)], vec![gpu(1, Some("nvidia"))], vec![]);
        let rows: [(Option<Standing>, &[Function], Option<Change>); 15] = [
            (None, &free, came(false)),
            (None, &bound, came(true)),
            (None, &gone, None),
            (Some(Driven), &free, Some(Change::LetGo(pci(1)))),
            (Some(Driven), &bound, None),
            (Some(Driven), &gone, Some(Change::Left(pci(1)))),
            (Some(Waiting), &free, None),
            (Some(Waiting), &bound, Some(Change::Bound(pci(1)))),
            (Some(Waiting), &gone, Some(Change::Left(pci(1)))),
            (Some(Released), &free, None),
            (Some(Released), &bound, came(true)),
            (Some(Released), &gone, Some(Change::Left(pci(1)))),
            (Some(Absent), &free, came(false)),
            (Some(Absent), &bound, came(true)),
            (Some(Absent), &gone, None),
        ];
        for (standing, bus, expected) in rows {
            let known: Vec<_> = standing.map(|standing| (pci(1), standing)).into_iter().collect();
            assert_eq!(changes(&known, &look(bus)), Vec::from_iter(expected), "{standing:?} {bus:?}");
        }
    }

    #[test]
    fn other_functions_and_other_drivers_are_no_gpus_of_ours() {
        let mut nic = gpu(2, None);
        nic.vendor = 0x15b3;
        assert_eq!(changes(&[], &look(&[nic])), []);
        let vfio = look(&[gpu(1, Some("vfio-pci"))]);
        assert_eq!(changes(&[(pci(1), Standing::Waiting)], &vfio), []);
        assert_eq!(changes(&[(pci(1), Standing::Driven)], &vfio), [Change::LetGo(pci(1))]);
    }

    proptest! {
        /// Whatever changes on the bus between two looks, following the changes ends in what is there.
        #[test]
        fn following_the_changes_ends_in_what_is_there(
            looks in prop::collection::vec(prop::collection::vec((1u8..5, any::<bool>()), 0..5), 1..20)
        ) {
            let mut known: Vec<(Address, Standing)> = Vec::new();
            for seen in looks {
                let mut bus: Vec<Function> = Vec::new();
                for (at, bound) in seen {
                    if bus.iter().all(|function| function.address != pci(at)) {
                        bus.push(gpu(at, bound.then_some(DRIVER)));
                    }
                }
                for change in changes(&known, &look(&bus)) {
                    let (pci, standing) = match change {
                        Change::Came { pci, bound, .. } => (pci, if bound { Standing::Driven } else { Standing::Waiting }),
                        Change::Bound(pci) => (pci, Standing::Driven),
                        Change::LetGo(pci) => (pci, Standing::Released),
                        Change::Left(pci) => (pci, Standing::Absent),
                    };
                    known.retain(|(other, _)| *other != pci);
                    known.push((pci, standing));
                }
                for (pci, standing) in &known {
                    let function = bus.iter().find(|function| function.address == *pci);
                    let bound = function.map(|function| function.driver.is_some());
                    prop_assert!(matches!(
                        (standing, bound),
                        (Standing::Driven, Some(true))
                            | (Standing::Waiting | Standing::Released, Some(false))
                            | (Standing::Absent, None)
                    ), "{standing:?} {bound:?}");
                }
                prop_assert!(bus.iter().all(|function| known.iter().any(|(pci, _)| *pci == function.address)));
                prop_assert_eq!(changes(&known, &look(&bus)), vec![]);
            }
        }
    }
}
