//! The basic promises: a container gets its GPUs, the record is complete, memory use is small.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, GpuPhase, Outcome, State};
use firstlight_e2e::Scenario;
use firstlight_lab::Guest;
use tokio::time::timeout;

#[test]
fn container_gets_its_gpus_and_is_denied_the_others() {
    let guest = Guest::with_gpus(4, Duration::from_millis(1500));
    let report = Scenario::guest(guest).request(&["0", "1"]).go().unwrap();
    let container = &report.container;
    assert_eq!(container.error, None);
    assert_eq!(container.exit_code, Some(0), "{}", container.stdout);
    assert_eq!(container.denied_open, Some(true), "{}", container.stdout);
    for (node, address) in [("/dev/nvidia0", "0000:01:00.0"), ("/dev/nvidia1", "0000:02:00.0")] {
        let sees = format!("sees {node}: {address}");
        assert!(container.stdout.contains(&sees), "{sees} in {}", container.stdout);
    }
    assert!(!container.stdout.contains("sees /dev/nvidia2"), "{}", container.stdout);
    assert!(container.stdout.contains("open char 195:2: refused: Operation not permitted"), "{}", container.stdout);

    let timeline = &report.timeline;
    let listening = timeline.agent_listening_us.unwrap();
    let first = timeline.first_gpu_ready_us.unwrap();
    let all = timeline.all_gpus_ready_us.unwrap();
    let started = timeline.container_started_us.unwrap();
    let exited = timeline.container_exited_us.unwrap();
    let off = timeline.power_off_us.unwrap();
    assert!(
        timeline.pid1_start_us < listening && listening < first,
        "the agent answers before the first GPU: {timeline:?}"
    );
    assert!(first <= all && started < exited && exited < off, "{timeline:?}");
    let ready = |index: u32| firstlight_e2e::gpu(&report.boot_record, index).end_us.unwrap();
    assert!(started > ready(0) && started > ready(1), "the container waited for its GPUs: {timeline:?}");
    assert_eq!(report.gpus.len(), 4);
    for gpu in &report.gpus {
        assert_eq!(gpu.outcome, "ready");
        assert!(gpu.attach_us.unwrap() >= 1_500_000, "{gpu:?}");
    }
    assert!(report.host.qemu_exit_us < 20_000_000, "QEMU's start to power-off: {} us", report.host.qemu_exit_us);
}

#[test]
fn boot_record_has_every_unit_with_its_times() {
    let report = Scenario::gpus(2).request(&["all"]).go().unwrap();
    let record = &report.boot_record;
    assert_eq!(record.state, State::PoweringOff);
    assert_eq!(record.mode.as_ref().unwrap().name, "gpu");
    assert!(record.mode.as_ref().unwrap().reason.contains('2'), "{:?}", record.mode);
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
fn idle_init_and_agent_stay_below_their_memory_limits() {
    let mut record = None;
    Scenario::gpus(2).watched(async |vm| {
        let reported = |record: &BootRecord| record.events.iter().filter(|event| event.kind == "resident").count() >= 3;
        let seen = timeout(Duration::from_secs(60), vm.console().wait_for(reported)).await;
        assert!(seen.is_ok_and(|seen| seen), "{}", vm.console_tail());
        record = vm.console().record();
    });
    let record = record.unwrap();
    let kib = |process: &str| {
        let event = record.events.iter().find(|event| event.kind == "resident" && event.object == process);
        event.unwrap().detail.trim_end_matches(" KiB").parse::<u64>().unwrap()
    };
    assert!(kib("init") <= 3 * 1024, "init: {} KiB", kib("init"));
    assert!(kib("agent") <= 5 * 1024, "agent: {} KiB", kib("agent"));
}

#[test]
fn parallel_attach_overlaps_and_serial_does_not() {
    let attach = Duration::from_millis(1000);
    let spread = |parameter: &str| {
        let report =
            Scenario::guest(Guest::with_gpus(3, attach)).parameter(parameter).command(&["/bin/true"]).go().unwrap();
        let driver = report.boot_record.unit("modules-nvidia").unwrap().end_us.unwrap();
        report.timeline.all_gpus_ready_us.unwrap() - driver
    };
    let (parallel, serial) = (spread("firstlight.attach=parallel"), spread("firstlight.attach=serial"));
    assert!(serial >= 3_000_000, "three seconds of attach, one after the other: {serial} us");
    assert!(parallel * 2 < serial, "parallel {parallel} us, serial {serial} us");
}

#[test]
fn guest_without_gpus_runs_containers() {
    let report = Scenario::gpus(0).go().unwrap();
    assert_eq!(report.boot_record.mode.as_ref().unwrap().name, "cpu");
    assert_eq!(report.container.exit_code, Some(0));
    assert_eq!(report.container.denied_open, Some(true), "{}", report.container.stdout);
    assert!(report.gpus.is_empty());
}

#[test]
fn gpu_is_granted_by_pci_address() {
    let report = Scenario::gpus(3).request(&["0000:03:00.0"]).go().unwrap();
    assert_eq!(report.container.error, None);
    assert!(report.container.stdout.contains("sees /dev/nvidia2: 0000:03:00.0"), "{}", report.container.stdout);
    assert_eq!(report.container.denied_open, Some(true), "{}", report.container.stdout);
}
