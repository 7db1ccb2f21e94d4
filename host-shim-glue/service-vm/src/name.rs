//! The domain's name, and the UUID that follows from it.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

/// The longest name; it is part of the names of files.
const LONGEST: usize = 60;

/// What the UUID is made of, beside the name. Another domain of the same name has
/// another UUID, and libvirt then refuses to take it for ours.
const NAMESPACE: &[u8] = b"firstlight service-vm domain\0";

/// A domain's name: letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(String);

/// A text that is no name for a domain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no name for a service VM: 1 to 60 letters, digits, '.', '_' or '-', the first of them a letter or digit"
)]
pub struct NameError {
    text: String,
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = (1..=LONGEST).contains(&text.len())
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
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The domain's UUID: the same for the same name on every host, of version 8.
    #[must_use]
    pub fn uuid(&self) -> String {
        let hash = Sha256::new().chain_update(NAMESPACE).chain_update(&self.0).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash[..16]);
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_uuid() {
        let name: Name = "firstlight-service-vm".parse().unwrap();
        assert_eq!(name.uuid(), name.uuid());
        assert_ne!(name.uuid(), "other".parse::<Name>().unwrap().uuid());
        let uuid = name.uuid();
        assert_eq!((uuid.len(), &uuid[14..15]), (36, "8"), "{uuid}");
    }

    #[test]
    fn what_leads_elsewhere_is_no_name() {
        for text in ["", "-x", ".hidden", "../x", "a b", "a/b", "a\n", "ä", "<x>", &"a".repeat(61)] {
            let error = text.parse::<Name>().unwrap_err().to_string();
            assert!(error.contains("no name for a service VM"), "{error}");
        }
    }
}
