//! Kernel versions, as rules compare them.

use std::fmt;

/// A kernel version without patch level, such as `6.12`; no rule depends on the patch level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u32, u32);

impl Version {
    /// Parses the version at the beginning of a string: `6.12`, `6.12.95+deb12-cloud-amd64`.
    #[must_use]
    pub fn leading(text: &str) -> Option<Self> {
        let mut numbers = text.splitn(3, '.');
        let major = numbers.next()?.parse().ok()?;
        let minor = numbers.next()?;
        let end = minor.find(|c: char| !c.is_ascii_digit()).unwrap_or(minor.len());
        Some(Self(major, minor[..end].parse().ok()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The range of kernel versions that have a symbol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kernels {
    /// The first version with it.
    pub since: Option<Version>,
    /// The first version without it again.
    pub until: Option<Version>,
}

impl Kernels {
    /// Parses `6.10..`, `..6.16` and `5.19..6.8`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (since, until) = text.split_once("..")?;
        let end = |text: &str| match text {
            "" => Some(None),
            text => Version::leading(text).filter(|version| version.to_string() == text).map(Some),
        };
        let range = Self { since: end(since)?, until: end(until)? };
        let empty = range.since.is_none() && range.until.is_none();
        let reversed = range.since.zip(range.until).is_some_and(|(since, until)| since >= until);
        (!empty && !reversed).then_some(range)
    }

    /// Returns whether `version` is older than the range.
    #[must_use]
    pub fn is_before(&self, version: Version) -> bool {
        self.since.is_some_and(|since| version < since)
    }

    /// Returns whether `version` is newer than the range.
    #[must_use]
    pub fn is_after(&self, version: Version) -> bool {
        self.until.is_some_and(|until| version >= until)
    }
}

impl fmt::Display for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.since, self.until) {
            (None, None) => f.write_str("all"),
            (Some(since), None) => write!(f, "since {since}"),
            (None, Some(until)) => write!(f, "before {until}"),
            (Some(since), Some(until)) => write!(f, "{since} to before {until}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_number() {
        let of = |text| Version::leading(text).unwrap();
        assert!(
            of("6.9") < of("6.12.95+deb12-cloud-amd64") && of("6.12") == of("6.12.1") && of("7.0-rc1") > of("6.99")
        );
        for text in ["", "6", "x.1", "6.x", "6."] {
            assert_eq!(Version::leading(text), None, "{text}");
        }
    }

    #[test]
    fn version_ranges_are_parsed_and_compared() {
        let of = |text| Kernels::parse(text).unwrap();
        let v = |text| Version::leading(text).unwrap();
        assert!(of("6.10..").is_before(v("6.1")) && !of("6.10..").is_before(v("6.10")));
        assert!(of("..6.16").is_after(v("6.16")) && !of("..6.16").is_after(v("6.15")));
        assert!(!Kernels::default().is_before(v("2.6")) && !Kernels::default().is_after(v("9.9")));
        for text in ["..", "6.1", "6.2..6.1", "6.1.2..", "x..", "6.1..6.1"] {
            assert_eq!(Kernels::parse(text), None, "{text}");
        }
        assert_eq!(of("5.19..6.8").to_string(), "5.19 to before 6.8");
    }
}
