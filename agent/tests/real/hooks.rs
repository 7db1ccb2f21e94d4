//! Guest hooks (`guest_hook_path`) and hooks of a configuration.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{CreateSandboxRequest, KernelModule};
use firstlight_agent_api::oci;
use ttrpc::Code;

use crate::support::{Agent, code, short, spec, with_agent};

/// Records its environment and state, or fails, sleeps or hangs if its container's id says so.
const HOOK: &str = r#"#!/bin/busybox sh
state=$(/bin/busybox cat)
{ echo "args=$0 $*"; echo "pwd=$(pwd)"; /bin/busybox env; echo "state=$state"; } > DIR/seen-$1
case "$state" in
  *fail-$1*) echo "on standard output"; echo "no luck" >&2; exit 9 ;;
  *slow-$1*) /bin/busybox sleep 3 ;;
  *stuck-$1*) echo "waiting"; /bin/busybox sleep 7777; true ;;
esac
"#;

fn plant(dir: &Path, kind: &str) {
    let path = dir.join("hooks").join(kind).join("10-hook");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, HOOK.replace("DIR", &dir.display().to_string())).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

async fn sandbox(agent: &Agent) {
    for kind in ["prestart", "poststart", "poststop"] {
        plant(agent.dir.path(), kind);
    }
    let hooks = agent.dir.path().join("hooks").display().to_string();
    let request = CreateSandboxRequest { sandbox_id: "s1".into(), guest_hook_path: hooks, ..Default::default() };
    agent.calls.create_sandbox(short(), &request).await.unwrap();
}

#[test]
fn guest_hooks_run_outside_the_container_without_its_environment() {
    with_agent(async |agent| {
        sandbox(&agent).await;
        let root = agent.root("c1");
        let mut evil = spec(&root, "sleep 1000");
        let process = evil.Process.mut_or_insert_default();
        process.Env = vec!["LD_PRELOAD=/proc/self/cwd/evil.so".into(), "EVIL=1".into()];
        // A hook of the configuration, which runs in the container, besides the guest hooks.
        let own = ["sh", "-c", "pwd > /tmp/own; env >> /tmp/own"].map(str::to_owned).to_vec();
        evil.Hooks.mut_or_insert_default().StartContainer =
            vec![oci::Hook { Path: "/bin/sh".into(), Args: own, ..Default::default() }];
        agent.create(evil, "c1").await.unwrap();
        let seen = |kind: &str| fs::read_to_string(agent.dir.path().join(format!("seen-{kind}"))).unwrap_or_default();
        assert!(!seen("prestart").is_empty() && seen("poststart").is_empty());
        agent.begin("c1").await;
        assert!(!seen("poststart").is_empty() && seen("poststop").is_empty());
        agent.remove("c1").await.unwrap();
        for kind in ["prestart", "poststart", "poststop"] {
            let text = seen(kind);
            assert!(text.contains("pwd=/\n") && text.contains(&format!("10-hook {kind}")), "{text}");
            assert!(text.contains("\"id\":\"c1\"") && text.contains("PATH=/usr"), "{text}");
            assert!(!text.contains("EVIL") && !text.contains("LD_PRELOAD") && !text.contains("AGENT_ADDR"), "{text}");
        }
        assert!(seen("poststart").contains("\"pid\":") && seen("poststart").contains("running"));
        let own = fs::read_to_string(root.join("tmp/own")).unwrap();
        assert!(own.contains("PATH=/usr") && !own.contains("EVIL") && !own.contains("LD_PRELOAD"), "{own}");
    });
}

#[test]
fn failed_hook_is_reported_with_its_output() {
    with_agent(async |agent| {
        sandbox(&agent).await;
        let annotated = |container: &str| {
            let root = agent.root(container);
            spec(&root, "sleep 1000")
        };
        let (_, text) = code(agent.create(annotated("fail-prestart"), "fail-prestart").await);
        assert!(text.contains("prestart/10-hook: exit status: 9") && text.contains("no luck"), "{text}");
        assert!(text.contains("on standard output") && !text.contains('\n'), "{text}");
        agent.create(annotated("fail-poststart"), "fail-poststart").await.unwrap();
        let (_, text) = code(agent.start_container("fail-poststart").await);
        assert!(text.contains("poststart hook") && text.contains("no luck") && !text.contains('\n'), "{text}");
        agent.remove("fail-poststart").await.unwrap();
        // A failed poststop hook is reported, and does not prevent the removal.
        agent.create(annotated("fail-poststop"), "fail-poststop").await.unwrap();
        agent.begin("fail-poststop").await;
        let (_, text) = code(agent.remove("fail-poststop").await);
        assert!(text.contains("poststop hook") && text.contains("no luck"), "{text}");
        assert_eq!(code(agent.remove("fail-poststop").await).0, Code::INVALID_ARGUMENT);
        assert!(!agent.inside("/run/kata-containers/fail-poststop").exists());
        assert!(!agent.group("fail-poststop", "").exists());
    });
}

#[test]
fn slow_hook_delays_only_its_own_container() {
    with_agent(async |agent| {
        sandbox(&agent).await;
        agent.run("c1", "sleep 1000").await;
        let root = agent.root("slow-prestart");
        let slow = async {
            let begin = Instant::now();
            agent.create(spec(&root, "sleep 1000"), "slow-prestart").await.unwrap();
            begin.elapsed()
        };
        let other = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let begin = Instant::now();
            assert_eq!(agent.shell("c1", "e1", "echo hi").await.0, "hi\n");
            begin.elapsed()
        };
        let (slow, other) = tokio::join!(slow, other);
        assert!(slow >= Duration::from_secs(3), "{slow:?}");
        // It completed before the hook did.
        assert!(other + Duration::from_millis(500) < slow, "{slow:?} {other:?}");
        for container in ["c1", "slow-prestart"] {
            agent.remove(container).await.unwrap();
        }
    });
}

/// Whether any process of the machine runs this command.
fn runs(command: &str) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.any(|line| String::from_utf8_lossy(&line).replace('\0', " ").contains(command))
}

#[test]
fn prestart_hook_and_its_descendants_have_a_deadline() {
    with_agent(async |agent| {
        plant(agent.dir.path(), "none");
        let root = agent.root("stuck-prestart");
        let mut stuck = spec(&root, "sleep 1000");
        let path = agent.dir.path().join("hooks/none/10-hook").display().to_string();
        let args = ["10-hook", "prestart"].map(str::to_owned).to_vec();
        stuck.Hooks.mut_or_insert_default().Prestart =
            vec![oci::Hook { Path: path, Args: args, Timeout: 2, ..Default::default() }];
        let begin = Instant::now();
        let create = agent.create(stuck, "stuck-prestart");
        let look = async {
            let begin = Instant::now();
            while !runs("sleep 7777") && begin.elapsed() < Duration::from_secs(30) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            begin.elapsed() < Duration::from_secs(30)
        };
        let (created, there) = tokio::join!(create, look);
        let (_, text) = code(created);
        assert!(there && text.contains("10-hook: timed out after") && text.contains("output: waiting"), "{text}");
        assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
        assert!(!runs("sleep 7777"), "the hook's descendants are killed with it");
        let seen = fs::read_to_string(agent.dir.path().join("seen-prestart")).unwrap();
        assert!(!agent.group("stuck-prestart", "").exists());
        assert!(seen.contains("\"status\":\"creating\"") && seen.contains("\"pid\":"), "{seen}");
    });
}

#[test]
fn loaded_kernel_modules_are_accepted_and_missing_ones_reported() {
    with_agent(async |agent| {
        let there = fs::read_dir("/sys/module").unwrap().flatten().next().unwrap();
        let module = |name: &str| KernelModule { name: name.into(), ..Default::default() };
        let request = |modules| CreateSandboxRequest { kernel_modules: modules, ..Default::default() };
        let missing = request(vec![module("not_a_module")]);
        let (_, text) = code(agent.calls.create_sandbox(short(), &missing).await);
        assert!(text.contains("not_a_module") && text.contains("PID 1"), "{text}");
        let (kind, _) = code(agent.calls.create_sandbox(short(), &request(vec![module("../x")])).await);
        assert_eq!(kind, Code::INVALID_ARGUMENT);
        let good = request(vec![module(there.file_name().to_str().unwrap())]);
        agent.calls.create_sandbox(short(), &good).await.unwrap();
    });
}
