//! Routes of the main table.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteProtocol, RouteScope,
    RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::link::Link;
use crate::names::Name;
use crate::netlink::Netlink;
use crate::network::{Network, has_ipv6};

/// `RTNH_F_ONLINK`: the gateway is behind the interface whatever its address.
pub const ONLINK: u32 = 4;

/// Which Internet protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// That of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl From<Family> for AddressFamily {
    fn from(family: Family) -> Self {
        match family {
            Family::V4 => Self::Inet,
            Family::V6 => Self::Inet6,
        }
    }
}

/// A route to be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The protocol of what is routed.
    pub family: Family,
    /// Where to; `None` is everywhere.
    pub destination: Option<Network>,
    /// By whom.
    pub gateway: Option<IpAddr>,
    /// Through which interface; `None` leaves it to the kernel, which needs a gateway for that.
    pub device: Option<Name>,
    /// From which own address.
    pub source: Option<IpAddr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// Whether the gateway is on the link though no route says so.
    pub onlink: bool,
    /// The largest packet in bytes; 0 leaves it to the interface.
    pub mtu: u32,
}

/// A route as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedRoute {
    /// The protocol of what is routed.
    pub family: Family,
    /// Where to; `None` is everywhere.
    pub destination: Option<Network>,
    /// By whom.
    pub gateway: Option<IpAddr>,
    /// The interface's number; 0 for none.
    pub link: u32,
    /// From which own address.
    pub source: Option<IpAddr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// `RTNH_F_*`.
    pub flags: u32,
    /// The largest packet in bytes; 0 leaves it to the interface.
    pub mtu: u32,
}

fn describe(route: &Route) -> String {
    let mut text = route.destination.map_or_else(|| "default".to_owned(), |network| network.to_string());
    for (word, value) in [
        (" via ", route.gateway.map(|gateway| gateway.to_string())),
        (" dev ", route.device.as_ref().map(Name::to_string)),
        (" src ", route.source.map(|source| source.to_string())),
    ] {
        text.extend(value.into_iter().flat_map(|value| [word.to_owned(), value]));
    }
    text
}

fn message(link: Option<u32>, route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.address_family = route.family.into();
    header.table = RouteHeader::RT_TABLE_MAIN;
    header.protocol = RouteProtocol::Static;
    header.kind = RouteType::Unicast;
    header.scope = RouteScope::from(route.scope);
    header.flags = if route.onlink { RouteFlags::Onlink } else { RouteFlags::empty() };
    let attributes = &mut message.attributes;
    if let Some(destination) = route.destination.map(Network::masked) {
        header.destination_prefix_length = destination.prefix();
        attributes.push(RouteAttribute::Destination(destination.address().into()));
    }
    attributes.extend(route.gateway.map(|gateway| {
        if Family::of(gateway) == route.family {
            RouteAttribute::Gateway(gateway.into())
        } else {
            RouteAttribute::Via(gateway.into())
        }
    }));
    attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(source.into())));
    attributes.extend(link.map(RouteAttribute::Oif));
    if route.mtu != 0 {
        attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(route.mtu)]));
    }
    message
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

fn via(via: &RouteVia) -> Option<IpAddr> {
    match via {
        RouteVia::Inet(address) => Some((*address).into()),
        RouteVia::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

impl ListedRoute {
    /// One for each way that a route has; none for what is not a route of the main table.
    fn of(message: &RouteMessage) -> Vec<Self> {
        let header = &message.header;
        let family = match header.address_family {
            AddressFamily::Inet => Family::V4,
            AddressFamily::Inet6 => Family::V6,
            _ => return vec![],
        };
        let mut route = Self {
            family,
            destination: None,
            gateway: None,
            link: 0,
            source: None,
            scope: header.scope.into(),
            flags: header.flags.bits(),
            mtu: 0,
        };
        let mut table = u32::from(header.table);
        let mut ways = Vec::new();
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Table(number) => table = *number,
                RouteAttribute::Destination(address) => {
                    route.destination = ip(address).and_then(|ip| Network::new(ip, header.destination_prefix_length));
                }
                RouteAttribute::Gateway(address) => route.gateway = ip(address),
                RouteAttribute::Via(address) => route.gateway = via(address),
                RouteAttribute::Oif(link) => route.link = *link,
                RouteAttribute::PrefSource(address) => route.source = ip(address),
                RouteAttribute::Metrics(metrics) => {
                    let mtu = metrics
                        .iter()
                        .find_map(|metric| if let RouteMetric::Mtu(mtu) = metric { Some(*mtu) } else { None });
                    route.mtu = mtu.unwrap_or(0);
                }
                RouteAttribute::MultiPath(hops) => ways = hops.clone(),
                _ => {}
            }
        }
        // Copies of routes that the kernel keeps for itself are no routes of the table.
        let wanted = header.kind == RouteType::Unicast && !header.flags.contains(RouteFlags::Cloned);
        if table != u32::from(RouteHeader::RT_TABLE_MAIN) || !wanted {
            return vec![];
        }
        if ways.is_empty() {
            return vec![route];
        }
        let each = |hop: netlink_packet_route::route::RouteNextHop| {
            let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Gateway(address) => ip(address),
                RouteAttribute::Via(address) => via(address),
                _ => None,
            });
            Self { gateway, link: hop.interface_index, flags: hop.flags.bits().into(), ..route.clone() }
        };
        ways.into_iter().map(each).collect()
    }
}

/// The numbers of interfaces by their names.
///
/// # Errors
/// One is missing: the error names it, its place in the request, and what there is.
pub(crate) fn devices<'a>(
    links: &[Link],
    what: &str,
    names: impl Iterator<Item = Option<&'a Name>>,
) -> Result<Vec<Option<u32>>> {
    let numbers: HashMap<&str, u32> = links.iter().map(|link| (link.name.as_str(), link.index)).collect();
    let find = |(at, name): (usize, Option<&Name>)| match name {
        None => Ok(None),
        Some(name) => numbers.get(name.as_str()).map(|number| Some(*number)).ok_or_else(|| {
            let there: Vec<&str> = links.iter().map(|link| link.name.as_str()).take(32).collect();
            Error::NoLink(format!("{what} {at} names interface {name}; there are {}", there.join(", ")))
        }),
    };
    names.enumerate().map(find).collect()
}

impl Netlink {
    /// The main table's routes of both protocols, the kernel's own included.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn routes(&mut self) -> Result<Vec<ListedRoute>> {
        let mut all = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = RouteMessage::default();
            message.header.address_family = family;
            let listed = self.list("list routes", &RouteNetlinkMessage::GetRoute(message), |entry| match entry {
                RouteNetlinkMessage::NewRoute(route) => ListedRoute::of(&route),
                _ => vec![],
            });
            match listed {
                Ok(listed) => all.extend(listed),
                // A kernel without IPv6.
                Err(error) if family == AddressFamily::Inet6 && error.errno() == Some(Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    fn replace_route(&mut self, at: usize, link: Option<u32>, route: &Route) -> Result<()> {
        let what = format!("route {at} ({})", describe(route));
        let message = RouteNetlinkMessage::NewRoute(message(link, route));
        if route.family == Family::V6 && route.gateway.is_none() {
            // Two interfaces can have the same IPv6 network, and REPLACE would
            // take the other's route away.
            return match self.act(what, message, NLM_F_CREATE) {
                Err(Error::Refused { source: Errno::EXIST, .. }) => Ok(()),
                done => done,
            };
        }
        self.act(what, message, NLM_F_CREATE | NLM_F_REPLACE)
    }
}

/// Puts these routes into the main table: those without a gateway first,
/// because the others need them. One to the same destination is replaced, none
/// is deleted. Those of IPv6 are passed over where there is none.
///
/// # Errors
/// An interface is missing, and then nothing is changed; or the kernel refuses
/// one, which the error names by its place in `routes`, and those before it are there.
pub fn replace_routes(netlink: &mut Netlink, routes: &[Route], proc: &Path) -> Result<()> {
    let links = devices(&netlink.links()?, "route", routes.iter().map(|route| route.device.as_ref()))?;
    let mut ordered: Vec<(usize, &Route, Option<u32>)> =
        routes.iter().zip(links).enumerate().map(|(at, (route, link))| (at, route, link)).collect();
    ordered.sort_by_key(|(_, route, _)| route.gateway.is_some());
    for (at, route, link) in ordered {
        if route.family == Family::V6 && !has_ipv6(proc, route.device.as_ref().map(Name::as_str)) {
            continue;
        }
        netlink.replace_route(at, link, route)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn route() -> impl Strategy<Value = Route> {
        let ip = (any::<u128>(), any::<bool>()).prop_map(|(bits, v6)| {
            if v6 { IpAddr::V6(std::net::Ipv6Addr::from_bits(bits)) } else { IpAddr::V4([10, 1, 2, 3].into()) }
        });
        let network =
            (ip.clone(), 1u8..=32).prop_map(|(address, prefix)| Network::new(address, prefix).unwrap().masked());
        let optional = (proptest::option::of(ip), proptest::option::of(network));
        (optional, any::<u8>(), any::<bool>(), 0u32..9000).prop_map(|((gateway, destination), scope, onlink, mtu)| {
            Route {
                family: destination.map(|network| network.address()).or(gateway).map_or(Family::V4, Family::of),
                destination,
                gateway,
                device: None,
                source: None,
                scope,
                onlink,
                mtu,
            }
        })
    }

    proptest! {
        #[test]
        fn what_is_sent_reads_as_what_was_meant(route in route(), link in 1u32..) {
            let read = ListedRoute::of(&message(Some(link), &route));
            let flags = if route.onlink { ONLINK } else { 0 };
            let Route { family, destination, gateway, source, scope, mtu, .. } = route;
            prop_assert_eq!(read, vec![ListedRoute { family, destination, gateway, link, source, scope, flags, mtu }]);
        }
    }

    #[test]
    fn a_missing_interface_is_named_with_its_place() {
        let links = [Link { index: 1, name: "lo".into(), ..Link::default() }];
        let names: Vec<Name> = ["lo", "eth9"].map(|name| name.parse().unwrap()).into();
        let error = devices(&links, "route", names.iter().map(Some)).unwrap_err().to_string();
        assert_eq!(error, "Link not found: route 1 names interface eth9; there are lo");
        assert_eq!(devices(&links, "route", [Some(&names[0]), None].into_iter()).unwrap(), [Some(1), None]);
    }
}
