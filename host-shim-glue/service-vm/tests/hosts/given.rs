//! Selected functions and domain XML of the supported boards.

use std::fs;
use std::path::Path;

use firstlight_service_vm::members::{Generation, PassthroughSet, Selection};
use firstlight_service_vm::xml::{Console, Domain, Hardware};
use firstlight_vm::Accelerator;

use crate::fixture::{ENDPOINT, Fixture, PORT, SWITCH};

fn addresses(passthrough: &PassthroughSet) -> Vec<String> {
    passthrough.passed.iter().map(|function| function.address.to_string()).collect()
}

/// Compares the domain with the golden file; `FIRSTLIGHT_BLESS=1` rewrites it.
fn golden(name: &str, domain: &Domain) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/golden").join(name);
    let xml = domain.xml().unwrap();
    assert_eq!(xml, domain.xml().unwrap());
    if std::env::var_os("FIRSTLIGHT_BLESS").is_some() {
        fs::write(&path, &xml).unwrap();
    }
    let golden = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(xml, golden, "{}: FIRSTLIGHT_BLESS=1 rewrites it", path.display());
}

#[test]
fn shared_group_is_passed_completely_except_ports() {
    let host = Fixture::hgx_h100();
    let passthrough = host.select(&Selection::default()).unwrap();
    assert_eq!(passthrough.generation, Generation::NvLink4);
    assert_eq!(
        addresses(&passthrough),
        ["0000:03:00.1", "0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0"]
    );
    assert!(passthrough.idle.is_empty() && passthrough.groups.iter().eq([&30]));
    golden("hgx-h100.xml", &host.domain(false));
    golden("hgx-h100-disk.xml", &host.domain(true));
}

#[test]
fn switches_in_separate_groups_are_all_passed() {
    let host = Fixture::dgx_h100();
    let passthrough = host.select(&Selection { unmanaged: true, ..Selection::default() }).unwrap();
    assert_eq!(addresses(&passthrough), ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0"]);
    assert_eq!(passthrough.groups.len(), 4);
    let mut domain = host.domain(false);
    let Hardware::Host { functions, .. } = domain.hardware else { panic!("it is a host's") };
    domain.hardware = Hardware::Host { functions, managed: false, cid: 4_000_000_000 };
    domain.console = Console::Pty;
    domain.state_disk = None;
    golden("dgx-h100-unmanaged.xml", &domain);
}

#[test]
fn bridge_is_identified_by_vpd_and_passed_with_all_functions() {
    let host = Fixture::hgx_b200();
    let all = ["0000:05:00.0", "0000:05:00.1", "0000:05:00.2", "0000:05:00.3"];
    let passthrough = host.select(&Selection::default()).unwrap();
    assert_eq!(
        (passthrough.generation, addresses(&passthrough)),
        (Generation::NvLink5, all.map(str::to_owned).to_vec())
    );
    golden("hgx-b200.xml", &host.domain(true));
    // A function without model in its VPD still belongs to the device.
    host.model("0000:05:00.2", b"");
    assert_eq!(addresses(&host.select(&Selection::default()).unwrap()), all);
}

#[test]
fn endpoint_of_another_group_or_function_is_not_passed() {
    let host = Fixture::dgx_h100();
    host.plug("0000:03:00.1", ENDPOINT, Some(99), None);
    assert_eq!(host.select(&Selection::default()).unwrap().passed.len(), 4);
    host.plug("0000:04:00.0", ENDPOINT, Some(40), None);
    let passthrough = host.select(&Selection::default()).unwrap();
    assert_eq!((passthrough.passed.len(), passthrough.idle.len()), (4, 1));
    assert_eq!(passthrough.idle[0].address.to_string(), "0000:04:00.0");
}

#[test]
fn one_of_two_boards_is_selected_by_device() {
    let host = Fixture::dgx_h100();
    for at in 0..4 {
        host.plug(&format!("0001:{:02x}:00.0", 5 + at), SWITCH, Some(80 + at), None);
        host.plug(&format!("0001:{:02x}:00.0", 1 + at), PORT, Some(80 + at), Some("pcieport"));
    }
    let only = (0..4).map(|at| format!("0001:{:02x}:00.0", 5 + at).parse().unwrap()).collect();
    let passthrough = host.select(&Selection { only, unmanaged: false }).unwrap();
    assert!(addresses(&passthrough).iter().all(|address| address.starts_with("0001:")), "{passthrough:?}");
}

#[test]
fn lab_domain_has_qemu_arguments() {
    let mut domain = Fixture::hgx_h100().domain(false);
    domain.accelerator = Accelerator::Tcg;
    domain.emulator = Some("/opt/qemu & more/qemu-system-x86_64".into());
    let arguments = ["-device", r#"{"driver":"vfio-user-pci","socket":{"type":"unix","path":"/tmp/0.sock"}}"#];
    domain.hardware = Hardware::External { arguments: arguments.map(str::to_owned).to_vec() };
    golden("lab.xml", &domain);
}
