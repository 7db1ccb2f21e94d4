//! Routes of the main routing table.

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

/// `RTNH_F_ONLINK`: the gateway is directly reachable on the interface, even if no prefix matches.
pub const ONLINK: u32 = 4;

/// The address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Returns the family of an address.
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

/// A requested route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The address family.
    pub family: Family,
    /// The destination; `None` is the default route.
    pub destination: Option<Network>,
    /// The gateway.
    pub gateway: Option<IpAddr>,
    /// The output interface; `None`: the kernel derives it from the gateway.
    pub device: Option<Name>,
    /// The preferred source address.
    pub source: Option<IpAddr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// Whether to set [`ONLINK`].
    pub onlink: bool,
    /// The MTU in bytes; 0 uses the interface's.
    pub mtu: u32,
}

/// An existing route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedRoute {
    /// The address family.
    pub family: Family,
    /// The destination; `None` is the default route.
    pub destination: Option<Network>,
    /// The gateway.
    pub gateway: Option<IpAddr>,
    /// The interface's index; 0 for none.
    pub link: u32,
    /// The preferred source address.
    pub source: Option<IpAddr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// `RTNH_F_*`.
    pub flags: u32,
    /// The MTU in bytes; 0 uses the interface's.
    pub mtu: u32,
}

fn describe(route: &Route) -> String {
    let mut text = route.destination.map_or_else(|| "default".to_owned(), |network| network.to_string());
    for (keyword, value) in [
        (" via ", route.gateway.map(|gateway| gateway.to_string())),
        (" dev ", route.device.as_ref().map(Name::to_string)),
        (" src ", route.source.map(|source| source.to_string())),
    ] {
        text.extend(value.into_iter().flat_map(|value| [keyword.to_owned(), value]));
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
    /// Converts a message to one route per next hop; empty if it is not a unicast route of the main table.
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
        let mut next_hops = Vec::new();
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
                RouteAttribute::MultiPath(hops) => next_hops = hops.clone(),
                _ => {}
            }
        }
        // Cloned routes are cache entries of the kernel.
        let listed = header.kind == RouteType::Unicast && !header.flags.contains(RouteFlags::Cloned);
        if table != u32::from(RouteHeader::RT_TABLE_MAIN) || !listed {
            return vec![];
        }
        if next_hops.is_empty() {
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
        next_hops.into_iter().map(each).collect()
    }
}

/// Resolves interface names to indexes.
///
/// # Errors
/// One is missing: the error names it, its index in the request, and the existing interfaces.
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
            Error::LinkNotFound(format!("{what} {at} names interface {name}; there are {}", there.join(", ")))
        }),
    };
    names.enumerate().map(find).collect()
}

impl Netlink {
    /// Lists the main table's IPv4 and IPv6 routes, including those that the kernel added.
    ///
    /// # Errors
    /// The netlink request fails.
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
            // Two interfaces can have the same IPv6 network, and NLM_F_REPLACE would remove the other's route.
            return match self.request(what, message, NLM_F_CREATE) {
                Err(Error::Refused { source: Errno::EXIST, .. }) => Ok(()),
                done => done,
            };
        }
        self.request(what, message, NLM_F_CREATE | NLM_F_REPLACE)
    }
}

/// Adds routes to the main table: those without a gateway first, because the others need them. A route to the
/// same destination is replaced; none is deleted. IPv6 routes are skipped on interfaces without IPv6.
///
/// # Errors
/// An interface is missing, and nothing was changed; or the kernel refuses one, which the error names by its
/// index in `routes`, and those before it were added.
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
        fn route_messages_round_trip(route in route(), link in 1u32..) {
            let read = ListedRoute::of(&message(Some(link), &route));
            let flags = if route.onlink { ONLINK } else { 0 };
            let Route { family, destination, gateway, source, scope, mtu, .. } = route;
            prop_assert_eq!(read, vec![ListedRoute { family, destination, gateway, link, source, scope, flags, mtu }]);
        }
    }

    #[test]
    fn missing_interface_is_reported_with_its_index_in_the_request() {
        let links = [Link { index: 1, name: "lo".into(), ..Link::default() }];
        let names: Vec<Name> = ["lo", "eth9"].map(|name| name.parse().unwrap()).into();
        let error = devices(&links, "route", names.iter().map(Some)).unwrap_err().to_string();
        assert_eq!(error, "Link not found: route 1 names interface eth9; there are lo");
        assert_eq!(devices(&links, "route", [Some(&names[0]), None].into_iter()).unwrap(), [Some(1), None]);
    }
}
