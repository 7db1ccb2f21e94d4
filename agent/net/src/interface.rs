//! Configures an interface.
//!
//! The steps are computed first, from the difference between the requested and the existing configuration. So a
//! request is idempotent: it changes nothing that is already as requested, and routes and addresses survive it.

use std::fmt;
use std::path::Path;

use crate::address::LinkAddress;
use crate::error::{Error, Result};
use crate::link::{Link, NOARP, UP};
use crate::names::{Mac, Name};
use crate::netlink::Netlink;
use crate::network::{Network, has_ipv6};

/// How a request identifies an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// By its hardware address.
    Mac(Mac),
    /// By its current name, which was looked up by its PCI address; only then may its hardware address be changed.
    Device {
        /// The current name.
        now: Name,
        /// The requested hardware address.
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

/// The requested configuration of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The interface.
    pub target: Target,
    /// The requested name.
    pub name: Name,
    /// The required addresses; other existing addresses are kept.
    pub addresses: Vec<Network>,
    /// The MTU in bytes; `None` leaves it unchanged.
    pub mtu: Option<u32>,
    /// Whether to set `IFF_NOARP`.
    pub noarp: bool,
}

/// One configuration step.
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

/// Finds the interface of a request.
fn find<'a>(links: &'a [Link], desired: &Interface) -> Result<&'a Link> {
    let found = match &desired.target {
        Target::Device { now, .. } => links.iter().find(|link| link.name == now.as_str()),
        Target::Mac(mac) => {
            let same = || links.iter().filter(|link| link.address == mac.bytes() && !link.is_loopback());
            // A VLAN or a bridge shares its device's address, but has a higher index.
            same().find(|link| link.name == desired.name.as_str()).or_else(|| same().next())
        }
    };
    found.ok_or_else(|| {
        let there: Vec<String> =
            links.iter().take(32).map(|link| format!("{} ({})", link.name, Mac::text(&link.address))).collect();
        Error::LinkNotFound(format!("no interface has {}; there are {}", desired.target, there.join(", ")))
    })
}

/// Parses the current name of an interface; the kernel has validated it.
fn name(link: &Link) -> Result<Name> {
    link.name.parse().map_err(|error| Error::Invalid(format!("interface {}: {error}", link.index)))
}

/// Returns the rename steps. An interface that already has the requested name swaps names.
fn rename(links: &[Link], link: &Link, desired: &Name) -> Result<Vec<Step>> {
    if link.name == desired.as_str() {
        return Ok(vec![]);
    }
    let from = name(link)?;
    let ours = Step::Rename { link: link.index, from: from.clone(), to: desired.clone() };
    let Some(other) = links.iter().find(|other| other.name == desired.as_str()) else { return Ok(vec![ours]) };
    if other.is_loopback() || link.is_loopback() {
        return Err(Error::Invalid(format!(
            "failed to rename {from} to {desired}: the loopback interface cannot be renamed"
        )));
    }
    let temporary = Name::temporary(other.index);
    let aside = Step::Rename { link: other.index, from: desired.clone(), to: temporary.clone() };
    let back = Step::Rename { link: other.index, from: temporary, to: from };
    Ok(vec![aside, ours, back])
}

fn plan(links: &[Link], addresses: &[LinkAddress], link: &Link, desired: &Interface, ipv6: bool) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    if let Target::Device { mac: Some(mac), .. } = &desired.target
        && link.address != mac.bytes()
    {
        steps.push(Step::Mac(link.index, mac.clone()));
    }
    steps.extend(rename(links, link, &desired.name)?);
    steps.extend(desired.mtu.filter(|mtu| *mtu != link.mtu).map(|mtu| Step::Mtu(link.index, mtu)));
    if desired.noarp && link.flags & NOARP == 0 {
        steps.push(Step::NoArp(link.index));
    }
    for network in desired.addresses.iter().filter(|network| ipv6 || !network.is_ipv6()) {
        if !addresses.contains(&LinkAddress { link: link.index, network: *network }) {
            steps.push(Step::Address(link.index, *network));
        }
    }
    if !link.is_up() {
        steps.push(Step::Up(link.index));
    }
    Ok(steps)
}

fn apply(netlink: &mut Netlink, step: &Step) -> Result<()> {
    match step {
        Step::Mac(link, mac) => netlink.set_mac(*link, mac),
        Step::Rename { link, to, .. } => netlink.set_name(*link, to),
        Step::Mtu(link, mtu) => netlink.set_mtu(*link, *mtu),
        Step::NoArp(link) => netlink.set_flags(*link, NOARP, NOARP),
        Step::Address(link, network) => netlink.add_address(*link, *network),
        Step::Up(link) => netlink.set_flags(*link, UP, UP),
    }
}

/// Restores the names after a half-done swap, so that a retry finds the original state.
fn undo_names(netlink: &mut Netlink, done: &[Step]) {
    for step in done.iter().rev() {
        if let Step::Rename { link, from, to } = step
            && let Err(error) = netlink.set_name(*link, from)
        {
            log::error!("failed to rename interface {to} back to {from}: {error}");
        }
    }
}

/// Configures an interface: hardware address, name, MTU, flags, addresses, up. Applies only differences. `proc`
/// is the procfs mount.
///
/// # Errors
/// [`Error::LinkNotFound`]: there is no such interface, and nothing was changed.
/// [`Error::Step`]: the kernel refused that step; those before it were applied, except renames, which were undone.
pub fn configure(netlink: &mut Netlink, desired: &Interface, proc: &Path) -> Result<()> {
    let links = netlink.links()?;
    let link = find(&links, desired)?;
    let ipv6 = has_ipv6(proc, Some(&link.name));
    let addresses = if desired.addresses.is_empty() { Vec::new() } else { netlink.addresses()? };
    let steps = plan(&links, &addresses, link, desired, ipv6)?;
    for (at, step) in steps.iter().enumerate() {
        if let Err(source) = apply(netlink, step) {
            if matches!(step, Step::Rename { .. }) {
                undo_names(netlink, &steps[..at]);
            }
            let interface = format!("{} ({})", desired.name, desired.target);
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

    fn desired(target: Target, name: &str) -> Interface {
        let addresses = vec!["10.0.0.5/24".parse().unwrap(), "fd00::5/64".parse().unwrap()];
        Interface { target, name: name.parse().unwrap(), addresses, mtu: Some(1400), noarp: true }
    }

    /// Applies the steps to the links, with the kernel's rule that names are unique.
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

    fn steps(links: &[Link], desired: &Interface) -> Result<Vec<Step>> {
        let link = find(links, desired)?;
        plan(links, &[], link, desired, true)
    }

    #[test]
    fn new_interface_is_configured_in_order() {
        let links = [link(1, "lo", 0), link(2, "ens1", 5)];
        let steps = steps(&links, &desired(Target::Mac(mac(5)), "eth0")).unwrap();
        let descriptions: Vec<String> = steps.iter().map(Step::to_string).collect();
        let expected = [
            "rename ens1 to eth0",
            "set MTU 1400",
            "turn ARP off",
            "add address 10.0.0.5/24",
            "add address fd00::5/64",
            "bring up",
        ];
        assert_eq!(descriptions, expected);
    }

    #[test]
    fn interface_configured_as_requested_is_unchanged() {
        let mut there = link(2, "eth0", 5);
        (there.mtu, there.flags) = (1400, UP | NOARP);
        let desired = desired(Target::Mac(mac(5)), "eth0");
        let addresses: Vec<LinkAddress> =
            desired.addresses.iter().map(|network| LinkAddress { link: 2, network: *network }).collect();
        let links = [there];
        assert_eq!(plan(&links, &addresses, &links[0], &desired, true).unwrap(), []);
        // The same address on another interface does not count, and without IPv6 no IPv6 address is added.
        let elsewhere = LinkAddress { link: 3, ..addresses[0] };
        let steps = plan(&links, &[elsewhere], &links[0], &desired, false).unwrap();
        assert_eq!(steps, [Step::Address(2, desired.addresses[0])]);
    }

    #[test]
    fn interface_with_the_requested_name_but_another_mac_is_not_used() {
        let links = [link(1, "lo", 0), link(2, "eth0", 7)];
        let error = steps(&links, &desired(Target::Mac(mac(5)), "eth0")).unwrap_err().to_string();
        assert!(
            error.starts_with("Link not found: no interface has hwAddr 02:00:00:00:00:05; there are lo"),
            "{error}"
        );
        let device = Target::Device { now: "eth1".parse().unwrap(), mac: Some(mac(5)) };
        assert!(steps(&links, &desired(device, "eth0")).unwrap_err().to_string().contains("device eth1"));
    }

    #[test]
    fn device_gets_the_requested_hardware_address() {
        let links = [link(2, "eth1", 7)];
        let device = |mac| Target::Device { now: "eth1".parse().unwrap(), mac };
        assert_eq!(steps(&links, &desired(device(Some(mac(5))), "eth1")).unwrap()[0], Step::Mac(2, mac(5)));
        for same in [None, Some(mac(7))] {
            assert!(
                !steps(&links, &desired(device(same), "eth1"))
                    .unwrap()
                    .iter()
                    .any(|step| matches!(step, Step::Mac(..)))
            );
        }
    }

    #[test]
    fn loopback_is_not_renamed() {
        let links = [link(1, "lo", 0), link(2, "eth0", 5)];
        assert!(steps(&links, &desired(Target::Mac(mac(5)), "lo")).unwrap_err().to_string().contains("loopback"));
    }

    proptest! {
        #[test]
        fn steps_reach_the_requested_state_and_change_no_other_interface(count in 1usize..5, at in 0usize..5, name in 0usize..6, by_device: bool, to in 1u8..9) {
            let mut links = vec![link(1, "lo", 0)];
            links.extend((0..count).map(|n| link(u32::try_from(n).unwrap() + 2, &format!("eth{n}"), u8::try_from(n).unwrap() + 1)));
            let at = 1 + at % count;
            let requested_name = if name == 5 { "net0".to_owned() } else { format!("eth{name}") };
            let (now, own) = (links[at].name.clone(), u8::try_from(at).unwrap());
            let target = if by_device { Target::Device { now: now.parse().unwrap(), mac: Some(mac(to)) } } else { Target::Mac(mac(own)) };
            let desired = desired(target, &requested_name);
            let after = simulate(&links, &steps(&links, &desired).unwrap());
            prop_assert_eq!(&after[at].name, &requested_name);
            let expected = mac(if by_device { to } else { own });
            prop_assert_eq!(&after[at].address, &expected.bytes());
            for (before, after) in links.iter().zip(&after).filter(|(before, _)| before.index != links[at].index) {
                // Only a name may have changed, and only by the swap.
                let expected = if before.name == requested_name { &now } else { &before.name };
                prop_assert_eq!(after, &Link { name: expected.clone(), ..before.clone() });
            }
        }
    }
}
