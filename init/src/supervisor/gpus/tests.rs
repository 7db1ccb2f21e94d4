use std::fs::File;

use firstlight_boot_record::GpuPhase;

use super::super::guest::testing::{gpu, guest};
use super::*;
use crate::hotplug::{BusSnapshot, Change};
use crate::open::Answer;

/// A guest with GPUs, a root directory and kernel log data.
struct Fixture {
    directory: tempfile::TempDir,
    guest: Guest,
    log: Log,
    gpus: Gpus,
    now: u64,
}

fn pci(bus: u8) -> Address {
    gpu(bus).address
}

impl Fixture {
    /// Creates a guest with this command line and with GPUs on these buses, found at boot, with
    /// minor numbers.
    fn with(line: &str, buses: &[u8]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("var/run/cdi")).unwrap();
        let guest = guest(directory.path(), line, buses);
        let mut gpus = Gpus::default();
        let effects = gpus.found(guest.gpus());
        assert_eq!(effects.len(), buses.len());
        gpus.set_minors(buses.iter().map(|bus| (pci(*bus), Ok(u32::from(*bus)))).collect());
        Self { directory, guest, log: Log::default(), gpus, now: 1_000_000 }
    }

    fn handle(&mut self, handle: impl FnOnce(&mut Gpus, &GpuContext<'_>) -> Vec<Effect>) -> Vec<Effect> {
        let context = GpuContext { now: self.now, guest: &self.guest, log: &self.log };
        handle(&mut self.gpus, &context)
    }

    fn attached(&mut self, bus: u8) -> Vec<Effect> {
        let held = File::open("/dev/null").unwrap().into();
        self.handle(|gpus, context| gpus.answered(pci(bus), Answer::Attached(held, None), context))
    }

    fn row(&self, bus: u8) -> &Gpu {
        &self.gpus.entries[self.gpus.find(pci(bus)).unwrap()].row
    }
}

/// Returns the effects without [`Effect::Gpu`].
fn without_rows(effects: Vec<Effect>) -> Vec<Effect> {
    effects.into_iter().filter(|effect| !matches!(effect, Effect::Gpu { .. })).collect()
}

fn unit(bus: u8) -> UnitId {
    UnitId::GpuAttach(pci(bus))
}

#[test]
fn attached_gpu_is_published_and_ends_its_unit() {
    let mut fixture = Fixture::with("", &[1]);
    let effects = fixture.handle(|gpus, context| gpus.start_unit(pci(1), context));
    assert_eq!(without_rows(effects), [Effect::Attach(pci(1), 1)]);
    assert!(fixture.gpus.next_deadline().is_some() && fixture.row(1).step == OPEN);
    fixture.gpus.opened(pci(1));
    fixture.now += 2_000_000;
    assert_eq!(without_rows(fixture.attached(1)), []);
    assert_eq!((fixture.gpus.ready(), fixture.gpus.is_held(pci(1))), (0, true));
    let effects = fixture.handle(Gpus::publish_ready);
    assert_eq!(without_rows(effects), [Effect::EndUnit(unit(1), End::Ok("ready after 2000 ms".into()))]);
    assert_eq!((fixture.gpus.ready(), fixture.row(1).phase), (1, GpuPhase::Ready));
    assert!(fixture.directory.path().join("var/run/cdi/nvidia.json").exists());
}

#[test]
fn gpu_with_requested_settings_waits_for_them() {
    let mut fixture = Fixture::with("firstlight.mig=all:on", &[1]);
    fixture.handle(|gpus, context| gpus.start_unit(pci(1), context));
    let effects = without_rows(fixture.attached(1));
    let ended = Effect::EndUnit(unit(1), End::Ok("attached after 0 ms".into()));
    assert_eq!(effects, [Effect::ApplySettings(pci(1)), ended]);
    assert_eq!(fixture.gpus.waiting_for_settings(), [(0, pci(1))]);
    fixture.handle(|gpus, context| gpus.settings_applied(pci(1), Some("no reply".into()), context));
    assert!(
        fixture.row(1).detail.ends_with(
            "the MIG instances of firstlight.mig are missing, so the GPU is not given to containers: no reply"
        )
    );
    assert_eq!((fixture.row(1).phase, fixture.row(1).step.as_str()), (GpuPhase::Failed, "mig"));
}

#[test]
fn failed_attempt_is_retried_once_and_the_second_fails_the_unit() {
    let mut fixture = Fixture::with("", &[1]);
    fixture.handle(|gpus, context| gpus.start_unit(pci(1), context));
    let mut refuse = || {
        let refusal = Refusal { step: OPEN, reason: "input/output error".into(), code: None };
        without_rows(fixture.handle(|gpus, context| gpus.answered(pci(1), Answer::Failed(refusal), context)))
    };
    assert_eq!(refuse(), [Effect::Attach(pci(1), 1)]);
    let effects = refuse();
    let [Effect::EndUnit(ended, End::Failed(text))] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(*ended, unit(1));
    assert!(
        text.starts_with("0000:01:00.0: attach failed in open after 0 ms (attempt 2 of 2): input/output"),
        "{text}"
    );
}

#[test]
fn silent_attach_times_out_and_a_late_result_is_served() {
    let mut fixture = Fixture::with("firstlight.attach-deadline=1s", &[1]);
    fixture.handle(|gpus, context| gpus.start_unit(pci(1), context));
    fixture.now = fixture.gpus.next_deadline().unwrap();
    let effects = without_rows(fixture.handle(Gpus::clock));
    assert!(matches!(&effects[..], [Effect::EndUnit(_, End::TimedOut(text))] if text.contains("not interrupted once")));
    fixture.attached(1);
    let effects = without_rows(fixture.handle(Gpus::publish_ready));
    assert!(matches!(&effects[..], [Effect::Event { kind: "gpu-attached-after-deadline", .. }]));
    assert_eq!(fixture.gpus.ready(), 1);
}

#[test]
fn gpu_without_node_or_driver_fails_with_the_step() {
    let mut fixture = Fixture::with("", &[1, 2]);
    fixture.gpus.set_minors(vec![(pci(1), Err("no minor".into()))]);
    assert!(!fixture.gpus.has_node(pci(1)));
    let effects = without_rows(fixture.handle(|gpus, context| gpus.start_unit(pci(1), context)));
    assert!(
        matches!(&effects[..], [Effect::EndUnit(_, End::Failed(text))] if text.contains("failed in nodes: no minor"))
    );
    fixture.handle(|gpus, context| gpus.unit_skipped(pci(2), "module", "it was skipped", context));
    assert_eq!(fixture.row(2).detail, "0000:02:00.0: it was skipped; the driver logged nothing about it");
}

#[test]
fn hotplugged_gpu_has_no_unit_and_changes_indices() {
    let mut fixture = Fixture::with("", &[2]);
    let added = Change::Added { pci: pci(1), device: 0x2330, bound: true };
    let effects = without_rows(fixture.handle(|gpus, context| gpus.changed(added, context)));
    let event = Effect::event("gpu-hotplugged", "0000:01:00.0", "index 0");
    assert_eq!(effects, [event, Effect::GpusChanged, Effect::AttachAdded(pci(1), true)]);
    assert_eq!((fixture.row(2).index, fixture.gpus.has_unit(pci(1))), (1, false));
    assert_eq!(fixture.gpus.bound(pci(1)), [Effect::MakeNode(pci(1))]);
    let effects = fixture.handle(|gpus, context| gpus.node_made(pci(1), Ok(7), context));
    assert_eq!(without_rows(effects), [Effect::Attach(pci(1), 7)]);
    fixture.attached(1);
    assert_eq!(without_rows(fixture.handle(Gpus::publish_ready)), []);
    assert_eq!(fixture.row(1).phase, GpuPhase::Ready);
}

#[test]
fn hotplugged_gpu_that_is_not_bound_fails_after_its_deadline() {
    let mut fixture = Fixture::with("", &[]);
    let added = Change::Added { pci: pci(1), device: 0x2330, bound: false };
    fixture.handle(|gpus, context| gpus.changed(added, context));
    fixture.now = fixture.gpus.next_deadline().unwrap();
    fixture.handle(Gpus::clock);
    assert!(fixture.row(1).detail.contains("failed in probe: the driver did not bind it within 10 s"));
    assert_eq!(fixture.gpus.next_deadline(), None);
}

#[test]
fn removed_gpu_is_published_as_removed_and_closed() {
    let mut fixture = Fixture::with("", &[1, 2]);
    for bus in [1, 2] {
        fixture.handle(|gpus, context| gpus.start_unit(pci(bus), context));
        fixture.attached(bus);
    }
    fixture.handle(Gpus::publish_ready);
    assert_eq!(fixture.gpus.changes(&BusSnapshot::default()).len(), 2);
    let effects = without_rows(fixture.handle(|gpus, context| gpus.changed(Change::Removed(pci(1)), context)));
    let event = Effect::event("gpu-removed", "0000:01:00.0", "it was removed from the guest");
    assert_eq!(effects, [event, Effect::CloseGpu(pci(1))]);
    assert_eq!((fixture.row(2).index, fixture.gpus.ready()), (0, 1));
    assert_eq!((fixture.gpus.take_closing(pci(1)).len(), fixture.gpus.take_closing(pci(1)).len()), (1, 0));
    assert_eq!(fixture.gpus.take_held().len(), 1);
}

#[test]
fn result_of_a_removed_gpu_is_dropped_and_its_successor_begins() {
    let mut fixture = Fixture::with("", &[1]);
    fixture.handle(|gpus, context| gpus.start_unit(pci(1), context));
    fixture.handle(|gpus, context| gpus.changed(Change::Removed(pci(1)), context));
    let added = Change::Added { pci: pci(1), device: 0x2330, bound: true };
    fixture.handle(|gpus, context| gpus.changed(added, context));
    fixture.gpus.bound(pci(1));
    let effects = fixture.handle(|gpus, context| gpus.node_made(pci(1), Ok(1), context));
    assert_eq!(without_rows(effects), [], "the first attempt is still in the driver");
    assert_eq!(without_rows(fixture.attached(1)), [Effect::Attach(pci(1), 1)]);
    assert!(!fixture.gpus.is_held(pci(1)));
}

#[test]
fn serial_attach_is_suggested_only_if_no_serial_attempt_failed() {
    let suggested = |policy, attempts, confidential| advice(policy, attempts, confidential).contains("attach=serial");
    assert!(suggested(Policy::Parallel, 1, false) && suggested(Policy::Auto, 1, false));
    assert!(!suggested(Policy::Auto, 2, false) && !suggested(Policy::Serial, 1, false));
    assert!(advice(Policy::Serial, 1, true).contains("reset"));
}
