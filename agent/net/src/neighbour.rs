//! Neighbours: which hardware address belongs to which IP address.

use std::net::IpAddr;
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::error::Result;
use crate::names::{Mac, Name};
use crate::netlink::Netlink;
use crate::network::has_ipv6;
use crate::route::devices;

/// A neighbour to be known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its IP address.
    pub address: IpAddr,
    /// The interface it is behind.
    pub device: Name,
    /// Its hardware address, where there are such things.
    pub mac: Option<Mac>,
    /// `NUD_*`.
    pub state: u16,
    /// `NTF_*`.
    pub flags: u8,
}

fn message(link: u32, neighbour: &Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    let v4 = neighbour.address.is_ipv4();
    message.header.family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = link;
    message.header.state = NeighbourState::from(neighbour.state);
    message.header.flags = NeighbourFlags::from_bits_retain(neighbour.flags);
    message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::from(neighbour.address)));
    let mac = neighbour.mac.as_ref().map(|mac| NeighbourAttribute::LinkLayerAddress(mac.bytes().to_vec()));
    message.attributes.extend(mac);
    message
}

/// Makes these neighbours known; what is known of the same address is
/// replaced. Those of IPv6 are passed over where there is none.
///
/// # Errors
/// An interface is missing, and then nothing is changed; or the kernel refuses
/// one, which the error names, and those before it are known.
pub fn replace_neighbours(netlink: &mut Netlink, neighbours: &[Neighbour], proc: &Path) -> Result<()> {
    let links = devices(&netlink.links()?, "neighbour", neighbours.iter().map(|neighbour| Some(&neighbour.device)))?;
    for (at, (neighbour, link)) in neighbours.iter().zip(links).enumerate() {
        let Neighbour { address, device, .. } = neighbour;
        if address.is_ipv6() && !has_ipv6(proc, Some(device.as_str())) {
            continue;
        }
        let message = RouteNetlinkMessage::NewNeighbour(message(link.unwrap_or(0), neighbour));
        netlink.act(format_args!("neighbour {at} ({address} on {device})"), message, NLM_F_CREATE | NLM_F_REPLACE)?;
    }
    Ok(())
}
