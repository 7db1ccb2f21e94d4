//! A copy of the runtime that waits for a call.
//!
//! Copying a process is quick; what takes long is that the copy then touches
//! its pages for the first time, one fault each. Calls come in bursts (a pod's
//! containers, a probe every few seconds), so while they come one copy is made
//! ahead of time and has its pages when a call arrives. A runtime that nobody
//! calls keeps none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use firstlight_sys::fork::{Side, fork};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::message::Call;
use crate::socket::{MAX_REQUEST, receive, send};
use crate::helper_log;

/// How long after a call the next one is expected.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long nothing may have happened before one is made: whoever calls now
/// must not wait for it.
const PREFORK_DELAY: Duration = Duration::from_millis(5);

/// What a copy is told to do; descriptors come with it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) call: Call,
    /// The container's bundle.
    pub(crate) bundle: PathBuf,
    /// Whether it is held to one processor.
    pub(crate) pinned: bool,
}

/// The runtime's end of a copy.
#[derive(Debug)]
pub(crate) struct PreforkedWorker {
    pub(crate) pid: Pid,
    /// Where it takes its call and gives its answer.
    pub(crate) socket: OwnedFd,
    /// The reading end of its pipe for last words.
    pub(crate) log: OwnedFd,
}

/// The copy's end of itself.
pub(crate) struct WorkerSide {
    pub(crate) socket: OwnedFd,
    /// Both ends of the pipe for last words.
    pub(crate) log: (OwnedFd, OwnedFd),
}

/// In which of the two processes a copying ended.
pub(crate) enum Forked {
    Parent(PreforkedWorker),
    Child(WorkerSide),
}

/// Copies this process.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn fork_worker() -> std::io::Result<Forked> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let log = helper_log::pipe()?;
    Ok(match fork()? {
        Side::Child => Forked::Child(WorkerSide { socket: theirs, log }),
        Side::Parent(pid) => {
            let pid = Pid::from_raw(pid).ok_or_else(|| std::io::Error::other("fork returned no process id"))?;
            Forked::Parent(PreforkedWorker { pid, socket: ours, log: log.0 })
        }
    })
}

impl PreforkedWorker {
    /// Gives it its call. An error means that it is of no use any more.
    pub(crate) fn assign(&self, job: &Job, fds: &[OwnedFd]) -> std::io::Result<()> {
        let packet = serde_json::to_vec(job)?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        Ok(send(&self.socket, &packet, &fds)?)
    }
}

/// Writes to the memory that a call will take first.
fn prefault() {
    /// About what making a container takes, bytes.
    const SIZE: usize = 64 << 10;
    std::hint::black_box(&mut [0_u8; SIZE]);
    std::hint::black_box(&mut vec![1_u8; SIZE]);
}

impl WorkerSide {
    /// Waits for a call. `None`: none will come.
    pub(crate) fn wait_for_job(&self) -> Option<(Job, Vec<OwnedFd>)> {
        // Only for people who look at the process table.
        let _ = rustix::thread::set_name(c"fl-prefork");
        // What a call will touch is better touched now. That it cannot be is no reason to stop.
        let _ = firstlight_sys::memory::populate_program();
        prefault();
        let mut buffer = vec![0; MAX_REQUEST];
        let (len, fds) = receive(&self.socket, &mut buffer).ok()?;
        let job = serde_json::from_slice(buffer.get(..len)?).ok()?;
        Some((job, fds))
    }
}

/// When one is made, and when it is let go.
#[derive(Debug, Default)]
pub(crate) struct PreforkPolicy {
    last: Option<Instant>,
}

/// What is to be done about a spare copy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PreforkAction {
    /// Nothing, until something happens.
    Idle,
    /// Nothing for so long.
    Wait(Duration),
    /// Make one, or let the one there is go.
    Act,
}

impl PreforkPolicy {
    /// A call came or ended.
    pub(crate) fn record_call(&mut self) {
        self.last = Some(Instant::now());
    }

    /// What to do if there is one (`have`) or none.
    pub(crate) fn next_action(&self, exists: bool) -> PreforkAction {
        let since = self.last.map(|last| last.elapsed());
        let after = |span: Duration, since: Duration| match span.checked_sub(since) {
            Some(left) if !left.is_zero() => PreforkAction::Wait(left),
            _ => PreforkAction::Act,
        };
        match (exists, since) {
            (true, Some(since)) => after(IDLE_TIMEOUT, since),
            (true, None) => PreforkAction::Act,
            (false, Some(since)) if since < IDLE_TIMEOUT => after(PREFORK_DELAY, since),
            (false, _) => PreforkAction::Idle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_while_calls_come() {
        let mut policy = PreforkPolicy::default();
        assert_eq!(policy.next_action(false), PreforkAction::Idle, "nobody has called yet");
        assert_eq!(policy.next_action(true), PreforkAction::Act);
        policy.record_call();
        assert!(matches!(policy.next_action(false), PreforkAction::Wait(left) if left <= PREFORK_DELAY));
        assert!(matches!(policy.next_action(true), PreforkAction::Wait(left) if left > PREFORK_DELAY));
        policy.last = Instant::now().checked_sub(PREFORK_DELAY);
        assert_eq!(policy.next_action(false), PreforkAction::Act);
        policy.last = Instant::now().checked_sub(IDLE_TIMEOUT);
        assert_eq!(policy.next_action(true), PreforkAction::Act);
        assert_eq!(policy.next_action(false), PreforkAction::Idle);
    }

    #[test]
    fn a_job_and_its_descriptors_arrive() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let worker = PreforkedWorker { pid: Pid::INIT, socket: ours, log: helper_log::pipe().unwrap().0 };
        let copy = WorkerSide { socket: theirs, log: helper_log::pipe().unwrap() };
        let call = Call::Start { container: "c".into() };
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        worker.assign(&Job { call: call.clone(), bundle: "/b".into(), pinned: true }, &[null]).unwrap();
        let (job, fds) = copy.wait_for_job().unwrap();
        assert_eq!((job.call, job.bundle, job.pinned, fds.len()), (call, PathBuf::from("/b"), true, 1));
        drop(worker);
        assert!(copy.wait_for_job().is_none(), "a runtime that is gone has no calls");
    }
}
