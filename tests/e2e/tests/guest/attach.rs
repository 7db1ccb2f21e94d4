//! Attach deadlines, and the order in which GPUs are attached.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, GpuPhase};
use firstlight_e2e::{Scenario, gpu};
use firstlight_lab::{Guest, fail_with};

fn phases(record: &BootRecord) -> Vec<GpuPhase> {
    record.gpus.iter().map(|gpu| gpu.phase).collect()
}

fn late(record: &BootRecord) -> Vec<&str> {
    record
        .events
        .iter()
        .filter(|event| event.kind == "gpu-attached-after-deadline")
        .map(|event| event.object.as_str())
        .collect()
}

#[test]
fn gpus_serialised_by_the_driver_do_not_time_out() {
    // The driver attaches them serially: the last attach starts after 4 s.
    let guest = Guest::with_gpus(3, Duration::from_secs(2));
    let scenario = Scenario::guest(guest)
        .parameter("nvidia.standin_lock_permille=1000")
        .parameter("firstlight.attach-deadline=3500ms")
        .request(&["0", "1", "2"]);
    let report = scenario.go().unwrap();
    assert_eq!(report.container.error, None);
    assert_eq!(phases(&report.boot_record), [GpuPhase::Ready; 3]);
    assert_eq!(late(&report.boot_record), [""; 0]);
    let longest = report.boot_record.gpus.iter().filter_map(|gpu| gpu.attach_us).max().unwrap();
    assert!(longest > 3_500_000, "none took longer than the deadline: {longest} us");
}

#[test]
fn attach_with_progress_extends_its_deadline_and_a_late_gpu_becomes_ready() {
    let guest = Guest::with_gpus(2, Duration::from_secs(5));
    let scenario = Scenario::guest(guest)
        .parameter("nvidia.standin_signs=1,0")
        .parameter("firstlight.attach-deadline=2s")
        .command(&["/bin/sleep", "6"])
        .request(&["0"]);
    let report = scenario.go().unwrap();
    assert_eq!(report.container.error, None, "{:?}", report.boot_record.gpus);
    assert_eq!(phases(&report.boot_record), [GpuPhase::Ready; 2]);
    assert_eq!(late(&report.boot_record), ["0000:02:00.0"], "{:?}", report.boot_record.events);
    let unit = |name: &str| report.boot_record.units.iter().find(|unit| unit.name == name).unwrap();
    assert!(unit("gpu-attach[0000:01:00.0]").detail.starts_with("ready after"));
    let given_up = &unit("gpu-attach[0000:02:00.0]").detail;
    for part in ["wait-open-complete", "nothing has moved for 2s", "has not interrupted once", "the attach continues"] {
        assert!(given_up.contains(part), "{part} in {given_up}");
    }
}

#[test]
fn confidential_computing_attaches_gpus_serially_without_retry() {
    let mut guest = Guest::with_gpus(3, Duration::from_millis(500));
    fail_with(&mut guest.devices[1], 0x22);
    let report = Scenario::guest(guest).parameter("firstlight.confidential=on").request(&["0", "2"]).go().unwrap();
    assert_eq!(report.container.error, None);
    let record = &report.boot_record;
    assert!(record.mode.as_ref().unwrap().reason.contains("confidential: firstlight.confidential=on"), "{record:?}");
    assert_eq!(phases(record), [GpuPhase::Ready, GpuPhase::Failed, GpuPhase::Ready]);
    for pair in record.gpus.windows(2) {
        // An attached GPU becomes ready only when all GPUs have ended their attach and may work.
        let end = pair[0].attach_us.map(|took| pair[0].start_us.unwrap() + took).or(pair[0].end_us);
        assert!(end.is_some() && end <= pair[1].start_us, "{pair:?}");
    }
    let failed = gpu(record, 1);
    assert_eq!(failed.attempts, 1, "a failed attach leaves a GPU that needs a reset");
    assert!(failed.detail.contains("attempt 1 of 1") && failed.detail.contains("the host has to reset"), "{failed:?}");
}

#[test]
fn driver_without_non_blocking_open_attaches_gpus_in_parallel() {
    let guest = Guest::with_gpus(4, Duration::from_secs(2));
    let scenario = Scenario::guest(guest)
        .parameter("firstlight.nvidia.NVreg_EnableNonblockingOpen=0")
        .request(&["0", "1", "2", "3"]);
    let report = scenario.go().unwrap();
    assert_eq!(report.container.error, None);
    let gpus = &report.boot_record.gpus;
    assert!(gpus.iter().all(|gpu| gpu.phase == GpuPhase::Ready), "{gpus:?}");
    let last_start = gpus.iter().filter_map(|gpu| gpu.start_us).max().unwrap();
    let first_end = gpus.iter().filter_map(|gpu| gpu.end_us).min().unwrap();
    assert!(last_start < first_end, "all are in the driver at once: {gpus:?}");
}
