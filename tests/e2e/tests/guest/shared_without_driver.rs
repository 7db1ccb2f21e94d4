//! A guest with a GPU, whose image has no driver and no extension.

use std::time::Duration;

use firstlight_boot_record::{GpuPhase, Outcome, State};
use firstlight_e2e::{Scenario, Shared, gpu, lab};
use firstlight_lab::Guest;

static GUEST: Shared = Shared::new(|| {
    let mut guest = Guest::with_gpus(1, Duration::from_millis(100));
    guest.initrd = Some(lab().variant("without-nvidia").unwrap().initrd);
    Scenario::guest(guest)
});

#[test]
fn missing_driver_degrades_the_boot_and_is_reported() {
    let guest = GUEST.guest();
    let error = guest.probe(&["0"]).error.expect("no driver, no GPU");
    for part in ["0000:01:00.0", "module nvidia is neither in"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let record = guest.record();
    assert_eq!(record.state, State::Degraded);
    let gpu = gpu(&record, 0);
    assert_eq!((gpu.phase, gpu.step.as_str()), (GpuPhase::Failed, "module"));
    assert!(record.event("agent-listening").is_some());
}

#[test]
fn guest_without_extensions_skips_their_units() {
    let record = GUEST.guest().record();
    assert_eq!(record.state, State::Degraded);
    for name in ["extensions", "extension-disks"] {
        assert_eq!(record.unit(name).unwrap().outcome, Outcome::Skipped, "{name}");
    }
}
