//! Converts netlink replies to Kata's messages.

use std::collections::HashMap;
use std::net::IpAddr;

use firstlight_agent_api::agent::{Interfaces, Routes};
use firstlight_agent_api::types::{IPAddress, IPFamily, Interface, Route};
use firstlight_net::{Family, Link, LinkAddress, ListedRoute, Mac, Netlink};

use crate::error::Error;

pub(super) fn error(what: &str, error: &firstlight_net::Error) -> Error {
    Error::internal(format!("{what}: {error}"))
}

fn family(address: IpAddr) -> IPFamily {
    match Family::of(address) {
        Family::V4 => IPFamily::v4,
        Family::V6 => IPFamily::v6,
    }
}

fn interface(link: &Link, addresses: &[LinkAddress]) -> Interface {
    let own = addresses.iter().filter(|address| address.link == link.index).map(|address| IPAddress {
        family: family(address.network.address()).into(),
        address: address.network.address().to_string(),
        mask: address.network.prefix().to_string(),
        ..Default::default()
    });
    Interface {
        device: link.name.clone(),
        name: link.name.clone(),
        IPAddresses: own.collect(),
        mtu: link.mtu.into(),
        hwAddr: Mac::text(&link.address),
        type_: link.kind.clone(),
        raw_flags: link.flags,
        ..Default::default()
    }
}

fn route(route: &ListedRoute, names: &HashMap<u32, &str>) -> Route {
    let text = |address: Option<IpAddr>| address.map(|address| address.to_string()).unwrap_or_default();
    Route {
        dest: route.destination.map(|network| network.to_string()).unwrap_or_default(),
        gateway: text(route.gateway),
        device: names.get(&route.link).copied().unwrap_or_default().to_owned(),
        source: text(route.source),
        scope: route.scope.into(),
        family: if route.family == Family::V4 { IPFamily::v4 } else { IPFamily::v6 }.into(),
        flags: route.flags,
        mtu: route.mtu,
        ..Default::default()
    }
}

pub(super) fn interfaces(netlink: &mut Netlink) -> firstlight_net::Result<Interfaces> {
    let (links, addresses) = (netlink.links()?, netlink.addresses()?);
    let all = links.iter().map(|link| interface(link, &addresses)).collect();
    Ok(Interfaces { Interfaces: all, ..Default::default() })
}

pub(super) fn routes(netlink: &mut Netlink) -> firstlight_net::Result<Routes> {
    let (routes, links) = (netlink.routes()?, netlink.links()?);
    let names = links.iter().map(|link| (link.index, link.name.as_str())).collect();
    Ok(Routes { Routes: routes.iter().map(|one| route(one, &names)).collect(), ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_have_their_own_families() {
        let link = Link { index: 1, name: "lo".into(), address: vec![0; 6], mtu: 65536, flags: 9, kind: String::new() };
        let address = |text: &str, link| LinkAddress { link, network: text.parse().unwrap() };
        let all = [address("127.0.0.1/8", 1), address("::1/128", 1), address("10.0.0.1/8", 2)];
        let wire = interface(&link, &all);
        let converted: Vec<_> =
            wire.IPAddresses.iter().map(|it| (it.family.unwrap(), it.address.as_str(), it.mask.as_str())).collect();
        assert_eq!(converted, [(IPFamily::v4, "127.0.0.1", "8"), (IPFamily::v6, "::1", "128")]);
        assert_eq!((wire.name.as_str(), wire.hwAddr.as_str(), wire.mtu), ("lo", "00:00:00:00:00:00", 65536));
    }

    #[test]
    fn routes_are_converted() {
        let listed = ListedRoute {
            family: Family::V6,
            destination: None,
            gateway: Some("fe80::1".parse().unwrap()),
            link: 2,
            source: None,
            scope: 0,
            flags: 4,
            mtu: 1300,
        };
        let wire = route(&listed, &HashMap::from([(2, "eth0")]));
        assert_eq!((wire.dest.as_str(), wire.gateway.as_str(), wire.device.as_str()), ("", "fe80::1", "eth0"));
        assert_eq!((wire.family.unwrap(), wire.flags, wire.mtu, wire.source.as_str()), (IPFamily::v6, 4, 1300, ""));
        assert_eq!(route(&listed, &HashMap::new()).device, "");
    }
}
