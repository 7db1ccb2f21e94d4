//! Builds the device cgroup rules of a container.
//!
//! `firstlight-device-filter` compiles the rules to an eBPF program: the last matching rule
//! decides, unmatched devices are denied, and a rule of type "all" discards the rules before it.
//! `mknod` of any number is allowed, because that alone opens nothing. Shims send no rules, so they
//! are built here: the default devices, the devices of the configuration, and those added by CDI.
//!
//! An allow rule without a major number is dropped: otherwise any GPU of the guest could be opened
//! after a `mknod`. So is one for the guest's console: the host takes output there for the guest's
//! own. A container's `/dev/console` is a pts.

use firstlight_device_filter::{Access, Filter, Kind, Rule};
use oci_spec::runtime::{Linux, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder, LinuxDeviceType, LinuxResources, Spec};

use crate::error::{Error, Result};

/// Default character devices: major, minor (all if absent), name.
const DEFAULT_DEVICES: &[(i64, Option<i64>, &str)] = &[
    (1, Some(3), "null"),
    (1, Some(5), "zero"),
    (1, Some(7), "full"),
    (1, Some(8), "random"),
    (1, Some(9), "urandom"),
    (5, Some(0), "tty"),
    (5, Some(2), "ptmx"),
    (136, None, "pts/*"),
];

/// The guest's console, major and minor.
const CONSOLE: (i64, i64) = (5, 1);

/// Replaces the configuration's device rules by the complete list, and returns the dropped entries
/// with reasons.
///
/// # Errors
/// Never for these values; oci-spec's builders are fallible by type.
pub fn allow(spec: &mut Spec) -> std::result::Result<Vec<String>, oci_spec::OciSpecError> {
    let linux = spec.linux_mut().get_or_insert_with(Linux::default);
    let nodes = linux.devices().clone().unwrap_or_default();
    let resources = linux.resources_mut().get_or_insert_with(LinuxResources::default);
    let requested = resources.devices().clone().unwrap_or_default();

    let any = |kind| LinuxDeviceCgroupBuilder::default().typ(kind);
    let mut rules = vec![any(LinuxDeviceType::A).allow(false).access("rwm").build()?];
    for kind in [LinuxDeviceType::C, LinuxDeviceType::B] {
        rules.push(any(kind).allow(true).access("m").build()?);
    }
    for (major, minor, _) in DEFAULT_DEVICES {
        let mut rule = any(LinuxDeviceType::C).allow(true).major(*major).access("rwm").build()?;
        rule.set_minor(*minor);
        rules.push(rule);
    }
    let mut dropped = Vec::new();
    // Nodes before the requested rules, so that a narrower rule about a node takes precedence.
    for node in &nodes {
        if node.typ() != LinuxDeviceType::B && (node.major(), node.minor()) == CONSOLE {
            dropped.push(format!("node {} is the guest's console", node.path().display()));
        } else if matches!(node.typ(), LinuxDeviceType::C | LinuxDeviceType::U | LinuxDeviceType::B)
            && !named(&requested, node)
        {
            let kind = if node.typ() == LinuxDeviceType::B { LinuxDeviceType::B } else { LinuxDeviceType::C };
            let rule = any(kind).allow(true).major(node.major()).minor(node.minor()).access("rwm");
            rules.push(rule.build()?);
        }
    }
    for rule in requested {
        let narrow = is_narrow(&rule);
        if narrow && !(rule.allow() && is_console(&rule)) {
            rules.push(rule);
        } else if rule.allow() {
            let why = if narrow { "is the guest's console" } else { "has no major number" };
            dropped.push(format!("rule {:?} {why}", rule.to_string()));
        }
    }
    // Last: takes precedence over a rule for the whole major number.
    let (major, minor) = CONSOLE;
    rules.push(any(LinuxDeviceType::C).allow(false).major(major).minor(minor).access("rw").build()?);
    resources.set_devices(Some(rules));
    Ok(dropped)
}

/// Returns the rules of a configuration as the runtime takes them. An out-of-range number is
/// rejected: it must not become "any".
///
/// # Errors
/// A rule is invalid, or there are too many.
pub fn rules(spec: &Spec) -> Result<Vec<Rule>> {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    let given = resources.and_then(|resources| resources.devices().as_deref()).unwrap_or_default();
    let rules = given.iter().map(rule).collect::<Result<Vec<Rule>>>()?;
    Filter::new(&rules).map_err(|error| Error::invalid(error.to_string()))?;
    Ok(rules)
}

fn rule(given: &LinuxDeviceCgroup) -> Result<Rule> {
    let wrong = |what: &str| Error::invalid(format!("device rule {:?}: {what}", given.to_string()));
    let number = |number: Option<i64>| {
        let out_of_range = |_| wrong("number out of range");
        number.map(|number| u32::try_from(number).map_err(out_of_range)).transpose()
    };
    let kind = match given.typ().unwrap_or_default() {
        LinuxDeviceType::A => Kind::All,
        LinuxDeviceType::C | LinuxDeviceType::U => Kind::Char,
        LinuxDeviceType::B => Kind::Block,
        LinuxDeviceType::P => return Err(wrong("type p (FIFO) is not a device")),
    };
    let access = given.access().as_deref().unwrap_or_default();
    Ok(Rule {
        allow: given.allow(),
        kind,
        major: number(given.major())?,
        minor: number(given.minor())?,
        access: Access::parse(access).ok_or_else(|| wrong("access must consist of r, w and m"))?,
    })
}

/// Returns whether a rule matches exactly this node.
fn named(rules: &[LinuxDeviceCgroup], node: &oci_spec::runtime::LinuxDevice) -> bool {
    rules.iter().any(|rule| {
        rule.typ() == Some(node.typ()) && rule.major() == Some(node.major()) && rule.minor() == Some(node.minor())
    })
}

/// Returns whether a rule is accepted: a deny rule unless it discards other rules, an allow rule
/// only with a major number.
fn is_narrow(rule: &LinuxDeviceCgroup) -> bool {
    let kind = matches!(rule.typ(), Some(LinuxDeviceType::C | LinuxDeviceType::B));
    kind && (!rule.allow() || rule.major().is_some())
}

/// Returns whether a rule matches the guest's console only.
fn is_console(rule: &LinuxDeviceCgroup) -> bool {
    let character = matches!(rule.typ(), Some(LinuxDeviceType::C | LinuxDeviceType::U));
    character && rule.major().zip(rule.minor()) == Some(CONSOLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_device_filter::AccessRequest;
    use oci_spec::runtime::LinuxDeviceBuilder;
    use proptest::prelude::*;

    fn rule(
        allow: bool,
        kind: LinuxDeviceType,
        major: Option<i64>,
        minor: Option<i64>,
        access: &str,
    ) -> LinuxDeviceCgroup {
        let mut rule = LinuxDeviceCgroupBuilder::default().allow(allow).typ(kind).access(access).build().unwrap();
        rule.set_major(major);
        rule.set_minor(minor);
        rule
    }

    fn spec_with(rules: Vec<LinuxDeviceCgroup>, nodes: &[(i64, i64)]) -> Spec {
        let mut spec = Spec::default();
        let linux = spec.linux_mut().get_or_insert_with(Linux::default);
        let nodes = nodes.iter().map(|(major, minor)| {
            LinuxDeviceBuilder::default()
                .path("/dev/x")
                .typ(LinuxDeviceType::C)
                .major(*major)
                .minor(*minor)
                .build()
                .unwrap()
        });
        linux.set_devices(Some(nodes.collect()));
        let mut resources = LinuxResources::default();
        resources.set_devices(Some(rules));
        linux.set_resources(Some(resources));
        spec
    }

    /// Returns the filter's decision.
    fn may(spec: &Spec, kind: LinuxDeviceType, major: u32, minor: u32, access: char) -> bool {
        let kind = if kind == LinuxDeviceType::B { Kind::Block } else { Kind::Char };
        let access = Access::parse(&access.to_string()).unwrap();
        Filter::new(&rules(spec).unwrap()).unwrap().allows(&AccessRequest { kind, major, minor, access })
    }

    const C: LinuxDeviceType = LinuxDeviceType::C;

    #[test]
    fn container_without_a_gpu_can_mknod_but_not_open_its_node() {
        let mut spec = spec_with(vec![], &[]);
        assert!(allow(&mut spec).unwrap().is_empty());
        assert!(may(&spec, C, 195, 0, 'm'));
        assert!(!may(&spec, C, 195, 0, 'r') && !may(&spec, C, 195, 0, 'w'));
        assert!(!may(&spec, LinuxDeviceType::B, 254, 0, 'r'));
        for (major, minor, name) in DEFAULT_DEVICES {
            let number = |number: i64| u32::try_from(number).unwrap();
            assert!(may(&spec, C, number(*major), number(minor.unwrap_or(7)), 'r'), "{name}");
        }
        assert!(!may(&spec, C, 10, 200, 'r'), "tun");
        assert!(!may(&spec, C, 1, 1, 'r'), "/dev/mem");
        assert!(!may(&spec, C, 4, 64, 'w'), "the serial console");
    }

    #[test]
    fn configured_nodes_open_and_narrower_rules_take_precedence() {
        let mut spec = spec_with(vec![rule(true, C, Some(195), Some(1), "r")], &[(195, 0), (195, 1)]);
        allow(&mut spec).unwrap();
        assert!(may(&spec, C, 195, 0, 'w'));
        assert!(may(&spec, C, 195, 1, 'r') && !may(&spec, C, 195, 1, 'w'));
        assert!(!may(&spec, C, 195, 2, 'r'));
    }

    #[test]
    fn allow_rules_without_a_major_number_are_dropped_and_reported() {
        let rules = vec![
            rule(true, LinuxDeviceType::A, None, None, "rwm"),
            rule(true, C, None, None, "rw"),
            rule(false, LinuxDeviceType::A, None, None, "rwm"),
            rule(true, C, Some(10), None, "rw"),
        ];
        let mut spec = spec_with(rules, &[]);
        let why = ["rule \"a *:* rwm\" has no major number", "rule \"c *:* rw\" has no major number"];
        assert_eq!(allow(&mut spec).unwrap(), why);
        assert!(!may(&spec, C, 195, 0, 'r'));
        assert!(may(&spec, C, 10, 229, 'r') && may(&spec, C, 1, 3, 'r'));
    }

    #[test]
    fn no_rule_opens_the_guests_console() {
        let mut spec = spec_with(vec![], &[]);
        assert!(allow(&mut spec).unwrap().is_empty());
        assert!(may(&spec, C, 5, 1, 'm') && !may(&spec, C, 5, 1, 'r') && !may(&spec, C, 5, 1, 'w'));
        let requested = vec![rule(true, C, Some(5), Some(1), "rw"), rule(true, C, Some(5), None, "rwm")];
        let mut spec = spec_with(requested, &[(5, 1)]);
        let why = ["node /dev/x is the guest's console", "rule \"c 5:1 rw\" is the guest's console"];
        assert_eq!(allow(&mut spec).unwrap(), why);
        assert!(!may(&spec, C, 5, 1, 'r') && !may(&spec, C, 5, 1, 'w'));
        assert!(may(&spec, C, 5, 2, 'w') && may(&spec, C, 5, 3, 'w'), "the rest of the major number was requested");
    }

    #[test]
    fn out_of_range_number_does_not_become_a_wildcard() {
        for (major, minor) in [(-1, 0), (195, -1), (1 << 32, 0)] {
            let mut spec = spec_with(vec![], &[(major, minor)]);
            allow(&mut spec).unwrap();
            let error = rules(&spec).unwrap_err().message;
            assert!(error.contains("number out of range") && error.contains("c "), "{error}");
        }
        let mut spec = spec_with(vec![], &[(195, 0); 1100]);
        allow(&mut spec).unwrap();
        assert!(rules(&spec).unwrap_err().message.contains("limit of 1024"));
    }

    #[test]
    fn requested_deny_rule_removes_a_default_device() {
        let mut spec = spec_with(vec![rule(false, C, Some(5), Some(2), "w")], &[]);
        allow(&mut spec).unwrap();
        assert!(may(&spec, C, 5, 2, 'r') && !may(&spec, C, 5, 2, 'w') && may(&spec, C, 5, 0, 'w'));
    }

    proptest! {
        #[test]
        fn gpu_opens_only_with_a_rule_for_its_major_number(
            rules in proptest::collection::vec((any::<bool>(), 0usize..3, proptest::option::of(0i64..200), "[rwm]{1,3}"), 0..8)
        ) {
            let kinds = [LinuxDeviceType::A, C, LinuxDeviceType::B];
            let rules: Vec<_> =
                rules.into_iter().map(|(allow, kind, major, access)| rule(allow, kinds[kind], major, None, &access)).collect();
            let names = rules.iter().any(|rule| rule.allow() && rule.typ() == Some(C) && rule.major() == Some(195));
            let mut spec = spec_with(rules, &[]);
            allow(&mut spec).unwrap();
            prop_assert!(names || !may(&spec, C, 195, 0, 'r'));
        }
    }
}
