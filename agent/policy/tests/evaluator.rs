//! The evaluator process: hostile policies, limits, restart and privileges.
#![cfg(test)]
#![forbid(unsafe_code)]

use std::fs;
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{CreateContainerRequest, StartContainerRequest};
use firstlight_policy::{Decision, Evaluator, LaunchOptions, Limits, PolicyError};
use protobuf::Message;

fn launch() -> LaunchOptions {
    let second = Duration::from_secs(1);
    LaunchOptions {
        program: env!("CARGO_BIN_EXE_firstlight-policy").into(),
        limits: Limits { load: 20 * second, evaluation: second, grace: 20 * second },
    }
}

fn start(policy: &str) -> Result<Evaluator, PolicyError> {
    Evaluator::start(launch(), policy.to_owned())
}

fn create(evaluator: &mut Evaluator, id: &str) -> Decision {
    let request = CreateContainerRequest { container_id: id.into(), ..Default::default() };
    evaluator.evaluate("CreateContainerRequest", &request.write_to_bytes().unwrap()).decision
}

fn begin(evaluator: &mut Evaluator, id: &str) -> Decision {
    let request = StartContainerRequest { container_id: id.into(), ..Default::default() };
    evaluator.evaluate("StartContainerRequest", &request.write_to_bytes().unwrap()).decision
}

const STATEFUL: &str = include_str!("policies/two-containers.rego");

#[test]
fn state_survives_a_restart_of_the_evaluator() {
    let mut evaluator = start(STATEFUL).unwrap();
    assert_eq!(create(&mut evaluator, "a"), Decision::Allowed);
    let first = evaluator.pid().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(first).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    // The next request may find the process dead, and is then denied.
    while begin(&mut evaluator, "a") == Decision::Denied {
        assert_eq!(evaluator.pid(), None);
    }
    assert_ne!(evaluator.pid(), Some(first));
    assert_eq!(begin(&mut evaluator, "b"), Decision::Denied);
    assert_eq!(create(&mut evaluator, "b"), Decision::Allowed);
    assert_eq!(create(&mut evaluator, "c"), Decision::Denied);
}

#[test]
fn policies_that_recurse_or_exhaust_memory_crash_the_evaluator_and_deny() {
    for (rule, rest) in [
        ("StartContainerRequest if f(1)", "f(x) := y if y := f(x + 1)"),
        ("StartContainerRequest if count(numbers.range(1, 1000000000)) > 1", ""),
    ] {
        let policy = format!("package agent_policy\nimport rego.v1\n{rule}\n{rest}\nCreateContainerRequest := true\n");
        let mut evaluator = start(&policy).unwrap();
        let verdict = evaluator.evaluate("StartContainerRequest", b"");
        assert_eq!(verdict.decision, Decision::Denied, "{rule}");
        assert!(!verdict.text.is_empty());
        // Later requests are served by a new process.
        assert_eq!(create(&mut evaluator, "a"), Decision::Allowed, "{rule}: {}", verdict.text);
    }
}

#[test]
fn evaluator_that_does_not_respond_is_killed() {
    let policy = "package agent_policy\nimport rego.v1\nStartContainerRequest if \
                  count([1 | some i in numbers.range(1, 9000); some j in numbers.range(1, 9000); i * j == 0]) > 1\n";
    // The engine's own limit is a minute; the agent's deadline is much shorter.
    let slow = Limits { evaluation: Duration::from_mins(1), ..launch().limits };
    let mut evaluator = Evaluator::start(LaunchOptions { limits: slow, ..launch() }, policy.into()).unwrap();
    let pid = evaluator.pid().unwrap();
    evaluator.set_limits(Limits { evaluation: Duration::ZERO, grace: Duration::from_millis(300), ..slow });
    let begin = Instant::now();
    let verdict = evaluator.evaluate("StartContainerRequest", b"");
    assert_eq!(verdict.decision, Decision::Denied);
    let took = verdict.text.split_once("took longer than ").and_then(|(_, rest)| rest.split_once(" s:"));
    let took: f64 = took.and_then(|(seconds, _)| seconds.parse().ok()).unwrap_or_default();
    assert!((0.3..10.0).contains(&took), "{}", verdict.text);
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}

#[test]
fn unloadable_policies_and_a_missing_program_are_distinct_errors() {
    let nested = format!("package agent_policy\nX := {}1{}\n", "[".repeat(30_000), "]".repeat(30_000));
    let mut brief = launch();
    brief.limits.load = Duration::from_secs(3);
    assert!(Evaluator::start(brief, nested).is_err());
    assert!(matches!(start("package agent_policy\nX := (\n"), Err(PolicyError::InvalidPolicy(_))));
    let missing = LaunchOptions { program: "/nowhere/evaluator".into(), ..launch() };
    assert!(
        matches!(Evaluator::start(missing, "package agent_policy\n".into()), Err(PolicyError::Evaluator(why)) if why.contains("/nowhere/evaluator"))
    );
}

#[test]
fn invalid_requests_are_malformed() {
    let mut evaluator = start("package agent_policy\ndefault SetPolicyRequest := true\n").unwrap();
    assert_eq!(evaluator.evaluate("SetPolicyRequest", &[0xff]).decision, Decision::Malformed);
    assert_eq!(evaluator.evaluate("Nonsense", b"").decision, Decision::Malformed);
    assert_eq!(evaluator.evaluate("SetPolicyRequest", b"").decision, Decision::Allowed);
}

#[test]
fn evaluator_is_unprivileged_and_ends_with_its_handle() {
    let evaluator = start("package agent_policy\n").unwrap();
    let pid = evaluator.pid().unwrap();
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let status = read("status");
    assert!(status.contains("Name:\tfl-policy\n") && status.contains("NoNewPrivs:\t1\n"), "{status}");
    if rustix::process::geteuid().is_root() {
        assert!(status.contains("Uid:\t65534\t65534\t65534\t65534\n"), "{status}");
        assert!(status.contains("CapEff:\t0000000000000000\n") && status.contains("Groups:\t \n"), "{status}");
    }
    assert_eq!(read("oom_score_adj"), "1000\n");
    assert!(read("limits").lines().any(|line| line.starts_with("Max core file size") && line.contains(" 0 ")));
    drop(evaluator);
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}
