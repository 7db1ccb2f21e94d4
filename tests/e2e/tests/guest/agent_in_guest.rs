//! Runs the agent's own tests with real containers inside a guest.

use std::time::Duration;

use firstlight_e2e::{Scenario, lab};
use tokio::time::timeout;

/// Timeout, longer than the guest's own for the tests.
const LIMIT: Duration = Duration::from_mins(16);

/// Environment variables with the size of long tests; the tests in the guest read
/// them as `tests.NAME=` from the kernel command line.
const AMOUNTS: &[&str] = &["SHORT_PROCESSES", "MANY_CONTAINERS"];

/// Minimum number of tests: an empty test program would pass too.
const AT_LEAST: usize = 45;

/// Prefix of each line of the tests' output.
const PREFIX: &str = "tests: ";

/// Returns the lines of the tests' output.
fn test_output(console: &str) -> Vec<&str> {
    console.lines().filter_map(|line| Some(line.split_once(PREFIX)?.1.trim_end_matches('\r'))).collect()
}

/// Returns the number of passed tests if none failed or was ignored and the program exited with 0.
fn all_passed(output: &[&str]) -> Option<usize> {
    let result = output.iter().find_map(|line| line.strip_prefix("test result: ok. "))?;
    let mut counts = result.split("; ");
    let passed = counts.next()?.strip_suffix(" passed")?.parse().ok()?;
    let nothing_else = counts.next() == Some("0 failed") && counts.next() == Some("0 ignored");
    let ended_well = output.last() == Some(&"ended with status 0");
    (nothing_else && ended_well).then_some(passed)
}

#[test]
fn agent_tests_with_real_containers_pass() {
    let image = lab().agent_tests().unwrap();
    // No agent listens, so the boot fails; `hold` keeps the guest running.
    let mut scenario = Scenario::gpus(0).parameter("firstlight.on-failure=hold");
    scenario.guest.initrd = Some(image.initrd);
    for name in AMOUNTS {
        if let Ok(amount) = std::env::var(name) {
            scenario = scenario.parameter(&format!("tests.{name}={amount}"));
        }
    }
    let mut ended = false;
    let console = scenario.watched(async |vm| ended = timeout(LIMIT, vm.wait()).await.is_ok());
    let output = test_output(&console);
    let passed = all_passed(&output);
    let shown = if output.is_empty() { console.clone() } else { output.join("\n") };
    assert!(ended, "the guest did not end in {LIMIT:?}:\n{shown}");
    assert!(passed.is_some_and(|passed| passed >= AT_LEAST), "not {AT_LEAST} tests, all passed:\n{shown}");
    for line in output.iter().filter(|line| line.starts_with("figures: ")) {
        println!("{line}");
    }
}

/// Runs the bundle directory of `cargo xtask agent-tests` on a system that is not prepared for it.
#[test]
fn agent_tests_run_from_a_bundle_and_report_tests_that_cannot_run() {
    let image = lab().agent_tests_bundle().unwrap();
    let filters = "short_processes,many_containers,guest_clock_is_set,iptables";
    let mut scenario = Scenario::gpus(0)
        .parameter("firstlight.on-failure=hold")
        .parameter(&format!("tests.run=--short-processes,60,--many-containers,3,{filters}"));
    scenario.guest.initrd = Some(image.initrd);
    let mut ended = false;
    let console = scenario.watched(async |vm| ended = timeout(LIMIT, vm.wait()).await.is_ok());
    let output = test_output(&console);
    let shown = if output.is_empty() { console.clone() } else { output.join("\n") };
    assert!(ended, "the guest did not end in {LIMIT:?}:\n{shown}");
    for start in [
        "ok       short_processes::output_of_short_processes_is_never_lost (",
        "         60 short processes, 4 at a time, in ",
        "ok       cleanup::many_containers_with_exec_processes_leave_nothing (",
        "         3 containers with 4 exec processes each, started in ",
        "ok       network::requests::iptables_programs_are_the_images (",
        "not run  guest::guest_clock_is_set: it sets the machine's clock: only in a guest",
    ] {
        assert!(output.iter().any(|line| line.starts_with(start)), "no {start:?} in:\n{shown}");
    }
    // It leaves nothing on the system.
    let end = ["4 tests: 3 ok, 0 failed, 1 not runnable here", "ended with status 0", "left: "];
    assert_eq!(output[output.len() - 3..], end, "{shown}");
    println!("{shown}");
}

#[test]
fn incomplete_or_failed_test_output_is_not_a_pass() {
    let end = "ended with status 0";
    let ok = "test result: ok. 15 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 31.02s";
    assert_eq!(all_passed(&["running 15 tests", ok, "", end]), Some(15));
    assert_eq!(all_passed(&[ok]), None);
    assert_eq!(all_passed(&[&ok.replace("0 ignored", "1 ignored"), end]), None);
    assert_eq!(all_passed(&[&ok.replace("ok. ", "FAILED. "), end]), None);
    assert_eq!(all_passed(&[ok, "ended with status 101"]), None);
}
