//! Invalid parameters and failing devices: the rest works, and the cause is reported.

use std::time::Duration;

use firstlight::run::RunError;
use firstlight_boot_record::{GpuPhase, State};
use firstlight_e2e::{Scenario, gpu, lab};
use firstlight_lab::Guest;

#[test]
fn unknown_parameter_is_named_with_the_nearest_known_one() {
    let report = Scenario::gpus(0).parameter("firstlight.atach=serial").command(&["/bin/true"]).go().unwrap();
    let text = format!("{:?} {:?}", report.boot_record.units, report.boot_record.events);
    assert!(text.contains("firstlight.atach") && text.contains("firstlight.attach"), "{text}");
    assert_eq!(report.container.exit_code, Some(0), "the boot continues");
}

#[test]
fn hung_gpu_times_out_and_other_gpus_stay_usable() {
    let mut guest = Guest::with_gpus(3, Duration::from_millis(300));
    guest.devices[1].hang = true;
    let scenario = Scenario::guest(guest).parameter("firstlight.attach-deadline=3s").request(&["0", "2"]);
    let report = scenario.go().unwrap();
    assert_eq!(report.container.error, None);
    assert_eq!(report.container.denied_open, Some(true), "{}", report.container.stdout);
    let phases: Vec<_> = report.boot_record.gpus.iter().map(|gpu| gpu.phase).collect();
    assert_eq!(phases, [GpuPhase::Ready, GpuPhase::TimedOut, GpuPhase::Ready]);
    let detail = &gpu(&report.boot_record, 1).detail;
    assert!(detail.contains("0000:02:00.0") && detail.contains("wait-open-complete"), "{detail}");
    assert!(report.timeline.power_off_us.is_some(), "a hanging attach does not keep the guest from powering off");
}

#[test]
fn gpu_hung_with_the_driver_lock_fails_waiting_gpus_by_name() {
    let mut guest = Guest::with_gpus(3, Duration::from_millis(300));
    guest.devices[0].hang = true;
    let scenario = Scenario::guest(guest)
        .parameter("nvidia.standin_hang_holds_lock=1")
        .parameter("firstlight.attach-deadline=2s")
        .request(&["2"]);
    let report = scenario.go().unwrap();
    assert_eq!(gpu(&report.boot_record, 0).phase, GpuPhase::TimedOut, "{:?}", report.boot_record.gpus);
    let error = report.container.error.expect("GPU 2 cannot attach while GPU 0 holds the lock");
    assert!(error.contains("0000:03:00.0"), "{error}");
}

#[test]
fn failed_boot_reports_its_cause_on_the_console_and_powers_off() {
    let image = lab().variant("without-agent").unwrap();
    let mut scenario = Scenario::gpus(0);
    scenario.guest.initrd = Some(image.initrd);
    let (result, console) = scenario.go_with_console();
    let error = result.unwrap_err();
    let RunError::Ended { record, why, .. } = &error else { panic!("{error}") };
    assert!(why.contains("agent") && why.contains("/usr/bin/firstlight-agent"), "{why}");
    let failure = record.as_ref().unwrap().failure.as_ref().unwrap();
    assert_eq!((failure.unit.as_str(), failure.action.as_str()), ("agent", "poweroff"));
    let sentence = console.lines().find(|line| line.contains("boot failed")).expect("a line with the cause");
    assert!(sentence.contains("agent"), "{sentence}");
}

#[test]
fn held_guest_ends_the_host_command_with_its_console_tail() {
    let image = lab().variant("without-agent").unwrap();
    let mut scenario = Scenario::gpus(0).parameter("firstlight.on-failure=hold");
    scenario.guest.initrd = Some(image.initrd);
    scenario.deadlines.boot = Duration::from_secs(12);
    let error = scenario.go().unwrap_err();
    let RunError::Hangs { step, console_tail, record, .. } = &error else { panic!("{error}") };
    assert_eq!(*step, "wait for the agent");
    assert!(console_tail.contains("boot failed"), "{console_tail}");
    assert_eq!(record.as_ref().unwrap().state, State::Failed);
}

#[test]
fn kernel_without_init_ends_the_host_command_with_its_panic() {
    let mut scenario = Scenario::gpus(0).parameter("rdinit=/no/such/init");
    scenario.deadlines.boot = Duration::from_secs(30);
    let error = scenario.go().unwrap_err().to_string();
    assert!(error.contains("exited") || error.contains("hangs"), "{error}");
    assert!(error.contains("Kernel panic") || error.contains("No working init"), "{error}");
}
