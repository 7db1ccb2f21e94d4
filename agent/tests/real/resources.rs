//! Resource usage of the agent's two processes, to detect leaks.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::Agent;

/// Memory that the allocator and the thread pool may retain after a burst, KiB.
const ALLOWED_GROWTH: usize = 3 << 10;

/// Limits of resident memory when idle, KiB: of the server, and of both processes.
const MAX_SERVER: usize = 4 << 10;
const MAX_TOTAL: usize = 7 << 10;

/// Unread output, idle threads and the preforked worker are kept for ten seconds.
const IDLE_TIME: Duration = Duration::from_secs(12);

/// The timeout of waiting for that on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Resource usage of server and runtime together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResourceUsage {
    fds: usize,
    threads: usize,
    mounts: usize,
    pub(crate) groups: usize,
    /// The runtime's children: init and exec processes.
    pub(crate) processes: usize,
    /// Container directories of the agent.
    files: Vec<String>,
}

/// Memory usage of both processes, KiB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    /// `RssAnon`.
    anonymous: usize,
    /// `VmRSS`, which includes the program's file-backed pages.
    resident: usize,
    /// `VmRSS` of the server.
    server: usize,
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fds, threads, mounts, groups, processes, files } = self;
        let files = files.len();
        write!(
            f,
            "{fds} fds, {threads} threads, {mounts} mounts, {groups} cgroups, {processes} processes, {files} directories"
        )
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB resident, {} KiB of them allocated", self.resident, self.anonymous)
    }
}

fn pids(agent: &Agent) -> Vec<u32> {
    let pids: Vec<u32> = agent.pids().into_iter().take(2).collect();
    assert_eq!(pids.len(), 2, "server and runtime");
    pids
}

/// Counts the directories below `dir` whose name begins with `start`, with their descendants.
fn groups(dir: &Path, start: &str) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(start))
        .map(|entry| 1 + groups(&entry.path(), ""))
        .sum()
}

fn count(path: String) -> usize {
    fs::read_dir(path).map_or(0, Iterator::count)
}

impl ResourceUsage {
    pub(crate) fn of(agent: &Agent) -> Self {
        let pids = pids(agent);
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", pids[1])).unwrap();
        let mountinfo = fs::read_to_string(format!("/proc/{}/mountinfo", pids[0])).unwrap();
        let mut files = Vec::new();
        for dir in ["/run/kata-containers", "/run/firstlight/containers"] {
            let entries = fs::read_dir(agent.inside(dir)).into_iter().flatten().flatten();
            files.extend(entries.map(|entry| entry.path().display().to_string()));
        }
        files.sort();
        Self {
            fds: pids.iter().map(|pid| count(format!("/proc/{pid}/fd"))).sum(),
            threads: pids.iter().map(|pid| count(format!("/proc/{pid}/task"))).sum(),
            mounts: mountinfo.lines().count(),
            // Other cgroups of the machine change.
            groups: groups(&agent.inside("/sys/fs/cgroup"), "firstlight"),
            processes: children.split_whitespace().count(),
            files,
        }
    }

    /// Waits until the usage equals `self`. Idle threads and unread output are kept for ten seconds; everything
    /// else is released at once.
    pub(crate) async fn wait_until_equal(&self, agent: &Agent) {
        let begin = Instant::now();
        while Self::of(agent) != *self {
            if begin.elapsed() > TIMEOUT {
                assert_eq!(Self::of(agent), *self, "now and before, after {TIMEOUT:?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until the usage is constant for [`IDLE_TIME`] and returns it.
    pub(crate) async fn when_idle(agent: &Agent) -> Self {
        let begin = Instant::now();
        let (mut usage, mut since) = (Self::of(agent), Instant::now());
        while since.elapsed() < IDLE_TIME {
            assert!(begin.elapsed() < TIMEOUT, "not idle in {TIMEOUT:?}: {usage:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            let now = Self::of(agent);
            if now != usage {
                (usage, since) = (now, Instant::now());
            }
        }
        usage
    }
}

impl Memory {
    pub(crate) fn of(agent: &Agent) -> Self {
        let each = |name: &str| {
            let of = |pid: u32| {
                let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
                let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                line.split_whitespace().next().unwrap().parse::<usize>().unwrap()
            };
            pids(agent).into_iter().map(of).collect::<Vec<_>>()
        };
        let (anonymous, resident) = (each("RssAnon:"), each("VmRSS:"));
        Self { anonymous: anonymous.iter().sum(), resident: resident.iter().sum(), server: resident[0] }
    }
}

/// Returns the usage when idle. Call it after a first use has created what is permanent: pools, buffers, directories.
pub(crate) async fn when_idle(agent: &Agent) -> (ResourceUsage, Memory) {
    let usage = ResourceUsage::when_idle(agent).await;
    let begin = Instant::now();
    let mut memory = Memory::of(agent);
    while memory.server > MAX_SERVER || memory.resident > MAX_TOTAL {
        assert!(begin.elapsed() < TIMEOUT, "idle: {memory:?} KiB");
        tokio::time::sleep(Duration::from_millis(100)).await;
        memory = Memory::of(agent);
    }
    (usage, memory)
}

/// Waits until the usage is back at `before`, and prints both.
pub(crate) async fn assert_released(agent: &Agent, (before, memory_before): (ResourceUsage, Memory)) {
    println!("figures: before: {before}; {memory_before}");
    before.wait_until_equal(agent).await;
    let begin = Instant::now();
    let mut memory = Memory::of(agent);
    while memory.anonymous > memory_before.anonymous + ALLOWED_GROWTH && begin.elapsed() < TIMEOUT {
        tokio::time::sleep(Duration::from_millis(100)).await;
        memory = Memory::of(agent);
    }
    println!("figures: after:  {}; {memory}", ResourceUsage::of(agent));
    assert!(memory.anonymous <= memory_before.anonymous + ALLOWED_GROWTH, "{memory_before} became {memory}");
}
