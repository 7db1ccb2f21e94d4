//! Platforms of images.

use std::fmt;
use std::str::FromStr;

use oci_spec::image::{self, Arch, Os};
use serde::Serialize;

/// An operating system, an architecture and an optional variant.
///
/// Wraps the type of oci-spec, which neither parses nor prints `linux/arm/v7`. Operating
/// systems and architectures that oci-spec does not know are kept as text: they are
/// untrusted, so [`Display`](fmt::Display) escapes control characters. Other properties,
/// such as the version of the operating system, are dropped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Platform(image::Platform);

impl Platform {
    pub(crate) fn new(os: Os, architecture: Arch, variant: Option<String>) -> Self {
        let mut platform = image::Platform::default();
        platform.set_os(os).set_architecture(architecture);
        platform.set_variant(variant.filter(|variant| !variant.is_empty()));
        Self(platform)
    }

    /// Returns the platform in the type of oci-spec.
    #[must_use]
    pub fn to_oci(&self) -> image::Platform {
        self.0.clone()
    }

    /// Returns whether an image for `self` can be used where `requested` is requested: a
    /// request without a variant accepts every variant.
    pub(crate) fn satisfies(&self, requested: &Self) -> bool {
        self.has_same_architecture(requested)
            && (requested.variant().is_none() || self.variant() == requested.variant())
    }

    /// Returns whether operating system and architecture are equal.
    pub(crate) fn has_same_architecture(&self, other: &Self) -> bool {
        (self.0.os(), self.0.architecture()) == (other.0.os(), other.0.architecture())
    }

    /// Returns the variant for comparisons: `v8` is the only one of arm64, whether it is
    /// stated or not.
    fn variant(&self) -> Option<&str> {
        match (self.0.architecture(), self.0.variant().as_deref()) {
            (Arch::ARM64, Some("v8")) => None,
            (_, variant) => variant,
        }
    }

    /// Returns whether this is the platform `unknown/unknown`, under which buildkit adds
    /// attestations to an index.
    pub(crate) fn is_unknown(&self) -> bool {
        self.0.os().to_string() == "unknown" || self.0.architecture().to_string() == "unknown"
    }
}

impl From<&image::Platform> for Platform {
    fn from(platform: &image::Platform) -> Self {
        Self::new(platform.os().clone(), platform.architecture().clone(), platform.variant().clone())
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (os, architecture) = (self.0.os().to_string(), self.0.architecture().to_string());
        write!(f, "{}/{}", os.escape_default(), architecture.escape_default())?;
        self.0.variant().as_ref().map_or(Ok(()), |variant| write!(f, "/{}", variant.escape_default()))
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_valid =
            |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        let parts: Vec<&str> = text.split('/').collect();
        match parts.as_slice() {
            [os, architecture, rest @ ..] if rest.len() < 2 && parts.iter().all(is_valid) => {
                let variant = rest.first().map(|variant| (*variant).to_owned());
                Ok(Self::new(Os::from(*os), Arch::from(*architecture), variant))
            }
            _ => Err(format!("invalid platform {text:?}: expected OS/ARCHITECTURE[/VARIANT], such as linux/amd64")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn platform(text: &str) -> Platform {
        text.parse().unwrap()
    }

    #[test]
    fn variant_is_compared_only_if_requested() {
        for (available, requested, satisfied) in [
            ("linux/amd64", "linux/amd64", true),
            ("linux/amd64/v3", "linux/amd64", true),
            ("linux/amd64", "linux/amd64/v3", false),
            ("linux/arm/v6", "linux/arm/v7", false),
            ("linux/arm64/v8", "linux/arm64", true),
            ("linux/arm64", "linux/arm64/v8", true),
            ("windows/amd64", "linux/amd64", false),
        ] {
            assert_eq!(platform(available).satisfies(&platform(requested)), satisfied, "{available} for {requested}");
        }
        assert!(platform("unknown/unknown").is_unknown() && !platform("linux/amd64").is_unknown());
        for invalid in ["", "linux", "linux/", "/amd64", "a/b/c/d", "linux/amd 64"] {
            assert!(invalid.parse::<Platform>().is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn control_characters_of_untrusted_platforms_are_escaped() {
        let untrusted: image::Platform =
            serde_json::from_str(r#"{"os":"a\u001b[2J","architecture":"b\n","variant":"\u0007"}"#).unwrap();
        let text = Platform::from(&untrusted).to_string();
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }

    proptest! {
        #[test]
        fn printed_platform_is_the_parsed_text(text in "[a-z]{1,8}/[a-z0-9]{1,8}(/v[0-9])?") {
            prop_assert_eq!(platform(&text).to_string(), text);
        }
    }
}
