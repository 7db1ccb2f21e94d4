//! The judge's process: what policies do to it, and what the agent makes of that.
#![cfg(test)]
#![forbid(unsafe_code)]

use std::fs;
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{CreateContainerRequest, StartContainerRequest};
use firstlight_policy::{Decision, Fault, Judge, Launch, Limits};
use protobuf::Message;

fn launch() -> Launch {
    let second = Duration::from_secs(1);
    Launch {
        program: env!("CARGO_BIN_EXE_firstlight-policy").into(),
        limits: Limits { load: 20 * second, evaluation: second, grace: 20 * second },
    }
}

fn start(policy: &str) -> Result<Judge, Fault> {
    Judge::start(launch(), policy.to_owned())
}

fn create(judge: &mut Judge, id: &str) -> Decision {
    let request = CreateContainerRequest { container_id: id.into(), ..Default::default() };
    judge.judge("CreateContainerRequest", &request.write_to_bytes().unwrap()).decision
}

fn begin(judge: &mut Judge, id: &str) -> Decision {
    let request = StartContainerRequest { container_id: id.into(), ..Default::default() };
    judge.judge("StartContainerRequest", &request.write_to_bytes().unwrap()).decision
}

const REMEMBERS: &str = include_str!("policies/two-containers.rego");

#[test]
fn memory_outlives_a_judge() {
    let mut judge = start(REMEMBERS).unwrap();
    assert_eq!(create(&mut judge, "a"), Decision::Allowed);
    let first = judge.pid().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(first).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    // Whoever asks next may find it dead: that one request is denied.
    while begin(&mut judge, "a") == Decision::Denied {
        assert_eq!(judge.pid(), None);
    }
    assert_ne!(judge.pid(), Some(first));
    assert_eq!(begin(&mut judge, "b"), Decision::Denied);
    assert_eq!(create(&mut judge, "b"), Decision::Allowed);
    assert_eq!(create(&mut judge, "c"), Decision::Denied);
}

#[test]
fn policies_that_recurse_or_eat_memory_end_their_judge_and_deny() {
    for (rule, rest) in [
        ("StartContainerRequest if f(1)", "f(x) := y if y := f(x + 1)"),
        ("StartContainerRequest if count(numbers.range(1, 1000000000)) > 1", ""),
    ] {
        let policy = format!("package agent_policy\nimport rego.v1\n{rule}\n{rest}\nCreateContainerRequest := true\n");
        let mut judge = start(&policy).unwrap();
        let verdict = judge.judge("StartContainerRequest", b"");
        assert_eq!(verdict.decision, Decision::Denied, "{rule}");
        assert!(!verdict.text.is_empty());
        // The others are served by the next judge.
        assert_eq!(create(&mut judge, "a"), Decision::Allowed, "{rule}: {}", verdict.text);
    }
}

#[test]
fn a_judge_that_does_not_answer_is_killed() {
    let policy = "package agent_policy\nimport rego.v1\nStartContainerRequest if \
                  count([1 | some i in numbers.range(1, 9000); some j in numbers.range(1, 9000); i * j == 0]) > 1\n";
    // The engine's own limit is a minute; the agent's is over soon.
    let patient = Limits { evaluation: Duration::from_mins(1), ..launch().limits };
    let mut judge = Judge::start(Launch { limits: patient, ..launch() }, policy.into()).unwrap();
    let pid = judge.pid().unwrap();
    judge.limit(Limits { evaluation: Duration::ZERO, grace: Duration::from_millis(300), ..patient });
    let begin = Instant::now();
    let verdict = judge.judge("StartContainerRequest", b"");
    assert_eq!(verdict.decision, Decision::Denied);
    let took = verdict.text.split_once("took longer than ").and_then(|(_, rest)| rest.split_once(" s:"));
    let took: f64 = took.and_then(|(seconds, _)| seconds.parse().ok()).unwrap_or_default();
    assert!((0.3..10.0).contains(&took), "{}", verdict.text);
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}

#[test]
fn nonsense_nests_no_deeper_than_the_judge_can_bear() {
    let nested = format!("package agent_policy\nX := {}1{}\n", "[".repeat(30_000), "]".repeat(30_000));
    let mut brief = launch();
    brief.limits.load = Duration::from_secs(3);
    assert!(Judge::start(brief, nested).is_err());
    assert!(matches!(start("package agent_policy\nX := (\n"), Err(Fault::Policy(_))));
    let missing = Launch { program: "/nowhere/judge".into(), ..launch() };
    assert!(
        matches!(Judge::start(missing, "package agent_policy\n".into()), Err(Fault::Judge(why)) if why.contains("/nowhere/judge"))
    );
}

#[test]
fn bytes_that_are_no_request_are_malformed() {
    let mut judge = start("package agent_policy\ndefault SetPolicyRequest := true\n").unwrap();
    assert_eq!(judge.judge("SetPolicyRequest", &[0xff]).decision, Decision::Malformed);
    assert_eq!(judge.judge("Nonsense", b"").decision, Decision::Malformed);
    assert_eq!(judge.judge("SetPolicyRequest", b"").decision, Decision::Allowed);
}

#[test]
fn a_judge_has_no_rights_and_does_not_outlive_who_asks() {
    let judge = start("package agent_policy\n").unwrap();
    let pid = judge.pid().unwrap();
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let status = read("status");
    assert!(status.contains("Name:\tfl-policy\n") && status.contains("NoNewPrivs:\t1\n"), "{status}");
    if rustix::process::geteuid().is_root() {
        assert!(status.contains("Uid:\t65534\t65534\t65534\t65534\n"), "{status}");
        assert!(status.contains("CapEff:\t0000000000000000\n") && status.contains("Groups:\t \n"), "{status}");
    }
    assert_eq!(read("oom_score_adj"), "1000\n");
    assert!(read("limits").lines().any(|line| line.starts_with("Max core file size") && line.contains(" 0 ")));
    drop(judge);
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}
