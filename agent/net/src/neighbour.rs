//! Neighbour entries: the hardware address of an IP address.

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

/// A requested neighbour entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// The IP address.
    pub address: IpAddr,
    /// The interface.
    pub device: Name,
    /// The hardware address, if the link has them.
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

/// Adds neighbour entries, replacing those of the same address. IPv6 entries are skipped on interfaces without IPv6.
///
/// # Errors
/// An interface is missing, and nothing was changed; or the kernel refuses one, which the error names, and those
/// before it were added.
pub fn replace_neighbours(netlink: &mut Netlink, neighbours: &[Neighbour], proc: &Path) -> Result<()> {
    let links = devices(&netlink.links()?, "neighbour", neighbours.iter().map(|neighbour| Some(&neighbour.device)))?;
    for (at, (neighbour, link)) in neighbours.iter().zip(links).enumerate() {
        let Neighbour { address, device, .. } = neighbour;
        if address.is_ipv6() && !has_ipv6(proc, Some(device.as_str())) {
            continue;
        }
        let message = RouteNetlinkMessage::NewNeighbour(message(link.unwrap_or(0), neighbour));
        netlink.request(
            format_args!("neighbour {at} ({address} on {device})"),
            message,
            NLM_F_CREATE | NLM_F_REPLACE,
        )?;
    }
    Ok(())
}
