//! Partially completed calls are rolled back.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use ttrpc::Code;

use crate::support::{Agent, code, has_exited, process, short, spec, with_agent};

/// Limits the server to one more descriptor than it has open, until dropped: enough to receive a terminal, too
/// few to use it.
struct DescriptorLimit {
    server: Pid,
    before: Rlimit,
}

impl DescriptorLimit {
    fn of(agent: &Agent) -> Self {
        let server = agent.pids()[0];
        let open = fs::read_dir(format!("/proc/{server}/fd")).unwrap().flatten();
        let open: BTreeSet<u64> = open.map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect();
        let free = (0..).find(|number| !open.contains(number)).unwrap();
        let server = Pid::from_raw(i32::try_from(server).unwrap()).unwrap();
        // Keeps the hard limit, which an unprivileged process could not raise again.
        let limits = fs::read_to_string(format!("/proc/{}/limits", server.as_raw_nonzero())).unwrap();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        let maximum = files.split_whitespace().nth(1).unwrap().parse().ok();
        let limit = Rlimit { current: Some(free + 1), maximum };
        let before = prlimit(Some(server), Resource::Nofile, limit).unwrap();
        Self { server, before }
    }
}

impl Drop for DescriptorLimit {
    fn drop(&mut self) {
        prlimit(Some(self.server), Resource::Nofile, self.before).unwrap();
    }
}

/// Returns the pids of processes that have this argument.
fn running(argument: &str) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split('\0').any(|word| word == argument)
    };
    pids.filter(|pid| has(pid) && !has_exited(*pid)).collect()
}

#[test]
fn create_with_an_unusable_terminal_is_rolled_back() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut terminal = spec(&root, "exit 6");
        terminal.Process.mut_or_insert_default().Terminal = true;
        let limit = DescriptorLimit::of(&agent);
        let (_, text) = code(agent.create(terminal.clone(), "c1").await);
        drop(limit);
        assert!(text.contains("failed to set up the terminal"), "{text}");
        assert!(!agent.group("c1", "").exists(), "its cgroup still exists");
        assert!(!agent.inside("/run/firstlight/containers/c1").exists());
        // The id is free, and no remains of the failed create interfere.
        agent.create(terminal, "c1").await.unwrap();
        agent.begin("c1").await;
        assert_eq!(agent.wait("c1", "").await.unwrap(), 6);
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn exec_with_an_unusable_terminal_is_rolled_back() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        // Survives the hang-up of its terminal.
        let mut terminal = process("trap '' HUP; exec sleep 4242");
        terminal.Terminal = true;
        let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
        (request.container_id, request.exec_id) = ("c1".into(), "e1".into());
        request.process = Some(terminal).into();
        // The exec blocks on the frozen cgroup; the stopped server receives the reply only after the process runs.
        let freezer = agent.group("c1", "cgroup.freeze");
        fs::write(&freezer, "1").unwrap();
        let limit = DescriptorLimit::of(&agent);
        let meanwhile = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            kill_process(limit.server, Signal::STOP).unwrap();
            fs::write(&freezer, "0").unwrap();
            let begin = Instant::now();
            while running("4242").is_empty() && begin.elapsed() < Duration::from_secs(10) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            kill_process(limit.server, Signal::CONT).unwrap();
        };
        let (refused, ()) = tokio::join!(agent.calls.exec_process(short(), &request), meanwhile);
        drop(limit);
        let (_, text) = code(refused);
        assert!(text.contains("failed to set up the terminal"), "{text}");
        assert_eq!(running("4242"), [0; 0], "an unmanaged process is still running");
        assert_eq!(code(agent.wait("c1", "e1").await).0, Code::NOT_FOUND);
        agent.calls.exec_process(short(), &request).await.unwrap();
        agent.signal("c1", "e1", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "e1").await.unwrap(), 137);
        agent.remove("c1").await.unwrap();
    });
}
