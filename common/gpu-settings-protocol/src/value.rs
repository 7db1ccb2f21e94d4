//! Values of settings that are numbers or words.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::number;

/// A text that is no value of its setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is no value of this setting")
    }
}

impl std::error::Error for Malformed {}

/// The word for what a GPU has by itself.
const DEFAULT: &str = "default";

/// More megahertz than any GPU has.
const MOST_MHZ: u32 = 20_000;

/// More watts than any GPU takes.
const MOST_WATTS: u32 = 20_000;

/// Clocks that a GPU is held to, MHz.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Clocks {
    /// As the GPU likes.
    Default,
    /// Between these two, both included.
    Between(u32, u32),
}

impl FromStr for Clocks {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        if text == DEFAULT {
            return Ok(Self::Default);
        }
        let (low, high) = text.split_once(',').unwrap_or((text, text));
        match (number(low, MOST_MHZ), number(high, MOST_MHZ)) {
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

/// What a GPU may take from its supply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Power {
    /// What its maker meant.
    Default,
    /// That many watts.
    Watts(u32),
}

impl FromStr for Power {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        match number(text, MOST_WATTS) {
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

/// Who may compute on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// None.
    Prohibited,
}

impl ComputeMode {
    const WORDS: [(&'static str, Self); 3] =
        [(DEFAULT, Self::Default), ("exclusive-process", Self::ExclusiveProcess), ("prohibited", Self::Prohibited)];
}

impl FromStr for ComputeMode {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        Self::WORDS.iter().find(|(word, _)| *word == text).map(|(_, mode)| *mode).ok_or(Malformed)
    }
}

impl fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::WORDS.iter().find(|(_, mode)| mode == self).map_or(DEFAULT, |(word, _)| word);
        f.write_str(word)
    }
}

/// Values travel as the text that they are written as.
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
    fn clocks_are_one_number_or_two_in_order() {
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
    fn watts_are_a_whole_number() {
        for (text, power) in [("500", Power::Watts(500)), ("default", Power::Default)] {
            assert_eq!((text.parse(), power.to_string().as_str()), (Ok(power), text));
        }
        for text in ["", "0", "500W", "-1", "20001", "1e2", "4294967797"] {
            assert_eq!(text.parse::<Power>(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn compute_modes_are_words() {
        for (word, mode) in ComputeMode::WORDS {
            assert_eq!((word.parse(), mode.to_string().as_str()), (Ok(mode), word));
        }
        assert_eq!("exclusive".parse::<ComputeMode>(), Err(Malformed));
    }
}
