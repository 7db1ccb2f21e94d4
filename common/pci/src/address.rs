//! PCI addresses, the only GPU name that no driver can renumber.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Domain, bus, device and function; written `0000:01:00.0`.
///
/// Ordered by bus scan order, which is the order of GPU indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Address {
    /// PCI segment; above 0xffff only on hosts with VMD or Hyper-V.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

/// Why a text is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a PCI address: {reason}; expected DDDD:BB:DD.F in hexadecimal, e.g. 0000:01:00.0")]
pub struct ParseAddressError {
    text: String,
    reason: &'static str,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let fits = digits.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    if fits { u32::from_str_radix(text, 16).ok() } else { None }
}

fn parse(text: &str) -> Result<Address, &'static str> {
    let (domain, rest) = text.split_once(':').ok_or("no domain")?;
    let (bus, rest) = rest.split_once(':').ok_or("no bus")?;
    let (device, function) = rest.split_once('.').ok_or("no function")?;
    let domain = hex(domain, 4..=8).ok_or("the domain is not 4 to 8 hexadecimal digits")?;
    let bus = hex(bus, 2..=2).and_then(|v| u8::try_from(v).ok()).ok_or("the bus is not 2 hexadecimal digits")?;
    let device = hex(device, 2..=2)
        .and_then(|v| u8::try_from(v).ok())
        .filter(|v| *v < 32)
        .ok_or("the device is not 00 to 1f")?;
    let function = hex(function, 1..=1)
        .and_then(|v| u8::try_from(v).ok())
        .filter(|v| *v < 8)
        .ok_or("the function is not 0 to 7")?;
    Ok(Address { domain, bus, device, function })
}

impl FromStr for Address {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| ParseAddressError { text: text.chars().take(40).collect(), reason })
    }
}

impl TryFrom<String> for Address {
    type Error = ParseAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sysfs_addresses_are_parsed() {
        let address: Address = "0000:c1:1f.7".parse().unwrap();
        assert_eq!(address, Address { domain: 0, bus: 0xc1, device: 0x1f, function: 7 });
        assert_eq!("10000:e1:00.0".parse::<Address>().unwrap().domain, 0x10000);
    }

    #[test]
    fn malformed_addresses_name_the_wrong_part() {
        for (text, part) in [
            ("", "domain"),
            ("0000", "domain"),
            ("0000:01", "bus"),
            ("0000:01:00", "function"),
            ("0000:01:20.0", "device"),
            ("0000:01:00.8", "function"),
            ("0000:1:00.0", "bus"),
            ("+000:01:00.0", "domain"),
            ("0000:01:00.0 ", "function"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    #[test]
    fn addresses_sort_in_bus_scan_order() {
        let sorted: Vec<Address> = ["0000:02:00.0", "0000:0a:00.0", "0000:10:00.0", "0001:00:00.0"]
            .iter()
            .map(|a| a.parse().unwrap())
            .collect();
        assert!(sorted.is_sorted());
    }

    proptest! {
        #[test]
        fn addresses_round_trip(domain in 0u32.., bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = Address { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
        }

        #[test]
        fn parsed_text_round_trips(text in ".{0,24}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string(), text.to_ascii_lowercase());
            }
        }
    }
}
