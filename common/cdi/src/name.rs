//! Qualified device names: `vendor/class=device`.

use std::fmt;
use std::str::FromStr;

/// A qualified CDI device name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    /// `vendor/class`, e.g. `nvidia.com/gpu`.
    pub kind: String,
    /// The device, e.g. `0` or `0000:01:00.0`.
    pub device: String,
}

/// Why a text is not a qualified device name.
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

/// Checks that `text` is a valid kind.
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

/// Checks that `text` is a valid device name within a specification.
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
    fn indices_addresses_and_uuids_are_parsed() {
        for text in ["nvidia.com/gpu=0", "nvidia.com/gpu=0000:01:00.0", "nvidia.com/gpu=GPU-1-2", "a/b=all"] {
            assert_eq!(text.parse::<DeviceName>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn paths_and_incomplete_names_are_refused() {
        for text in
            ["", "gpu=0", "nvidia.com/gpu", "nvidia.com/gpu=", "nvidia.com/gpu=../x", "/gpu=0", "n/=0", "n/g=a b"]
        {
            assert!(text.parse::<DeviceName>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsed_text_round_trips(text in "\\PC{0,60}") {
            if let Ok(name) = text.parse::<DeviceName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
