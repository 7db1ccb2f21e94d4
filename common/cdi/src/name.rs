//! Qualified device names: `vendor/class=device`.

use std::fmt;
use std::str::FromStr;

/// A device as requests name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    /// `vendor/class`, e.g. `nvidia.com/gpu`.
    pub kind: String,
    /// The device, e.g. `0` or `0000:01:00.0`.
    pub device: String,
}

/// A text that is no qualified device name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a CDI device name: {reason}; expected vendor/class=device, e.g. nvidia.com/gpu=0")]
pub struct ParseNameError {
    text: String,
    reason: &'static str,
}

fn middle(c: char, extra: &str) -> bool {
    c.is_ascii_alphanumeric() || extra.contains(c)
}

fn well_formed(text: &str, first_is_letter: bool, extra: &str) -> bool {
    let first = text.chars().next();
    let last = text.chars().next_back();
    let starts =
        first.is_some_and(|c| if first_is_letter { c.is_ascii_alphabetic() } else { c.is_ascii_alphanumeric() });
    starts && last.is_some_and(|c| c.is_ascii_alphanumeric()) && text.chars().all(|c| middle(c, extra))
}

/// Whether `text` may be a spec's kind.
pub(crate) fn kind_is_valid(text: &str) -> Result<(), &'static str> {
    let (vendor, class) = text.split_once('/').ok_or("the kind has no '/'")?;
    if !well_formed(vendor, true, "_-.") {
        return Err("the vendor is not letters, digits, '_', '-', '.' beginning with a letter");
    }
    if !well_formed(class, true, "_-") {
        return Err("the class is not letters, digits, '_', '-' beginning with a letter");
    }
    Ok(())
}

/// Whether `text` may be a device's name inside a spec.
pub(crate) fn device_is_valid(text: &str) -> Result<(), &'static str> {
    if well_formed(text, false, "_-.:") { Ok(()) } else { Err("the device is not letters, digits, '_', '-', '.', ':'") }
}

impl FromStr for DeviceName {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |reason| ParseNameError { text: text.chars().take(80).collect(), reason };
        let (kind, device) = text.split_once('=').ok_or(wrong("no '='"))?;
        kind_is_valid(kind).map_err(wrong)?;
        device_is_valid(device).map_err(wrong)?;
        Ok(Self { kind: kind.to_owned(), device: device.to_owned() })
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_indices_addresses_and_uuids() {
        for text in ["nvidia.com/gpu=0", "nvidia.com/gpu=0000:01:00.0", "nvidia.com/gpu=GPU-1-2", "a/b=all"] {
            assert_eq!(text.parse::<DeviceName>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn refuses_paths_and_half_names() {
        for text in
            ["", "gpu=0", "nvidia.com/gpu", "nvidia.com/gpu=", "nvidia.com/gpu=../x", "/gpu=0", "n/=0", "n/g=a b"]
        {
            assert!(text.parse::<DeviceName>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_name_or_an_error(text in "\\PC{0,60}") {
            if let Ok(name) = text.parse::<DeviceName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
