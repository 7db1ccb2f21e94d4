//! Validates network requests: every field is untrusted input, and errors name the field.

use std::fmt::Display;
use std::net::IpAddr;

use firstlight_agent_api::types::{ARPNeighbor, IPFamily, Interface, Route};
use firstlight_net::{Family, Mac, NOARP, Name, Neighbour, Network, ONLINK, Target};

use crate::error::{Error, Result};

/// Upper bounds per request: above any pod's needs, and handled within a shim's timeout.
const MAX_ADDRESSES: usize = 256;
const MAX_ROUTES: usize = 8192;
const MAX_NEIGHBOURS: usize = 8192;

/// Default state of a neighbour; `NUD_PERMANENT`.
const PERMANENT: u16 = 0x80;

/// A validated UpdateInterface request. Its target may depend on a device that is not present yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InterfaceRequest {
    /// PCI path of its device.
    pub(super) pci_path: Option<String>,
    mac: Option<Mac>,
    name: Name,
    addresses: Vec<Network>,
    mtu: Option<u32>,
    noarp: bool,
}

fn invalid(field: impl Display, why: impl Display) -> Error {
    Error::invalid(format!("{field}: {why}"))
}

fn check_len<T>(field: &str, all: &[T], most: usize) -> Result<()> {
    if all.len() > most {
        return Err(invalid(field, format_args!("{} entries; at most {most} are accepted in one request", all.len())));
    }
    Ok(())
}

fn ip(field: impl Display, text: &str) -> Result<IpAddr> {
    text.parse().map_err(|_| {
        let cut: String = text.chars().take(60).collect();
        invalid(field, format_args!("{cut:?} is not an IP address"))
    })
}

/// Returns `None` for an empty text.
fn optional<T>(text: &str, read: impl FnOnce(&str) -> Result<T>) -> Result<Option<T>> {
    if text.is_empty() { Ok(None) } else { read(text).map(Some) }
}

fn name(field: impl Display, text: &str) -> Result<Name> {
    text.parse().map_err(|error| invalid(field, error))
}

pub(super) fn interface(request: &Interface) -> Result<InterfaceRequest> {
    check_len("interface.IPAddresses", &request.IPAddresses, MAX_ADDRESSES)?;
    let text = if request.name.is_empty() { &request.device } else { &request.name };
    let addresses = request.IPAddresses.iter().enumerate().map(|(at, address)| {
        Network::parse(&address.address, &address.mask)
            .map_err(|error| invalid(format_args!("interface.IPAddresses[{at}]"), error))
    });
    let mtu =
        u32::try_from(request.mtu).map_err(|_| invalid("interface.mtu", format_args!("{} bytes", request.mtu)))?;
    let checked = InterfaceRequest {
        pci_path: Some(request.devicePath.clone()).filter(|path| !path.is_empty()),
        mac: optional(&request.hwAddr, |text| text.parse().map_err(|error| invalid("interface.hwAddr", error)))?,
        name: name("interface.name", text)?,
        addresses: addresses.collect::<Result<_>>()?,
        mtu: Some(mtu).filter(|mtu| *mtu != 0),
        noarp: request.raw_flags & NOARP != 0,
    };
    if checked.mac.is_none() && checked.pci_path.is_none() {
        return Err(invalid("interface", "hwAddr and devicePath are empty, so the interface is not identified"));
    }
    Ok(checked)
}

impl InterfaceRequest {
    /// Completes the request with the current name of the device at its PCI path.
    pub(super) fn with_device(self, now: Option<&str>) -> Result<firstlight_net::Interface> {
        let Self { mac, name, addresses, mtu, noarp, .. } = self;
        let target = match (now, mac) {
            (Some(now), mac) => Target::Device { now: self::name("interface.devicePath", now)?, mac },
            (None, Some(mac)) => Target::Mac(mac),
            (None, None) => return Err(invalid("interface.hwAddr", "must not be empty")),
        };
        Ok(firstlight_net::Interface { target, name, addresses, mtu, noarp })
    }
}

pub(super) fn routes(request: &[Route]) -> Result<Vec<firstlight_net::Route>> {
    check_len("routes", request, MAX_ROUTES)?;
    request.iter().enumerate().map(|(at, one)| route(at, one)).collect()
}

fn route(at: usize, request: &Route) -> Result<firstlight_net::Route> {
    let field = |field: &str| format!("routes[{at}].{field}");
    let destination =
        optional(&request.dest, |text| text.parse::<Network>().map_err(|error| invalid(field("dest"), error)))?;
    let gateway = optional(&request.gateway, |text| ip(field("gateway"), text))?;
    let source = optional(&request.source, |text| ip(field("source"), text))?;
    let device = optional(&request.device, |text| name(field("device"), text))?;
    let given_family = match request.family.enum_value() {
        Ok(IPFamily::v4) => Family::V4,
        Ok(IPFamily::v6) => Family::V6,
        Err(number) => return Err(invalid(field("family"), format_args!("{number} is neither 0 (v4) nor 1 (v6)"))),
    };
    // An address takes precedence over a field whose default is 0.
    let family = destination.map(|to| to.address()).or(gateway).or(source).map_or(given_family, Family::of);
    if source.is_some_and(|source| Family::of(source) != family) {
        return Err(invalid(field("source"), "its address family differs from dest and gateway"));
    }
    if family == Family::V6 && gateway.is_some_and(|gateway| gateway.is_ipv4()) {
        return Err(invalid(field("gateway"), "an IPv4 gateway cannot route IPv6 addresses"));
    }
    if device.is_none() && gateway.is_none() {
        return Err(invalid(field("device"), "device and gateway are both empty"));
    }
    let scope = u8::try_from(request.scope)
        .map_err(|_| invalid(field("scope"), format_args!("{} is above 255", request.scope)))?;
    Ok(firstlight_net::Route {
        family,
        destination: destination.filter(|network| network.prefix() != 0),
        gateway,
        device,
        source,
        scope,
        onlink: request.flags & ONLINK != 0,
        mtu: request.mtu,
    })
}

pub(super) fn neighbours(request: &[ARPNeighbor]) -> Result<Vec<Neighbour>> {
    check_len("neighbors", request, MAX_NEIGHBOURS)?;
    request.iter().enumerate().map(|(at, one)| neighbour(at, one)).collect()
}

fn neighbour(at: usize, request: &ARPNeighbor) -> Result<Neighbour> {
    let field = |field: &str| format!("neighbors[{at}].{field}");
    let address = request.toIPAddress.as_ref().map_or("", |address| &address.address);
    let wrong = |name: &str, value: i32| invalid(field(name), format_args!("{value} is not between 0 and 255"));
    let state = u8::try_from(request.state).map_err(|_| wrong("state", request.state))?;
    Ok(Neighbour {
        address: ip(field("toIPAddress.address"), address)?,
        device: name(field("device"), &request.device)?,
        mac: optional(&request.lladdr, |text| Mac::any(text).map_err(|error| invalid(field("lladdr"), error)))?,
        state: if state == 0 { PERMANENT } else { state.into() },
        flags: u8::try_from(request.flags).map_err(|_| wrong("flags", request.flags))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_agent_api::types::IPAddress;
    use proptest::prelude::*;

    /// A field's name, and a change that makes a valid request invalid.
    type Case<T> = (&'static str, fn(&mut T));

    fn address(address: &str, mask: &str) -> IPAddress {
        IPAddress { address: address.into(), mask: mask.into(), ..Default::default() }
    }

    fn good() -> Interface {
        Interface {
            device: "eth0".into(),
            name: "eth0".into(),
            IPAddresses: vec![address("10.0.0.5", "24"), address("fd00::5", "64")],
            mtu: 1400,
            hwAddr: "02:00:00:00:00:05".into(),
            raw_flags: 0x80 | 1,
            ..Default::default()
        }
    }

    #[test]
    fn interface_requests_of_shims_are_parsed() {
        let checked = interface(&good()).unwrap().with_device(None).unwrap();
        assert_eq!(checked.target, Target::Mac("02:00:00:00:00:05".parse().unwrap()));
        assert_eq!((checked.name.as_str(), checked.mtu, checked.noarp), ("eth0", Some(1400), true));
        assert_eq!(checked.addresses.iter().map(Network::to_string).collect::<Vec<_>>(), ["10.0.0.5/24", "fd00::5/64"]);
        let plain = Interface { mtu: 0, raw_flags: 1, devicePath: "02/00".into(), hwAddr: String::new(), ..good() };
        let plain = interface(&plain).unwrap();
        assert_eq!(plain.pci_path.as_deref(), Some("02/00"));
        let plain = plain.with_device(Some("ens3")).unwrap();
        assert_eq!(plain.target, Target::Device { now: "ens3".parse().unwrap(), mac: None });
        assert_eq!((plain.mtu, plain.noarp), (None, false));
    }

    #[test]
    fn invalid_interface_field_is_reported() {
        let cases: &[Case<Interface>] = &[
            ("interface.name", |it| it.name = "a/b".into()),
            ("interface.name", |it| it.name = "eth0\0".into()),
            ("interface.name", |it| it.name = "x".repeat(1 << 20)),
            ("interface.name", |it| (it.name, it.device) = Default::default()),
            ("interface.hwAddr", |it| it.hwAddr = "00:00:00:00:00:00".into()),
            ("interface.hwAddr", |it| it.hwAddr = "zz".repeat(1 << 20)),
            ("interface: hwAddr and devicePath", |it| it.hwAddr.clear()),
            ("interface.mtu", |it| it.mtu = 1 << 32),
            ("interface.IPAddresses[1]", |it| it.IPAddresses[1].mask = "255.255.255.0".into()),
            ("interface.IPAddresses[0]", |it| it.IPAddresses[0].address = "10.0.0".into()),
            ("interface.IPAddresses[0]", |it| it.IPAddresses[0].mask = "33".into()),
            ("interface.IPAddresses: 300 entries", |it| it.IPAddresses = vec![IPAddress::new(); 300]),
        ];
        for (field, spoil) in cases {
            let mut request = good();
            spoil(&mut request);
            let error = interface(&request).unwrap_err();
            assert!(
                error.code == ttrpc::Code::INVALID_ARGUMENT && error.message.starts_with(field),
                "{field}: {error}"
            );
            assert!(error.message.len() < 300, "{field}");
        }
    }

    fn to(dest: &str, gateway: &str) -> Route {
        Route { dest: dest.into(), gateway: gateway.into(), device: "eth0".into(), ..Default::default() }
    }

    #[test]
    fn routes_of_shims_are_parsed() {
        let parsed = |route: Route| {
            let route = &routes(&[route]).unwrap()[0];
            (route.family, route.destination.map(|to| to.to_string()).unwrap_or_default(), route.gateway.is_some())
        };
        assert_eq!(parsed(to("", "10.0.0.1")), (Family::V4, String::new(), true));
        assert_eq!(parsed(to("0.0.0.0/0", "10.0.0.1")), (Family::V4, String::new(), true));
        assert_eq!(parsed(to("::/0", "fe80::1")), (Family::V6, String::new(), true));
        assert_eq!(parsed(to("", "fe80::1")), (Family::V6, String::new(), true));
        assert_eq!(parsed(to("10.1.0.0/16", "")), (Family::V4, "10.1.0.0/16".into(), false));
        assert_eq!(parsed(to("10.1.0.1", "")), (Family::V4, "10.1.0.1/32".into(), false));
        assert_eq!(parsed(to("10.1.0.0/16", "fe80::1")), (Family::V4, "10.1.0.0/16".into(), true));
        let nothing = Route { family: IPFamily::v6.into(), ..to("", "") };
        assert_eq!(parsed(nothing), (Family::V6, String::new(), false));
        let full = Route { source: "10.0.0.5".into(), scope: 253, flags: 4 | 16, mtu: 1300, ..to("10.0.0.0/24", "") };
        let full = &routes(&[full]).unwrap()[0];
        assert_eq!((full.source, full.scope, full.onlink, full.mtu), (Some([10, 0, 0, 5].into()), 253, true, 1300));
    }

    #[test]
    fn invalid_route_field_is_reported() {
        let cases: &[Case<Route>] = &[
            ("routes[1].dest", |it| it.dest = "10.0.0.0/99".into()),
            ("routes[1].gateway", |it| it.gateway = "gw".into()),
            ("routes[1].gateway", |it| (it.dest, it.gateway) = ("fd00::/8".into(), "10.0.0.1".into())),
            ("routes[1].source", |it| it.source = "10.0.0.5/24".into()),
            ("routes[1].source", |it| it.source = "fd00::1".into()),
            ("routes[1].device", |it| it.device = "a b".into()),
            ("routes[1].device", |it| (it.device, it.gateway) = Default::default()),
            ("routes[1].scope", |it| it.scope = 256),
            ("routes[1].family", |it| it.family = protobuf::EnumOrUnknown::from_i32(7)),
        ];
        for (field, spoil) in cases {
            let mut request = to("10.0.0.0/8", "10.0.0.1");
            spoil(&mut request);
            let error = routes(&[to("", "10.0.0.1"), request]).unwrap_err();
            assert!(
                error.code == ttrpc::Code::INVALID_ARGUMENT && error.message.starts_with(field),
                "{field}: {error}"
            );
        }
        let error = routes(&vec![to("", "10.0.0.1"); 100_000]).unwrap_err();
        assert_eq!(error, Error::invalid("routes: 100000 entries; at most 8192 are accepted in one request"));
    }

    #[test]
    fn neighbours_are_permanent_by_default() {
        let one = |state, flags, lladdr: &str| ARPNeighbor {
            toIPAddress: Some(address("10.0.0.9", "")).into(),
            device: "eth0".into(),
            lladdr: lladdr.into(),
            state,
            flags,
            ..Default::default()
        };
        let all = neighbours(&[one(0, 0, "02:00:00:00:00:09"), one(4, 0x80, "")]).unwrap();
        assert_eq!((all[0].state, all[1].state, all[1].flags, all[1].mac.is_none()), (0x80, 4, 0x80, true));
        for (field, request) in [
            ("neighbors[0].state", one(256, 0, "")),
            ("neighbors[0].state", one(-1, 0, "")),
            ("neighbors[0].flags", one(0, 256, "")),
            ("neighbors[0].lladdr", one(0, 0, "x")),
            ("neighbors[0].toIPAddress.address", ARPNeighbor { toIPAddress: None.into(), ..one(0, 0, "") }),
            ("neighbors[0].device", ARPNeighbor { device: "..".into(), ..one(0, 0, "") }),
        ] {
            let error = neighbours(&[request]).unwrap_err();
            assert!(error.message.starts_with(field), "{field}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_request_is_valid_or_a_one_line_error(
            texts in proptest::array::uniform5("\\PC{0,30}|[0-9a-f.:/]{0,20}"), numbers: (u64, u32, i32)
        ) {
            let [a, b, c, d, e] = texts;
            let one = Interface { name: a.clone(), hwAddr: b.clone(), IPAddresses: vec![address(&c, &d)], mtu: numbers.0, devicePath: e.clone(), ..Default::default() };
            let hop = Route { dest: a, gateway: b.clone(), source: c.clone(), device: d.clone(), scope: numbers.1, ..Default::default() };
            let known = ARPNeighbor { toIPAddress: Some(address(&c, "")).into(), device: d, lladdr: e, state: numbers.2, ..Default::default() };
            let errors = [interface(&one).err(), routes(&[hop]).err(), neighbours(&[known]).err()];
            for error in errors.into_iter().flatten() {
                prop_assert!(error.code == ttrpc::Code::INVALID_ARGUMENT && !error.message.contains('\n'), "{}", error);
            }
        }
    }
}
