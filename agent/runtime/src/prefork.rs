//! A worker that is forked ahead of its call.
//!
//! `fork` is quick; the page faults of the child's first writes are slow. Calls come in bursts (a pod's
//! containers, a probe every few seconds), so while they come one worker is forked ahead of time and has its
//! pages when a call arrives. An idle runtime has none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use firstlight_sys::fork::{Side, fork};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::helper_log;
use crate::message::Call;
use crate::socket::{MAX_REQUEST, receive, send};

/// The preforked worker is discarded this long after the last call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Quiet time before a worker is preforked, so that a caller does not wait for the fork.
const PREFORK_DELAY: Duration = Duration::from_millis(5);

/// The job of a preforked worker; its descriptors come in the same packet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) call: Call,
    /// The container's bundle.
    pub(crate) bundle: PathBuf,
    /// Whether the worker is pinned to one CPU.
    pub(crate) pinned: bool,
}

/// The runtime's handle of a forked worker.
#[derive(Debug)]
pub(crate) struct PreforkedWorker {
    pub(crate) pid: Pid,
    /// Carries the job to the worker and its result back.
    pub(crate) socket: OwnedFd,
    /// The reading end of its helper log.
    pub(crate) log: OwnedFd,
}

/// The worker's own ends.
pub(crate) struct WorkerSide {
    pub(crate) socket: OwnedFd,
    /// Both ends of the helper log pipe.
    pub(crate) log: (OwnedFd, OwnedFd),
}

/// The process in which [`fork_worker`] returned.
pub(crate) enum Forked {
    Parent(PreforkedWorker),
    Child(WorkerSide),
}

/// Forks a worker.
///
/// # Errors
/// The kernel refuses the socket pair, the pipe or the fork.
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
    /// Sends the worker its job. After an error the worker is unusable.
    pub(crate) fn assign(&self, job: &Job, fds: &[OwnedFd]) -> std::io::Result<()> {
        let packet = serde_json::to_vec(job)?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        Ok(send(&self.socket, &packet, &fds)?)
    }
}

/// Faults in the memory that a call uses first.
fn prefault() {
    /// Roughly what creating a container uses, bytes.
    const SIZE: usize = 64 << 10;
    std::hint::black_box(&mut [0_u8; SIZE]);
    std::hint::black_box(&mut vec![1_u8; SIZE]);
}

impl WorkerSide {
    /// Waits for a job. `None`: the runtime has closed the socket.
    pub(crate) fn wait_for_job(&self) -> Option<(Job, Vec<OwnedFd>)> {
        // Only for readers of the process table.
        let _ = rustix::thread::set_name(c"fl-prefork");
        // Faults pages in ahead of the call; a failure costs only speed.
        let _ = firstlight_sys::memory::populate_program();
        prefault();
        let mut buffer = vec![0; MAX_REQUEST];
        let (len, fds) = receive(&self.socket, &mut buffer).ok()?;
        let job = serde_json::from_slice(buffer.get(..len)?).ok()?;
        Some((job, fds))
    }
}

/// Decides when a worker is preforked and when it is discarded.
#[derive(Debug, Default)]
pub(crate) struct PreforkPolicy {
    last: Option<Instant>,
}

/// The next action for the preforked worker.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PreforkAction {
    /// Nothing until the next call.
    Idle,
    /// Nothing for this long.
    Wait(Duration),
    /// Fork one, or discard the existing one.
    Act,
}

impl PreforkPolicy {
    /// Records that a call came or completed.
    pub(crate) fn record_call(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Returns the next action, given whether a preforked worker exists.
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
    fn worker_is_preforked_while_calls_come_and_discarded_when_idle() {
        let mut policy = PreforkPolicy::default();
        assert_eq!(policy.next_action(false), PreforkAction::Idle, "no call yet");
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
    fn job_arrives_with_its_descriptors() {
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
        assert!(copy.wait_for_job().is_none(), "the runtime has closed the socket");
    }
}
