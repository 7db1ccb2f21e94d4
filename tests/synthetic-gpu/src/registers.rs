//! The lab's registers: a test controls the stand-in driver's attach through the device.
//!
//! They are in BAR0 from [`LAB_BASE`]; each has 32 bits, little endian.
//! `tests/stand-in-nvidia/standin.h` has the same names and numbers, and a
//! test here compares the two files.
//!
//! | name | offset | access | meaning |
//! |---|---|---|---|
//! | `LAB_MAGIC` | 0x00 | read | [`LAB_MAGIC_VALUE`]: this is a synthetic device |
//! | `LAB_ATTACH_MS` | 0x04 | read, write | duration of an attach in milliseconds |
//! | `LAB_FAIL_CODE` | 0x08 | read, write | 0, or the code that the attach fails with |
//! | `LAB_HANG` | 0x0c | read, write | 1: the attach never completes |
//! | `LAB_ATTACH_COUNT` | 0x10 | read, write | attaches started; incremented by the driver |
//! | `LAB_INDEX` | 0x14 | read | position on the server's command line |
//! | `LAB_DOORBELL` | 0x18 | write | raises the MSI-X vector of that number |
//!
//! A reset (function level or by the VMM) restores the values of the command line, except `LAB_ATTACH_COUNT`,
//! which counts over the server's lifetime, across guests.

/// BAR0 offset of the lab's registers: the last page of the smallest BAR0.
pub const LAB_BASE: u64 = 0x3f_f000;
/// Length of the lab's registers in bytes.
pub const LAB_SIZE: u64 = 0x20;
/// The value of `LAB_MAGIC`: `FLAB`.
pub const LAB_MAGIC_VALUE: u32 = u32::from_be_bytes(*b"FLAB");

/// Offset from [`LAB_BASE`].
pub const LAB_MAGIC: u64 = 0x00;
/// Offset from [`LAB_BASE`].
pub const LAB_ATTACH_MS: u64 = 0x04;
/// Offset from [`LAB_BASE`].
pub const LAB_FAIL_CODE: u64 = 0x08;
/// Offset from [`LAB_BASE`].
pub const LAB_HANG: u64 = 0x0c;
/// Offset from [`LAB_BASE`].
pub const LAB_ATTACH_COUNT: u64 = 0x10;
/// Offset from [`LAB_BASE`].
pub const LAB_INDEX: u64 = 0x14;
/// Offset from [`LAB_BASE`].
pub const LAB_DOORBELL: u64 = 0x18;

/// BAR0 offset of the chip identity, the first register a driver reads.
pub const PMC_BOOT_0: u64 = 0x00;
/// BAR0 offset of the chip identity in the format that newer drivers read: NVIDIA's open modules determine by it
/// whether a GPU has a GSP.
pub const PMC_BOOT_42: u64 = 0xa00;

/// Returns [`PMC_BOOT_42`] of a chip with this [`PMC_BOOT_0`]: architecture and implementation have the same
/// bits, the revision is shifted up.
pub(crate) fn boot_42(boot_0: u32) -> u32 {
    boot_0 & 0x3ff0_0000 | (boot_0 & 0xff) << 12
}

/// BAR0: storage with a few registers.
#[derive(Debug)]
pub(crate) struct Registers {
    bytes: Vec<u8>,
    initial: Vec<(u64, u32)>,
    read_only: Vec<(u64, u32)>,
}

impl Registers {
    /// Creates the registers; a reset restores `initial`, and writes do not change `read_only`.
    pub(crate) fn new(size: usize, initial: Vec<(u64, u32)>, read_only: Vec<(u64, u32)>) -> Self {
        let mut registers = Self { bytes: vec![0; size], initial, read_only };
        registers.reset();
        registers
    }

    /// Reads; bytes beyond the end are 0xff, as on a PCI bus.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Ok(start) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(self.bytes.iter().skip(start)) {
            *to = *from;
        }
    }

    /// Writes; returns the vector of a doorbell write.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Option<u32> {
        self.store(offset, data);
        self.hold_read_only();
        let word: [u8; 4] = data.try_into().ok()?;
        (offset == LAB_BASE + LAB_DOORBELL).then_some(u32::from_le_bytes(word))
    }

    /// Restores the values of the command line; keeps the attach count.
    pub(crate) fn reset(&mut self) {
        for (offset, value) in self.initial.clone() {
            self.store(offset, &value.to_le_bytes());
        }
        self.hold_read_only();
    }

    fn hold_read_only(&mut self) {
        for (offset, value) in self.read_only.clone() {
            self.store(offset, &value.to_le_bytes());
        }
    }

    fn store(&mut self, offset: u64, data: &[u8]) {
        let Ok(start) = usize::try_from(offset) else { return };
        for (to, from) in self.bytes.iter_mut().skip(start).zip(data) {
            *to = *from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Registers {
        Registers::new(
            4 << 20,
            vec![(LAB_BASE + LAB_ATTACH_MS, 300)],
            vec![(PMC_BOOT_0, 0x1800_00a1), (LAB_BASE + LAB_MAGIC, LAB_MAGIC_VALUE)],
        )
    }

    fn word(registers: &Registers, offset: u64) -> u32 {
        let mut data = [0; 4];
        registers.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn identity_cannot_be_overwritten() {
        let mut registers = sample();
        registers.write(0, &[0xff; 8]);
        assert_eq!(word(&registers, PMC_BOOT_0), 0x1800_00a1);
        assert_eq!(word(&registers, 4), 0xffff_ffff);
    }

    #[test]
    fn reset_restores_the_command_line_and_keeps_the_count() {
        let mut registers = sample();
        registers.write(LAB_BASE + LAB_ATTACH_MS, &7u32.to_le_bytes());
        registers.write(LAB_BASE + LAB_ATTACH_COUNT, &2u32.to_le_bytes());
        registers.reset();
        assert_eq!(word(&registers, LAB_BASE + LAB_ATTACH_MS), 300);
        assert_eq!(word(&registers, LAB_BASE + LAB_ATTACH_COUNT), 2);
    }

    #[test]
    fn only_a_doorbell_write_returns_a_vector() {
        let mut registers = sample();
        assert_eq!(registers.write(LAB_BASE + LAB_DOORBELL, &3u32.to_le_bytes()), Some(3));
        assert_eq!(registers.write(LAB_BASE + LAB_DOORBELL, &[3]), None);
        assert_eq!(registers.write(LAB_BASE + LAB_HANG, &3u32.to_le_bytes()), None);
    }

    #[test]
    fn outside_the_bar_reads_ones_and_writes_nothing() {
        let mut registers = sample();
        let mut data = [0; 4];
        registers.write((4 << 20) - 2, &[1, 2, 3, 4]);
        registers.read((4 << 20) - 2, &mut data);
        assert_eq!(data, [1, 2, 0xff, 0xff]);
        registers.read(u64::MAX, &mut data);
        assert_eq!(data, [0xff; 4]);
    }

    #[test]
    fn stand_in_driver_has_the_same_constants() {
        let header = include_str!("../../stand-in-nvidia/standin.h");
        let expected = [
            ("LAB_BASE", LAB_BASE),
            ("LAB_MAGIC_VALUE", u64::from(LAB_MAGIC_VALUE)),
            ("LAB_MAGIC", LAB_MAGIC),
            ("LAB_ATTACH_MS", LAB_ATTACH_MS),
            ("LAB_FAIL_CODE", LAB_FAIL_CODE),
            ("LAB_HANG", LAB_HANG),
            ("LAB_ATTACH_COUNT", LAB_ATTACH_COUNT),
            ("LAB_INDEX", LAB_INDEX),
            ("LAB_DOORBELL", LAB_DOORBELL),
            ("PMC_BOOT_0", PMC_BOOT_0),
        ];
        for (name, value) in expected {
            let found = header.lines().find_map(|line| {
                let mut fields = line.split_whitespace();
                (fields.next() == Some("#define") && fields.next() == Some(name)).then(|| fields.next())?
            });
            let digits = found.unwrap_or_else(|| panic!("standin.h lacks {name}")).trim_start_matches("0x");
            assert_eq!(u64::from_str_radix(digits, 16).unwrap(), value, "{name}");
        }
    }
}
