//! What kind of guest this is: rules over what is on the PCI bus.

use firstlight_boot_record::Mode;
use firstlight_pci::{Function, Kind};

/// Generation of NVLink, by how its switches are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// Up to NVLink 4 (A100, H100, H200): NVSwitches are PCI functions that `nvidia.ko` drives.
    NvLink4,
    /// NVLink 5 (B200, B300): switches are behind management bridges, InfiniBand functions of a ConnectX-7.
    NvLink5,
}

/// The NVLink fabric that this guest manages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fabric {
    /// How its switches are reached.
    pub generation: Generation,
    /// Whether it is shared among other guests (a service VM) or all this guest's own.
    pub shared: bool,
}

/// What kind of guest it is to be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ModeChoice {
    /// What the rules say.
    #[default]
    Auto,
    /// This one, whatever is on the bus.
    Chosen(&'static Kit),
}

/// What is done about devices that are no system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnOddDevices {
    /// What can be used is used.
    #[default]
    Degrade,
    /// The failure policy.
    Fail,
}

impl OnOddDevices {
    /// The word on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Degrade => "degrade",
            Self::Fail => "fail",
        }
    }
}

/// A kind of guest and what it takes.
#[derive(Debug, PartialEq, Eq)]
pub struct Kit {
    /// Its name in the record and on the command line.
    pub name: &'static str,
    /// Whether the driver is loaded.
    pub driver: bool,
    /// Whether GPUs are attached.
    pub attach: bool,
    /// The fabric, if it is managed here.
    pub fabric: Option<Fabric>,
}

const fn fabric(generation: Generation, shared: bool) -> Option<Fabric> {
    Some(Fabric { generation, shared })
}

const CPU: Kit = Kit { name: "cpu", driver: false, attach: false, fabric: None };
const GPU: Kit = Kit { name: "gpu", driver: true, attach: true, fabric: None };
const GPU_NVL4: Kit =
    Kit { name: "gpu+fabric-nvl4", driver: true, attach: true, fabric: fabric(Generation::NvLink4, false) };
const GPU_NVL5: Kit =
    Kit { name: "gpu+fabric-nvl5", driver: true, attach: true, fabric: fabric(Generation::NvLink5, false) };
const SERVICE_NVL4: Kit =
    Kit { name: "service-vm-nvl4", driver: true, attach: false, fabric: fabric(Generation::NvLink4, true) };
const SERVICE_NVL5: Kit =
    Kit { name: "service-vm-nvl5", driver: false, attach: false, fabric: fabric(Generation::NvLink5, true) };

/// Every kind of guest.
pub static KITS: [Kit; 6] = [CPU, GPU, GPU_NVL4, GPU_NVL5, SERVICE_NVL4, SERVICE_NVL5];

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// For the record.
    pub mode: Mode,
    /// Whether the driver is loaded.
    pub driver: bool,
    /// Whether GPUs are attached.
    pub attach: bool,
    /// The fabric, if it is managed here.
    pub fabric: Option<Fabric>,
    /// Whether the only GPU has nothing to be linked with: the driver then need not wait for links to come up.
    pub lone_gpu: bool,
    /// What says that this guest's memory is closed to its host, if something does.
    pub confidential: Option<String>,
    /// Why the devices are no system that is known to work, if they are none.
    pub odd: Option<String>,
}

/// Functions by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    gpus: usize,
    switches: usize,
    bridges: usize,
    others: usize,
}

/// One rule. Never an exact count: any number of GPUs is a number of GPUs.
struct Rule {
    holds: fn(Counts) -> bool,
    kit: &'static Kit,
    odd: &'static str,
}

const TWO_FABRICS: &str = "NVSwitches and NVLink 5 management bridges in one guest: no system has both, and neither is touched; give the \
     guest one kind, or say firstlight.mode=";

/// The rules in the order in which they are tried; the last one always holds.
const RULES: &[Rule] = &[
    Rule { holds: |on| on.switches > 0 && on.bridges > 0 && on.gpus > 0, kit: &GPU, odd: TWO_FABRICS },
    Rule { holds: |on| on.switches > 0 && on.bridges > 0, kit: &CPU, odd: TWO_FABRICS },
    Rule { holds: |on| on.gpus > 0 && on.switches > 0, kit: &GPU_NVL4, odd: "" },
    Rule { holds: |on| on.gpus > 0 && on.bridges > 0, kit: &GPU_NVL5, odd: "" },
    Rule { holds: |on| on.gpus > 0, kit: &GPU, odd: "" },
    Rule { holds: |on| on.switches > 0, kit: &SERVICE_NVL4, odd: "" },
    Rule { holds: |on| on.bridges > 0, kit: &SERVICE_NVL5, odd: "" },
    Rule { holds: |_| true, kit: &CPU, odd: "" },
];

/// What a mode that was asked for misses on the bus.
fn missing(kit: &Kit, on: Counts) -> Option<String> {
    let what = match kit.fabric.map(|fabric| fabric.generation) {
        _ if kit.attach && on.gpus == 0 => "GPU",
        Some(Generation::NvLink4) if on.switches == 0 => "NVSwitch",
        Some(Generation::NvLink5) if on.bridges == 0 => "NVLink 5 management bridge (SW_MNG in its VPD)",
        _ => return None,
    };
    Some(format!("mode {} was asked for, and no {what} is on the PCI bus", kit.name))
}

/// Decides the mode from what is on the bus, unless it is already chosen.
#[must_use]
pub fn decide(functions: &[Function], choice: ModeChoice) -> Decision {
    let count = |kind| functions.iter().filter(|function| function.kind() == Some(kind)).count();
    let on = Counts {
        gpus: count(Kind::Gpu),
        switches: count(Kind::NvSwitch),
        bridges: count(Kind::NvLinkBridge),
        others: count(Kind::Mellanox),
    };
    let mut seen = format!("GPUs on the PCI bus: {}, NVSwitches: {}", on.gpus, on.switches);
    for (number, what) in [(on.bridges, "NVLink 5 management bridges"), (on.others, "other Mellanox functions")] {
        if number > 0 {
            seen.push_str(&format!(", {what}: {number}"));
        }
    }
    let (kit, odd) = match choice {
        ModeChoice::Chosen(kit) => {
            seen.insert_str(0, &format!("firstlight.mode={}; ", kit.name));
            (kit, missing(kit, on))
        }
        ModeChoice::Auto => {
            let rule = RULES.iter().find(|rule| (rule.holds)(on));
            let odd = rule.map(|rule| rule.odd).filter(|odd| !odd.is_empty());
            (rule.map_or(&CPU, |rule| rule.kit), odd.map(str::to_owned))
        }
    };
    if let Some(odd) = &odd {
        seen.push_str(&format!("; odd: {odd}"));
    }
    Decision {
        mode: Mode { name: kit.name.to_owned(), reason: seen },
        driver: kit.driver,
        attach: kit.attach,
        fabric: kit.fabric,
        lone_gpu: kit.attach && kit.fabric.is_none() && on.gpus == 1,
        confidential: None,
        odd,
    }
}

impl Decision {
    /// Whether this is a service VM: it shares a fabric out among other guests.
    #[must_use]
    pub fn is_service(&self) -> bool {
        self.fabric.is_some_and(|fabric| fabric.shared)
    }

    /// With what says that this is a guest under confidential computing, where GPUs are attached.
    #[must_use]
    pub fn in_confidence(mut self, why: Option<String>) -> Self {
        if let Some(why) = why.filter(|_| self.attach) {
            self.mode.reason.push_str(&format!("; confidential: {why}"));
            self.confidential = Some(why);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GPU_3D: u32 = 0x03_0200;
    const SWITCH: u32 = 0x06_8000;
    const INFINIBAND: u32 = 0x02_0700;

    fn bus(parts: &[(usize, u16, u16, u32, bool)]) -> Vec<Function> {
        let mut all: Vec<Function> = Vec::new();
        for (number, vendor, device, class, nvlink_bridge) in parts {
            for _ in 0..*number {
                let address = format!("{:04x}:{:02x}:00.0", all.len() >> 8, all.len() & 0xff).parse().unwrap();
                let (vendor, device, class, nvlink_bridge) = (*vendor, *device, *class, *nvlink_bridge);
                all.push(Function { address, vendor, device, class, driver: None, nvlink_bridge });
            }
        }
        all
    }

    fn functions(gpus: usize, switches: usize, bridges: usize, nics: usize) -> Vec<Function> {
        bus(&[
            (gpus, 0x10de, 0x2330, GPU_3D, false),
            (switches, 0x10de, 0x22a3, SWITCH, false),
            (bridges, 0x15b3, 0x1021, INFINIBAND, true),
            (nics, 0x15b3, 0x1021, INFINIBAND, false),
        ])
    }

    fn name(functions: &[Function]) -> String {
        decide(functions, ModeChoice::Auto).mode.name
    }

    /// Guests as they are made from the field's systems, by device id.
    #[test]
    fn systems_of_the_field_are_known() {
        let gpus = |number, device| (number, 0x10de, device, GPU_3D, false);
        let bridges = |number| (number, 0x15b3, 0x1021, INFINIBAND, true);
        for (system, parts, mode) in [
            ("HGX A100, all of it", vec![gpus(8, 0x20b2), (6, 0x10de, 0x1af1, SWITCH, false)], "gpu+fabric-nvl4"),
            ("HGX A100, the switches", vec![(6, 0x10de, 0x1af1, SWITCH, false)], "service-vm-nvl4"),
            (
                "HGX-2",
                vec![(16, 0x10de, 0x1db8, GPU_3D, false), (12, 0x10de, 0x1ac2, SWITCH, false)],
                "gpu+fabric-nvl4",
            ),
            ("HGX H100, all of it", vec![gpus(8, 0x2330), (4, 0x10de, 0x22a3, SWITCH, false)], "gpu+fabric-nvl4"),
            ("HGX H200, a tenant of one", vec![gpus(1, 0x2335)], "gpu"),
            ("HGX H200, a tenant of two", vec![gpus(2, 0x2335)], "gpu"),
            ("HGX H200, a tenant of four", vec![gpus(4, 0x2335)], "gpu"),
            ("HGX H200, a tenant of eight", vec![gpus(8, 0x2335)], "gpu"),
            ("HGX H200, the switches", vec![(4, 0x10de, 0x22a3, SWITCH, false)], "service-vm-nvl4"),
            ("HGX B200, all of it", vec![gpus(8, 0x2901), bridges(4)], "gpu+fabric-nvl5"),
            ("HGX B300, all of it", vec![gpus(8, 0x3182), bridges(4)], "gpu+fabric-nvl5"),
            ("HGX B200, the bridges", vec![bridges(4)], "service-vm-nvl5"),
            ("HGX B200, two of the bridges", vec![bridges(2)], "service-vm-nvl5"),
            ("a tenant with an InfiniBand NIC", vec![gpus(2, 0x2330), (1, 0x15b3, 0x1021, INFINIBAND, false)], "gpu"),
            ("a guest with a NIC only", vec![(1, 0x15b3, 0x101e, 0x02_0000, false)], "cpu"),
            ("Grace Hopper", vec![gpus(1, 0x2342)], "gpu"),
            (
                "a workstation's card with its audio",
                vec![(1, 0x10de, 0x2684, 0x03_0000, false), (1, 0x10de, 0x22ba, 0x04_0300, false)],
                "gpu",
            ),
            ("no GPU", vec![(1, 0x1af4, 0x1053, 0xff_0000, false)], "cpu"),
        ] {
            let decision = decide(&bus(&parts), ModeChoice::Auto);
            assert_eq!((decision.mode.name.as_str(), decision.odd), (mode, None), "{system}");
        }
    }

    #[test]
    fn what_was_found_is_the_reason() {
        let reason = |functions: &[Function]| decide(functions, ModeChoice::Auto).mode.reason;
        assert_eq!(reason(&functions(2, 0, 0, 0)), "GPUs on the PCI bus: 2, NVSwitches: 0");
        assert_eq!(
            reason(&functions(8, 0, 4, 1)),
            "GPUs on the PCI bus: 8, NVSwitches: 0, NVLink 5 management bridges: 4, other Mellanox functions: 1"
        );
    }

    #[test]
    fn who_loads_the_driver_and_who_manages_the_fabric() {
        let of = |gpus, switches, bridges| {
            let Decision { driver, attach, fabric, lone_gpu, .. } =
                decide(&functions(gpus, switches, bridges, 0), ModeChoice::Auto);
            (driver, attach, fabric.map(|fabric| (fabric.generation, fabric.shared)), lone_gpu)
        };
        assert_eq!(of(0, 0, 0), (false, false, None, false));
        assert_eq!(of(1, 0, 0), (true, true, None, true));
        assert_eq!(of(2, 0, 0), (true, true, None, false));
        assert_eq!(of(1, 4, 0), (true, true, Some((Generation::NvLink4, false)), false));
        assert_eq!(of(8, 0, 4), (true, true, Some((Generation::NvLink5, false)), false));
        assert_eq!(of(0, 6, 0), (true, false, Some((Generation::NvLink4, true)), false));
        assert_eq!(of(0, 0, 4), (false, false, Some((Generation::NvLink5, true)), false));
    }

    #[test]
    fn two_fabrics_in_one_guest_are_odd_and_its_gpus_are_served() {
        for (gpus, mode) in [(0, "cpu"), (3, "gpu")] {
            let decision = decide(&functions(gpus, 4, 2, 0), ModeChoice::Auto);
            assert_eq!((decision.mode.name.as_str(), decision.fabric), (mode, None));
            assert!(decision.odd.is_some_and(|odd| odd.contains("no system has both")));
            assert!(decision.mode.reason.contains("; odd: NVSwitches and"), "{}", decision.mode.reason);
        }
    }

    #[test]
    fn a_choice_on_the_command_line_wins_and_says_so() {
        for kit in &KITS {
            let decision = decide(&functions(2, 4, 4, 0), ModeChoice::Chosen(kit));
            assert_eq!(
                (decision.mode.name.as_str(), decision.attach, decision.fabric),
                (kit.name, kit.attach, kit.fabric)
            );
            assert!(decision.mode.reason.starts_with(&format!("firstlight.mode={}; GPUs on the PCI bus: 2", kit.name)));
            assert_eq!(decision.odd, None);
            // On an empty bus all but one miss something.
            let odd = decide(&[], ModeChoice::Chosen(kit)).odd;
            assert_eq!(odd.is_none(), kit.name == "cpu", "{odd:?}");
        }
        let odd = decide(&functions(8, 0, 0, 0), ModeChoice::Chosen(&SERVICE_NVL4)).odd.unwrap();
        assert!(odd.contains("service-vm-nvl4 was asked for, and no NVSwitch"), "{odd}");
    }

    proptest! {
        #[test]
        fn any_bus_is_some_mode(gpus in 0..20_usize, switches in 0..14_usize, bridges in 0..6_usize, nics in 0..4_usize) {
            let all = functions(gpus, switches, bridges, nics);
            let decision = decide(&all, ModeChoice::Auto);
            prop_assert!(KITS.iter().any(|kit| kit.name == decision.mode.name));
            prop_assert_eq!(decision.attach, gpus > 0);
            prop_assert_eq!(decision.odd.is_some(), switches > 0 && bridges > 0);
            // NICs of tenants decide nothing.
            prop_assert_eq!(name(&all), name(&functions(gpus, switches, bridges, 0)));
        }
    }
}
