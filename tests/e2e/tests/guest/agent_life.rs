//! PID 1's reaction to a killed agent.

use std::time::Duration;

use firstlight::agent::{Agent, sandbox_storages};
use firstlight::run::{Outputs, RunError, parse_record};
use firstlight_boot_record::BootRecord;
use firstlight_e2e::{Scenario, lab};
use firstlight_vm::Vm;
use tokio::time::timeout;

/// A guest whose agent kills itself once, three seconds after its start.
fn crashing_agent() -> Scenario {
    let image = lab().variant("crashing-agent").unwrap();
    let mut scenario = Scenario::gpus(0);
    scenario.guest.initrd = Some(image.initrd);
    scenario
}

#[test]
fn killed_agent_is_restarted_and_serves_again() {
    crashing_agent().watched(async |vm| {
        let console = vm.console().clone();
        let listens = |record: &BootRecord| record.event("agent-listening").is_some();
        assert!(console.wait_for(listens).await, "the agent listened once:\n{}", vm.console_tail());
        // The sandbox of the first agent still exists when the second one starts.
        check_and_create_sandbox(vm).await;
        let twice =
            |record: &BootRecord| record.events.iter().filter(|event| event.kind == "agent-listening").count() == 2;
        let again = timeout(Duration::from_secs(60), console.wait_for(twice)).await;
        assert!(again.is_ok_and(|seen| seen), "the agent listened twice:\n{}", vm.console_tail());
        let record = console.record().unwrap();
        let exited = record.event("agent-exited").expect("an event for the exit");
        assert!(exited.detail.contains("signal 9"), "{exited:?}");
        let restarted = record.event("agent-restarted").expect("an event for the restart");
        assert!(exited.at_us <= restarted.at_us, "{:?}", record.events);
        check_and_create_sandbox(vm).await;
    });
}

/// Calls Check and CreateSandbox, as a shim does first, but without a shared directory.
async fn check_and_create_sandbox(vm: &Vm) {
    let stream = vm.connect(1024, Duration::from_secs(30)).await.unwrap();
    let agent = Agent::new(stream, Duration::from_secs(20));
    agent.check().await.unwrap();
    let storages = sandbox_storages().into_iter().filter(|storage| storage.driver != "virtio-fs").collect();
    agent.create_sandbox_with("sandbox", storages).await.unwrap();
}

#[test]
fn killed_agent_powers_off_the_guest_with_restart_policy_poweroff() {
    let scenario = crashing_agent().parameter("firstlight.agent-restart=poweroff");
    scenario.watched(async |vm| {
        let exit = timeout(Duration::from_secs(60), vm.wait()).await.expect("the guest powers off").unwrap();
        let record = vm.console().record().unwrap();
        assert!(record.event("agent-exited").is_some(), "{:?}", record.events);
        assert!(record.event("power-off").is_some(), "{:?}", record.events);
        assert!(record.event("agent-restarted").is_none(), "{:?}", record.events);
        assert!(exit.status.success());
    });
}

#[test]
fn guest_that_exits_after_its_agent_answered_is_reported_with_its_boot() {
    let scenario = crashing_agent().parameter("firstlight.agent-restart=poweroff").command(&["/bin/sleep", "600"]);
    let error = scenario.go().unwrap_err();
    let RunError::Ended { step, record: Some(record), .. } = &error else { panic!("{error}") };
    assert!(record.event("agent-listening").is_some() && record.event("agent-exited").is_some(), "{record:?}");
    let text = error.to_string();
    assert!(text.starts_with("guest exited ") && text.contains(&format!("in step {step:?}")), "{text}");

    // What `firstlight run` then shows and leaves.
    let dir = tempfile::tempdir().unwrap();
    let outputs = Outputs { dir: dir.path().to_owned(), json: None };
    let _lock = outputs.prepare().unwrap();
    let shown = outputs.failed(&error);
    assert!(shown.contains("\nmounts ") && shown.contains("boot.svg"), "{shown}");
    let written = std::fs::read_to_string(dir.path().join("boot-record.json")).unwrap();
    assert_eq!(parse_record(&written).unwrap(), **record);
    assert!(std::fs::read_to_string(dir.path().join("boot.svg")).unwrap().starts_with("<svg"));
}
