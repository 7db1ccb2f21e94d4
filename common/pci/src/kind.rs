//! What a PCI function is to Firstlight, by rule rather than by count.

use serde::{Deserialize, Serialize};

/// The part a PCI function plays in a GPU guest or a service VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// An NVIDIA GPU: display controller, VGA or 3D.
    Gpu,
    /// An NVSwitch: NVIDIA bridge of class "other".
    NvSwitch,
    /// An NVLink 5 management bridge: a Mellanox/NVIDIA network function that
    /// leads to NVSwitches. That it is one is written in its VPD, not in its ids.
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

/// The rules in the order in which they are tried. Classes are the 24 bits that
/// sysfs shows: base class, sub-class, programming interface.
pub const KINDS: &[KindRule] = &[
    KindRule { vendor: 0x10de, class: 0x03_0000, mask: 0xff_0000, kind: Kind::Gpu },
    KindRule { vendor: 0x10de, class: 0x06_8000, mask: 0xff_ff00, kind: Kind::NvSwitch },
    KindRule { vendor: 0x15b3, class: 0x02_0000, mask: 0xff_0000, kind: Kind::Mellanox },
];

/// The kind of a function with this vendor id and 24-bit class, if any rule has it.
#[must_use]
pub fn kind_of(vendor: u16, class: u32) -> Option<Kind> {
    KINDS.iter().find(|rule| rule.vendor == vendor && class & rule.mask == rule.class).map(|rule| rule.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_tell_gpus_switches_and_nics_apart() {
        assert_eq!(kind_of(0x10de, 0x03_0200), Some(Kind::Gpu));
        assert_eq!(kind_of(0x10de, 0x03_0000), Some(Kind::Gpu));
        assert_eq!(kind_of(0x10de, 0x06_8000), Some(Kind::NvSwitch));
        assert_eq!(kind_of(0x15b3, 0x02_0700), Some(Kind::Mellanox));
        // A GPU's audio function and another vendor's display are none of ours.
        assert_eq!(kind_of(0x10de, 0x04_0300), None);
        assert_eq!(kind_of(0x1002, 0x03_0000), None);
        assert_eq!(kind_of(0x10de, 0x06_0400), None);
    }
}
