//! Requests, checked: every field's text is the host's, so nothing of it is
//! believed, and an error names the field.

use std::fmt::Display;
use std::net::IpAddr;

use firstlight_agent_api::types::{ARPNeighbor, IPFamily, Interface, Route};
use firstlight_net::{Family, Mac, NOARP, Name, Neighbour, Network, ONLINK, Target};

use crate::error::{Error, Result};

/// More than any pod has, and few enough to be done before a shim gives up.
const MOST_ADDRESSES: usize = 256;
const MOST_ROUTES: usize = 8192;
const MOST_NEIGHBOURS: usize = 8192;

/// A neighbour is known for good unless the request says how well; `NUD_PERMANENT`.
const PERMANENT: u16 = 0x80;

/// An interface as a request wants it. Which one it is may depend on a device
/// that has yet to be found.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Its place on the bus.
    pub(super) place: Option<String>,
    mac: Option<Mac>,
    name: Name,
    addresses: Vec<Network>,
    mtu: Option<u32>,
    noarp: bool,
}

fn invalid(field: impl Display, why: impl Display) -> Error {
    Error::invalid(format!("{field}: {why}"))
}

fn few<T>(field: &str, all: &[T], most: usize) -> Result<()> {
    if all.len() > most {
        return Err(invalid(field, format_args!("{} of them; at most {most} are taken in one request", all.len())));
    }
    Ok(())
}

fn ip(field: impl Display, text: &str) -> Result<IpAddr> {
    text.parse().map_err(|_| {
        let cut: String = text.chars().take(60).collect();
        invalid(field, format_args!("{cut:?} is not an IP address"))
    })
}

/// `None` for an empty text.
fn optional<T>(text: &str, read: impl FnOnce(&str) -> Result<T>) -> Result<Option<T>> {
    if text.is_empty() { Ok(None) } else { read(text).map(Some) }
}

fn name(field: impl Display, text: &str) -> Result<Name> {
    text.parse().map_err(|error| invalid(field, error))
}

pub(super) fn interface(request: &Interface) -> Result<Wanted> {
    few("interface.IPAddresses", &request.IPAddresses, MOST_ADDRESSES)?;
    let text = if request.name.is_empty() { &request.device } else { &request.name };
    let addresses = request.IPAddresses.iter().enumerate().map(|(at, address)| {
        Network::parse(&address.address, &address.mask)
            .map_err(|error| invalid(format_args!("interface.IPAddresses[{at}]"), error))
    });
    let mtu =
        u32::try_from(request.mtu).map_err(|_| invalid("interface.mtu", format_args!("{} bytes", request.mtu)))?;
    let wanted = Wanted {
        place: Some(request.devicePath.clone()).filter(|place| !place.is_empty()),
        mac: optional(&request.hwAddr, |text| text.parse().map_err(|error| invalid("interface.hwAddr", error)))?,
        name: name("interface.name", text)?,
        addresses: addresses.collect::<Result<_>>()?,
        mtu: Some(mtu).filter(|mtu| *mtu != 0),
        noarp: request.raw_flags & NOARP != 0,
    };
    if wanted.mac.is_none() && wanted.place.is_none() {
        return Err(invalid("interface", "hwAddr and devicePath are empty, so nothing says which one is meant"));
    }
    Ok(wanted)
}

impl Wanted {
    /// The same once it is known what the device at its place is called.
    pub(super) fn with_device(self, now: Option<&str>) -> Result<firstlight_net::Interface> {
        let Self { mac, name, addresses, mtu, noarp, .. } = self;
        let target = match (now, mac) {
            (Some(now), mac) => Target::Device { now: self::name("interface.devicePath", now)?, mac },
            (None, Some(mac)) => Target::Mac(mac),
            (None, None) => return Err(invalid("interface.hwAddr", "it is empty")),
        };
        Ok(firstlight_net::Interface { target, name, addresses, mtu, noarp })
    }
}

pub(super) fn routes(request: &[Route]) -> Result<Vec<firstlight_net::Route>> {
    few("routes", request, MOST_ROUTES)?;
    request.iter().enumerate().map(|(at, one)| route(at, one)).collect()
}

fn route(at: usize, request: &Route) -> Result<firstlight_net::Route> {
    let field = |field: &str| format!("routes[{at}].{field}");
    let destination =
        optional(&request.dest, |text| text.parse::<Network>().map_err(|error| invalid(field("dest"), error)))?;
    let gateway = optional(&request.gateway, |text| ip(field("gateway"), text))?;
    let source = optional(&request.source, |text| ip(field("source"), text))?;
    let device = optional(&request.device, |text| name(field("device"), text))?;
    let said = match request.family.enum_value() {
        Ok(IPFamily::v4) => Family::V4,
        Ok(IPFamily::v6) => Family::V6,
        Err(number) => return Err(invalid(field("family"), format_args!("{number} is neither 0 (v4) nor 1 (v6)"))),
    };
    // An address says more than a field that is 0 when it was not set.
    let family = destination.map(|to| to.address()).or(gateway).or(source).map_or(said, Family::of);
    if source.is_some_and(|source| Family::of(source) != family) {
        return Err(invalid(field("source"), "it is not of the same protocol as dest and gateway"));
    }
    if family == Family::V6 && gateway.is_some_and(|gateway| gateway.is_ipv4()) {
        return Err(invalid(field("gateway"), "an IPv4 gateway cannot be the way to IPv6 addresses"));
    }
    if device.is_none() && gateway.is_none() {
        return Err(invalid(field("device"), "it is empty, and so is gateway"));
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
    few("neighbors", request, MOST_NEIGHBOURS)?;
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

    /// A field's name, and what is done to a good request to spoil it.
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
    fn an_interface_as_shims_ask_for_it() {
        let wanted = interface(&good()).unwrap().with_device(None).unwrap();
        assert_eq!(wanted.target, Target::Mac("02:00:00:00:00:05".parse().unwrap()));
        assert_eq!((wanted.name.as_str(), wanted.mtu, wanted.noarp), ("eth0", Some(1400), true));
        assert_eq!(wanted.addresses.iter().map(Network::to_string).collect::<Vec<_>>(), ["10.0.0.5/24", "fd00::5/64"]);
        let plain = Interface { mtu: 0, raw_flags: 1, devicePath: "02/00".into(), hwAddr: String::new(), ..good() };
        let plain = interface(&plain).unwrap();
        assert_eq!(plain.place.as_deref(), Some("02/00"));
        let plain = plain.with_device(Some("ens3")).unwrap();
        assert_eq!(plain.target, Target::Device { now: "ens3".parse().unwrap(), mac: None });
        assert_eq!((plain.mtu, plain.noarp), (None, false));
    }

    #[test]
    fn what_is_wrong_with_an_interface_is_named() {
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
            ("interface.IPAddresses: 300 of them", |it| it.IPAddresses = vec![IPAddress::new(); 300]),
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
    fn routes_as_shims_ask_for_them() {
        let said = |route: Route| {
            let route = &routes(&[route]).unwrap()[0];
            (route.family, route.destination.map(|to| to.to_string()).unwrap_or_default(), route.gateway.is_some())
        };
        assert_eq!(said(to("", "10.0.0.1")), (Family::V4, String::new(), true));
        assert_eq!(said(to("0.0.0.0/0", "10.0.0.1")), (Family::V4, String::new(), true));
        assert_eq!(said(to("::/0", "fe80::1")), (Family::V6, String::new(), true));
        assert_eq!(said(to("", "fe80::1")), (Family::V6, String::new(), true));
        assert_eq!(said(to("10.1.0.0/16", "")), (Family::V4, "10.1.0.0/16".into(), false));
        assert_eq!(said(to("10.1.0.1", "")), (Family::V4, "10.1.0.1/32".into(), false));
        assert_eq!(said(to("10.1.0.0/16", "fe80::1")), (Family::V4, "10.1.0.0/16".into(), true));
        let nothing = Route { family: IPFamily::v6.into(), ..to("", "") };
        assert_eq!(said(nothing), (Family::V6, String::new(), false));
        let full = Route { source: "10.0.0.5".into(), scope: 253, flags: 4 | 16, mtu: 1300, ..to("10.0.0.0/24", "") };
        let full = &routes(&[full]).unwrap()[0];
        assert_eq!((full.source, full.scope, full.onlink, full.mtu), (Some([10, 0, 0, 5].into()), 253, true, 1300));
    }

    #[test]
    fn what_is_wrong_with_a_route_is_named() {
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
        assert_eq!(error, Error::invalid("routes: 100000 of them; at most 8192 are taken in one request"));
    }

    #[test]
    fn neighbours_are_permanent_unless_they_say_otherwise() {
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
        fn any_texts_are_a_request_or_an_error_of_one_line(
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
