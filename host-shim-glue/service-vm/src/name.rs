//! The domain's name, and the UUID derived from it.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

/// Maximum length; the name is part of file names.
const MAX_LENGTH: usize = 60;

/// Prefix of the hashed name. A foreign domain of the same name has another UUID, so libvirt refuses to redefine it.
const NAMESPACE: &[u8] = b"firstlight service-vm domain\0";

/// A domain's name: letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(String);

/// An invalid domain name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid service VM name {text:?}: 1 to 60 letters, digits, '.', '_' or '-', the first of them a letter or digit"
)]
pub struct NameError {
    text: String,
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = (1..=MAX_LENGTH).contains(&text.len())
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if fits { Ok(Self(text.to_owned())) } else { Err(NameError { text: text.chars().take(80).collect() }) }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Name {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the domain's UUID, version 8: the same for the same name on every host.
    #[must_use]
    pub fn uuid(&self) -> String {
        let hash = Sha256::new().chain_update(NAMESPACE).chain_update(&self.0).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash[..16]);
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let digits = hex::encode(bytes);
        [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_determines_the_uuid() {
        let name: Name = "firstlight-service-vm".parse().unwrap();
        assert_eq!(name.uuid(), name.uuid());
        assert_ne!(name.uuid(), "other".parse::<Name>().unwrap().uuid());
        let uuid = name.uuid();
        assert_eq!((uuid.len(), &uuid[14..15]), (36, "8"), "{uuid}");
    }

    #[test]
    fn invalid_names_are_refused() {
        for text in ["", "-x", ".hidden", "../x", "a b", "a/b", "a\n", "ä", "<x>", &"a".repeat(61)] {
            let error = text.parse::<Name>().unwrap_err().to_string();
            assert!(error.contains("invalid service VM name"), "{error}");
        }
    }
}
