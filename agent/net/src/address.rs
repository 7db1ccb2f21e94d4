//! Interface addresses.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::netlink::Netlink;
use crate::network::Network;

/// An address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkAddress {
    /// The interface's index.
    pub link: u32,
    /// The local address.
    pub network: Network,
}

impl LinkAddress {
    fn of(message: &AddressMessage) -> Option<Self> {
        let mut found = None;
        for attribute in &message.attributes {
            match attribute {
                // On point-to-point links IFA_ADDRESS is the peer.
                AddressAttribute::Local(own) => found = Some(*own),
                AddressAttribute::Address(address) => found = found.or(Some(*address)),
                _ => {}
            }
        }
        let network = Network::new(found?, message.header.prefix_len)?;
        Some(Self { link: message.header.index, network })
    }
}

fn message(link: u32, network: Network) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = link;
    message.header.prefix_len = network.prefix();
    let address = network.address();
    message.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    if let IpAddr::V4(v4) = address {
        if v4.is_loopback() {
            message.header.scope = AddressScope::Host;
        }
        message.attributes.push(AddressAttribute::Local(address));
    } else {
        // The pod's IPAM has already checked for duplicates. Duplicate address detection takes a second or two,
        // during which no program can bind the address and no route can use it as source.
        message.header.flags = AddressHeaderFlags::Nodad;
    }
    message.attributes.push(AddressAttribute::Address(address));
    message.attributes.extend(network.broadcast().map(AddressAttribute::Broadcast));
    message
}

impl Netlink {
    /// Lists the addresses of all interfaces.
    ///
    /// # Errors
    /// The netlink request fails.
    pub fn addresses(&mut self) -> Result<Vec<LinkAddress>> {
        let all = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.list("list addresses", &all, |entry| match entry {
            RouteNetlinkMessage::NewAddress(address) => LinkAddress::of(&address).into_iter().collect(),
            _ => vec![],
        })
    }

    /// Adds an address; an existing one is not an error.
    pub(crate) fn add_address(&mut self, link: u32, network: Network) -> Result<()> {
        let message = RouteNetlinkMessage::NewAddress(message(link, network));
        match self.request("add address", message, NLM_F_CREATE | NLM_F_EXCL) {
            Err(Error::Refused { source: Errno::EXIST, .. }) => Ok(()),
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    proptest! {
        #[test]
        fn address_messages_round_trip(bits: u128, v6: bool, prefix in 0u8..=128, link: u32) {
            let address = if v6 { IpAddr::V6(Ipv6Addr::from_bits(bits)) } else { IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(bits >> 96).unwrap())) };
            if let Some(network) = Network::new(address, prefix) {
                prop_assert_eq!(LinkAddress::of(&message(link, network)), Some(LinkAddress { link, network }));
            }
        }
    }
}
