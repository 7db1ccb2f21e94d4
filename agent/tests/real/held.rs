//! What the agent's two processes hold, to be the same again later.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::Agent;

/// What an allocator and a pool of threads may keep of a burst, KiB.
const KEPT: usize = 3 << 10;

/// What may be resident at rest, KiB: the server, and both.
const SERVER: usize = 4 << 10;
const BOTH: usize = 7 << 10;

/// Unread output, idle threads and the spare copy of the runtime stay for ten seconds.
const LINGERS: Duration = Duration::from_secs(12);

/// How long that may take on a machine that has much to do.
const SETTLES: Duration = Duration::from_secs(90);

/// Server and runtime together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    fds: usize,
    threads: usize,
    mounts: usize,
    pub(crate) groups: usize,
    /// The runtime's children: the containers' and those of their further processes.
    pub(crate) processes: usize,
    /// Of containers, in the agent's directories.
    files: Vec<String>,
}

/// Memory of both processes, KiB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    /// What they have allocated.
    anonymous: usize,
    /// That and what they have read of their program.
    resident: usize,
    /// The server's part of it.
    server: usize,
}

impl fmt::Display for Held {
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

/// Directories below a directory whose name begins so.
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

impl Held {
    pub(crate) fn by(agent: &Agent) -> Self {
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
            // Others of the machine come and go.
            groups: groups(&agent.inside("/sys/fs/cgroup"), "firstlight"),
            processes: children.split_whitespace().count(),
            files,
        }
    }

    /// Threads of the pool end after ten idle seconds, and unread output stays
    /// for as long; everything else is gone at once.
    pub(crate) async fn settles(&self, agent: &Agent) {
        let begin = Instant::now();
        while Self::by(agent) != *self {
            if begin.elapsed() > SETTLES {
                assert_eq!(Self::by(agent), *self, "now and before, after {SETTLES:?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What is held when nothing has changed for longer than anything lingers.
    pub(crate) async fn at_rest(agent: &Agent) -> Self {
        let begin = Instant::now();
        let (mut held, mut since) = (Self::by(agent), Instant::now());
        while since.elapsed() < LINGERS {
            assert!(begin.elapsed() < SETTLES, "no rest in {SETTLES:?}: {held:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            let now = Self::by(agent);
            if now != held {
                (held, since) = (now, Instant::now());
            }
        }
        held
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

/// At rest, after a first use has made what stays: pools, buffers, directories.
pub(crate) async fn at_rest(agent: &Agent) -> (Held, Memory) {
    let held = Held::at_rest(agent).await;
    let begin = Instant::now();
    let mut memory = Memory::of(agent);
    while memory.server > SERVER || memory.resident > BOTH {
        assert!(begin.elapsed() < SETTLES, "at rest: {memory:?} KiB");
        tokio::time::sleep(Duration::from_millis(100)).await;
        memory = Memory::of(agent);
    }
    (held, memory)
}

/// Waits until the agent holds what it held, and prints both.
pub(crate) async fn back_at(agent: &Agent, (before, memory_before): (Held, Memory)) {
    println!("figures: before: {before}; {memory_before}");
    before.settles(agent).await;
    let begin = Instant::now();
    let mut memory = Memory::of(agent);
    while memory.anonymous > memory_before.anonymous + KEPT && begin.elapsed() < SETTLES {
        tokio::time::sleep(Duration::from_millis(100)).await;
        memory = Memory::of(agent);
    }
    println!("figures: after:  {}; {memory}", Held::by(agent));
    assert!(memory.anonymous <= memory_before.anonymous + KEPT, "{memory_before} became {memory}");
}
