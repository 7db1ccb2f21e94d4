//! Policies, enforced over a real connection.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{
    GuestDetailsRequest, ReadStreamRequest, SetPolicyRequest, StartContainerRequest, StatsContainerRequest,
};
use firstlight_agent_api::health::CheckRequest;
use ttrpc::{Code, Error};

use crate::support::{Agent, program, short, spec, with_containers};

/// Denies exec and output; signals have no rule.
const NO_EXEC: &str = include_str!("../../policy/tests/policies/no-exec.rego");
const TWO_CONTAINERS: &str = include_str!("../../policy/tests/policies/two-containers.rego");

async fn with_policy(policy: &str) -> Agent {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.rego");
    fs::write(&path, policy).unwrap();
    let path = path.display().to_string();
    Agent::start_in(dir, &[("KATA_AGENT_POLICY_FILE", &path)]).await
}

fn status<T>(result: ttrpc::Result<T>) -> (Code, String) {
    match result {
        Err(Error::RpcStatus(status)) => (status.code(), status.message().to_owned()),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("no error"),
    }
}

async fn set(agent: &Agent, policy: &str) -> ttrpc::Result<()> {
    let request = SetPolicyRequest { policy: policy.into(), ..Default::default() };
    agent.calls.set_policy(short(), &request).await.map(|_| ())
}

/// Returns the number of policy evaluators of all agents in this guest.
fn evaluators() -> usize {
    let dirs = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let names = dirs.filter_map(|dir| fs::read_to_string(dir.path().join("comm")).ok());
    names.filter(|name| name == "fl-policy\n").count()
}

#[test]
fn image_policy_denies_exec_and_hides_output() {
    with_containers(async || {
        let agent = with_policy(NO_EXEC).await;
        agent.sandbox().await;
        agent.run("c1", "echo secret; sleep 1000").await;
        let read =
            ReadStreamRequest { container_id: "c1".into(), exec_id: "c1".into(), len: 100, ..Default::default() };
        assert_eq!(agent.calls.read_stdout(short(), &read).await.unwrap().data, b"");
        let denied = (Code::PERMISSION_DENIED, "ExecProcessRequest is blocked by policy: ".to_owned());
        assert_eq!(status(agent.exec("c1", "e1", "true").await), denied);
        let (code, message) = status(agent.signal("c1", "", 9).await);
        assert_eq!(code, Code::PERMISSION_DENIED);
        assert!(message.contains("no rule SignalProcessRequest"), "{message}");
        assert_eq!(status(set(&agent, "package agent_policy\n").await).0, Code::PERMISSION_DENIED);
        assert_eq!(agent.remove("c1").await, Ok(()));
    });
}

#[test]
fn set_policy_takes_effect_immediately() {
    with_containers(async || {
        let before = evaluators();
        let agent = Agent::start().await;
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        assert_eq!(agent.shell("c1", "e1", "echo one").await, ("one\n".into(), 0));
        let (code, message) = status(set(&agent, "package agent_policy\nX := \n").await);
        assert_eq!(code, Code::INVALID_ARGUMENT);
        assert!(message.contains("policy.rego:3:1: "), "{message}");
        assert_eq!(evaluators(), before, "no evaluator without a policy");
        assert_eq!(agent.shell("c1", "e2", "echo two").await, ("two\n".into(), 0));

        let rules = ["ExecProcessRequest := false", "SetPolicyRequest := true", "ReadStreamRequest := true"];
        let strict = format!("package agent_policy\ndefault {}\n", rules.join("\ndefault "));
        set(&agent, &strict).await.unwrap();
        assert_eq!(evaluators(), before + 1);
        assert_eq!(status(agent.exec("c1", "e3", "true").await).0, Code::PERMISSION_DENIED);
        // An invalid policy changes nothing.
        assert_eq!(status(set(&agent, "not rego").await).0, Code::INVALID_ARGUMENT);
        assert_eq!(status(agent.exec("c1", "e3", "true").await).0, Code::PERMISSION_DENIED);
        set(&agent, &format!("{strict}AllowRequestsFailingPolicy := true\n")).await.unwrap();
        assert_eq!(agent.shell("c1", "e3", "echo three").await, ("three\n".into(), 0));
        assert_eq!(evaluators(), before + 1);
        drop(agent);
        let end = Instant::now() + Duration::from_secs(5);
        while evaluators() > before {
            assert!(Instant::now() < end, "the evaluator outlives its agent");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

#[test]
fn policy_state_limits_containers() {
    with_containers(async || {
        let agent = with_policy(TWO_CONTAINERS).await;
        for id in ["c1", "c2", "c3"] {
            let created = agent.create(spec(&agent.root(id), "sleep 1000"), id).await;
            assert_eq!(created.is_ok(), id != "c3", "{id}: {created:?}");
        }
        let start = |id: &str| StartContainerRequest { container_id: id.into(), ..Default::default() };
        agent.calls.start_container(short(), &start("c1")).await.unwrap();
        assert_eq!(
            status(agent.calls.start_container(short(), &start("c3")).await).0,
            Code::PERMISSION_DENIED,
            "a container that is not in the policy's state"
        );
        agent.remove("c1").await.unwrap();
        agent.create(spec(&agent.root("c4"), "sleep 1000"), "c4").await.unwrap();
        assert_eq!(status(agent.wait("c2", "").await).0, Code::PERMISSION_DENIED);
    });
}

#[test]
fn health_check_responds_during_a_policy_evaluation() {
    with_containers(async || {
        let slow = "package agent_policy\nimport rego.v1\ndefault GuestDetailsRequest := true\n\
            StatsContainerRequest if count([1 | some i in numbers.range(1, 9000); some j in numbers.range(1, 9000); i * j == 0]) > 1\n";
        let agent = with_policy(slow).await;
        let stats = StatsContainerRequest { container_id: "c1".into(), ..Default::default() };
        let mut evaluation = std::pin::pin!(agent.calls.stats_container(short(), &stats));
        let mut responses = 0;
        let verdict = loop {
            tokio::select! {
                verdict = &mut evaluation => break verdict,
                () = tokio::time::sleep(Duration::from_millis(100)) => {
                    let begin = Instant::now();
                    agent.health.check(short(), &CheckRequest::new()).await.unwrap();
                    assert!(begin.elapsed() < Duration::from_secs(3), "Check took {:?}", begin.elapsed());
                    responses += 1;
                }
            }
        };
        assert!(responses > 10, "{responses} checks during the evaluation");
        let (code, message) = status(verdict);
        assert_eq!(code, Code::PERMISSION_DENIED);
        assert!(message.contains("time limit"), "{message}");
        agent.calls.get_guest_details(short(), &GuestDetailsRequest::new()).await.unwrap();
    });
}

#[test]
fn agent_with_an_invalid_policy_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let (policy, socket) = (dir.path().join("policy.rego"), dir.path().join("agent.sock"));
    for (text, why) in [(Some("package agent_policy\nX := \n"), "policy.rego:3:1"), (None, "No such file")] {
        if let Some(text) = text {
            fs::write(&policy, text).unwrap();
        } else {
            fs::remove_file(&policy).unwrap();
        }
        let output = Command::new(program())
            .env("AGENT_ADDR", format!("unix://{}", socket.display()))
            .env("KATA_AGENT_POLICY_FILE", &policy)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && log.contains(why) && log.contains("policy.rego: "), "{log}");
        assert!(!socket.exists(), "it listened");
    }
}
