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
use crate::words;

/// How long after a call the next one is expected.
const KEPT: Duration = Duration::from_secs(10);

/// How long nothing may have happened before one is made: whoever calls now
/// must not wait for it.
const QUIET: Duration = Duration::from_millis(5);

/// What a copy is told to do; descriptors come with it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) call: Call,
    /// The container's bundle.
    pub(crate) bundle: PathBuf,
    /// Whether it is held to one processor.
    pub(crate) held: bool,
}

/// The runtime's end of a copy.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) pid: Pid,
    /// Where it takes its call and gives its answer.
    pub(crate) socket: OwnedFd,
    /// The reading end of its pipe for last words.
    pub(crate) words: OwnedFd,
}

/// The copy's end of itself.
pub(crate) struct Copy {
    pub(crate) socket: OwnedFd,
    /// Both ends of the pipe for last words.
    pub(crate) words: (OwnedFd, OwnedFd),
}

/// In which of the two processes a copying ended.
pub(crate) enum Copied {
    Here(Spare),
    There(Copy),
}

/// Copies this process.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn copy() -> std::io::Result<Copied> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let words = words::pipe()?;
    Ok(match fork()? {
        Side::Child => Copied::There(Copy { socket: theirs, words }),
        Side::Parent(pid) => {
            let pid = Pid::from_raw(pid).ok_or_else(|| std::io::Error::other("fork returned no process id"))?;
            Copied::Here(Spare { pid, socket: ours, words: words.0 })
        }
    })
}

impl Spare {
    /// Gives it its call. An error means that it is of no use any more.
    pub(crate) fn take(&self, job: &Job, fds: &[OwnedFd]) -> std::io::Result<()> {
        let packet = serde_json::to_vec(job)?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        Ok(send(&self.socket, &packet, &fds)?)
    }
}

/// Writes to the memory that a call will take first.
fn touch() {
    /// About what making a container takes, bytes.
    const SIZE: usize = 64 << 10;
    std::hint::black_box(&mut [0_u8; SIZE]);
    std::hint::black_box(&mut vec![1_u8; SIZE]);
}

impl Copy {
    /// Waits for a call. `None`: none will come.
    pub(crate) fn job(&self) -> Option<(Job, Vec<OwnedFd>)> {
        // Only for people who look at the process table.
        let _ = rustix::thread::set_name(c"fl-spare");
        // What a call will touch is better touched now. That it cannot be is no reason to stop.
        let _ = firstlight_sys::memory::populate_program();
        touch();
        let mut buffer = vec![0; MAX_REQUEST];
        let (len, fds) = receive(&self.socket, &mut buffer).ok()?;
        let job = serde_json::from_slice(buffer.get(..len)?).ok()?;
        Some((job, fds))
    }
}

/// When one is made, and when it is let go.
#[derive(Debug, Default)]
pub(crate) struct Season {
    last: Option<Instant>,
}

/// What is to be done about a spare copy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Nothing, until something happens.
    Rest,
    /// Nothing for so long.
    Wait(Duration),
    /// Make one, or let the one there is go.
    Now,
}

impl Season {
    /// A call came or ended.
    pub(crate) fn called(&mut self) {
        self.last = Some(Instant::now());
    }

    /// What to do if there is one (`have`) or none.
    pub(crate) fn advice(&self, have: bool) -> Advice {
        let since = self.last.map(|last| last.elapsed());
        let after = |span: Duration, since: Duration| match span.checked_sub(since) {
            Some(left) if !left.is_zero() => Advice::Wait(left),
            _ => Advice::Now,
        };
        match (have, since) {
            (true, Some(since)) => after(KEPT, since),
            (true, None) => Advice::Now,
            (false, Some(since)) if since < KEPT => after(QUIET, since),
            (false, _) => Advice::Rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_while_calls_come() {
        let mut season = Season::default();
        assert_eq!(season.advice(false), Advice::Rest, "nobody has called yet");
        assert_eq!(season.advice(true), Advice::Now);
        season.called();
        assert!(matches!(season.advice(false), Advice::Wait(left) if left <= QUIET));
        assert!(matches!(season.advice(true), Advice::Wait(left) if left > QUIET));
        season.last = Instant::now().checked_sub(QUIET);
        assert_eq!(season.advice(false), Advice::Now);
        season.last = Instant::now().checked_sub(KEPT);
        assert_eq!(season.advice(true), Advice::Now);
        assert_eq!(season.advice(false), Advice::Rest);
    }

    #[test]
    fn a_job_and_its_descriptors_arrive() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let spare = Spare { pid: Pid::INIT, socket: ours, words: words::pipe().unwrap().0 };
        let copy = Copy { socket: theirs, words: words::pipe().unwrap() };
        let call = Call::Start { container: "c".into() };
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        spare.take(&Job { call: call.clone(), bundle: "/b".into(), held: true }, &[null]).unwrap();
        let (job, fds) = copy.job().unwrap();
        assert_eq!((job.call, job.bundle, job.held, fds.len()), (call, PathBuf::from("/b"), true, 1));
        drop(spare);
        assert!(copy.job().is_none(), "a runtime that is gone has no calls");
    }
}
