//! Removed containers leave no resources.

use std::time::{Duration, Instant};

use firstlight_agent_api::agent::WriteStreamRequest;

use crate::resources::{ResourceUsage, assert_released, when_idle};
use crate::support::{Agent, amount, short, spec, with_agent};

/// The number of containers without `MANY_CONTAINERS`; the goal is 100.
const DEFAULT: usize = 20;

/// Concurrent exec processes of each container.
const EXECS: usize = 4;

/// Starts a container with exec processes, which wait for input or forever.
async fn start_with_execs(agent: &Agent, container: &str) {
    let root = agent.root(container);
    agent.create(spec(&root, "sleep 100000"), container).await.unwrap();
    agent.begin(container).await;
    let exec = async |number: usize| {
        let script = if number == 3 { "sleep 100000" } else { "read line; echo $line" };
        agent.exec(container, &format!("e{number}"), script).await.unwrap();
    };
    tokio::join!(exec(0), exec(1), exec(2), exec(3));
}

/// Sends input to the exec processes. The output of two is read, of one it is not, and one runs until its
/// container is removed.
async fn finish_execs(agent: &Agent, container: &str) {
    let exec = async |number: usize| {
        let name = format!("e{number}");
        let (container_id, exec_id) = (container.into(), name.clone());
        let line = format!("{container}-{number}");
        let data = format!("{line}\n").into_bytes();
        let write = WriteStreamRequest { container_id, exec_id, data, ..Default::default() };
        agent.calls.write_stdin(short(), &write).await.unwrap();
        if number < 2 {
            assert_eq!(agent.output(container, &name).await, format!("{line}\n"));
        }
        assert_eq!(agent.wait(container, &name).await.unwrap(), 0);
    };
    tokio::join!(exec(0), exec(1), exec(2));
}

async fn run_lifecycle(agent: &Agent, container: &str) {
    start_with_execs(agent, container).await;
    finish_execs(agent, container).await;
}

/// Runs `what` for all containers, four at a time.
async fn each(all: usize, what: impl AsyncFn(&str)) {
    let lane = async |lane: usize| {
        for number in (lane..all).step_by(4) {
            what(&format!("many{number}")).await;
        }
    };
    tokio::join!(lane(0), lane(1), lane(2), lane(3));
}

#[test]
fn many_containers_with_exec_processes_leave_nothing() {
    with_agent(async |agent| {
        let all = amount("MANY_CONTAINERS", DEFAULT);
        agent.sandbox().await;
        run_lifecycle(&agent, "warm").await;
        agent.remove("warm").await.unwrap();
        let before = when_idle(&agent).await;

        let clock = Instant::now();
        each(all, async |container| start_with_execs(&agent, container).await).await;
        let (most, began) = (ResourceUsage::of(&agent), clock.elapsed());
        // The init and exec processes of all containers run at the same time.
        assert!(most.processes >= (1 + EXECS) * all && most.groups >= all, "{most:?}");
        each(all, async |container| finish_execs(&agent, container).await).await;
        let clock = Instant::now();
        each(all, async |container| agent.remove(container).await.unwrap()).await;
        println!(
            "figures: {all} containers with {EXECS} exec processes each, started in {:.1} s, removed in {:.1} s",
            began.as_secs_f64(),
            clock.elapsed().as_secs_f64()
        );
        println!("figures: most:   {most}");
        assert_released(&agent, before).await;
    });
}

#[test]
fn disconnected_clients_leave_nothing() {
    with_agent(async |agent| {
        agent.sandbox().await;
        run_lifecycle(&agent, "warm").await;
        agent.remove("warm").await.unwrap();
        agent.run("c1", "sleep 100000").await;
        let (before, _) = when_idle(&agent).await;
        for round in 0..12 {
            let root = agent.root(&format!("gone{round}"));
            // The client disconnects two milliseconds or more after the request.
            let wait = Duration::from_millis(2 + 3 * round);
            let client = agent.connect().await;
            let mut create = firstlight_agent_api::agent::CreateContainerRequest::new();
            create.container_id = format!("gone{round}");
            create.OCI = Some(spec(&root, "sleep 100000")).into();
            let _ =
                tokio::time::timeout(wait, client.create_container(ttrpc::context::Context::default(), &create)).await;
            drop(client);
            let client = agent.connect().await;
            let mut exec = firstlight_agent_api::agent::ExecProcessRequest::new();
            exec.container_id = "c1".into();
            exec.exec_id = format!("gone{round}");
            exec.process = Some(crate::support::process("sleep 100000")).into();
            let _ = tokio::time::timeout(wait, client.exec_process(ttrpc::context::Context::default(), &exec)).await;
            drop(client);
        }
        // A call that completed before the disconnect created something with a known name, removed here. Nothing
        // else may exist.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for round in 0..12 {
            let name = format!("gone{round}");
            if agent.signal("c1", &name, 9).await.is_ok() {
                let _ = agent.wait("c1", &name).await;
            }
            let _ = agent.remove(&name).await;
        }
        before.wait_until_equal(&agent).await;
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");
        agent.remove("c1").await.unwrap();
    });
}
