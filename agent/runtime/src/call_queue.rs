//! Calls that are being carried out, each in a process of its own.
//!
//! libcontainer waits for what it starts: for file systems, for hooks, for a
//! process that enters a frozen resource group. Whoever waits must not be the
//! one that serves all containers.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::message::Call;

/// Calls that run at once, not counting those that take long. A guest has few
/// processors, and more would only wait for each other.
const MAX_CONCURRENT: usize = 8;

/// From here on a call takes long: it waits for something else than a processor.
const LONG_RUNNING: Duration = Duration::from_secs(1);

/// Calls at all that run at once. Above it something is wrong with the guest.
const MAX_IN_FLIGHT: usize = 256;

/// Calls that wait for their turn.
const MAX_QUEUED: usize = 4096;

/// A call that waits for its turn.
#[derive(Debug)]
pub(crate) struct QueuedCall {
    /// The server's number, if it wants an answer.
    pub(crate) request: Option<u64>,
    pub(crate) call: Call,
    pub(crate) fds: Vec<OwnedFd>,
}

/// A call that is being carried out.
#[derive(Debug)]
pub(crate) struct InFlightCall {
    /// Counts calls in the order in which they started.
    pub(crate) number: u64,
    /// The process that does it; none if it is the container's own that does.
    pub(crate) pid: Option<Pid>,
    pub(crate) request: Option<u64>,
    pub(crate) call: Call,
    /// Where its answer comes from; without a process, the container's last words.
    pub(crate) answer: OwnedFd,
    /// What the container's first process says before it becomes its program.
    pub(crate) log: Option<OwnedFd>,
    /// What has come of an answer that comes in pieces.
    pub(crate) received: Vec<u8>,
    started: Instant,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct CallQueue {
    pub(crate) in_flight: Vec<InFlightCall>,
    waiting: VecDeque<QueuedCall>,
    last: u64,
}

/// How long a call may take. Hooks and slow file systems are in it.
pub(crate) fn timeout_of(call: &Call) -> Duration {
    Duration::from_secs(match call {
        Call::Create { .. } => 120,
        Call::Start { .. } | Call::Exec { .. } | Call::Delete { .. } => 60,
        Call::Namespaces { .. } | Call::Signal { .. } | Call::Kill { .. } => 10,
    })
}

impl CallQueue {
    /// Puts a call into the line; gives it back if the line is too long.
    pub(crate) fn enqueue(&mut self, waiting: QueuedCall) -> Result<(), Box<QueuedCall>> {
        if self.waiting.len() >= MAX_QUEUED {
            return Err(Box::new(waiting));
        }
        self.waiting.push_back(waiting);
        Ok(())
    }

    /// The next call whose turn it is.
    pub(crate) fn next(&mut self) -> Option<QueuedCall> {
        let concurrent = self.in_flight.iter().filter(|call| call.started.elapsed() < LONG_RUNNING).count();
        if concurrent >= MAX_CONCURRENT || self.in_flight.len() >= MAX_IN_FLIGHT {
            return None;
        }
        self.waiting.pop_front()
    }

    /// The number that the next call will have.
    pub(crate) fn next_number(&self) -> u64 {
        self.last + 1
    }

    /// The number of the call that has been under way longest.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.in_flight.iter().map(|call| call.number).min()
    }

    /// Whether none is under way or waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn insert(&mut self, pid: Option<Pid>, waiting: QueuedCall, answer: OwnedFd, log: Option<OwnedFd>) {
        self.last += 1;
        let QueuedCall { request, call, .. } = waiting;
        let (number, started) = (self.last, Instant::now());
        self.in_flight.push(InFlightCall { number, pid, request, call, answer, log, received: Vec::new(), started });
    }

    /// Takes out the calls whose time is over.
    pub(crate) fn take_timed_out(&mut self) -> Vec<InFlightCall> {
        let is_late = |call: &mut InFlightCall| call.started.elapsed() >= timeout_of(&call.call);
        self.in_flight.extract_if(.., is_late).collect()
    }

    /// When to look again although nothing has happened.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let ends = self.in_flight.iter().map(|call| timeout_of(&call.call).saturating_sub(call.started.elapsed()));
        let turns = self
            .in_flight
            .iter()
            .map(|call| LONG_RUNNING.saturating_sub(call.started.elapsed()))
            .filter(|left| !self.waiting.is_empty() && !left.is_zero());
        ends.chain(turns).min()
    }

    /// Whether another call of this kind is under way for the container.
    pub(crate) fn any(&self, container: &str, kind: impl Fn(&Call) -> bool) -> bool {
        let calls = self.in_flight.iter().map(|call| &call.call).chain(self.waiting.iter().map(|one| &one.call));
        calls.into_iter().any(|call| call.container() == container && kind(call))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(container: &str) -> QueuedCall {
        QueuedCall { request: None, call: Call::Start { container: container.into() }, fds: Vec::new() }
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn calls_that_take_long_leave_room_for_others() {
        let mut queue = CallQueue::default();
        for number in 0..=MAX_CONCURRENT {
            queue.enqueue(waiting(&number.to_string())).unwrap();
        }
        for number in 0..MAX_CONCURRENT {
            let next = queue.next().unwrap();
            assert_eq!(next.call.container(), number.to_string());
            queue.insert(Pid::from_raw(1), next, null(), None);
        }
        assert!(queue.next().is_none());
        assert!(queue.next_deadline().unwrap() <= LONG_RUNNING);
        queue.in_flight[0].started = Instant::now().checked_sub(LONG_RUNNING).unwrap();
        assert_eq!(queue.next().unwrap().call.container(), MAX_CONCURRENT.to_string());
        assert_eq!((queue.oldest(), queue.next_number()), (Some(1), u64::try_from(MAX_CONCURRENT).unwrap() + 1));
    }

    #[test]
    fn late_ones_are_taken_out() {
        let mut queue = CallQueue::default();
        queue.insert(Pid::from_raw(1), waiting("a"), null(), None);
        queue.insert(Pid::from_raw(2), waiting("b"), null(), None);
        let call = queue.in_flight[0].call.clone();
        queue.in_flight[0].started = Instant::now().checked_sub(timeout_of(&call)).unwrap();
        let late = queue.take_timed_out();
        assert_eq!(late.iter().map(|call| call.pid).collect::<Vec<_>>(), [Pid::from_raw(1)]);
        assert!(queue.any("b", |call| matches!(call, Call::Start { .. })));
        assert!(!queue.any("a", |_| true) && !queue.any("b", |call| matches!(call, Call::Kill { .. })));
    }
}
