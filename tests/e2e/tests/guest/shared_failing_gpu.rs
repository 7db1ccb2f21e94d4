//! A guest with two GPUs, of which the second fails to attach.

use std::time::Duration;

use firstlight::container::Probe;
use firstlight_boot_record::GpuPhase;
use firstlight_e2e::{Scenario, Shared, gpu};
use firstlight_lab::{Guest, fail_with};

static GUEST: Shared = Shared::new(|| {
    let mut guest = Guest::with_gpus(2, Duration::from_millis(300));
    fail_with(&mut guest.devices[1], 0x22);
    Scenario::guest(guest)
});

#[test]
fn failing_gpu_leaves_other_gpus_usable() {
    let guest = GUEST.guest();
    let container = guest.probe(&["0"]);
    assert_eq!(container.error, None);
    assert_eq!(Probe::read(&container.stdout).denied_open(&[0]), Some(true), "{}", container.stdout);
    let record = guest.record();
    assert_eq!(gpu(&record, 0).phase, GpuPhase::Ready);
    let failed = gpu(&record, 1);
    assert_eq!((failed.phase, failed.attempts), (GpuPhase::Failed, 2), "auto retries once: {failed:?}");
    assert!(failed.driver.unwrap().adapter_status != 0, "{failed:?}");
    assert!(failed.detail.contains("RmInitAdapter failed"), "the driver's last message: {failed:?}");
}

#[test]
fn request_for_a_failed_gpu_returns_address_step_time_and_cause() {
    let error = GUEST.guest().probe(&["0", "1"]).error.expect("the container must not run");
    for part in ["0000:02:00.0", "wait-open-complete", " ms", "0x22"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(!error.contains("backtrace") && error.lines().count() == 1, "one line: {error}");
}
