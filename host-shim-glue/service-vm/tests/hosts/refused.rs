//! Hosts on which no service VM is possible, and the reported problems.

use firstlight_service_vm::members::Selection;

use crate::fixture::{CX7, Fixture, GPU, NVME, SWITCH, vpd};

/// Asserts that one of the problems contains all these texts.
#[track_caller]
fn refused(host: &Fixture, selection: &Selection, message: &[&str]) {
    let problems = host.select(selection).unwrap_err();
    let found = problems.iter().any(|problem| message.iter().all(|word| problem.contains(word)));
    assert!(found, "{message:?}: {problems:#?}");
}

fn selection(only: &[&str]) -> Selection {
    Selection { only: only.iter().map(|address| address.parse().unwrap()).collect(), unmanaged: false }
}

#[test]
fn host_without_switches_is_refused() {
    let any = Selection::default();
    refused(&Fixture::new(), &any, &["no NVSwitch and no NVLink bridge", "lspci"]);
    let host = Fixture::new();
    host.plug("0000:18:00.0", CX7, Some(1), Some("mlx5_core"));
    host.model("0000:18:00.0", &vpd(""));
    refused(&host, &any, &["no NVSwitch and no NVLink bridge"]);
}

#[test]
fn switches_and_bridges_together_are_refused() {
    let host = Fixture::hgx_b200();
    host.plug("0000:07:00.0", SWITCH, Some(90), None);
    refused(&host, &Selection::default(), &["0000:07:00.0", "0000:05:00.0", "--device"]);
}

#[test]
fn host_without_an_iommu_is_refused() {
    let host = Fixture::new();
    for at in 5..9 {
        host.plug(&format!("0000:{at:02x}:00.0"), SWITCH, None, None);
    }
    refused(&host, &Selection::default(), &["0000:05:00.0, 0000:06:00.0", "no IOMMU group", "intel_iommu=on"]);
    let host = Fixture::hgx_h100();
    std::fs::write(host.path().join("sys/kernel/iommu_groups/30/name"), "vfio-noiommu\n").unwrap();
    refused(&host, &Selection::default(), &["group 30 is a no-IOMMU group", "enable_unsafe_noiommu_mode"]);
}

#[test]
fn group_with_another_used_device_is_refused() {
    let any = Selection::default();
    let host = Fixture::hgx_h100();
    host.plug("0000:09:00.0", GPU, Some(30), None);
    refused(&host, &any, &["group 30 also has GPU 0000:09:00.0", "ACS"]);
    let host = Fixture::hgx_h100();
    host.plug("0000:09:00.0", CX7, Some(30), Some("mlx5_core"));
    host.named("0000:09:00.0", "net", "eth7");
    refused(&host, &any, &["NIC 0000:09:00.0", "as eth7 with driver mlx5_core", "nodedev-detach pci_0000_09_00_0"]);
    host.bind("0000:09:00.0", None);
    assert_eq!(host.select(&any).unwrap().idle.len(), 1, "an idle one only has to stay so");
    let host = Fixture::hgx_h100();
    host.plug("0000:09:00.0", NVME, Some(30), Some("nvme"));
    host.named("0000:09:00.0", "nvme", "nvme0");
    refused(&host, &any, &["storage controller 0000:09:00.0", "as nvme0 with driver nvme"]);
}

#[test]
fn too_few_or_too_many_switches_are_refused() {
    let host = Fixture::hgx_h100();
    std::fs::remove_dir_all(host.dir("0000:06:00.0")).unwrap();
    refused(&host, &Selection::default(), &["3 NVSwitches", "HGX H100 and H200 has 4", "kernel log"]);
    let host = Fixture::hgx_h100();
    for at in 0..4 {
        host.plug(&format!("0001:{:02x}:00.0", 5 + at), SWITCH, Some(80), None);
    }
    refused(&host, &Selection::default(), &["8 NVSwitches", "--device"]);
    refused(&host, &selection(&["0001:05:00.0"]), &["1 NVSwitches", "has 4"]);
    refused(&host, &selection(&["0001:05:00.0"]), &["group 80 also has NVSwitch 0001:06:00.0, which was not selected"]);
    let host = Fixture::hgx_b200();
    std::fs::remove_dir_all(host.dir("0000:05:00.3")).unwrap();
    refused(&host, &Selection::default(), &["3 functions", "not 4"]);
    let host = Fixture::hgx_b200();
    for at in 0..4 {
        host.plug(&format!("0001:05:00.{at}"), CX7, Some(90), None);
        host.model(&format!("0001:05:00.{at}"), &vpd(",SMDL=SW_MNG"));
    }
    refused(&host, &Selection::default(), &["NVLink bridges of 2 boards", "--device"]);
}

#[test]
fn boards_before_h100_are_refused() {
    let host = Fixture::new();
    for at in 0..6 {
        host.plug(&format!("0000:{:02x}:00.0", 5 + at), (0x10de, 0x1af1, 0x06_8000), Some(at), None);
    }
    refused(&host, &Selection::default(), &["HGX A100", "not supported"]);
    host.plug("0000:20:00.0", SWITCH, Some(30), None);
    refused(&host, &Selection::default(), &["are of two boards"]);
}

#[test]
fn selected_device_has_to_be_a_switch() {
    let host = Fixture::hgx_h100();
    refused(&host, &selection(&["0000:90:00.0"]), &["0000:90:00.0 is a GPU, not an NVSwitch"]);
    refused(&host, &selection(&["0000:77:00.0"]), &["0000:77:00.0 is not on this host's PCI bus"]);
}

#[test]
fn bound_host_driver_is_a_problem_only_when_unmanaged() {
    let host = Fixture::hgx_h100();
    host.bind("0000:05:00.0", Some("nvidia"));
    assert!(host.select(&Selection::default()).is_ok());
    let unmanaged = Selection { unmanaged: true, ..Selection::default() };
    refused(&host, &unmanaged, &["NVSwitch 0000:05:00.0 has driver nvidia", "nodedev-detach pci_0000_05_00_0"]);
    refused(&host, &unmanaged, &["0000:03:00.1 has no driver, not vfio-pci"]);
}
