//! Parses a device of the command line.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use thiserror::Error;

use crate::profile::{PROFILES, Profile, profile};

/// One device to serve: `KIND[:OPTION]...`.
///
/// KIND is a name of the table in [`PROFILES`]. The options, in any order,
/// each at most once:
///
/// * `bar=SIZE`: size of the large BAR, a power of two with the unit `K`,
///   `M`, `G` or `T` (GPUs only), from 1M to 1T;
/// * `attach-ms=N`: how long a driver's attach takes (GPUs only);
/// * `fail=0xCODE`: the attach fails with this code, not 0 (GPUs only): the low half is
///   the resource manager's status, the high half the stage (0 means 0x22);
/// * `hang`: the attach never completes (GPUs only; not together with `fail`).
///
/// ```
/// use firstlight_synthetic_gpu::Device;
/// let device: Device = "h100:attach-ms=2000:bar=64G".parse()?;
/// assert_eq!(device.to_string(), "h100:bar=64G:attach-ms=2000");
/// # Ok::<(), firstlight_synthetic_gpu::DeviceError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// The device's profile.
    pub profile: &'static Profile,
    /// Size of the large BAR if not the profile's.
    pub bar: Option<u64>,
    /// Duration of an attach in milliseconds if not the profile's.
    pub attach_ms: Option<u32>,
    /// The code with which the attach fails.
    pub fail: Option<NonZeroU32>,
    /// Whether the attach never completes.
    pub hang: bool,
}

/// An error of a device on the command line.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// The part before the first colon is not in the table.
    #[error("unknown device kind {kind:?}; known kinds: {}", known_kinds())]
    Kind {
        /// The text.
        kind: String,
    },
    /// An unknown option.
    #[error("{device}: unknown option {option:?}; known options: bar=SIZE, attach-ms=N, fail=0xCODE, hang")]
    Option {
        /// The kind.
        device: &'static str,
        /// The text.
        option: String,
    },
    /// An option with an invalid value.
    #[error("{device}: {option}={value:?}: expected {expected}")]
    Value {
        /// The kind.
        device: &'static str,
        /// The option's name.
        option: &'static str,
        /// The value.
        value: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// A repeated option.
    #[error("{device}: option {option} given twice; keep one")]
    Twice {
        /// The kind.
        device: &'static str,
        /// The option's name.
        option: &'static str,
    },
    /// An option that applies only to GPUs.
    #[error("{device}: option {option} is for GPUs; remove it")]
    NotForKind {
        /// The kind.
        device: &'static str,
        /// The option's name.
        option: &'static str,
    },
    /// `fail` together with `hang`.
    #[error("{device}: fail and hang are mutually exclusive; keep one")]
    FailAndHang {
        /// The kind.
        device: &'static str,
    },
}

fn known_kinds() -> String {
    PROFILES.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

/// Units of `bar=`, largest first.
const UNITS: &[(char, u32)] = &[('T', 40), ('G', 30), ('M', 20), ('K', 10)];
/// A smaller BAR cannot be a frame buffer; eight larger ones exceed 46 bits of address space.
const BAR_RANGE: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 40;

impl Device {
    /// Creates a device of this kind without options.
    pub fn new(profile: &'static Profile) -> Self {
        Self { profile, bar: None, attach_ms: None, fail: None, hang: false }
    }

    fn apply(&mut self, option: &str) -> Result<(), DeviceError> {
        let device = self.profile.name;
        let gpu = self.profile.attach_ms.is_some();
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let (option, set_before, applies) = match (name, value) {
            ("bar", Some(_)) => ("bar", self.bar.is_some(), self.profile.large_bar().is_some()),
            ("attach-ms", Some(_)) => ("attach-ms", self.attach_ms.is_some(), gpu),
            ("fail", Some(_)) => ("fail", self.fail.is_some(), gpu),
            ("hang", None) => ("hang", self.hang, gpu),
            _ => return Err(DeviceError::Option { device, option: option.to_owned() }),
        };
        if !applies {
            return Err(DeviceError::NotForKind { device, option });
        }
        if set_before {
            return Err(DeviceError::Twice { device, option });
        }
        let value = value.unwrap_or_default();
        let wrong = |expected| DeviceError::Value { device, option, value: value.to_owned(), expected };
        match option {
            "bar" => {
                let size = parse_size(value).filter(|size| size.is_power_of_two() && BAR_RANGE.contains(size));
                self.bar = Some(size.ok_or_else(|| wrong("a power of two from 1M to 1T, such as 128G"))?);
            }
            "attach-ms" => {
                self.attach_ms = Some(parse_digits(value, 10).ok_or_else(|| wrong("milliseconds, such as 1500"))?);
            }
            "fail" => {
                let code = value.strip_prefix("0x").and_then(|digits| parse_digits(digits, 16));
                self.fail =
                    Some(code.and_then(NonZeroU32::new).ok_or_else(|| wrong("a hexadecimal code, such as 0x56"))?);
            }
            _ => self.hang = true,
        }
        if self.hang && self.fail.is_some() { Err(DeviceError::FailAndHang { device }) } else { Ok(()) }
    }
}

/// Parses digits only: the standard parser would also accept a sign.
fn parse_digits(text: &str, radix: u32) -> Option<u32> {
    text.chars().all(|c| c.is_digit(radix)).then(|| u32::from_str_radix(text, radix).ok())?
}

fn parse_size(text: &str) -> Option<u64> {
    let unit = text.chars().next_back()?;
    let &(_, shift) = UNITS.iter().find(|(letter, _)| *letter == unit)?;
    let count = u64::from(parse_digits(text.strip_suffix(unit)?, 10)?);
    count.checked_mul(1 << shift)
}

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let mut parts = text.split(':');
        let kind = parts.next().unwrap_or_default();
        let profile = profile(kind).ok_or_else(|| DeviceError::Kind { kind: kind.to_owned() })?;
        let mut device = Self::new(profile);
        for option in parts {
            device.apply(option)?;
        }
        Ok(device)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.profile.name)?;
        if let Some(size) = self.bar {
            let (unit, shift) = UNITS.iter().find(|(_, shift)| size >= 1 << shift).copied().unwrap_or(('K', 10));
            write!(f, ":bar={}{unit}", size >> shift)?;
        }
        if let Some(ms) = self.attach_ms {
            write!(f, ":attach-ms={ms}")?;
        }
        if let Some(code) = self.fail {
            write!(f, ":fail={code:#x}")?;
        }
        if self.hang {
            f.write_str(":hang")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_options_are_parsed() {
        let device: Device = "h100:bar=64G:attach-ms=2000:fail=0x56".parse().unwrap();
        assert_eq!(device.profile.device, 0x2330);
        assert_eq!(device.bar, Some(64 << 30));
        assert_eq!(device.attach_ms, Some(2000));
        assert_eq!(device.fail.map(NonZeroU32::get), Some(0x56));
        assert!(!device.hang);
        assert!("b200:hang".parse::<Device>().unwrap().hang);
    }

    #[test]
    fn errors_name_the_bad_part() {
        for (text, part) in [
            ("", "\"\""),
            ("v100", "v100"),
            ("h100:", "option \"\""),
            ("h100:colour=red", "colour=red"),
            ("h100:hang=1", "hang=1"),
            ("h100:bar", "\"bar\""),
            ("h100:bar=100G", "bar=\"100G\""),
            ("h100:bar=1K", "bar=\"1K\""),
            ("h100:bar=4T", "bar=\"4T\""),
            ("h100:bar=+1G", "bar=\"+1G\""),
            ("h100:bar=99999999999T", "99999999999T"),
            ("h100:attach-ms=-1", "attach-ms=\"-1\""),
            ("h100:fail=56", "fail=\"56\""),
            ("h100:fail=0x0", "fail=\"0x0\""),
            ("h100:hang:hang", "hang given twice"),
            ("h100:fail=0x1:hang", "fail and hang"),
            ("nvswitch:bar=1G", "bar is for GPUs"),
            ("pmc:hang", "hang is for GPUs"),
        ] {
            let error = text.parse::<Device>().expect_err(text).to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_parses_or_fails_without_panic(text in "\\PC*") {
            let _ = text.parse::<Device>();
        }

        #[test]
        fn invalid_options_are_named_in_the_error(option in "(bar|attach-ms|fail|hang)=?[0-9a-zA-Z+-]{0,12}") {
            if let Err(error) = format!("h200:{option}").parse::<Device>() {
                let (name, value) = option.split_once('=').unwrap_or((&option, ""));
                let text = error.to_string();
                prop_assert!(text.contains(name) && text.contains(value), "{}", text);
            }
        }

        #[test]
        fn printed_form_parses_back(
            row in 0..PROFILES.len(),
            bar in proptest::option::of(20u32..=40),
            attach_ms in proptest::option::of(any::<u32>()),
            fail in proptest::option::of(1u32..),
            hang in any::<bool>(),
        ) {
            let profile = &PROFILES[row];
            let gpu = profile.attach_ms.is_some();
            let device = Device {
                profile,
                bar: bar.filter(|_| gpu).map(|shift| 1 << shift),
                attach_ms: attach_ms.filter(|_| gpu),
                fail: fail.filter(|_| gpu && !hang).and_then(NonZeroU32::new),
                hang: gpu && hang,
            };
            prop_assert_eq!(device.to_string().parse::<Device>(), Ok(device));
        }
    }
}
