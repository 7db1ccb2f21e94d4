//! Versions of drivers and kernels, and version ranges.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

/// A version of dot-separated numbers: `550.163.01`, `6.12.107`.
///
/// The original spelling is preserved, because it is part of file names of the driver;
/// order and equality depend on the numbers only.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "String")]
pub struct Version {
    text: String,
    numbers: Vec<u32>,
}

impl Version {
    /// Returns the original spelling.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether it begins with the numbers of `branch`: 550.163.01 is in 550.
    #[must_use]
    pub fn is_in_branch(&self, branch: &Self) -> bool {
        self.numbers.starts_with(&branch.numbers)
    }

    /// Returns the number at `index`; 0 if absent.
    pub(super) fn number(&self, index: usize) -> u32 {
        self.numbers.get(index).copied().unwrap_or(0)
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u32>, _> = text.split('.').map(str::parse).collect();
        // The integer parser accepts a plus sign.
        match numbers {
            Ok(numbers) if numbers.len() <= 4 && !text.contains('+') => Ok(Self { text: text.to_owned(), numbers }),
            _ => Err(format!("invalid version {text:?}: expected up to four numbers separated by dots")),
        }
    }
}

impl TryFrom<String> for Version {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let length = self.numbers.len().max(other.numbers.len());
        (0..length)
            .map(|index| self.number(index).cmp(&other.number(index)))
            .find(|order| order.is_ne())
            .unwrap_or(Ordering::Equal)
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Version {}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A version range: `>=6.12.97, <6.13`, or an exact version such as `550.163.01`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Range {
    text: String,
    bounds: Vec<(Bound, Version)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    Exactly,
    AtLeast,
    Below,
}

/// Operators of bounds; a bound without operator is exact.
const BOUNDS: &[(&str, Bound)] = &[(">=", Bound::AtLeast), ("<", Bound::Below), ("", Bound::Exactly)];

impl Range {
    /// Returns whether `version` satisfies every bound.
    #[must_use]
    pub fn contains(&self, version: &Version) -> bool {
        self.bounds.iter().all(|(bound, than)| match bound {
            Bound::Exactly => version == than,
            Bound::AtLeast => version >= than,
            Bound::Below => version < than,
        })
    }
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bound = |part: &str| {
            let part = part.trim();
            let found = BOUNDS.iter().find_map(|(operator, bound)| Some((*bound, part.strip_prefix(operator)?)));
            let (bound, version) = found.unwrap_or((Bound::Exactly, part));
            Ok((bound, version.trim().parse()?))
        };
        let bounds: Result<_, String> = text.split(',').map(bound).collect();
        Ok(Self { text: text.to_owned(), bounds: bounds.map_err(|what| format!("invalid range {text:?}: {what}"))? })
    }
}

impl TryFrom<String> for Range {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn numbers_are_compared_and_the_spelling_is_preserved() {
        assert!(version("6.12.97") < version("6.12.107") && version("6.12") < version("6.12.1"));
        assert_eq!(version("6.12"), version("6.12.0"));
        assert_eq!(version("550.163.01"), version("550.163.1"));
        assert_eq!(version("550.163.01").to_string(), "550.163.01");
        assert!(
            version("550.163.01").is_in_branch(&version("550")) && !version("550.163.01").is_in_branch(&version("55"))
        );
        for text in ["", "6.", "6.12-rc1", "1.2.3.4.5", "+6", "99999999999"] {
            assert!(text.parse::<Version>().unwrap_err().contains("invalid version"), "{text}");
        }
    }

    #[test]
    fn version_must_satisfy_every_bound() {
        let range: Range = ">=6.12.97, <6.13".parse().unwrap();
        for (text, inside) in
            [("6.12.96", false), ("6.12.97", true), ("6.12.107", true), ("6.13", false), ("6.1.176", false)]
        {
            assert_eq!(range.contains(&version(text)), inside, "{text}");
        }
        let exact: Range = "550.163.01".parse().unwrap();
        assert!(exact.contains(&version("550.163.01")) && !exact.contains(&version("550.163.02")));
        assert_eq!(range.to_string(), ">=6.12.97, <6.13");
        let error = ">=6, <=7".parse::<Range>().unwrap_err();
        assert!(error.contains("\"=7\""), "{error}");
    }

    proptest! {
        #[test]
        fn order_agrees_with_the_numbers(a in proptest::collection::vec(0u32..200, 3), b in proptest::collection::vec(0u32..200, 3)) {
            let text = |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(".");
            prop_assert_eq!(version(&text(&a)).cmp(&version(&text(&b))), a.cmp(&b));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in "(?s).{0,60}") {
            let _ = text.parse::<Version>();
            let _ = text.parse::<Range>();
        }
    }
}
