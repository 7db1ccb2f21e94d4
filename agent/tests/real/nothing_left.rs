//! When containers are gone, everything of theirs is.

use std::time::{Duration, Instant};

use firstlight_agent_api::agent::WriteStreamRequest;

use crate::held::{Held, at_rest, back_at};
use crate::support::{Agent, amount, short, spec, with_agent};

/// How many containers unless `MANY_CONTAINERS` says otherwise; the goal is 100.
const DEFAULT: usize = 20;

/// Further processes of each container, all at once.
const FURTHER: usize = 4;

/// A container with further processes, which wait for a word or for ever.
async fn begin(agent: &Agent, container: &str) {
    let root = agent.root(container);
    agent.create(spec(&root, "sleep 100000"), container).await.unwrap();
    agent.begin(container).await;
    let exec = async |number: usize| {
        let script = if number == 3 { "sleep 100000" } else { "read word; echo $word" };
        agent.exec(container, &format!("e{number}"), script).await.unwrap();
    };
    tokio::join!(exec(0), exec(1), exec(2), exec(3));
}

/// Gives them the word. Two are read, one is not, and one outlives its container's end.
async fn end(agent: &Agent, container: &str) {
    let exec = async |number: usize| {
        let name = format!("e{number}");
        let (container_id, exec_id) = (container.into(), name.clone());
        let word = format!("{container}-{number}");
        let data = format!("{word}\n").into_bytes();
        let write = WriteStreamRequest { container_id, exec_id, data, ..Default::default() };
        agent.calls.write_stdin(short(), &write).await.unwrap();
        if number < 2 {
            assert_eq!(agent.output(container, &name).await, format!("{word}\n"));
        }
        assert_eq!(agent.wait(container, &name).await.unwrap(), 0);
    };
    tokio::join!(exec(0), exec(1), exec(2));
}

async fn life(agent: &Agent, container: &str) {
    begin(agent, container).await;
    end(agent, container).await;
}

/// Does something to all containers, four at a time.
async fn each(all: usize, what: impl AsyncFn(&str)) {
    let lane = async |lane: usize| {
        for number in (lane..all).step_by(4) {
            what(&format!("many{number}")).await;
        }
    };
    tokio::join!(lane(0), lane(1), lane(2), lane(3));
}

#[test]
fn many_containers_with_processes_leave_nothing() {
    with_agent(async |agent| {
        let all = amount("MANY_CONTAINERS", DEFAULT);
        agent.sandbox().await;
        life(&agent, "warm").await;
        agent.remove("warm").await.unwrap();
        let before = at_rest(&agent).await;

        let clock = Instant::now();
        each(all, async |container| begin(&agent, container).await).await;
        let (most, began) = (Held::by(&agent), clock.elapsed());
        // Each container's own process and the further ones, all at the same time.
        assert!(most.processes >= (1 + FURTHER) * all && most.groups >= all, "{most:?}");
        each(all, async |container| end(&agent, container).await).await;
        let clock = Instant::now();
        each(all, async |container| agent.remove(container).await.unwrap()).await;
        println!(
            "figures: {all} containers with {FURTHER} further processes each, there after {:.1} s, removed in {:.1} s",
            began.as_secs_f64(),
            clock.elapsed().as_secs_f64()
        );
        println!("figures: most:   {most}");
        back_at(&agent, before).await;
    });
}

#[test]
fn callers_that_go_away_at_once_leave_nothing() {
    with_agent(async |agent| {
        agent.sandbox().await;
        life(&agent, "warm").await;
        agent.remove("warm").await.unwrap();
        agent.run("c1", "sleep 100000").await;
        let (before, _) = at_rest(&agent).await;
        for round in 0..12 {
            let root = agent.root(&format!("gone{round}"));
            // The connection itself ends, two milliseconds after the request was sent, or later.
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
        // A call that ended before its caller left has been answered, and what it made is known by name. What is
        // not known by name must not be there.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for round in 0..12 {
            let name = format!("gone{round}");
            if agent.signal("c1", &name, 9).await.is_ok() {
                let _ = agent.wait("c1", &name).await;
            }
            let _ = agent.remove(&name).await;
        }
        before.settles(&agent).await;
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");
        agent.remove("c1").await.unwrap();
    });
}
