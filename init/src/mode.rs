//! What kind of guest this is: a rule over what is on the PCI bus.

use firstlight_boot_record::Mode;
use firstlight_pci::{Function, Kind};

use crate::params::ModeChoice;

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// For the record.
    pub mode: Mode,
    /// Whether the driver is loaded and GPUs are attached.
    pub attach: bool,
}

/// Functions by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    gpus: usize,
    switches: usize,
}

/// One rule. Never an exact count: any number of GPUs is a number of GPUs.
struct Rule {
    name: &'static str,
    attach: bool,
    holds: fn(Counts) -> bool,
    note: &'static str,
}

/// The rules in the order in which they are tried; the last one always holds.
const RULES: &[Rule] = &[
    Rule {
        name: "gpu",
        attach: true,
        holds: |counts| counts.gpus > 0 && counts.switches > 0,
        note: "; this guest does not manage the fabric between them yet",
    },
    Rule { name: "gpu", attach: true, holds: |counts| counts.gpus > 0, note: "" },
    Rule {
        name: "cpu",
        attach: false,
        holds: |counts| counts.switches > 0,
        note: "; the modes of a service VM are not built yet",
    },
    Rule { name: "cpu", attach: false, holds: |_| true, note: "" },
];

/// Decides the mode from what is on the bus, unless it is already chosen.
#[must_use]
pub fn decide(functions: &[Function], choice: ModeChoice) -> Decision {
    let count = |kind| functions.iter().filter(|function| function.kind() == Some(kind)).count();
    let counts = Counts { gpus: count(Kind::Gpu), switches: count(Kind::NvSwitch) };
    let seen = format!("GPUs on the PCI bus: {}, NVSwitches: {}", counts.gpus, counts.switches);
    let made = |name: &str, attach, reason| Decision { mode: Mode { name: name.to_owned(), reason }, attach };
    match choice {
        ModeChoice::Cpu => made("cpu", false, format!("firstlight.mode=cpu; {seen}")),
        ModeChoice::Gpu => made("gpu", true, format!("firstlight.mode=gpu; {seen}")),
        ModeChoice::Auto => match RULES.iter().find(|rule| (rule.holds)(counts)) {
            Some(rule) => made(rule.name, rule.attach, format!("{seen}{}", rule.note)),
            None => made("cpu", false, seen),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(gpus: u8, switches: u8) -> Vec<Function> {
        let function = |device: u8, class| Function {
            address: format!("0000:01:{device:02x}.0").parse().unwrap(),
            vendor: 0x10de,
            device: 0x2330,
            class,
            driver: None,
        };
        (0..gpus).map(|n| function(n, 0x03_0200)).chain((0..switches).map(|n| function(16 + n, 0x06_8000))).collect()
    }

    #[test]
    fn any_number_of_gpus_is_the_gpu_mode() {
        for (gpus, switches, name, attach) in [
            (0, 0, "cpu", false),
            (1, 0, "gpu", true),
            (7, 0, "gpu", true),
            (8, 4, "gpu", true),
            (3, 6, "gpu", true),
            (0, 4, "cpu", false),
        ] {
            let decision = decide(&functions(gpus, switches), ModeChoice::Auto);
            assert_eq!((decision.mode.name.as_str(), decision.attach), (name, attach), "{gpus} {switches}");
            assert!(decision.mode.reason.starts_with(&format!("GPUs on the PCI bus: {gpus}, NVSwitches: {switches}")));
        }
        assert!(decide(&functions(8, 4), ModeChoice::Auto).mode.reason.contains("fabric"));
    }

    #[test]
    fn a_choice_on_the_command_line_wins_and_says_so() {
        let decision = decide(&functions(2, 0), ModeChoice::Cpu);
        assert!(!decision.attach);
        assert_eq!(decision.mode.reason, "firstlight.mode=cpu; GPUs on the PCI bus: 2, NVSwitches: 0");
        assert!(decide(&[], ModeChoice::Gpu).attach);
    }
}
