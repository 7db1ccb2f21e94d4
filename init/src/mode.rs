//! Decides the guest mode by rules over the functions on the PCI bus.

use firstlight_boot_record::Mode;
use firstlight_pci::{Function, Kind};

/// A generation of NVLink, by the way in which its switches are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvLinkGeneration {
    /// Up to NVLink 4 (A100, H100, H200): NVSwitches are PCI functions that `nvidia.ko` drives.
    NvLink4,
    /// NVLink 5 (B200, B300): switches are behind management bridges, InfiniBand functions of a ConnectX-7.
    NvLink5,
}

/// The NVLink fabric that this guest manages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fabric {
    /// The generation of the fabric's switches.
    pub generation: NvLinkGeneration,
    /// Whether the fabric is shared among other guests (a service VM) or used only by this guest.
    pub shared: bool,
}

/// The requested guest mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ModeChoice {
    /// The mode is decided by the rules.
    #[default]
    Auto,
    /// This mode is used, whatever is on the PCI bus.
    Chosen(&'static GuestMode),
}

/// The reaction to an unsupported device topology.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnUnsupportedTopology {
    /// Use the devices that can be used.
    #[default]
    Degrade,
    /// Apply the failure policy.
    Fail,
}

impl OnUnsupportedTopology {
    /// Returns the value as it is written on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Degrade => "degrade",
            Self::Fail => "fail",
        }
    }
}

/// A guest mode and its properties.
#[derive(Debug, PartialEq, Eq)]
pub struct GuestMode {
    /// The name in the boot record and on the command line.
    pub name: &'static str,
    /// Whether the driver is loaded.
    pub driver: bool,
    /// Whether GPUs are attached.
    pub attach: bool,
    /// The NVLink fabric, if this guest manages it.
    pub fabric: Option<Fabric>,
}

const fn fabric(generation: NvLinkGeneration, shared: bool) -> Option<Fabric> {
    Some(Fabric { generation, shared })
}

const CPU: GuestMode = GuestMode { name: "cpu", driver: false, attach: false, fabric: None };
const GPU: GuestMode = GuestMode { name: "gpu", driver: true, attach: true, fabric: None };
const GPU_NVL4: GuestMode =
    GuestMode { name: "gpu+fabric-nvl4", driver: true, attach: true, fabric: fabric(NvLinkGeneration::NvLink4, false) };
const GPU_NVL5: GuestMode =
    GuestMode { name: "gpu+fabric-nvl5", driver: true, attach: true, fabric: fabric(NvLinkGeneration::NvLink5, false) };
const SERVICE_NVL4: GuestMode =
    GuestMode { name: "service-vm-nvl4", driver: true, attach: false, fabric: fabric(NvLinkGeneration::NvLink4, true) };
const SERVICE_NVL5: GuestMode = GuestMode {
    name: "service-vm-nvl5",
    driver: false,
    attach: false,
    fabric: fabric(NvLinkGeneration::NvLink5, true),
};

/// All guest modes.
pub static GUEST_MODES: [GuestMode; 6] = [CPU, GPU, GPU_NVL4, GPU_NVL5, SERVICE_NVL4, SERVICE_NVL5];

/// The mode decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The mode as it is written to the boot record.
    pub mode: Mode,
    /// Whether the driver is loaded.
    pub driver: bool,
    /// Whether GPUs are attached.
    pub attach: bool,
    /// The NVLink fabric, if this guest manages it.
    pub fabric: Option<Fabric>,
    /// Whether there is a single GPU without NVLink peers: the driver does not have to wait for
    /// link training.
    pub single_gpu: bool,
    /// The reason why this is a confidential guest, if it is one.
    pub confidential: Option<String>,
    /// The reason why the device topology is not supported, if it is not.
    pub unsupported: Option<String>,
}

/// Number of functions by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    gpus: usize,
    switches: usize,
    bridges: usize,
    others: usize,
}

/// One rule. Rules never test for an exact number of GPUs.
struct Rule {
    holds: fn(Counts) -> bool,
    guest_mode: &'static GuestMode,
    unsupported: &'static str,
}

const TWO_FABRICS: &str = "NVSwitches and NVLink 5 management bridges in one guest: no system has both, and neither is managed; assign one \
     kind to the guest, or set firstlight.mode=";

/// The rules in the order in which they are tried; the last rule always matches.
const RULES: &[Rule] = &[
    Rule { holds: |on| on.switches > 0 && on.bridges > 0 && on.gpus > 0, guest_mode: &GPU, unsupported: TWO_FABRICS },
    Rule { holds: |on| on.switches > 0 && on.bridges > 0, guest_mode: &CPU, unsupported: TWO_FABRICS },
    Rule { holds: |on| on.gpus > 0 && on.switches > 0, guest_mode: &GPU_NVL4, unsupported: "" },
    Rule { holds: |on| on.gpus > 0 && on.bridges > 0, guest_mode: &GPU_NVL5, unsupported: "" },
    Rule { holds: |on| on.gpus > 0, guest_mode: &GPU, unsupported: "" },
    Rule { holds: |on| on.switches > 0, guest_mode: &SERVICE_NVL4, unsupported: "" },
    Rule { holds: |on| on.bridges > 0, guest_mode: &SERVICE_NVL5, unsupported: "" },
    Rule { holds: |_| true, guest_mode: &CPU, unsupported: "" },
];

/// Returns the device that the requested mode requires and the bus lacks.
fn missing(guest_mode: &GuestMode, on: Counts) -> Option<String> {
    let what = match guest_mode.fabric.map(|fabric| fabric.generation) {
        _ if guest_mode.attach && on.gpus == 0 => "GPU",
        Some(NvLinkGeneration::NvLink4) if on.switches == 0 => "NVSwitch",
        Some(NvLinkGeneration::NvLink5) if on.bridges == 0 => "NVLink 5 management bridge (SW_MNG in its VPD)",
        _ => return None,
    };
    Some(format!("mode {} was requested, but no {what} is on the PCI bus", guest_mode.name))
}

/// Decides the mode from the functions on the bus, unless one is requested.
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
    let (guest_mode, unsupported) = match choice {
        ModeChoice::Chosen(guest_mode) => {
            seen.insert_str(0, &format!("firstlight.mode={}; ", guest_mode.name));
            (guest_mode, missing(guest_mode, on))
        }
        ModeChoice::Auto => {
            let rule = RULES.iter().find(|rule| (rule.holds)(on));
            let unsupported = rule.map(|rule| rule.unsupported).filter(|unsupported| !unsupported.is_empty());
            (rule.map_or(&CPU, |rule| rule.guest_mode), unsupported.map(str::to_owned))
        }
    };
    if let Some(unsupported) = &unsupported {
        seen.push_str(&format!("; unsupported: {unsupported}"));
    }
    Decision {
        mode: Mode { name: guest_mode.name.to_owned(), reason: seen },
        driver: guest_mode.driver,
        attach: guest_mode.attach,
        fabric: guest_mode.fabric,
        single_gpu: guest_mode.attach && guest_mode.fabric.is_none() && on.gpus == 1,
        confidential: None,
        unsupported,
    }
}

impl Decision {
    /// Returns whether this is a service VM, which shares a fabric among other guests.
    #[must_use]
    pub fn is_service(&self) -> bool {
        self.fabric.is_some_and(|fabric| fabric.shared)
    }

    /// Sets the reason why this is a confidential guest, if the mode attaches GPUs.
    #[must_use]
    pub fn with_confidential(mut self, why: Option<String>) -> Self {
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

    /// Guests of existing systems, by device id.
    #[test]
    fn known_systems_have_the_expected_mode() {
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
            assert_eq!((decision.mode.name.as_str(), decision.unsupported), (mode, None), "{system}");
        }
    }

    #[test]
    fn reason_lists_devices_found() {
        let reason = |functions: &[Function]| decide(functions, ModeChoice::Auto).mode.reason;
        assert_eq!(reason(&functions(2, 0, 0, 0)), "GPUs on the PCI bus: 2, NVSwitches: 0");
        assert_eq!(
            reason(&functions(8, 0, 4, 1)),
            "GPUs on the PCI bus: 8, NVSwitches: 0, NVLink 5 management bridges: 4, other Mellanox functions: 1"
        );
    }

    #[test]
    fn mode_decides_driver_attach_and_fabric() {
        let of = |gpus, switches, bridges| {
            let Decision { driver, attach, fabric, single_gpu, .. } =
                decide(&functions(gpus, switches, bridges, 0), ModeChoice::Auto);
            (driver, attach, fabric.map(|fabric| (fabric.generation, fabric.shared)), single_gpu)
        };
        assert_eq!(of(0, 0, 0), (false, false, None, false));
        assert_eq!(of(1, 0, 0), (true, true, None, true));
        assert_eq!(of(2, 0, 0), (true, true, None, false));
        assert_eq!(of(1, 4, 0), (true, true, Some((NvLinkGeneration::NvLink4, false)), false));
        assert_eq!(of(8, 0, 4), (true, true, Some((NvLinkGeneration::NvLink5, false)), false));
        assert_eq!(of(0, 6, 0), (true, false, Some((NvLinkGeneration::NvLink4, true)), false));
        assert_eq!(of(0, 0, 4), (false, false, Some((NvLinkGeneration::NvLink5, true)), false));
    }

    #[test]
    fn two_fabrics_are_unsupported_and_gpus_are_attached() {
        for (gpus, mode) in [(0, "cpu"), (3, "gpu")] {
            let decision = decide(&functions(gpus, 4, 2, 0), ModeChoice::Auto);
            assert_eq!((decision.mode.name.as_str(), decision.fabric), (mode, None));
            assert!(decision.unsupported.is_some_and(|unsupported| unsupported.contains("no system has both")));
            assert!(decision.mode.reason.contains("; unsupported: NVSwitches and"), "{}", decision.mode.reason);
        }
    }

    #[test]
    fn requested_mode_overrides_rules_and_is_the_reason() {
        for guest_mode in &GUEST_MODES {
            let decision = decide(&functions(2, 4, 4, 0), ModeChoice::Chosen(guest_mode));
            assert_eq!(
                (decision.mode.name.as_str(), decision.attach, decision.fabric),
                (guest_mode.name, guest_mode.attach, guest_mode.fabric)
            );
            assert!(
                decision
                    .mode
                    .reason
                    .starts_with(&format!("firstlight.mode={}; GPUs on the PCI bus: 2", guest_mode.name))
            );
            assert_eq!(decision.unsupported, None);
            // On an empty bus every mode but cpu lacks a device.
            let unsupported = decide(&[], ModeChoice::Chosen(guest_mode)).unsupported;
            assert_eq!(unsupported.is_none(), guest_mode.name == "cpu", "{unsupported:?}");
        }
        let unsupported = decide(&functions(8, 0, 0, 0), ModeChoice::Chosen(&SERVICE_NVL4)).unsupported.unwrap();
        assert!(unsupported.contains("service-vm-nvl4 was requested, but no NVSwitch"), "{unsupported}");
    }

    proptest! {
        #[test]
        fn every_bus_has_a_mode(gpus in 0..20_usize, switches in 0..14_usize, bridges in 0..6_usize, nics in 0..4_usize) {
            let all = functions(gpus, switches, bridges, nics);
            let decision = decide(&all, ModeChoice::Auto);
            prop_assert!(GUEST_MODES.iter().any(|guest_mode| guest_mode.name == decision.mode.name));
            prop_assert_eq!(decision.attach, gpus > 0);
            prop_assert_eq!(decision.unsupported.is_some(), switches > 0 && bridges > 0);
            // NICs do not affect the mode.
            prop_assert_eq!(name(&all), name(&functions(gpus, switches, bridges, 0)));
        }
    }
}
