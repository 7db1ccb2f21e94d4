//! Roles of PCI functions, by vendor and class rules.

use serde::{Deserialize, Serialize};

/// The role of a PCI function in a GPU guest or a service VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// An NVIDIA GPU: display controller, VGA or 3D.
    Gpu,
    /// An NVSwitch: NVIDIA bridge of class "other".
    NvSwitch,
    /// An NVLink 5 management bridge: a Mellanox/NVIDIA network function that
    /// manages NVSwitches. Identified by its VPD, not by its ids.
    NvLinkBridge,
    /// Any other Mellanox/NVIDIA network function.
    Mellanox,
}

/// One rule: vendor, class with mask, kind. First match wins.
#[derive(Debug, Clone, Copy)]
pub struct KindRule {
    vendor: u16,
    class: u32,
    mask: u32,
    kind: Kind,
}

/// The rules in matching order. Classes are the 24 bits of sysfs: base class,
/// sub-class, programming interface.
pub const KINDS: &[KindRule] = &[
    KindRule { vendor: 0x10de, class: 0x03_0000, mask: 0xff_0000, kind: Kind::Gpu },
    KindRule { vendor: 0x10de, class: 0x06_8000, mask: 0xff_ff00, kind: Kind::NvSwitch },
    KindRule { vendor: 0x15b3, class: 0x02_0000, mask: 0xff_0000, kind: Kind::Mellanox },
];

/// Returns the kind of a function with this vendor id and 24-bit class, if a rule matches.
#[must_use]
pub fn kind_of(vendor: u16, class: u32) -> Option<Kind> {
    KINDS.iter().find(|rule| rule.vendor == vendor && class & rule.mask == rule.class).map(|rule| rule.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_distinguish_gpus_switches_and_nics() {
        assert_eq!(kind_of(0x10de, 0x03_0200), Some(Kind::Gpu));
        assert_eq!(kind_of(0x10de, 0x03_0000), Some(Kind::Gpu));
        assert_eq!(kind_of(0x10de, 0x06_8000), Some(Kind::NvSwitch));
        assert_eq!(kind_of(0x15b3, 0x02_0700), Some(Kind::Mellanox));
        // A GPU's audio function and another vendor's display match no rule.
        assert_eq!(kind_of(0x10de, 0x04_0300), None);
        assert_eq!(kind_of(0x1002, 0x03_0000), None);
        assert_eq!(kind_of(0x10de, 0x06_0400), None);
    }
}
