//! GPU settings, applied by the real program with the stand-in for NVML.

use firstlight_boot_record::{BootRecord, GpuPhase, Outcome, Severity};
use firstlight_e2e::{Scenario, gpu, lab};

const ONE: &str = "0000:01:00.0";
const TWO: &str = "0000:02:00.0";

/// Returns a scenario with two GPUs and an image that has `firstlight-gpu-settings`.
fn scenario(parameters: &[&str]) -> Scenario {
    let mut scenario = Scenario::gpus(2);
    scenario.guest.initrd = Some(lab().settings().unwrap().initrd);
    parameters.iter().fold(scenario, |scenario, parameter| scenario.parameter(parameter))
}

/// Returns the details of an object's events of one kind, without their times.
fn events<'a>(record: &'a BootRecord, what: &str, object: &str) -> Vec<&'a str> {
    let of = record.events.iter().filter(|event| event.kind == what && event.object == object);
    of.map(|event| event.detail.rsplit_once(" (").map_or(event.detail.as_str(), |(detail, _)| detail)).collect()
}

#[test]
fn gpu_settings_and_mig_are_applied_before_gpus_are_ready_and_a_container_gets_one_instance() {
    let scenario = scenario(&[
        "firstlight.mig=0:3g.71gb,4g.71gb;1:off",
        "firstlight.gpu-power-limit=all:500;1:400",
        "firstlight.gpu-clocks=1:345,1980",
        "firstlight.gpu-memory-clock=2619",
        "firstlight.gpu-compute-mode=1:exclusive-process",
    ]);
    let (report, console) = scenario.request(&["0:1"]).command(&["/bin/ls", "/dev/nvidia-caps"]).go_with_console();
    let report = report.unwrap();
    let record = &report.boot_record;
    let unit = record.unit("gpu-settings").unwrap();
    assert_eq!((unit.outcome, unit.detail.as_str()), (Outcome::Ok, "7 done, 2 as they were"), "{unit:?}");
    assert_eq!(
        events(record, "gpu-setting", ONE),
        [
            "mig: 3g.71gb,4g.71gb (previously without instances)",
            "power-limit: 500 W (previously 700 W)",
            "memory-clock: 2619 MHz"
        ]
    );
    assert_eq!(
        events(record, "gpu-setting", TWO),
        [
            "compute-mode: exclusive-process (previously default)",
            "power-limit: 400 W (previously 700 W)",
            "memory-clock: 2619 MHz",
            "clocks: 345 to 1980 MHz"
        ]
    );
    assert_eq!(events(record, "gpu-setting-unchanged", TWO), ["mig: off"]);

    // The resulting state, as the stand-in library prints it.
    for line in [
        format!("{ONE} mig 1"),
        format!("{ONE} power 500000"),
        format!("{TWO} power 400000"),
        format!("{TWO} clocks 345,1980"),
        format!("{TWO} compute-mode 3"),
        format!("{ONE} memory-clock 2619,2619"),
    ] {
        assert!(console.contains(&format!("gpu-settings: stand-in NVML: {line}")), "{line} in\n{console}");
    }

    // A GPU is not announced before its settings are applied.
    let attach = |pci| record.unit(&format!("gpu-attach[{pci}]")).unwrap();
    for (index, pci) in [(0, ONE), (1, TWO)] {
        let (unit_end, row) = (attach(pci).end_us.unwrap(), gpu(record, index));
        assert!(attach(pci).detail.starts_with("attached after "), "{:?}", attach(pci));
        assert_eq!(row.phase, GpuPhase::Ready);
        assert!(unit_end <= unit.start_us.unwrap() && unit.start_us <= row.end_us, "{row:?} {unit:?}");
    }
    // The container gets one GPU instance, with its compute instance.
    let nodes: Vec<&str> = report.container.stdout.split_ascii_whitespace().collect();
    assert_eq!(nodes.len(), 2, "the nodes of one instance: {:?}", report.container);
    assert!(nodes.iter().all(|node| node.starts_with("nvidia-cap")), "{nodes:?}");
}

#[test]
fn out_of_range_setting_and_missing_mig_profile_are_reported_with_valid_values() {
    let parameters =
        ["firstlight.gpu-power-limit=1:900", "firstlight.mig=0:5g.99gb", "firstlight.gpu-clocks=7:1000;1:1980"];
    let record = scenario(&parameters).request(&["1"]).go().unwrap().boot_record;
    let unit = record.unit("gpu-settings").unwrap();
    assert_eq!((unit.outcome, unit.severity), (Outcome::Failed, Severity::Degraded));
    for part in [
        "firstlight.gpu-clocks names a GPU that this guest does not have: its GPUs are 0 to 1",
        "0000:02:00.0: power-limit: requested 900 W, but this GPU supports 200 W to 700 W, default 700 W",
        "0000:01:00.0: mig: unknown profile 5g.99gb; this GPU has 1g.18gb (19: 7 free of 7)",
    ] {
        assert!(unit.detail.contains(part), "{part} in {}", unit.detail);
    }
    assert_eq!(events(&record, "gpu-setting", TWO), ["clocks: 1980 MHz"], "the other settings are applied");
    // A GPU with an invalid power limit is ready; a GPU that could not be partitioned is not granted to any container.
    assert_eq!(gpu(&record, 1).phase, GpuPhase::Ready);
    let whole = gpu(&record, 0);
    assert_eq!((whole.phase, whole.step.as_str()), (GpuPhase::Failed, "mig"));
    assert!(whole.detail.contains("the MIG instances of firstlight.mig are missing"), "{}", whole.detail);
}

#[test]
fn hung_nvml_call_times_out_and_is_named() {
    let record = scenario(&[
        "firstlight.gpu-power-limit=500",
        "firstlight.gpu-settings-deadline=3s",
        &format!("stand_in_nvml.fault=nvmlDeviceSetPowerManagementLimit,{ONE},hang"),
    ])
    .request(&["0"])
    .go()
    .unwrap()
    .boot_record;
    let unit = record.unit("gpu-settings").unwrap();
    assert_eq!((unit.outcome, unit.severity), (Outcome::TimedOut, Severity::Degraded), "{unit:?}");
    for part in [
        "0000:01:00.0: power-limit has begun and not ended",
        "killed, as it did not end within 3s, firstlight.gpu-settings-deadline",
    ] {
        assert!(unit.detail.contains(part), "{part} in {}", unit.detail);
    }
    assert!(unit.end_us.unwrap() - unit.start_us.unwrap() >= 3_000_000);
    assert_eq!(events(&record, "gpu-setting", TWO), ["power-limit: 500 W (previously 700 W)"], "{:?}", record.events);
    assert!((0..2).all(|index| gpu(&record, index).phase == GpuPhase::Ready), "{:?}", record.gpus);
}

#[test]
fn missing_settings_program_is_named() {
    let scenario = Scenario::gpus(1).request(&["0"]).parameter("firstlight.gpu-clocks=1980");
    let record = scenario.go().unwrap().boot_record;
    let unit = record.unit("gpu-settings").unwrap();
    assert_eq!((unit.outcome, unit.severity), (Outcome::Failed, Severity::Degraded));
    assert!(unit.detail.contains("/usr/bin/firstlight-gpu-settings is not in the image; add it"), "{}", unit.detail);
    assert_eq!(gpu(&record, 0).phase, GpuPhase::Ready);
}
