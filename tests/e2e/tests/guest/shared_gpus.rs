//! A guest with three GPUs: which of them a container gets, and the boot record.

use firstlight::container::Probe;
use firstlight_boot_record::{GpuPhase, Outcome, State};
use firstlight_e2e::{Scenario, Shared};

static GUEST: Shared = Shared::new(|| Scenario::gpus(3));

#[test]
fn boot_record_has_every_unit_with_its_times() {
    let record = GUEST.guest().record();
    assert_eq!(record.state, State::Ready);
    assert_eq!(record.mode.as_ref().unwrap().name, "gpu");
    assert!(record.mode.as_ref().unwrap().reason.contains('3'), "{:?}", record.mode);
    for unit in &record.units {
        let name = &unit.name;
        assert!(matches!(unit.outcome, Outcome::Ok | Outcome::Running | Outcome::Skipped), "{unit:?}");
        for need in &unit.need {
            let needed = record.unit(need);
            if let (Some(needed), Some(start)) = (needed, unit.start_us) {
                let usable = needed.ready_us.or(needed.end_us).unwrap();
                assert!(usable <= start, "{name} started before {need} was usable");
            }
        }
    }
    for name in ["gpu-attach[0000:01:00.0]", "gpu-attach[0000:02:00.0]"] {
        let unit = record.unit(name).unwrap_or_else(|| panic!("no {name} among {:?}", record.units));
        assert_eq!(unit.pci.unwrap().to_string(), name["gpu-attach[".len()..name.len() - 1]);
        assert!(unit.end_us.unwrap() - unit.start_us.unwrap() >= 300_000, "{unit:?}");
    }
    assert!(record.kernel.milestones.iter().any(|milestone| milestone.name == "init-exec"), "{:?}", record.kernel);
    assert!(record.gpus.iter().all(|gpu| gpu.phase == GpuPhase::Ready && gpu.attempts == 1));
}

#[test]
fn container_gets_all_gpus_on_request() {
    let container = GUEST.guest().probe(&["all"]);
    assert_eq!(container.error, None);
    assert_eq!(Probe::read(&container.stdout).denied_open(&[0, 1, 2]), Some(true), "{}", container.stdout);
}

#[test]
fn gpu_is_granted_by_pci_address() {
    let container = GUEST.guest().probe(&["0000:03:00.0"]);
    assert_eq!(container.error, None);
    assert!(container.stdout.contains("sees /dev/nvidia2: 0000:03:00.0"), "{}", container.stdout);
    assert_eq!(Probe::read(&container.stdout).denied_open(&[2]), Some(true), "{}", container.stdout);
}

#[test]
fn request_for_a_missing_gpu_is_rejected_with_a_list_of_gpus() {
    let error = GUEST.guest().run(&["/bin/true"], &["7"]).error.expect("there is no GPU 7");
    assert!(error.contains("no GPU 7") && error.contains("0000:01:00.0"), "{error}");
}

#[test]
fn guest_without_gpu_settings_skips_their_unit() {
    let record = GUEST.guest().record();
    let unit = record.unit("gpu-settings").unwrap();
    assert_eq!(unit.outcome, Outcome::Skipped, "{unit:?}");
}
