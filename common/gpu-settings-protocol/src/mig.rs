//! MIG mode and GPU instances.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::number;
use crate::value::{Malformed, as_text};

/// Maximum number of instances accepted, more than any GPU has.
const MAX_INSTANCES: u32 = 32;

/// Maximum profile id accepted, above that of any profile.
const MAX_ID: u32 = 9999;

/// The requested MIG mode and instances of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Mig {
    /// MIG mode off.
    Off,
    /// MIG mode on; instances stay unchanged.
    On,
    /// MIG mode on, with exactly these instances.
    Instances(Vec<InstanceCount>),
}

/// A number of GPU instances of one profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceCount {
    /// Profile.
    pub profile: Profile,
    /// Number of instances.
    pub count: u32,
}

/// A GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Profile {
    /// By name, in lower case: `1g.18gb+me`.
    Name(String),
    /// By id.
    Id(u32),
}

/// Returns whether `text` is a profile name: slices, memory, optional attributes (`+me`, `-me`).
fn is_name(text: &str) -> bool {
    let Some((slices, rest)) = text.split_once("g.") else { return false };
    let Some((memory, more)) = rest.split_once("gb") else { return false };
    let attribute = |word: &str| {
        !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'.')
    };
    let attributes = more.is_empty()
        || (more.starts_with(['+', '-']) && more.len() <= 24 && more[1..].split(['+', '-']).all(attribute));
    number(slices, 64).is_some_and(|count| count > 0)
        && number(memory, 99_999).is_some_and(|size| size > 0)
        && attributes
}

impl FromStr for Profile {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let text = text.to_ascii_lowercase();
        match number(&text, MAX_ID) {
            Some(id) => Ok(Self::Id(id)),
            None if is_name(&text) => Ok(Self::Name(text)),
            None => Err(Malformed),
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Id(id) => id.fmt(f),
        }
    }
}

impl FromStr for Mig {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        match text {
            "off" => return Ok(Self::Off),
            "on" => return Ok(Self::On),
            _ => {}
        }
        let mut parts = Vec::new();
        let mut total = 0;
        for part in text.split(',') {
            let (profile, count) = part.split_once('*').unwrap_or((part, "1"));
            let count = number(count, MAX_INSTANCES).filter(|count| *count > 0).ok_or(Malformed)?;
            total += count;
            if total > MAX_INSTANCES {
                return Err(Malformed);
            }
            parts.push(InstanceCount { profile: profile.parse()?, count });
        }
        Ok(Self::Instances(parts))
    }
}

impl fmt::Display for Mig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = match self {
            Self::Off => return f.write_str("off"),
            Self::On => return f.write_str("on"),
            Self::Instances(parts) => parts,
        };
        for (at, part) in parts.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}{}", part.profile)?;
            if part.count > 1 {
                write!(f, "*{}", part.count)?;
            }
        }
        Ok(())
    }
}

as_text!(Mig);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layouts_use_profile_names_of_nvidia_smi() {
        let name = |name: &str, count| InstanceCount { profile: Profile::Name(name.to_owned()), count };
        for (text, parts) in [
            ("3g.71gb,4g.71gb", vec![name("3g.71gb", 1), name("4g.71gb", 1)]),
            ("1g.18gb*7", vec![name("1g.18gb", 7)]),
            ("1g.18gb+me,1g.18gb*2", vec![name("1g.18gb+me", 1), name("1g.18gb", 2)]),
            ("1g.24gb-me,1g.24gb+me.all,2g.48gb+gfx", {
                vec![name("1g.24gb-me", 1), name("1g.24gb+me.all", 1), name("2g.48gb+gfx", 1)]
            }),
            ("19*7", vec![InstanceCount { profile: Profile::Id(19), count: 7 }]),
        ] {
            assert_eq!(
                (text.parse(), Mig::Instances(parts.clone()).to_string().as_str()),
                (Ok(Mig::Instances(parts)), text)
            );
        }
        assert_eq!("3G.71GB".parse(), Ok(Mig::Instances(vec![name("3g.71gb", 1)])));
        assert_eq!(("on".parse(), "off".parse()), (Ok(Mig::On), Ok(Mig::Off)));
        for text in [
            "",
            ",",
            "3g",
            "3g.71",
            "g.71gb",
            "0g.1gb",
            "3g.71gb,",
            "1g.18gb*",
            "1g.18gb*0",
            "1g.18gb*33",
            "1g.18gb*x",
            "1g.18gb+",
            "1g.18gb+m e",
            "on,off",
            "MIG 1g.18gb",
            "1c.3g.71gb",
            "19*17,19*16",
            "-1",
            "10000",
        ] {
            assert_eq!(text.parse::<Mig>(), Err(Malformed), "{text}");
        }
    }

    proptest! {
        #[test]
        fn layout_round_trips(
            parts in proptest::collection::vec(("([1-9]g\\.[1-9][0-9]{0,2}gb([+-](me|gfx|me\\.all))?|[0-9]{1,3})", 1..5u32), 1..7)
        ) {
            let parts: Vec<InstanceCount> = parts.into_iter()
                .map(|(profile, count)| InstanceCount { profile: profile.parse().unwrap(), count })
                .collect();
            let mig = Mig::Instances(parts);
            prop_assert_eq!(mig.to_string().parse(), Ok(mig));
        }

        #[test]
        fn parsed_text_round_trips(text in "\\PC{0,40}|[0-9g.b+*,-]{0,30}") {
            if let Ok(mig) = text.parse::<Mig>() {
                prop_assert_eq!(mig.to_string().parse(), Ok(mig));
            }
        }
    }
}
