//! Typical Kata policies against requests of a shim.
#![cfg(test)]
#![forbid(unsafe_code)]

use std::time::Duration;

use firstlight_agent_api::agent::{
    CreateContainerRequest, ExecProcessRequest, RemoveContainerRequest, StartContainerRequest, Storage,
};
use firstlight_agent_api::oci::Mount;
use firstlight_policy::engine::Engine;
use firstlight_policy::{Decision, PolicyError, requests};
use protobuf::Message;
use serde_json::json;

fn engine(policy: &str) -> Result<Engine, PolicyError> {
    Engine::load(policy.to_owned(), json!({}), Duration::from_secs(10))
}

fn evaluate<M: Message>(engine: &mut Engine, request: &M) -> (Decision, String) {
    let input = requests::json(M::NAME, &request.write_to_bytes().unwrap()).unwrap();
    let verdict = engine.evaluate(M::NAME, &input);
    (verdict.decision, verdict.text)
}

fn web() -> CreateContainerRequest {
    let mut request = CreateContainerRequest::new();
    request.container_id = "c1".into();
    request.storages = vec![Storage { driver: "virtio-fs".into(), ..Default::default() }];
    let spec = request.OCI.mut_or_insert_default();
    spec.Annotations.insert("io.kubernetes.cri.image-name".into(), "registry.example/web@sha256:11".into());
    let process = spec.Process.mut_or_insert_default();
    process.Args = ["/bin/web", "--port", "80"].map(str::to_owned).into();
    process.Env = vec!["PATH=/usr/bin:/bin".into(), "POD_IP=10.1.2.3".into()];
    process.User.mut_or_insert_default().UID = 1000;
    let mount = |destination: &str, kind: &str, source: &str| Mount {
        destination: destination.into(),
        type_: kind.into(),
        source: source.into(),
        ..Default::default()
    };
    let hosts = "/run/kata-containers/shared/containers/c1-0f1e-hosts";
    spec.Mounts = vec![mount("/proc", "proc", "proc"), mount("/etc/hosts", "bind", hosts)];
    request
}

#[test]
fn allow_all_policy_allows_without_text() {
    let mut engine = engine(include_str!("policies/allow-all.rego")).unwrap();
    assert_eq!(evaluate(&mut engine, &web()), (Decision::Allowed, String::new()));
    assert_eq!(evaluate(&mut engine, &ExecProcessRequest::new()).0, Decision::Allowed);
}

#[test]
fn false_and_missing_rules_deny() {
    let mut engine = engine(include_str!("policies/no-exec.rego")).unwrap();
    assert_eq!(evaluate(&mut engine, &web()).0, Decision::Allowed);
    assert_eq!(evaluate(&mut engine, &ExecProcessRequest::new()), (Decision::Denied, String::new()));
    let verdict = engine.evaluate("AddSwapRequest", "{}");
    assert_eq!(verdict.decision, Decision::Denied);
    assert_eq!(verdict.text, "the policy has no rule AddSwapRequest, or its conditions are not met");
}

#[test]
fn workload_is_identified_by_image_arguments_environment_and_mounts() {
    let mut engine = engine(include_str!("policies/one-workload.rego")).unwrap();
    assert_eq!(evaluate(&mut engine, &web()).0, Decision::Allowed);

    let mut denied = |change: fn(&mut CreateContainerRequest), last_print: &str| {
        let mut request = web();
        change(&mut request);
        let (decision, text) = evaluate(&mut engine, &request);
        assert_eq!(decision, Decision::Denied);
        assert!(text.ends_with(last_print), "{last_print:?} in {text:?}");
    };
    let spec = |request: &mut CreateContainerRequest| request.OCI.mut_or_insert_default().Process.take().unwrap();
    assert_eq!(spec(&mut web()).Args.len(), 3);
    denied(|request| request.OCI.mut_or_insert_default().Annotations.clear(), "");
    denied(
        |request| request.OCI.mut_or_insert_default().Process.mut_or_insert_default().Args.push("x".into()),
        "known;",
    );
    denied(
        |request| request.OCI.mut_or_insert_default().Process.mut_or_insert_default().Env.push("LD_PRELOAD=/x".into()),
        "arguments are right;",
    );
    denied(
        |request| request.OCI.mut_or_insert_default().Mounts[1].source = "/etc/shadow".into(),
        "environment is right;",
    );
    denied(
        |request| {
            request.OCI.mut_or_insert_default().Process.mut_or_insert_default().User.mut_or_insert_default().UID = 0;
        },
        "mounts are right;",
    );
    denied(|request| request.storages[0].driver = "blk".into(), "mounts are right;");

    let exec = |args: &[&str]| {
        let mut request = ExecProcessRequest::new();
        request.process.mut_or_insert_default().Args = args.iter().map(ToString::to_string).collect();
        request
    };
    assert_eq!(evaluate(&mut engine, &exec(&["/bin/ready", "--now"])).0, Decision::Allowed);
    assert_eq!(evaluate(&mut engine, &exec(&["/bin/sh"])).0, Decision::Denied);
}

#[test]
fn policy_keeps_state_across_requests() {
    let mut engine = engine(include_str!("policies/two-containers.rego")).unwrap();
    let create = |engine: &mut Engine, id: &str| {
        evaluate(engine, &CreateContainerRequest { container_id: id.into(), ..Default::default() }).0
    };
    let start = |engine: &mut Engine, id: &str| {
        evaluate(engine, &StartContainerRequest { container_id: id.into(), ..Default::default() }).0
    };
    let remove = |engine: &mut Engine, id: &str| {
        evaluate(engine, &RemoveContainerRequest { container_id: id.into(), ..Default::default() })
    };
    assert_eq!(start(&mut engine, "a"), Decision::Denied);
    assert_eq!(create(&mut engine, "a"), Decision::Allowed);
    assert_eq!(start(&mut engine, "a"), Decision::Allowed);
    assert_eq!(create(&mut engine, "b"), Decision::Allowed);
    assert_eq!(create(&mut engine, "c"), Decision::Denied);
    assert_eq!(engine.state(), &json!({"containers": {"a": true, "b": true}}));
    assert_eq!(remove(&mut engine, "a").0, Decision::Allowed);
    assert_eq!(create(&mut engine, "c"), Decision::Allowed);
    assert_eq!(start(&mut engine, "a"), Decision::Denied);
    // The policy's patch fails, so the request is denied.
    let (decision, text) = remove(&mut engine, "unknown");
    assert_eq!(decision, Decision::Denied);
    assert!(text.contains("no such value"), "{text}");
}

#[test]
fn allow_requests_failing_policy_turns_denials_into_warnings() {
    let warn_only = "package agent_policy\ndefault AllowRequestsFailingPolicy := true\nX := false\n";
    let mut engine = engine(warn_only).unwrap();
    assert_eq!(engine.evaluate("X", "{}").decision, Decision::Tolerated);
    assert_eq!(engine.evaluate("Missing", "{}").decision, Decision::Tolerated);
    let mut engine = self::engine("package agent_policy\ndefault AllowRequestsFailingPolicy := false\n").unwrap();
    assert_eq!(engine.evaluate("Missing", "{}").decision, Decision::Denied);
}

#[test]
fn invalid_results_deny() {
    let policy = "package agent_policy\nimport rego.v1\nA := 1\nB := {\"ops\": []}\nC := null\nD contains true\n\
                  E := {\"allowed\": true, \"ops\": [{\"op\": \"move\", \"from\": \"/pstate\", \"path\": \"/pstate/x\"}]}\n\
                  F := true if input.x\nF := false if input.x\n";
    let mut engine = engine(policy).unwrap();
    for rule in ["A", "B", "C", "D", "E", "F"] {
        let verdict = engine.evaluate(rule, "{\"x\": 1}");
        assert_eq!(verdict.decision, Decision::Denied, "{rule}");
        assert!(!verdict.text.is_empty() && !verdict.text.contains('\n'), "{rule}: {:?}", verdict.text);
    }
}

#[test]
fn invalid_policy_is_reported_with_its_line() {
    let Err(PolicyError::InvalidPolicy(why)) =
        engine("package agent_policy\ndefault A := true\nB if {\n  input.a ==\n}\n")
    else {
        panic!("no error")
    };
    assert_eq!(why, "policy.rego:5:1: expecting expression");
}

#[test]
fn length_limits_are_those_of_kata_agent() {
    let with = |filler: &str| engine(&format!("package agent_policy\n{filler}\nA := true\n"));
    assert!(with(&format!("x := \"{}\"", "y".repeat(60 * 1024))).is_ok());
    assert!(with(&format!("x := \"{}\"", "y".repeat(65 * 1024))).is_err());
    assert!(with(&"#\n".repeat(199_000)).is_ok());
    assert!(with(&"#\n".repeat(201_000)).is_err());
    assert!(with(&format!("#{}\n", "y".repeat(60 * 1024)).repeat(280)).is_err());
}

#[test]
fn evaluation_stops_at_the_time_limit() {
    let policy = "package agent_policy\nimport rego.v1\n\
                  A if count([1 | some i in numbers.range(1, 9000); some j in numbers.range(1, 9000); i * j == 0]) > 1\n";
    let mut engine = Engine::load(policy.into(), json!({}), Duration::from_millis(200)).unwrap();
    let begin = std::time::Instant::now();
    let verdict = engine.evaluate("A", "{}");
    assert_eq!(verdict.decision, Decision::Denied);
    assert!(verdict.text.contains("time limit") && begin.elapsed() < Duration::from_secs(5), "{}", verdict.text);
}
