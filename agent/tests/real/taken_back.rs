//! What was made and then could not be used is taken back.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use ttrpc::Code;

use crate::support::{Agent, code, gone, process, short, spec, with_agent};

/// Leaves the server one descriptor more than it has, for as long as this is
/// there: enough to be sent a terminal, and too few to use it.
struct Scarce {
    server: Pid,
    before: Rlimit,
}

impl Scarce {
    fn of(agent: &Agent) -> Self {
        let server = agent.pids()[0];
        let open = fs::read_dir(format!("/proc/{server}/fd")).unwrap().flatten();
        let open: BTreeSet<u64> = open.map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect();
        let free = (0..).find(|number| !open.contains(number)).unwrap();
        let server = Pid::from_raw(i32::try_from(server).unwrap()).unwrap();
        // Its hard limit stays: whoever may not raise it could not put it back.
        let limits = fs::read_to_string(format!("/proc/{}/limits", server.as_raw_nonzero())).unwrap();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        let maximum = files.split_whitespace().nth(1).unwrap().parse().ok();
        let limit = Rlimit { current: Some(free + 1), maximum };
        let before = prlimit(Some(server), Resource::Nofile, limit).unwrap();
        Self { server, before }
    }
}

impl Drop for Scarce {
    fn drop(&mut self) {
        prlimit(Some(self.server), Resource::Nofile, self.before).unwrap();
    }
}

/// Processes of the machine with this among their arguments.
fn running(argument: &str) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split('\0').any(|word| word == argument)
    };
    pids.filter(|pid| has(pid) && !gone(*pid)).collect()
}

#[test]
fn a_container_whose_terminal_cannot_be_used() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut terminal = spec(&root, "exit 6");
        terminal.Process.mut_or_insert_default().Terminal = true;
        let scarce = Scarce::of(&agent);
        let (_, text) = code(agent.create(terminal.clone(), "c1").await);
        drop(scarce);
        assert!(text.contains("failed to set up the terminal"), "{text}");
        assert!(!agent.group("c1", "").exists(), "its resource group is there");
        assert!(!agent.inside("/run/firstlight/containers/c1").exists());
        // The name is free, and what the other one had does not get in the way.
        agent.create(terminal, "c1").await.unwrap();
        agent.begin("c1").await;
        assert_eq!(agent.wait("c1", "").await.unwrap(), 6);
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn a_further_process_whose_terminal_cannot_be_used() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        // The end of its terminal is not its end.
        let mut terminal = process("trap '' HUP; exec sleep 4242");
        terminal.Terminal = true;
        let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
        (request.container_id, request.exec_id) = ("c1".into(), "e1".into());
        request.process = Some(terminal).into();
        // It cannot be made in a frozen group, and the server hears of it only when it runs as it should.
        let freezer = agent.group("c1", "cgroup.freeze");
        fs::write(&freezer, "1").unwrap();
        let scarce = Scarce::of(&agent);
        let meanwhile = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            kill_process(scarce.server, Signal::STOP).unwrap();
            fs::write(&freezer, "0").unwrap();
            let begin = Instant::now();
            while running("4242").is_empty() && begin.elapsed() < Duration::from_secs(10) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            kill_process(scarce.server, Signal::CONT).unwrap();
        };
        let (refused, ()) = tokio::join!(agent.calls.exec_process(short(), &request), meanwhile);
        drop(scarce);
        let (_, text) = code(refused);
        assert!(text.contains("failed to set up the terminal"), "{text}");
        assert_eq!(running("4242"), [0; 0], "it runs, and nobody can reach it");
        assert_eq!(code(agent.wait("c1", "e1").await).0, Code::NOT_FOUND);
        agent.calls.exec_process(short(), &request).await.unwrap();
        agent.signal("c1", "e1", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "e1").await.unwrap(), 137);
        agent.remove("c1").await.unwrap();
    });
}
