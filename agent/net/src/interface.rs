//! An interface brought to what a request wants of it.
//!
//! What is to be done is worked out first, from what is there, as a list of
//! steps; so a request that finds everything as it wants it does nothing, and
//! routes and addresses outlive it.

use std::fmt;
use std::path::Path;

use crate::address::LinkAddress;
use crate::error::{Error, Result};
use crate::link::{Link, NOARP, UP};
use crate::names::{Mac, Name};
use crate::netlink::Netlink;
use crate::network::{Network, has_ipv6};

/// Which interface is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The one with this hardware address.
    Mac(Mac),
    /// The one that is called so now, because its place on the bus says that
    /// it is the one; only then may its hardware address be changed.
    Device {
        /// What it is called now.
        now: Name,
        /// Its hardware address to be.
        mac: Option<Mac>,
    },
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mac(mac) => write!(f, "hwAddr {mac}"),
            Self::Device { now, .. } => write!(f, "device {now}"),
        }
    }
}

/// What a request wants of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Which one.
    pub target: Target,
    /// Its name to be.
    pub name: Name,
    /// Addresses it has to have; others that it has are left alone.
    pub addresses: Vec<Network>,
    /// The largest packet in bytes, unless it may stay as it is.
    pub mtu: Option<u32>,
    /// Whether it must not ask for hardware addresses.
    pub noarp: bool,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Mac(u32, Mac),
    Rename { link: u32, from: Name, to: Name },
    Mtu(u32, u32),
    NoArp(u32),
    Address(u32, Network),
    Up(u32),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mac(_, mac) => write!(f, "set hwAddr {mac}"),
            Self::Rename { from, to, .. } => write!(f, "rename {from} to {to}"),
            Self::Mtu(_, mtu) => write!(f, "set MTU {mtu}"),
            Self::NoArp(_) => f.write_str("turn ARP off"),
            Self::Address(_, network) => write!(f, "add address {network}"),
            Self::Up(_) => f.write_str("bring up"),
        }
    }
}

/// The interface that is meant.
fn find<'a>(links: &'a [Link], want: &Interface) -> Result<&'a Link> {
    let found = match &want.target {
        Target::Device { now, .. } => links.iter().find(|link| link.name == now.as_str()),
        Target::Mac(mac) => {
            let same = || links.iter().filter(|link| link.address == mac.bytes() && !link.is_loopback());
            // A VLAN or a bridge shares its device's address, but came after it.
            same().find(|link| link.name == want.name.as_str()).or_else(|| same().next())
        }
    };
    found.ok_or_else(|| {
        let there: Vec<String> =
            links.iter().take(32).map(|link| format!("{} ({})", link.name, Mac::text(&link.address))).collect();
        Error::NoLink(format!("no interface has {}; there are {}", want.target, there.join(", ")))
    })
}

/// Names come from the kernel, which has them checked.
fn name(link: &Link) -> Result<Name> {
    link.name.parse().map_err(|error| Error::Impossible(format!("interface {}: {error}", link.index)))
}

/// The renaming. Whoever has the name now gets the other's for it.
fn rename(links: &[Link], link: &Link, want: &Name) -> Result<Vec<Step>> {
    if link.name == want.as_str() {
        return Ok(vec![]);
    }
    let from = name(link)?;
    let ours = Step::Rename { link: link.index, from: from.clone(), to: want.clone() };
    let Some(other) = links.iter().find(|other| other.name == want.as_str()) else { return Ok(vec![ours]) };
    if other.is_loopback() || link.is_loopback() {
        return Err(Error::Impossible(format!("cannot rename {from} to {want}: the loopback keeps its name")));
    }
    let passing = Name::passing(other.index);
    let aside = Step::Rename { link: other.index, from: want.clone(), to: passing.clone() };
    let back = Step::Rename { link: other.index, from: passing, to: from };
    Ok(vec![aside, ours, back])
}

fn plan(links: &[Link], addresses: &[LinkAddress], link: &Link, want: &Interface, ipv6: bool) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    if let Target::Device { mac: Some(mac), .. } = &want.target
        && link.address != mac.bytes()
    {
        steps.push(Step::Mac(link.index, mac.clone()));
    }
    steps.extend(rename(links, link, &want.name)?);
    steps.extend(want.mtu.filter(|mtu| *mtu != link.mtu).map(|mtu| Step::Mtu(link.index, mtu)));
    if want.noarp && link.flags & NOARP == 0 {
        steps.push(Step::NoArp(link.index));
    }
    for network in want.addresses.iter().filter(|network| ipv6 || !network.is_ipv6()) {
        if !addresses.contains(&LinkAddress { link: link.index, network: *network }) {
            steps.push(Step::Address(link.index, *network));
        }
    }
    if !link.is_up() {
        steps.push(Step::Up(link.index));
    }
    Ok(steps)
}

fn carry_out(netlink: &mut Netlink, step: &Step) -> Result<()> {
    match step {
        Step::Mac(link, mac) => netlink.set_mac(*link, mac),
        Step::Rename { link, to, .. } => netlink.set_name(*link, to),
        Step::Mtu(link, mtu) => netlink.set_mtu(*link, *mtu),
        Step::NoArp(link) => netlink.set_flags(*link, NOARP, NOARP),
        Step::Address(link, network) => netlink.add_address(*link, *network),
        Step::Up(link) => netlink.set_flags(*link, UP, UP),
    }
}

/// Gives the names back that a swap has got half way with, so that the next
/// try finds what this one found.
fn undo_names(netlink: &mut Netlink, done: &[Step]) {
    for step in done.iter().rev() {
        if let Step::Rename { link, from, to } = step
            && let Err(error) = netlink.set_name(*link, from)
        {
            log::error!("interface {to} cannot have its name {from} back: {error}");
        }
    }
}

/// Brings an interface to what is wanted: hardware address, name, MTU, flags,
/// addresses, up. Does only what is not so already. `proc` is where procfs is.
///
/// # Errors
/// [`Error::NoLink`]: there is no such interface, and nothing was changed.
/// [`Error::Step`]: the kernel refused that step; those before it were done,
/// but for names, which are as they were.
pub fn configure(netlink: &mut Netlink, want: &Interface, proc: &Path) -> Result<()> {
    let links = netlink.links()?;
    let link = find(&links, want)?;
    let ipv6 = has_ipv6(proc, Some(&link.name));
    let addresses = if want.addresses.is_empty() { Vec::new() } else { netlink.addresses()? };
    let steps = plan(&links, &addresses, link, want, ipv6)?;
    for (at, step) in steps.iter().enumerate() {
        if let Err(source) = carry_out(netlink, step) {
            if matches!(step, Step::Rename { .. }) {
                undo_names(netlink, &steps[..at]);
            }
            let interface = format!("{} ({})", want.name, want.target);
            return Err(Error::Step { interface, step: step.to_string(), source: Box::new(source) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mac(last: u8) -> Mac {
        Mac::text(&[2, 0, 0, 0, 0, last]).parse().unwrap()
    }

    fn link(index: u32, name: &str, last: u8) -> Link {
        let address = if last == 0 { vec![0; 6] } else { mac(last).bytes().to_vec() };
        let flags = if name == "lo" { UP | 8 } else { 0 };
        Link { index, name: name.into(), address, mtu: 1500, flags, kind: String::new() }
    }

    fn want(target: Target, name: &str) -> Interface {
        let addresses = vec!["10.0.0.5/24".parse().unwrap(), "fd00::5/64".parse().unwrap()];
        Interface { target, name: name.parse().unwrap(), addresses, mtu: Some(1400), noarp: true }
    }

    /// What the links are after the steps; the kernel's own rule about names is kept.
    fn simulate(links: &[Link], steps: &[Step]) -> Vec<Link> {
        let mut links = links.to_vec();
        for step in steps {
            let free = |name: &Name| !links.iter().any(|link| link.name == name.as_str());
            match step {
                Step::Rename { to, .. } => assert!(free(to), "{to} is taken"),
                Step::Address(..) => continue,
                _ => {}
            }
            let (Step::Mac(at, _)
            | Step::Rename { link: at, .. }
            | Step::Mtu(at, _)
            | Step::NoArp(at)
            | Step::Up(at)
            | Step::Address(at, _)) = step;
            let link = links.iter_mut().find(|link| link.index == *at).unwrap();
            match step {
                Step::Mac(_, mac) => link.address = mac.bytes().to_vec(),
                Step::Rename { from, to, .. } => {
                    assert_eq!(link.name, from.as_str());
                    link.name = to.as_str().to_owned();
                }
                Step::Mtu(_, mtu) => link.mtu = *mtu,
                Step::NoArp(_) => link.flags |= NOARP,
                Step::Up(_) => link.flags |= UP,
                Step::Address(..) => {}
            }
        }
        links
    }

    fn steps(links: &[Link], want: &Interface) -> Result<Vec<Step>> {
        let link = find(links, want)?;
        plan(links, &[], link, want, true)
    }

    #[test]
    fn a_new_interface_gets_everything_in_order() {
        let links = [link(1, "lo", 0), link(2, "ens1", 5)];
        let steps = steps(&links, &want(Target::Mac(mac(5)), "eth0")).unwrap();
        let said: Vec<String> = steps.iter().map(Step::to_string).collect();
        let expected = [
            "rename ens1 to eth0",
            "set MTU 1400",
            "turn ARP off",
            "add address 10.0.0.5/24",
            "add address fd00::5/64",
            "bring up",
        ];
        assert_eq!(said, expected);
    }

    #[test]
    fn nothing_is_done_to_one_that_is_as_wanted() {
        let mut there = link(2, "eth0", 5);
        (there.mtu, there.flags) = (1400, UP | NOARP);
        let want = want(Target::Mac(mac(5)), "eth0");
        let addresses: Vec<LinkAddress> =
            want.addresses.iter().map(|network| LinkAddress { link: 2, network: *network }).collect();
        let links = [there];
        assert_eq!(plan(&links, &addresses, &links[0], &want, true).unwrap(), []);
        // The same address elsewhere does not count, and IPv6 only where there is IPv6.
        let elsewhere = LinkAddress { link: 3, ..addresses[0] };
        let steps = plan(&links, &[elsewhere], &links[0], &want, false).unwrap();
        assert_eq!(steps, [Step::Address(2, want.addresses[0])]);
    }

    #[test]
    fn one_that_merely_has_the_name_is_not_taken_for_the_missing_one() {
        let links = [link(1, "lo", 0), link(2, "eth0", 7)];
        let error = steps(&links, &want(Target::Mac(mac(5)), "eth0")).unwrap_err().to_string();
        assert!(
            error.starts_with("Link not found: no interface has hwAddr 02:00:00:00:00:05; there are lo"),
            "{error}"
        );
        let device = Target::Device { now: "eth1".parse().unwrap(), mac: Some(mac(5)) };
        assert!(steps(&links, &want(device, "eth0")).unwrap_err().to_string().contains("device eth1"));
    }

    #[test]
    fn a_device_gets_its_hardware_address() {
        let links = [link(2, "eth1", 7)];
        let device = |mac| Target::Device { now: "eth1".parse().unwrap(), mac };
        assert_eq!(steps(&links, &want(device(Some(mac(5))), "eth1")).unwrap()[0], Step::Mac(2, mac(5)));
        for same in [None, Some(mac(7))] {
            assert!(
                !steps(&links, &want(device(same), "eth1")).unwrap().iter().any(|step| matches!(step, Step::Mac(..)))
            );
        }
    }

    #[test]
    fn the_loopback_keeps_its_name() {
        let links = [link(1, "lo", 0), link(2, "eth0", 5)];
        assert!(steps(&links, &want(Target::Mac(mac(5)), "lo")).unwrap_err().to_string().contains("loopback"));
    }

    proptest! {
        #[test]
        fn steps_lead_there_and_touch_nobody_else(count in 1usize..5, at in 0usize..5, name in 0usize..6, by_device: bool, to in 1u8..9) {
            let mut links = vec![link(1, "lo", 0)];
            links.extend((0..count).map(|n| link(u32::try_from(n).unwrap() + 2, &format!("eth{n}"), u8::try_from(n).unwrap() + 1)));
            let at = 1 + at % count;
            let wanted = if name == 5 { "net0".to_owned() } else { format!("eth{name}") };
            let (now, own) = (links[at].name.clone(), u8::try_from(at).unwrap());
            let target = if by_device { Target::Device { now: now.parse().unwrap(), mac: Some(mac(to)) } } else { Target::Mac(mac(own)) };
            let want = want(target, &wanted);
            let after = simulate(&links, &steps(&links, &want).unwrap());
            prop_assert_eq!(&after[at].name, &wanted);
            let expected = mac(if by_device { to } else { own });
            prop_assert_eq!(&after[at].address, &expected.bytes());
            for (before, after) in links.iter().zip(&after).filter(|(before, _)| before.index != links[at].index) {
                // Only a name may have changed, and only to the one that was given up.
                let expected = if before.name == wanted { &now } else { &before.name };
                prop_assert_eq!(after, &Link { name: expected.clone(), ..before.clone() });
            }
        }
    }
}
