//! Device requests against a fake sysfs; real disks are tested in tests/e2e.

use super::*;
use std::fs;
use std::path::Path;
use std::time::Duration;

fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn device(kind: &str, options: &[&str]) -> Device {
    Device {
        type_: kind.into(),
        container_path: "/dev/x".into(),
        options: options.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

fn plant(root: &Path, slot: &str) {
    let bridge = root.join("sys/devices/pci0000:00/0000:00:02.0");
    fs::create_dir_all(bridge.join("pci_bus/0000:01")).unwrap();
    fs::create_dir_all(bridge.join(format!("0000:01:{slot}.0"))).unwrap();
}

fn try_attach(root: &Path, devices: &[Device], spec: &mut Spec) -> Result<Functions> {
    let paths = Paths::below(root);
    let hotplug = Hotplug::new(&paths, Duration::from_millis(20));
    run(attach(&hotplug, &paths, devices, spec))
}

#[test]
fn unknown_type_is_reported_with_the_supported_ones() {
    let root = tempfile::tempdir().unwrap();
    let error = try_attach(root.path(), &[device("blk-ccw", &[])], &mut Spec::default()).unwrap_err().message;
    for part in ["blk-ccw", "/dev/x", "mmioblk", "vfio-pci-gk"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[test]
fn all_functions_of_all_devices_are_translated_in_the_environment() {
    let root = tempfile::tempdir().unwrap();
    plant(root.path(), "00");
    plant(root.path(), "01");
    plant(root.path(), "02");
    let mut spec = Spec::default();
    let mut process = oci_spec::runtime::Process::default();
    process.set_env(Some(vec!["PCIDEVICE_A=0000:c1:00.0,0000:c2:00.0,0000:c3:00.0".into()]));
    spec.set_process(Some(process));
    let devices = [
        device("vfio-pci-gk", &["0000:c1:00.0=02/00", "0000:c2:00.0=02/01"]),
        device("vfio-pci-gk", &["0000:c3:00.0=02/02", "0000:c4:00.0="]),
    ];
    let functions = try_attach(root.path(), &devices, &mut spec).unwrap();
    assert_eq!(functions.0.len(), 3, "{functions:?}");
    let environment = spec.process().as_ref().unwrap().env().clone().unwrap();
    assert_eq!(environment, ["PCIDEVICE_A=0000:01:00.0,0000:01:01.0,0000:01:02.0"]);
}

#[test]
fn invalid_or_missing_device_leaves_the_configuration_unchanged() {
    let root = tempfile::tempdir().unwrap();
    plant(root.path(), "00");
    for (device, part) in [
        (device("vfio-pci-gk", &["0000:c1:00.0"]), "HOST-ADDRESS=GUEST-PCI-PATH"),
        (device("vfio-pci-gk", &["c1=02/00"]), "HOST-ADDRESS=GUEST-PCI-PATH"),
        (device("vfio-pci-gk", &["0000:c1:00.0=02/05"]), "0000:01:05.0"),
        (device("vfio-pci", &[]), "no option"),
        (device("vfio-pci", &["0000:c1:00.0=02/00"]), "IOMMU"),
        (device("blk", &[]), "block device"),
        (Device { id: "02/00".into(), ..device("blk", &[]) }, "0000:01:00.0 is there"),
        (Device { id: "x".into(), ..device("scsi", &[]) }, "SCSI address"),
        (Device { vm_path: "/dev/pmem3".into(), ..device("nvdimm", &[]) }, "pmem3"),
    ] {
        let mut spec = Spec::default();
        let error = try_attach(root.path(), &[device], &mut spec).unwrap_err().message;
        assert!(error.contains(part) && error.contains("/dev/x"), "{part} in {error}");
        assert_eq!(spec, Spec::default());
    }
}

#[test]
fn too_many_devices_are_rejected() {
    let root = tempfile::tempdir().unwrap();
    let devices = vec![device("blk", &[]); MAX_DEVICES + 1];
    assert!(try_attach(root.path(), &devices, &mut Spec::default()).unwrap_err().message.contains("at most"));
}
