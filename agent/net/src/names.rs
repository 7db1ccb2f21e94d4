//! Interface names and hardware addresses.

use std::fmt;
use std::str::FromStr;

/// The kernel's limit including the NUL, `IFNAMSIZ`.
const NAME_SIZE: usize = 16;

/// An interface name that the kernel accepts unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Name(String);

/// An invalid interface name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid interface name {text:?}: {reason}")]
pub struct InvalidName {
    text: String,
    reason: &'static str,
}

impl Name {
    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the temporary name of an interface during a swap of names.
    pub(crate) fn temporary(index: u32) -> Self {
        Self(format!("fl-swap{index:x}"))
    }
}

impl FromStr for Name {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let reason = if text.is_empty() {
            "it is empty"
        } else if text.len() >= NAME_SIZE {
            "it is longer than 15 bytes"
        } else if matches!(text, "." | "..") {
            "it is a directory entry"
        } else if text.contains(['/', ':', '%']) {
            // The kernel replaces `%d` in a new name by a number.
            "it contains '/', ':' or '%'"
        } else if text.contains(|letter: char| letter.is_whitespace() || letter.is_control()) {
            "it contains white space or control characters"
        } else {
            return Ok(Self(text.to_owned()));
        };
        Err(InvalidName { text: text.chars().take(40).collect(), reason })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A hardware address of Ethernet (6 bytes) or `InfiniBand` (20). `parse` accepts only addresses that a single
/// interface can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mac(Vec<u8>);

/// An invalid hardware address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid hardware address {text:?}: {reason}")]
pub struct InvalidMac {
    text: String,
    reason: &'static str,
}

const LENGTHS: [usize; 2] = [6, 20];

impl Mac {
    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Parses any address, including multicast and all-zero ones: a neighbour may be a cluster.
    ///
    /// # Errors
    /// It is not a hardware address.
    pub fn any(text: &str) -> Result<Self, InvalidMac> {
        // 20 pairs with separators; checked first, so that a long text is not collected.
        let bytes: Option<Vec<u8>> = if text.len() < 60 { text.split(':').map(pair).collect() } else { None };
        let reason = "expected 6 (or 20) pairs of hexadecimal digits with ':' between them";
        let bytes = bytes.filter(|bytes| LENGTHS.contains(&bytes.len()));
        bytes.map(Self).ok_or_else(|| InvalidMac { text: text.chars().take(60).collect(), reason })
    }

    /// Formats bytes as a hardware address, `02:00:00:00:00:01`.
    #[must_use]
    pub fn text(bytes: &[u8]) -> String {
        let pairs: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        pairs.join(":")
    }
}

fn pair(text: &str) -> Option<u8> {
    let hexadecimal = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if hexadecimal { u8::from_str_radix(text, 16).ok() } else { None }
}

impl FromStr for Mac {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mac = Self::any(text)?;
        let wrong = |reason| Err(InvalidMac { text: text.to_owned(), reason });
        if mac.0.iter().all(|byte| *byte == 0) {
            return wrong("it is all zero, as on interfaces without a hardware address");
        }
        if mac.0.len() == 6 && mac.0.first().is_some_and(|first| first & 1 == 1) {
            return wrong("it is a multicast address");
        }
        Ok(mac)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Self::text(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_that_the_kernel_would_refuse_or_change_are_invalid() {
        for (text, part) in [
            ("", "empty"),
            ("sixteen-letters-", "15"),
            ("..", "directory"),
            ("a/b", "'/'"),
            ("eth%d", "'%'"),
            ("a b", "white"),
            ("a\0b", "control"),
            ("a\nb", "white"),
        ] {
            let error = text.parse::<Name>().unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
        for text in ["lo", "eth0", "enp1s0f0.100", "fifteen-letters"] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
        assert!(Name::temporary(u32::MAX).as_str().parse::<Name>().is_ok());
    }

    #[test]
    fn only_unicast_hardware_addresses_are_parsed() {
        assert_eq!("02:AB:00:00:00:01".parse::<Mac>().unwrap().bytes(), [2, 0xab, 0, 0, 0, 1]);
        for text in
            ["", "02", "02:00:00:00:00", "0x:00:00:00:00:01", "+2:00:00:00:00:01", "2:0:0:0:0:1", "0200.0000.0001"]
        {
            assert!(text.parse::<Mac>().unwrap_err().to_string().contains("pairs"), "{text}");
        }
        for (text, part) in
            [("00:00:00:00:00:00", "all zero"), ("01:00:5e:00:00:01", "multicast"), ("ff:ff:ff:ff:ff:ff", "multicast")]
        {
            assert!(text.parse::<Mac>().unwrap_err().to_string().contains(part), "{text}");
            assert_eq!(Mac::any(text).unwrap().to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_a_valid_name_or_an_error(text in ".{0,20}") {
            if let Ok(name) = text.parse::<Name>() {
                prop_assert!(name.as_str() == text && text.len() < 16 && !text.contains(['/', '\0', ' ']));
            }
        }

        #[test]
        fn hardware_addresses_round_trip(bytes in any::<[u8; 6]>()) {
            let text = Mac::text(&bytes);
            match text.parse::<Mac>() {
                Ok(mac) => prop_assert_eq!((mac.bytes(), mac.to_string()), (&bytes[..], text)),
                Err(_) => prop_assert!(bytes[0] & 1 == 1 || bytes == [0; 6]),
            }
        }

        #[test]
        fn arbitrary_text_is_a_hardware_address_or_an_error(text in "[0-9a-fx:+]{0,70}") {
            if let Ok(mac) = text.parse::<Mac>() {
                prop_assert_eq!(mac.to_string(), text);
            }
        }
    }
}
