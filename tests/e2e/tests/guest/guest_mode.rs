//! The guest's mode, detected from its PCI devices.

use std::time::Duration;

use firstlight::run::RunError;
use firstlight_boot_record::{GpuPhase, Outcome};
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;

/// Returns a scenario with these devices, in the notation of the synthetic devices' server.
fn guest(devices: &[&str]) -> Scenario {
    let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
    Scenario::guest(Guest { devices, ..Guest::default() }).command(&["/bin/true"])
}

/// Like [`guest`], with an image that has daemons.
fn with_daemons(devices: &[&str]) -> Scenario {
    let mut scenario = guest(devices);
    scenario.guest.initrd = Some(lab().variant("daemons").unwrap().initrd);
    scenario
}

#[test]
fn nvswitches_without_gpus_select_service_vm_mode() {
    let report = with_daemons(&["nvswitch", "nvswitch", "nvswitch", "nvswitch"]).go().unwrap();
    let record = &report.boot_record;
    let mode = record.mode.as_ref().unwrap();
    assert_eq!(mode.name, "service-vm-nvl4", "{mode:?}");
    assert_eq!(mode.reason, "GPUs on the PCI bus: 0, NVSwitches: 4");
    let driver = record.unit("modules-nvidia").unwrap();
    assert!(driver.outcome == Outcome::Ok && !driver.detail.contains("uvm"), "{driver:?}");
    assert_eq!(report.container.exit_code, Some(0));
}

#[test]
fn gpus_with_nvlink5_management_bridge_select_fabric_mode() {
    // The second InfiniBand function is an ordinary NIC: its VPD does not identify it as a management bridge.
    let report =
        guest(&["h100:attach-ms=100", "h100:attach-ms=100", "cx7", "cx7-nic"]).request(&["0", "1"]).go().unwrap();
    let mode = report.boot_record.mode.as_ref().unwrap();
    assert_eq!(mode.name, "gpu+fabric-nvl5", "{mode:?}");
    assert!(mode.reason.ends_with("NVLink 5 management bridges: 1, other Mellanox functions: 1"), "{mode:?}");
    assert!(report.boot_record.gpus.iter().all(|gpu| gpu.phase == GpuPhase::Ready), "{:?}", report.boot_record.gpus);
    assert_eq!(report.container.error, None);
}

#[test]
fn two_fabric_kinds_are_unsupported_and_fail_the_boot_only_if_requested() {
    let devices = ["h100:attach-ms=100", "nvswitch", "cx7"];
    let report = guest(&devices).request(&["0"]).go().unwrap();
    let record = &report.boot_record;
    assert_eq!(record.mode.as_ref().unwrap().name, "gpu", "the GPU is used");
    let event = record.events.iter().find(|event| event.kind == "unsupported-topology").unwrap();
    assert!(event.detail.contains("no system has both"), "{event:?}");
    assert_eq!(report.container.error, None);

    let mut strict = guest(&devices).parameter("firstlight.on-unsupported-topology=fail");
    strict.deadlines.boot = Duration::from_secs(60);
    let RunError::Ended { record, why, .. } = strict.go().unwrap_err() else { panic!("the guest must power off") };
    assert!(why.contains("mode") && why.contains("no system has both"), "{why}");
    let failure = record.unwrap().failure.unwrap();
    assert_eq!((failure.unit.as_str(), failure.action.as_str()), ("mode", "poweroff"));
}

#[test]
fn mode_parameter_overrides_detection() {
    let report = with_daemons(&["h100:attach-ms=100"]).parameter("firstlight.mode=service-vm-nvl4").go().unwrap();
    let record = &report.boot_record;
    assert_eq!(record.mode.as_ref().unwrap().name, "service-vm-nvl4");
    assert!(
        record.events.iter().any(|event| event.kind == "unsupported-topology" && event.detail.contains("no NVSwitch"))
    );
    let gpu = &record.gpus[0];
    assert!(gpu.phase == GpuPhase::Failed && gpu.step == "mode" && gpu.driver.is_none(), "{gpu:?}");
}
