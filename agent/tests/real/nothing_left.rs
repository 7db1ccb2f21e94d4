//! When containers are gone, everything of theirs is.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::support::{Agent, amount, spec, with_agent};

/// How many containers unless `MANY_CONTAINERS` says otherwise; the goal is 100.
const DEFAULT: usize = 20;

/// What an allocator and a pool of threads may keep of a burst, KiB.
const KEPT: usize = 3 << 10;

/// What the agent's two processes hold.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    fds: usize,
    threads: usize,
    mounts: usize,
    groups: usize,
    processes: usize,
    files: Vec<String>,
}

fn groups(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| 1 + groups(&entry.path()))
        .sum()
}

fn count(path: String) -> usize {
    fs::read_dir(path).map_or(0, Iterator::count)
}

fn held(agent: &Agent) -> Held {
    let pids: Vec<u32> = agent.pids().into_iter().take(2).collect();
    assert_eq!(pids.len(), 2, "server and runtime");
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", pids[1])).unwrap();
    let mountinfo = fs::read_to_string(format!("/proc/{}/mountinfo", pids[0])).unwrap();
    let mut files = Vec::new();
    for folder in ["/run/kata-containers", "/run/firstlight/containers"] {
        let entries = fs::read_dir(agent.inside(folder)).into_iter().flatten().flatten();
        files.extend(entries.map(|entry| entry.path().display().to_string()));
    }
    files.sort();
    Held {
        fds: pids.iter().map(|pid| count(format!("/proc/{pid}/fd"))).sum(),
        threads: pids.iter().map(|pid| count(format!("/proc/{pid}/task"))).sum(),
        mounts: mountinfo.lines().count(),
        groups: groups(&agent.inside("/sys/fs/cgroup")),
        processes: children.split_whitespace().count(),
        files,
    }
}

/// Anonymous memory of both processes, KiB: what they have allocated.
fn memory(agent: &Agent) -> usize {
    let of = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or("0 kB");
        line.split_whitespace().next().and_then(|text| text.parse::<usize>().ok()).unwrap_or(0)
    };
    agent.pids().into_iter().take(2).map(of).sum()
}

/// Threads of the pool end after ten idle seconds, and unread output stays for
/// as long; everything else is gone at once.
async fn settles(agent: &Agent, before: &Held) {
    for _ in 0..250 {
        if held(agent) == *before {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(held(agent), *before);
}

async fn life(agent: &Agent, container: String) {
    let root = agent.root(&container);
    agent.create(spec(&root, "sleep 100000"), &container).await.unwrap();
    agent.begin(&container).await;
    let exec = async |number: usize| {
        let name = format!("e{number}");
        // Some are read, some are not, one outlives the container's end.
        match number {
            0 | 1 => assert_eq!(agent.shell(&container, &name, "echo hi").await, ("hi\n".to_owned(), 0)),
            2 => {
                agent.exec(&container, &name, "echo unread").await.unwrap();
                agent.wait(&container, &name).await.unwrap();
            }
            _ => agent.exec(&container, &name, "sleep 100000").await.unwrap(),
        }
    };
    tokio::join!(exec(0), exec(1), exec(2), exec(3));
}

#[test]
fn many_containers_with_processes_leave_nothing() {
    with_agent(async |agent| {
        let all = amount("MANY_CONTAINERS", DEFAULT);
        agent.sandbox().await;
        // The first makes what stays: the folder of resource groups, pools, buffers.
        life(&agent, "warm".to_owned()).await;
        agent.remove("warm").await.unwrap();
        tokio::time::sleep(Duration::from_secs(12)).await;
        let (before, memory_before) = (held(&agent), memory(&agent));

        let lane = async |lane: usize| {
            for number in (lane..all).step_by(4) {
                life(&agent, format!("many{number}")).await;
            }
        };
        tokio::join!(lane(0), lane(1), lane(2), lane(3));
        let most = held(&agent);
        assert!(most.processes >= 2 * all && most.groups >= all, "{most:?}");
        let lane = async |lane: usize| {
            for number in (lane..all).step_by(4) {
                agent.remove(&format!("many{number}")).await.unwrap();
            }
        };
        tokio::join!(lane(0), lane(1), lane(2), lane(3));
        settles(&agent, &before).await;
        let memory_after = memory(&agent);
        println!(
            "{all} containers with 4 processes each: {before:?}; memory {memory_before} KiB, then {memory_after} KiB"
        );
        assert!(memory_after <= memory_before + KEPT, "{memory_before} KiB became {memory_after} KiB");
    });
}

#[test]
fn callers_that_go_away_at_once_leave_nothing() {
    with_agent(async |agent| {
        agent.sandbox().await;
        life(&agent, "warm".to_owned()).await;
        agent.remove("warm").await.unwrap();
        agent.run("c1", "sleep 100000").await;
        tokio::time::sleep(Duration::from_secs(12)).await;
        let before = held(&agent);
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
        settles(&agent, &before).await;
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");
        agent.remove("c1").await.unwrap();
    });
}
