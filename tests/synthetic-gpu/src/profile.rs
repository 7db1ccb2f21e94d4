//! The devices that can be served, as a table.

/// Bytes in a mebibyte.
const MIB: u64 = 1 << 20;
/// Bytes in a gibibyte.
const GIB: u64 = 1 << 30;

/// The implementation of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Every access is a message to the server: registers.
    Registers,
    /// A sparse memory file that QEMU maps into the guest: frame buffer.
    /// Costs memory only for the pages that the guest writes.
    Memory,
}

/// One base address register pair. All are 64-bit and prefetchable, as on
/// H100 and H200, so only even indexes occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Index of the lower register: 0, 2 or 4.
    pub index: u8,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// The implementation.
    pub backing: Backing,
}

/// The MSI-X capability. Table and pending bit array are in BAR0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiX {
    /// Number of vectors, at least 1.
    pub vectors: u16,
    /// Offset of the table in BAR0.
    pub table: u32,
    /// Offset of the pending bit array in BAR0.
    pub pba: u32,
}

/// One row of the table: a kind of PCI function.
#[derive(Debug, PartialEq, Eq)]
pub struct Profile {
    /// The name on the command line.
    pub name: &'static str,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// Subsystem vendor.
    pub subsystem_vendor: u16,
    /// Subsystem device.
    pub subsystem_device: u16,
    /// Class, subclass and programming interface, 24 bits.
    pub class: u32,
    /// Revision.
    pub revision: u8,
    /// The BARs in ascending order.
    pub bars: &'static [Bar],
    /// Interrupts.
    pub msix: MsiX,
    /// The value of BAR0 offset 0: on GPUs the chip identity.
    pub boot_0: u32,
    /// Default duration of a driver's attach in milliseconds; `None` if the device has no attach (then
    /// `attach-ms`, `fail` and `hang` do not apply either).
    pub attach_ms: Option<u32>,
    /// Value of the `SMDL` keyword in the vital product data; `Some("")` is a
    /// device whose data lack the keyword, `None` one without the capability.
    pub vpd_model: Option<&'static str>,
}

impl Profile {
    /// Returns the BAR that `bar=SIZE` changes: the first memory BAR.
    pub fn large_bar(&self) -> Option<&Bar> {
        self.bars.iter().find(|bar| bar.backing == Backing::Memory)
    }
}

const GPU_MSIX: MsiX = MsiX { vectors: 9, table: 0xb9_0000, pba: 0xba_0000 };
const SMALL_MSIX: MsiX = MsiX { vectors: 4, table: 0x2000, pba: 0x3000 };

const fn registers(size: u64) -> Bar {
    Bar { index: 0, size, backing: Backing::Registers }
}

const fn memory(index: u8, size: u64) -> Bar {
    Bar { index, size, backing: Backing::Memory }
}

/// All profiles.
///
/// Verified on hardware: the H200's ids and BARs, vendor, device and class of all
/// the others, the subsystems of NVSwitch and PMC. Placeholders: the other
/// subsystems, the B200's BAR0 and chip identity, vectors outside GPUs.
pub const PROFILES: &[Profile] = &[
    Profile {
        name: "h100",
        vendor: 0x10de,
        device: 0x2330,
        subsystem_vendor: 0x10de,
        subsystem_device: 0x16c1,
        class: 0x03_02_00,
        revision: 0xa1,
        bars: &[registers(16 * MIB), memory(2, 128 * GIB), memory(4, 32 * MIB)],
        msix: GPU_MSIX,
        boot_0: 0x1800_00a1,
        attach_ms: Some(200),
        vpd_model: None,
    },
    Profile {
        name: "h200",
        vendor: 0x10de,
        device: 0x2335,
        subsystem_vendor: 0x10de,
        subsystem_device: 0x18be,
        class: 0x03_02_00,
        revision: 0xa1,
        bars: &[registers(16 * MIB), memory(2, 256 * GIB), memory(4, 32 * MIB)],
        msix: GPU_MSIX,
        boot_0: 0x1800_00a1,
        attach_ms: Some(200),
        vpd_model: None,
    },
    Profile {
        name: "b200",
        vendor: 0x10de,
        device: 0x2901,
        subsystem_vendor: 0x10de,
        subsystem_device: 0x1999,
        class: 0x03_02_00,
        revision: 0xa1,
        bars: &[registers(64 * MIB), memory(2, 256 * GIB), memory(4, 32 * MIB)],
        msix: GPU_MSIX,
        boot_0: 0x1a00_00a1,
        attach_ms: Some(200),
        vpd_model: None,
    },
    // Has no GSP, which the driver's open modules need.
    Profile {
        name: "p100",
        vendor: 0x10de,
        device: 0x15f8,
        subsystem_vendor: 0x10de,
        subsystem_device: 0x118f,
        class: 0x03_02_00,
        revision: 0xa1,
        bars: &[registers(16 * MIB), memory(2, 16 * GIB), memory(4, 32 * MIB)],
        msix: GPU_MSIX,
        boot_0: 0x1300_00a1,
        attach_ms: Some(200),
        vpd_model: None,
    },
    Profile {
        name: "nvswitch",
        vendor: 0x10de,
        device: 0x22a3,
        subsystem_vendor: 0x10de,
        subsystem_device: 0x1796,
        class: 0x06_80_00,
        revision: 0xa1,
        bars: &[registers(32 * MIB)],
        msix: GPU_MSIX,
        boot_0: 0,
        attach_ms: None,
        vpd_model: None,
    },
    // The management bridge of an NVLink 5 baseboard: only its vital product data distinguish it from a network
    // card with the same chip.
    Profile {
        name: "cx7",
        vendor: 0x15b3,
        device: 0x1021,
        subsystem_vendor: 0x15b3,
        subsystem_device: 0x0041,
        class: 0x02_07_00,
        revision: 0x00,
        bars: &[registers(32 * MIB)],
        msix: SMALL_MSIX,
        boot_0: 0,
        attach_ms: None,
        vpd_model: Some("SW_MNG"),
    },
    Profile {
        name: "cx7-nic",
        vendor: 0x15b3,
        device: 0x1021,
        subsystem_vendor: 0x15b3,
        subsystem_device: 0x0041,
        class: 0x02_07_00,
        revision: 0x00,
        bars: &[registers(32 * MIB)],
        msix: SMALL_MSIX,
        boot_0: 0,
        attach_ms: None,
        vpd_model: Some(""),
    },
    // The PCIe switch's management endpoint on an H100 or H200 baseboard.
    Profile {
        name: "pmc",
        vendor: 0x11f8,
        device: 0x4128,
        subsystem_vendor: 0x10de,
        subsystem_device: 0x1643,
        class: 0x05_80_00,
        revision: 0x00,
        bars: &[registers(4 * MIB)],
        msix: SMALL_MSIX,
        boot_0: 0,
        attach_ms: None,
        vpd_model: None,
    },
];

/// Returns the profile with this name.
pub fn profile(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers;

    #[test]
    fn names_are_unique() {
        for (i, row) in PROFILES.iter().enumerate() {
            assert!(PROFILES[..i].iter().all(|other| other.name != row.name), "{} twice", row.name);
            assert_eq!(profile(row.name), Some(row));
        }
    }

    #[test]
    fn bars_are_valid() {
        for row in PROFILES {
            let mut last = None;
            for bar in row.bars {
                assert!(bar.size.is_power_of_two() && bar.size >= 4096, "{} BAR{}", row.name, bar.index);
                assert!(bar.index.is_multiple_of(2) && bar.index < 6, "{} BAR{}", row.name, bar.index);
                assert!(last < Some(bar.index), "{} BAR{} out of order", row.name, bar.index);
                last = Some(bar.index);
            }
        }
    }

    #[test]
    fn interrupts_and_lab_registers_fit_bar0_and_do_not_overlap() {
        for row in PROFILES {
            let bar0 = row.bars[0];
            assert_eq!((bar0.index, bar0.backing), (0, Backing::Registers), "{}", row.name);
            let table = u64::from(row.msix.table)..u64::from(row.msix.table) + u64::from(row.msix.vectors) * 16;
            let pba = u64::from(row.msix.pba)..u64::from(row.msix.pba) + 8;
            let lab = registers::LAB_BASE..registers::LAB_BASE + registers::LAB_SIZE;
            for part in [&table, &pba, &lab] {
                assert!(part.end <= bar0.size, "{}: {part:x?} outside BAR0", row.name);
            }
            assert!(table.end <= pba.start && (lab.end <= table.start || pba.end <= lab.start), "{}", row.name);
        }
    }
}
