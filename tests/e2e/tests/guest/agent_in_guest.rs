//! The agent's own tests with real containers, run inside a guest.

use std::time::Duration;

use firstlight_e2e::{Scenario, lab};
use tokio::time::timeout;

/// Beyond the guest's own limit for the tests.
const LIMIT: Duration = Duration::from_mins(16);

/// How much of something long is done, by the environment: the tests in the
/// guest read `tests.NAME=` from its command line.
const AMOUNTS: &[&str] = &["SHORT_PROCESSES", "MANY_CONTAINERS"];

/// How many tests there are at least: an empty test program passes too.
const AT_LEAST: usize = 45;

/// What the guest puts before each line of the tests.
const PREFIX: &str = "tests: ";

/// How many tests passed, if that is all that happened to them.
fn all_passed(output: &[&str]) -> Option<usize> {
    let result = output.iter().find_map(|line| line.strip_prefix("test result: ok. "))?;
    let mut counts = result.split("; ");
    let passed = counts.next()?.strip_suffix(" passed")?.parse().ok()?;
    let nothing_else = counts.next() == Some("0 failed") && counts.next() == Some("0 ignored");
    let ended_well = output.last() == Some(&"ended with status 0");
    (nothing_else && ended_well).then_some(passed)
}

#[test]
fn agents_tests_with_real_containers_pass() {
    let image = lab().agent_tests().unwrap();
    // PID 1 waits in vain for its agent to listen.
    let mut scenario = Scenario::gpus(0).parameter("firstlight.on-failure=hold");
    scenario.guest.initrd = Some(image.initrd);
    for name in AMOUNTS {
        if let Ok(amount) = std::env::var(name) {
            scenario = scenario.parameter(&format!("tests.{name}={amount}"));
        }
    }
    let mut ended = false;
    let console = scenario.watched(async |vm| ended = timeout(LIMIT, vm.wait()).await.is_ok());
    let output: Vec<&str> =
        console.lines().filter_map(|line| Some(line.split_once(PREFIX)?.1.trim_end_matches('\r'))).collect();
    let passed = all_passed(&output);
    let shown = if output.is_empty() { console.clone() } else { output.join("\n") };
    assert!(ended, "the guest did not end in {LIMIT:?}:\n{shown}");
    assert!(passed.is_some_and(|passed| passed >= AT_LEAST), "not {AT_LEAST} tests, all passed:\n{shown}");
}

#[test]
fn only_a_whole_success_counts() {
    let end = "ended with status 0";
    let ok = "test result: ok. 15 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 31.02s";
    assert_eq!(all_passed(&["running 15 tests", ok, "", end]), Some(15));
    assert_eq!(all_passed(&[ok]), None);
    assert_eq!(all_passed(&[&ok.replace("0 ignored", "1 ignored"), end]), None);
    assert_eq!(all_passed(&[&ok.replace("ok. ", "FAILED. "), end]), None);
    assert_eq!(all_passed(&[ok, "ended with status 101"]), None);
}
