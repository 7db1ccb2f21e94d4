//! Links (network interfaces).

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};

use crate::error::{Error, Result};
use crate::names::{Mac, Name};
use crate::netlink::Netlink;

/// `IFF_UP`: the interface is up.
pub const UP: u32 = 1;

/// `IFF_LOOPBACK`.
const LOOPBACK: u32 = 8;

/// `IFF_NOARP`: no ARP or neighbour discovery.
pub const NOARP: u32 = 0x80;

/// An existing interface.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Link {
    /// The index, which the kernel does not reuse.
    pub index: u32,
    /// The name.
    pub name: String,
    /// The hardware address.
    pub address: Vec<u8>,
    /// The MTU in bytes.
    pub mtu: u32,
    /// `IFF_*`.
    pub flags: u32,
    /// The kernel's link kind, such as `veth`; empty for a hardware device.
    pub kind: String,
}

impl Link {
    /// Whether it is `lo`.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.flags & LOOPBACK != 0
    }

    pub(crate) fn is_up(&self) -> bool {
        self.flags & UP != 0
    }

    fn of(message: LinkMessage) -> Self {
        let mut link = Self { index: message.header.index, flags: message.header.flags.bits(), ..Self::default() };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Address(address) => link.address = address,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::LinkInfo(all) => {
                    let kinds = all
                        .into_iter()
                        .filter_map(|info| if let LinkInfo::Kind(kind) = info { Some(kind) } else { None });
                    link.kind = kinds.map(|kind: InfoKind| kind.to_string()).next().unwrap_or_default();
                }
                _ => {}
            }
        }
        link
    }
}

fn change(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

impl Netlink {
    /// Lists all interfaces in the order of their indexes.
    ///
    /// # Errors
    /// The netlink request fails.
    pub fn links(&mut self) -> Result<Vec<Link>> {
        let all = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let mut links = self.list("list interfaces", &all, |entry| match entry {
            RouteNetlinkMessage::NewLink(link) => vec![Link::of(link)],
            _ => vec![],
        })?;
        links.retain(|link| link.index != 0 && !link.name.is_empty());
        links.sort_by_key(|link| link.index);
        Ok(links)
    }

    fn set(&mut self, what: &str, index: u32, attribute: LinkAttribute) -> Result<()> {
        let mut message = change(index);
        message.attributes.push(attribute);
        self.request(what, RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Sets the flags in `mask` to their values in `flags`.
    pub(crate) fn set_flags(&mut self, index: u32, flags: u32, mask: u32) -> Result<()> {
        let mut message = change(index);
        message.header.flags = LinkFlags::from_bits_retain(flags);
        message.header.change_mask = LinkFlags::from_bits_retain(mask);
        self.request("set flags", RouteNetlinkMessage::SetLink(message), 0)
    }

    pub(crate) fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<()> {
        self.set("set MTU", index, LinkAttribute::Mtu(mtu))
    }

    pub(crate) fn set_name(&mut self, index: u32, name: &Name) -> Result<()> {
        let change = |netlink: &mut Self| netlink.set("rename", index, LinkAttribute::IfName(name.as_str().to_owned()));
        self.change_even_if_up(index, change)
    }

    pub(crate) fn set_mac(&mut self, index: u32, mac: &Mac) -> Result<()> {
        let change = |netlink: &mut Self| {
            netlink.set("set hardware address", index, LinkAttribute::Address(mac.bytes().to_vec()))
        };
        self.change_even_if_up(index, change)
    }

    /// Applies a change that some drivers and kernels allow only while the interface is down. It is taken down
    /// only after `EBUSY`, because that removes its routes and IPv6 addresses.
    fn change_even_if_up(&mut self, index: u32, change: impl Fn(&mut Self) -> Result<()>) -> Result<()> {
        match change(self) {
            Err(Error::Refused { source: rustix::io::Errno::BUSY, .. }) => {}
            done => return done,
        }
        self.set_flags(index, 0, UP)?;
        let done = change(self);
        let up = self.set_flags(index, UP, UP);
        done.and(up)
    }
}
