//! The basic promises: a container gets its GPUs in time, memory use is small.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, State};
use firstlight_e2e::Scenario;
use firstlight_lab::Guest;
use tokio::time::timeout;

#[test]
fn container_gets_its_gpus_and_is_denied_the_others() {
    let guest = Guest::with_gpus(4, Duration::from_millis(1500));
    let report = Scenario::guest(guest).request(&["0", "1"]).go().unwrap();
    assert!(report.succeeded(), "{:?}", report.container);
    assert_eq!(report.boot_record.state, State::PoweringOff);
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
