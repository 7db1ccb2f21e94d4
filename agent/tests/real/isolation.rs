//! A stuck container does not delay other containers or the agent.

use std::fs;
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::WriteStreamRequest;
use firstlight_agent_api::health::CheckRequest;

use crate::support::{Agent, process, short, spec, with_agent};

/// The allowed slowdown of a container's lifecycle while another container is stuck, as a factor and an absolute
/// slack. The guest may be emulated on a busy machine, so only a comparison within one run is meaningful.
const FACTOR: u32 = 4;
const SLACK: Duration = Duration::from_secs(2);

/// Runs a container from create to remove; returns the duration.
async fn run_lifecycle(agent: &Agent, name: &str) -> Duration {
    let begin = Instant::now();
    agent.health.check(short(), &CheckRequest::new()).await.unwrap();
    agent.run(name, "echo out; exit 3").await;
    assert_eq!(agent.output(name, "").await, "out\n");
    assert_eq!(agent.wait(name, "").await.unwrap(), 3);
    agent.remove(name).await.unwrap();
    begin.elapsed()
}

/// Asserts that another container's lifecycle is not delayed and the agent responds.
async fn assert_not_delayed(agent: &Agent, name: &str, usual: Duration) {
    let took = run_lifecycle(agent, name).await;
    assert!(took < usual * FACTOR + SLACK, "{name}: {took:?}, usually {usual:?}");
}

#[test]
fn full_pipe_delays_no_other_container() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let usual = run_lifecycle(&agent, "usual").await;
        agent.run("c1", "yes").await;
        agent.run("c2", "sleep 1000").await;
        // A process that does not read its input.
        let write = WriteStreamRequest { container_id: "c2".into(), data: vec![1; 200_000], ..Default::default() };
        let full = agent.calls.write_stdin(ttrpc::context::with_duration(Duration::from_secs(1)), &write).await;
        assert!(full.is_err());
        assert_not_delayed(&agent, "c3", usual).await;
        assert_eq!(agent.shell("c1", "e1", "echo hi").await.0, "hi\n");
        for container in ["c1", "c2"] {
            agent.signal(container, "", 9).await.unwrap();
            assert_eq!(agent.wait(container, "").await.unwrap(), 137);
            agent.remove(container).await.unwrap();
        }
    });
}

/// A process cannot enter a frozen cgroup: its worker blocks. The cgroup is frozen without the agent's knowledge,
/// to imitate a process that hangs in a device.
#[test]
fn blocked_exec_delays_no_other_container() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let usual = run_lifecycle(&agent, "usual").await;
        agent.run("c1", "sleep 1000").await;
        fs::write(agent.group("c1", "cgroup.freeze"), "1").unwrap();
        let client = agent.connect().await;
        let exec = |name: &str| {
            let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
            request.container_id = "c1".into();
            request.exec_id = name.into();
            request.process = Some(process("echo made; sleep 1000")).into();
            request
        };
        let (first, second) = (exec("e1"), exec("e2"));
        let stuck = client.exec_process(short(), &first);
        let check = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            for round in 0..3 {
                assert_not_delayed(&agent, &format!("other{round}"), usual).await;
            }
            // After the thaw, the exec completes.
            fs::write(agent.group("c1", "cgroup.freeze"), "0").unwrap();
        };
        let (made, ()) = tokio::join!(stuck, check);
        made.unwrap();
        agent.signal("c1", "e1", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "e1").await.unwrap(), 137);
        // If the container is removed instead, the exec fails.
        fs::write(agent.group("c1", "cgroup.freeze"), "1").unwrap();
        let stuck = client.exec_process(short(), &second);
        let remove = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let begin = Instant::now();
            agent.remove("c1").await.unwrap();
            begin.elapsed()
        };
        let (stuck, took) = tokio::join!(stuck, remove);
        assert!(stuck.is_err());
        assert!(took < usual * FACTOR + SLACK, "{took:?}, a whole lifecycle takes {usual:?}");
        assert_not_delayed(&agent, "last", usual).await;
    });
}

#[test]
fn paused_container_and_slow_create_delay_no_other_container() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let usual = run_lifecycle(&agent, "usual").await;
        agent.run("c1", "sleep 1000").await;
        agent.pause("c1").await.unwrap();
        // As slow as a root on a file system that does not respond.
        let root = agent.root("c2");
        let mut slow = spec(&root, "true");
        let args = ["sh", "-c", "sleep 8"].map(str::to_owned).to_vec();
        slow.Hooks.mut_or_insert_default().CreateRuntime = vec![firstlight_agent_api::oci::Hook {
            Path: "/bin/sh".into(),
            Args: args,
            Timeout: 20,
            ..Default::default()
        }];
        let create = async {
            let begin = Instant::now();
            agent.create(slow, "c2").await.unwrap();
            begin.elapsed()
        };
        let others = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_not_delayed(&agent, "c3", usual).await;
        };
        let (took, ()) = tokio::join!(create, others);
        assert!(took >= Duration::from_secs(8), "{took:?}");
        for container in ["c1", "c2"] {
            agent.remove(container).await.unwrap();
        }
    });
}
