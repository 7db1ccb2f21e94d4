//! For which machine an image is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An operating system, an architecture, and where that matters a variant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// In Go's words: `linux`.
    pub os: String,
    /// In Go's words: `amd64`, `arm64`.
    pub architecture: String,
    /// Such as `v7` of `arm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// Whether an image that says to be for `self` is for `wanted`. Who asks
    /// for no variant takes any.
    pub(crate) fn serves(&self, wanted: &Self) -> bool {
        let plain = |platform: &Self| match (platform.architecture.as_str(), platform.variant.as_deref()) {
            // Every arm64 is v8, whether it says so or not.
            ("arm64", Some("v8")) => None,
            (_, variant) => variant.map(str::to_owned),
        };
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (plain(wanted).is_none() || plain(self) == plain(wanted))
    }

    /// Attestations lie beside images, under this name.
    pub(crate) fn is_unknown(&self) -> bool {
        self.os == "unknown" || self.architecture == "unknown"
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { os, architecture, variant } = self;
        // These words are somebody else's and go to a terminal.
        write!(f, "{}/{}", os.escape_default(), architecture.escape_default())?;
        variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{}", variant.escape_default()))
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let word =
            |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        let words: Vec<&str> = text.split('/').collect();
        match words.as_slice() {
            [os, architecture, rest @ ..] if rest.len() < 2 && words.iter().all(word) => Ok(Self {
                os: (*os).to_owned(),
                architecture: (*architecture).to_owned(),
                variant: rest.first().map(|variant| (*variant).to_owned()),
            }),
            _ => Err(format!("{text:?} is no platform; one is OS/ARCHITECTURE[/VARIANT], such as linux/amd64")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Platform {
        text.parse().unwrap()
    }

    #[test]
    fn variants_matter_to_those_who_ask() {
        for (have, want, serves) in [
            ("linux/amd64", "linux/amd64", true),
            ("linux/amd64/v3", "linux/amd64", true),
            ("linux/amd64", "linux/amd64/v3", false),
            ("linux/arm/v6", "linux/arm/v7", false),
            ("linux/arm64/v8", "linux/arm64", true),
            ("linux/arm64", "linux/arm64/v8", true),
            ("windows/amd64", "linux/amd64", false),
        ] {
            assert_eq!(of(have).serves(&of(want)), serves, "{have} for {want}");
        }
        assert!(of("unknown/unknown").is_unknown() && !of("linux/amd64").is_unknown());
        for wrong in ["", "linux", "linux/", "/amd64", "a/b/c/d", "linux/amd 64"] {
            assert!(wrong.parse::<Platform>().is_err(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_again(text in "[a-z]{1,8}/[a-z0-9]{1,8}(/v[0-9])?") {
            prop_assert_eq!(of(&text).to_string(), text);
        }
    }
}
