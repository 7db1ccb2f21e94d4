//! The agent's death and PID 1's answer.

use firstlight::run::RunError;
use firstlight_e2e::{Scenario, lab};

/// An image whose agent kills itself once, one second after its start.
fn mortal() -> Scenario {
    let image = lab().variant("mortal-agent").unwrap();
    let mut scenario = Scenario::gpus(0).command(&["/bin/sh", "-c", "sleep 3; echo survived"]);
    scenario.guest.initrd = Some(image.initrd);
    scenario
}

#[test]
fn killed_agent_is_restarted_and_the_record_says_so() {
    // The first connection dies with the agent, so the run itself fails; what
    // counts is what the console tells.
    let (_, console) = mortal().go_watched();
    let restarted = console.lines().find(|line| line.contains("agent-restarted")).expect("an event for the restart");
    let exited = console.lines().find(|line| line.contains("agent-exited")).expect("an event for the exit");
    assert!(exited.contains("signal 9"), "{exited}");
    assert!(restarted.contains("at_us"), "{restarted}");
}

#[test]
fn killed_agent_powers_the_guest_off_where_policy_says_so() {
    let (result, console) = mortal().parameter("firstlight.agent-restart=poweroff").go_watched();
    let error = result.unwrap_err();
    assert!(matches!(error, RunError::Ended { .. } | RunError::Agent(..)), "{error}");
    assert!(console.contains("agent-exited") && console.contains("power-off"), "{console}");
    assert!(!console.contains("agent-restarted"), "{console}");
}
