//! Real causes for rows of docs/failures.md: each is reported by its deadline,
//! with its step and its cause, and everything that does not depend on it works.
//!
//! Times are the guest's own, from the record.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, Gpu, GpuPhase, Outcome, State, Unit};
use firstlight_e2e::{Scenario, gpu, lab};
use firstlight_lab::Guest;
use tokio::time::timeout;

use crate::gpu_hotplug::{CONSOLE, container, plug, record_when, shell};
use crate::support::{Files, output, ready, refused};

/// How much later than its deadline a failure may be reported, µs.
const SLACK_US: u64 = 1_000_000;

/// PID 1's start to the agent's start in an emulated guest on an idle machine, µs.
const USUAL_US: u64 = 500_000;

/// How long after a failure its consequences may be reported, µs.
const SILENCE_US: u64 = 2_000_000;

fn unit<'a>(record: &'a BootRecord, name: &str) -> &'a Unit {
    record.unit(name).unwrap()
}

/// Returns how many times slower than usual this guest booted: the host may be busy.
fn slowness(record: &BootRecord) -> u64 {
    let agent = unit(record, "agent").start_us.unwrap();
    (agent - record.pid1_start_us).div_ceil(USUAL_US)
}

/// Asserts that the unit timed out at its deadline and not much later.
fn assert_timed_out_at(record: &BootRecord, name: &str, deadline: Duration) {
    let unit = unit(record, name);
    let took = unit.end_us.unwrap() - unit.start_us.unwrap();
    let deadline = u64::try_from(deadline.as_micros()).unwrap();
    println!("  {name}: timed out {} us after its deadline", took.saturating_sub(deadline));
    assert!((deadline..=deadline + SLACK_US * slowness(record)).contains(&took), "{} {unit:?}", slowness(record));
}

#[test]
fn hung_driver_load_times_out_and_containers_without_gpus_run() {
    let guest = Guest::with_gpus(1, Duration::from_millis(300));
    let scenario = Scenario::guest(guest)
        .parameter("nvidia.standin_init_ms=7000")
        .parameter("firstlight.deadline.modules-nvidia=2s")
        .command(&["/bin/sleep", "9"]);
    let report = scenario.go().unwrap();
    assert_eq!(report.container.exit_code, Some(0), "{:?}", report.container);
    let record = &report.boot_record;
    let driver = unit(record, "modules-nvidia");
    assert_eq!(driver.outcome, Outcome::TimedOut);
    assert_timed_out_at(record, "modules-nvidia", Duration::from_secs(2));
    assert!(driver.detail.contains("deadline of 2000 ms") && driver.detail.contains("NVRM"), "{}", driver.detail);
    let gpu = gpu(record, 0);
    assert_eq!((gpu.phase, gpu.step.as_str()), (GpuPhase::Failed, "module"), "{gpu:?}");
    assert!(gpu.detail.contains("modules-nvidia timed out"), "{gpu:?}");
    assert!(gpu.end_us.unwrap() <= driver.end_us.unwrap() + SILENCE_US * slowness(record));
    let late = record.event("unit-ended-after-deadline").expect("its end is recorded although it timed out");
    assert!(late.object == "modules-nvidia" && late.detail.contains("given up"), "{late:?}");
}

#[test]
fn missing_firmware_is_reported_with_the_drivers_message() {
    let guest = Guest::with_gpus(2, Duration::from_millis(300));
    let scenario = Scenario::guest(guest).parameter("nvidia.standin_firmware=nvidia/550/none.bin").request(&["1"]);
    let report = scenario.go().unwrap();
    let error = report.container.error.expect("no firmware, no GPU");
    for part in ["0000:02:00.0", "wait-open-complete", "no firmware nvidia/550/none.bin", "0x38"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(report.boot_record.gpus.iter().all(|gpu| gpu.phase == GpuPhase::Failed && gpu.attempts == 2));
}

#[test]
fn agent_that_never_listens_fails_the_boot_at_its_deadline() {
    let image = lab().variant("silent-agent").unwrap();
    let mut scenario = Scenario::gpus(0).parameter("firstlight.deadline.agent=3s");
    scenario.guest.initrd = Some(image.initrd);
    let console = scenario.watched(async |vm| {
        let exit = timeout(Duration::from_secs(90), vm.wait()).await.expect("the guest powers off").unwrap();
        assert!(exit.status.success());
        let record = vm.console().record().unwrap();
        let agent = unit(&record, "agent");
        assert_eq!(agent.outcome, Outcome::TimedOut);
        assert_timed_out_at(&record, "agent", Duration::from_secs(3));
        let failure = record.failure.as_ref().unwrap();
        assert_eq!((failure.unit.as_str(), failure.action.as_str()), ("agent", "poweroff"));
        assert!(failure.at_us <= agent.end_us.unwrap() + SILENCE_US * slowness(&record), "{failure:?}");
        assert!(failure.detail.contains("the agent did not report that it listens"));
        let off = record.event("power-off").expect("the record has the power-off");
        assert!(off.at_us > failure.at_us);
    });
    assert!(console.contains("waiting for nothing"), "the agent's own output:\n{console}");
    assert!(console.lines().any(|line| line.contains("boot failed") && line.contains("agent")), "{console}");
}

#[test]
fn full_run_directory_fails_a_hotplugged_gpu_until_space_is_freed() {
    let files = Files::make();
    let mut scenario = files.scenario("with-shell", Vec::new());
    scenario.guest.devices = vec![firstlight_lab::h100(Duration::from_millis(300))];
    scenario.guest.spare_gpus = scenario.guest.devices.clone();
    let scenario = scenario.parameter("agent.debug_console").parameter(&format!("agent.debug_console_vport={CONSOLE}"));
    scenario.watched_with(async |vm, spare| {
        let agent = ready(vm).await;
        record_when(&agent, "the boot has ended", |record| record.state == State::Ready).await;
        let filled = shell(vm, "dd if=/dev/zero of=/run/full bs=1M 2>&1; df /run | tail -n 1").await;
        assert!(filled.contains("No space left") && filled.contains("100%"), "{filled}");
        plug(vm, spare).await;
        let settled = |gpu: &Gpu| matches!(gpu.phase, GpuPhase::Failed | GpuPhase::Ready);
        let record = record_when(&agent, "the attach of the second GPU has ended", |record| {
            record.gpus.len() == 2 && settled(&record.gpus[1])
        })
        .await;
        let second = &record.gpus[1];
        assert_eq!((second.phase, second.step.as_str()), (GpuPhase::Failed, "cdi"), "{second:?}");
        for part in ["0000:02:00.0", "nvidia.json", "No space left"] {
            assert!(second.detail.contains(part), "{part} in {}", second.detail);
        }
        // The agent replies with the cause, and the CDI file of the first GPU is intact.
        let error = refused(&agent, &container(&files, "c2", "1")).await;
        assert!(error.contains("No space left"), "{error}");
        shell(vm, "rm /run/full; echo 1 > /sys/bus/pci/devices/0000:02:00.0/remove; echo 1 > /sys/bus/pci/rescan")
            .await;
        record_when(&agent, "both are ready", |record| record.gpus.iter().all(|gpu| gpu.phase == GpuPhase::Ready))
            .await;
        assert_eq!(output(&agent, &container(&files, "c1", "0")).await, "nvidia0\nopened\n");
    });
}

/// 300 baud are 30 bytes a second: the console output of a boot takes half an hour.
#[test]
fn console_at_300_baud_does_not_delay_the_boot() {
    let mut guest = Guest::with_gpus(2, Duration::from_millis(300));
    guest.slow_console = Some(30);
    let mut scenario = Scenario::guest(guest).request(&["0", "1"]).command(&["/bin/true"]);
    // Such a console rarely has the end of the record in time; the record is read from the agent.
    scenario.deadlines.create = Duration::from_secs(30);
    let report = scenario.go().unwrap();
    assert_eq!((report.container.error, report.container.exit_code), (None, Some(0)));
    let record = &report.boot_record;
    assert!(record.gpus.iter().all(|gpu| gpu.phase == GpuPhase::Ready));
    for unit in &record.units {
        assert!(!matches!(unit.outcome, Outcome::TimedOut | Outcome::Failed), "{unit:?}");
    }
}
