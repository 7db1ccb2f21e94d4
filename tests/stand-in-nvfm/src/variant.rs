//! The variant of the library: the environment variable `FAKE_NVFM`.

use firstlight_fake_fm::codes;

/// The environment variable.
pub const VARIABLE: &str = "FAKE_NVFM";

/// A variant of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// `610`, the default: connects with both versions.
    V610,
    /// `575`: supports the first connect structure only, and codes to -10.
    V575,
    /// `counts`: lists have excessive counts.
    Counts,
    /// `garbage`: strings are not terminated, and booleans are 7.
    Garbage,
    /// `version-6`: every call fails, as with a manager of another version.
    Version6,
}

impl Variant {
    /// Reads the environment; with an unknown variant every call fails.
    pub(crate) fn now() -> Option<Self> {
        match std::env::var_os(VARIABLE) {
            None => Some(Self::V610),
            Some(word) => Self::named(word.to_str()?),
        }
    }

    fn named(word: &str) -> Option<Self> {
        match word {
            "610" => Some(Self::V610),
            "575" => Some(Self::V575),
            "counts" => Some(Self::Counts),
            "garbage" => Some(Self::Garbage),
            "version-6" => Some(Self::Version6),
            _ => None,
        }
    }

    /// Converts a code to those that the variant knows.
    pub(crate) fn code(self, rc: i32) -> i32 {
        if self == Self::V575 && rc < codes::NVLINK_ERROR { codes::GENERIC_ERROR } else { rc }
    }

    /// Returns the count that a list reports.
    pub(crate) fn count(self, true_one: u32, otherwise: u32) -> u32 {
        if self == Self::Counts { otherwise } else { true_one }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_library_prints_unknown_codes_as_numbers() {
        assert_eq!(Variant::named("575"), Some(Variant::V575));
        assert_eq!(Variant::named("576"), None);
        assert_eq!([-10, -11, -24, 0].map(|rc| Variant::V575.code(rc)), [-10, -2, -2, 0]);
        assert_eq!(Variant::V610.code(-24), -24);
    }
}
