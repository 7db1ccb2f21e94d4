//! IP addresses with a prefix length.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

/// An IP address with its prefix length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

/// An invalid address with a prefix length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an IP address{reason}")]
pub struct InvalidNetwork {
    text: String,
    reason: &'static str,
}

const PREFIX: &str = " with a prefix length, as in 10.0.0.0/8 or fd00::/64";

fn longest(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl Network {
    /// Creates a network; `None` if the prefix is longer than the address.
    #[must_use]
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        (prefix <= longest(address)).then_some(Self { address, prefix })
    }

    /// Parses an address and its prefix length from two texts.
    ///
    /// # Errors
    /// One of them is invalid.
    pub fn parse(address: &str, prefix: &str) -> Result<Self, InvalidNetwork> {
        let wrong = |reason| InvalidNetwork { text: format!("{}/{}", cut(address), cut(prefix)), reason };
        let digits = !prefix.is_empty() && prefix.len() <= 3 && prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix: u8 = if digits { prefix.parse().map_err(|_| wrong(PREFIX))? } else { return Err(wrong(PREFIX)) };
        let address: IpAddr = address.parse().map_err(|_| wrong(PREFIX))?;
        Self::new(address, prefix).ok_or_else(|| wrong(" with a valid prefix length: at most 32 (IPv4) or 128 bits"))
    }

    /// Returns the address.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the prefix length in bits.
    #[must_use]
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether the address is IPv6.
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        self.address.is_ipv6()
    }

    /// Returns the network with the host bits cleared.
    #[must_use]
    pub fn masked(self) -> Self {
        let address = match self.address {
            IpAddr::V4(address) => IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & !host4(self.prefix))),
            IpAddr::V6(address) => {
                let host = u128::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !host))
            }
        };
        Self { address, ..self }
    }

    /// Returns the IPv4 broadcast address, if the network is large enough to have one.
    pub(crate) fn broadcast(&self) -> Option<Ipv4Addr> {
        match self.address {
            IpAddr::V4(address) if self.prefix < 31 => {
                Some(Ipv4Addr::from_bits(address.to_bits() | host4(self.prefix)))
            }
            _ => None,
        }
    }
}

/// Returns the mask of the host bits.
fn host4(prefix: u8) -> u32 {
    u32::MAX.checked_shr(prefix.into()).unwrap_or(0)
}

fn cut(text: &str) -> String {
    text.chars().take(60).collect()
}

impl FromStr for Network {
    type Err = InvalidNetwork;

    /// Parses `ADDRESS/PREFIX`, or an address alone with a full-length prefix.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((address, prefix)) = text.split_once('/') {
            return Self::parse(address, prefix);
        }
        let address: IpAddr = text.parse().map_err(|_| InvalidNetwork { text: cut(text), reason: PREFIX })?;
        Ok(Self { address, prefix: longest(address) })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Whether IPv6 is enabled on an interface (`None`: in general); `proc` is the procfs mount.
#[must_use]
pub fn has_ipv6(proc: &Path, interface: Option<&str>) -> bool {
    let dir = proc.join("sys/net/ipv6/conf");
    let read = |name: &str| fs::read_to_string(dir.join(name).join("disable_ipv6")).ok();
    // A new interface inherits from "all" and has its own setting from then on.
    interface.and_then(read).or_else(|| read("all")).is_some_and(|value| value.trim() == "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn networks_are_parsed_and_masked() {
        for (text, masked, broadcast) in [
            ("10.1.2.3/8", "10.0.0.0/8", Some([10, 255, 255, 255])),
            ("10.1.2.3", "10.1.2.3/32", None),
            ("10.1.2.3/31", "10.1.2.2/31", None),
            ("0.0.0.0/0", "0.0.0.0/0", Some([255; 4])),
            ("fd00::1:2/112", "fd00::1:0/112", None),
            ("::/0", "::/0", None),
            ("fd00::7", "fd00::7/128", None),
        ] {
            let network: Network = text.parse().unwrap();
            assert_eq!(
                (network.masked().to_string().as_str(), network.broadcast()),
                (masked, broadcast.map(Ipv4Addr::from))
            );
        }
        for text in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/33",
            "::/129",
            "10.0.0/8",
            "10.0.0.0/+8",
            "10.0.0.0/8/8",
            "a/8",
            "fe80::1%eth0/64",
        ] {
            let error = text.parse::<Network>().unwrap_err().to_string();
            assert!(error.contains("is not an IP address"), "{text}: {error}");
        }
    }

    #[test]
    fn ipv6_setting_of_the_interface_precedes_the_general_one() {
        let proc = tempfile::tempdir().unwrap();
        assert!(!has_ipv6(proc.path(), None));
        for (name, value) in [("all", "1\n"), ("eth0", "0\n"), ("eth1", "1\n")] {
            let dir = proc.path().join("sys/net/ipv6/conf").join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("disable_ipv6"), value).unwrap();
        }
        let has = |name| has_ipv6(proc.path(), name);
        assert_eq!([has(None), has(Some("eth0")), has(Some("eth1")), has(Some("eth2"))], [false, true, false, false]);
    }

    proptest! {
        #[test]
        fn networks_round_trip(bits: u128, v6: bool, prefix in 0u8..=128) {
            let address = if v6 { IpAddr::V6(Ipv6Addr::from_bits(bits)) } else { IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(bits >> 96).unwrap())) };
            let Some(network) = Network::new(address, prefix) else {
                prop_assert!(!v6 && prefix > 32);
                return Ok(());
            };
            prop_assert_eq!(network.to_string().parse::<Network>(), Ok(network));
            let masked = network.masked();
            prop_assert_eq!(masked.masked(), masked);
        }

        #[test]
        fn arbitrary_text_is_a_network_or_an_error(text in "[0-9a-f.:/]{0,50}") {
            if let Ok(network) = text.parse::<Network>() {
                prop_assert!(network.prefix() <= longest(network.address()));
            }
        }
    }
}
