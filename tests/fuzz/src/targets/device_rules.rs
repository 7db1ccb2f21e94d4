//! Device rules as a shim sends them, and the cgroup device filter compiled from them.

use firstlight_agent::{convert, devices};
use firstlight_agent_api::oci;
use firstlight_device_filter::{Access, AccessRequest, Filter, Kind};
use protobuf::Message as _;

/// Allow `c 195:0 rw`; deny everything, allow `b 8:* r`, deny `c *:* w`.
pub(super) const SEEDS: &[&[u8]] = &[
    b"\x0a\x0c\x08\x01\x12\x01c\x18\xc3\x01\x2a\x02rw",
    b"\x0a\x08\x12\x01a\x2a\x03rwm\x0a\x13\x08\x01\x12\x01b\x18\x08\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x2a\x01r\x0a\x06\x12\x01c\x2a\x01w",
];

/// A list of rules compiles to a filter that denies GPUs unless a rule names the driver's major, or is rejected.
pub(super) fn read(bytes: &[u8]) {
    let Ok(message) = oci::LinuxResources::parse_from_bytes(bytes) else { return };
    let Ok(resources) = convert::resources(Some(&message)) else { return };
    let mut spec = oci_spec::runtime::Spec::default();
    spec.linux_mut().get_or_insert_default().set_resources(Some(resources)).set_devices(None);
    let Ok(_) = devices::allow(&mut spec) else { return };
    let Ok(rules) = devices::rules(&spec) else { return };
    let Ok(filter) = Filter::new(&rules) else { return };
    let asked = AccessRequest { kind: Kind::Char, major: 195, minor: 0, access: Access::READ };
    let is_named = message.Devices.iter().any(|rule| rule.Allow && rule.Major == 195);
    assert!(is_named || !filter.allows(&asked), "{rules:?}");
    assert!(filter.program().len() < 1 << 14);
}
