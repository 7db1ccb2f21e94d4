//! What the boards that there are give to a service VM, and its domain.

use std::fs;
use std::path::Path;

use firstlight_service_vm::members::{Fabric, Members, Wish};
use firstlight_service_vm::xml::{Console, Domain, Hardware};
use firstlight_vm::Accelerator;

use crate::fixture::{ENDPOINT, Fixture, PORT, SWITCH};

fn addresses(members: &Members) -> Vec<String> {
    members.passed.iter().map(|function| function.address.to_string()).collect()
}

/// The domain is what the tree has, or with `FIRSTLIGHT_BLESS=1` the tree has it from now on.
fn golden(name: &str, domain: &Domain) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/golden").join(name);
    let xml = domain.xml().unwrap();
    assert_eq!(xml, domain.xml().unwrap());
    if std::env::var_os("FIRSTLIGHT_BLESS").is_some() {
        fs::write(&path, &xml).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(xml, kept, "{}: FIRSTLIGHT_BLESS=1 rewrites it", path.display());
}

#[test]
fn a_shared_group_goes_as_a_whole_and_its_ports_stay() {
    let host = Fixture::hgx_h100();
    let members = host.choose(&Wish::default()).unwrap();
    assert_eq!(members.fabric, Fabric::NvLink4);
    assert_eq!(addresses(&members), ["0000:03:00.1", "0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0"]);
    assert!(members.idle.is_empty() && members.groups.iter().eq([&30]));
    golden("hgx-h100.xml", &host.domain(false));
    golden("hgx-h100-disk.xml", &host.domain(true));
}

#[test]
fn groups_of_their_own_are_all_given() {
    let host = Fixture::dgx_h100();
    let members = host.choose(&Wish { unmanaged: true, ..Wish::default() }).unwrap();
    assert_eq!(addresses(&members), ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0"]);
    assert_eq!(members.groups.len(), 4);
    let mut domain = host.domain(false);
    let Hardware::Host { functions, .. } = domain.hardware else { panic!("it is a host's") };
    domain.hardware = Hardware::Host { functions, managed: false, cid: 4_000_000_000 };
    domain.console = Console::Pty;
    domain.state_disk = None;
    golden("dgx-h100-unmanaged.xml", &domain);
}

#[test]
fn a_bridge_is_known_by_its_product_data_and_goes_with_all_its_functions() {
    let host = Fixture::hgx_b200();
    let all = ["0000:05:00.0", "0000:05:00.1", "0000:05:00.2", "0000:05:00.3"];
    let members = host.choose(&Wish::default()).unwrap();
    assert_eq!((members.fabric, addresses(&members)), (Fabric::NvLink5, all.map(str::to_owned).to_vec()));
    golden("hgx-b200.xml", &host.domain(true));
    // A function whose product data names nothing is one of the device's all the same.
    host.model("0000:05:00.2", b"");
    assert_eq!(addresses(&host.choose(&Wish::default()).unwrap()), all);
}

#[test]
fn an_endpoint_of_another_group_or_function_is_not_given() {
    let host = Fixture::dgx_h100();
    host.plug("0000:03:00.1", ENDPOINT, Some(99), None);
    assert_eq!(host.choose(&Wish::default()).unwrap().passed.len(), 4);
    host.plug("0000:04:00.0", ENDPOINT, Some(40), None);
    let members = host.choose(&Wish::default()).unwrap();
    assert_eq!((members.passed.len(), members.idle.len()), (4, 1));
    assert_eq!(members.idle[0].address.to_string(), "0000:04:00.0");
}

#[test]
fn two_boards_are_one_each_by_name() {
    let host = Fixture::dgx_h100();
    for at in 0..4 {
        host.plug(&format!("0001:{:02x}:00.0", 5 + at), SWITCH, Some(80 + at), None);
        host.plug(&format!("0001:{:02x}:00.0", 1 + at), PORT, Some(80 + at), Some("pcieport"));
    }
    let only = (0..4).map(|at| format!("0001:{:02x}:00.0", 5 + at).parse().unwrap()).collect();
    let members = host.choose(&Wish { only, unmanaged: false }).unwrap();
    assert!(addresses(&members).iter().all(|address| address.starts_with("0001:")), "{members:?}");
}

#[test]
fn a_lab_has_what_qemu_is_told() {
    let mut domain = Fixture::hgx_h100().domain(false);
    domain.accelerator = Accelerator::Tcg;
    domain.emulator = Some("/opt/qemu & more/qemu-system-x86_64".into());
    let arguments = ["-device", r#"{"driver":"vfio-user-pci","socket":{"type":"unix","path":"/tmp/0.sock"}}"#];
    domain.hardware = Hardware::Lab { arguments: arguments.map(str::to_owned).to_vec() };
    golden("lab.xml", &domain);
}
