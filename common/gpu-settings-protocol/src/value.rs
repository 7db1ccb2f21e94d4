//! Setting values: clocks, power limits, compute modes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::number;

/// The text is not a valid value of its setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a valid value of this setting")
    }
}

impl std::error::Error for Malformed {}

/// The keyword for the GPU's default.
const DEFAULT: &str = "default";

/// Highest clock accepted, MHz, above that of any GPU.
const MAX_MHZ: u32 = 20_000;

/// Highest power limit accepted, watts, above that of any GPU.
const MAX_WATTS: u32 = 20_000;

/// Locked clocks of a GPU, MHz.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Clocks {
    /// Not locked.
    Default,
    /// Locked between minimum and maximum, both inclusive.
    Between(u32, u32),
}

impl FromStr for Clocks {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        if text == DEFAULT {
            return Ok(Self::Default);
        }
        let (low, high) = text.split_once(',').unwrap_or((text, text));
        match (number(low, MAX_MHZ), number(high, MAX_MHZ)) {
            (Some(low), Some(high)) if 0 < low && low <= high => Ok(Self::Between(low, high)),
            _ => Err(Malformed),
        }
    }
}

impl fmt::Display for Clocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str(DEFAULT),
            Self::Between(low, high) if low == high => low.fmt(f),
            Self::Between(low, high) => write!(f, "{low},{high}"),
        }
    }
}

/// The power limit of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Power {
    /// The GPU's default limit.
    Default,
    /// A limit in watts.
    Watts(u32),
}

impl FromStr for Power {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        match number(text, MAX_WATTS) {
            _ if text == DEFAULT => Ok(Self::Default),
            Some(watts @ 1..) => Ok(Self::Watts(watts)),
            _ => Err(Malformed),
        }
    }
}

impl fmt::Display for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str(DEFAULT),
            Self::Watts(watts) => watts.fmt(f),
        }
    }
}

/// The compute mode of a GPU, as nvidia-smi's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ComputeMode {
    /// Any number of processes may compute.
    Default,
    /// One process at a time may compute.
    ExclusiveProcess,
    /// No process may compute.
    Prohibited,
}

impl ComputeMode {
    const KEYWORDS: [(&'static str, Self); 3] =
        [(DEFAULT, Self::Default), ("exclusive-process", Self::ExclusiveProcess), ("prohibited", Self::Prohibited)];
}

impl FromStr for ComputeMode {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        Self::KEYWORDS.iter().find(|(word, _)| *word == text).map(|(_, mode)| *mode).ok_or(Malformed)
    }
}

impl fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::KEYWORDS.iter().find(|(_, mode)| mode == self).map_or(DEFAULT, |(word, _)| word);
        f.write_str(word)
    }
}

/// Serialises values as the text that `Display` and `FromStr` use.
macro_rules! as_text {
    ($($kind:ty),*) => {$(
        impl TryFrom<String> for $kind {
            type Error = crate::Malformed;

            fn try_from(text: String) -> Result<Self, crate::Malformed> {
                text.parse()
            }
        }

        impl From<$kind> for String {
            fn from(value: $kind) -> Self {
                value.to_string()
            }
        }
    )*};
}
pub(crate) use as_text;

as_text!(Clocks, Power, ComputeMode);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_one_number_or_an_ascending_pair() {
        for (text, clocks) in [
            ("1980", Clocks::Between(1980, 1980)),
            ("345,1980", Clocks::Between(345, 1980)),
            ("default", Clocks::Default),
        ] {
            assert_eq!((text.parse(), clocks.to_string().as_str()), (Ok(clocks), text));
        }
        for text in ["", "0", "1980,345", "0,345", "+345", "345,", ",345", "345,1,2", "20001", "1 2", "fast", "Default"]
        {
            assert_eq!(text.parse::<Clocks>(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn power_limit_is_a_whole_number_of_watts() {
        for (text, power) in [("500", Power::Watts(500)), ("default", Power::Default)] {
            assert_eq!((text.parse(), power.to_string().as_str()), (Ok(power), text));
        }
        for text in ["", "0", "500W", "-1", "20001", "1e2", "4294967797"] {
            assert_eq!(text.parse::<Power>(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn compute_modes_round_trip_as_keywords() {
        for (word, mode) in ComputeMode::KEYWORDS {
            assert_eq!((word.parse(), mode.to_string().as_str()), (Ok(mode), word));
        }
        assert_eq!("exclusive".parse::<ComputeMode>(), Err(Malformed));
    }
}
