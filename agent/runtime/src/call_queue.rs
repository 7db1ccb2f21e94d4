//! Queued and in-flight calls; each in-flight call has its own process.
//!
//! libcontainer blocks on what it starts: file systems, hooks, a process that enters a frozen cgroup. The process
//! that serves all containers must not block.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::message::Call;

/// Concurrent calls, not counting long-running ones. A guest has few CPUs, and more calls would only compete for
/// them.
const MAX_CONCURRENT: usize = 8;

/// A call that has run for this long is waiting for something other than a CPU.
const LONG_RUNNING: Duration = Duration::from_secs(1);

/// Concurrent calls including long-running ones. More indicate a faulty guest.
const MAX_IN_FLIGHT: usize = 256;

/// Queued calls.
const MAX_QUEUED: usize = 4096;

/// A call that has not started.
#[derive(Debug)]
pub(crate) struct QueuedCall {
    /// The request's id, if the server expects a reply.
    pub(crate) request: Option<u64>,
    pub(crate) call: Call,
    pub(crate) fds: Vec<OwnedFd>,
}

/// A call in progress.
#[derive(Debug)]
pub(crate) struct InFlightCall {
    /// Sequence number, in the order in which calls started.
    pub(crate) number: u64,
    /// The worker; `None` if the container's init process carries the call out itself.
    pub(crate) pid: Option<Pid>,
    pub(crate) request: Option<u64>,
    pub(crate) call: Call,
    /// The worker's reply socket; without a worker, the init process's helper log.
    pub(crate) answer: OwnedFd,
    /// The helper log of the worker and of the container's init process before it execs.
    pub(crate) log: Option<OwnedFd>,
    /// The part of a streamed result received so far.
    pub(crate) received: Vec<u8>,
    started: Instant,
}

/// All queued and in-flight calls.
#[derive(Debug, Default)]
pub(crate) struct CallQueue {
    pub(crate) in_flight: Vec<InFlightCall>,
    waiting: VecDeque<QueuedCall>,
    last: u64,
}

/// Returns the timeout of a call, hooks and slow file systems included.
pub(crate) fn timeout_of(call: &Call) -> Duration {
    Duration::from_secs(match call {
        Call::Create { .. } => 120,
        Call::Start { .. } | Call::Exec { .. } | Call::Delete { .. } => 60,
        Call::Namespaces { .. } | Call::Signal { .. } | Call::Kill { .. } => 10,
    })
}

impl CallQueue {
    /// Queues a call; returns it if the queue is full.
    pub(crate) fn enqueue(&mut self, waiting: QueuedCall) -> Result<(), Box<QueuedCall>> {
        if self.waiting.len() >= MAX_QUEUED {
            return Err(Box::new(waiting));
        }
        self.waiting.push_back(waiting);
        Ok(())
    }

    /// Takes the next call to start, if the concurrency limits allow one.
    pub(crate) fn next(&mut self) -> Option<QueuedCall> {
        let concurrent = self.in_flight.iter().filter(|call| call.started.elapsed() < LONG_RUNNING).count();
        if concurrent >= MAX_CONCURRENT || self.in_flight.len() >= MAX_IN_FLIGHT {
            return None;
        }
        self.waiting.pop_front()
    }

    /// Returns the sequence number of the next call.
    pub(crate) fn next_number(&self) -> u64 {
        self.last + 1
    }

    /// Returns the sequence number of the oldest call in flight.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.in_flight.iter().map(|call| call.number).min()
    }

    /// Whether no call is in flight or queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn insert(&mut self, pid: Option<Pid>, waiting: QueuedCall, answer: OwnedFd, log: Option<OwnedFd>) {
        self.last += 1;
        let QueuedCall { request, call, .. } = waiting;
        let (number, started) = (self.last, Instant::now());
        self.in_flight.push(InFlightCall { number, pid, request, call, answer, log, received: Vec::new(), started });
    }

    /// Removes and returns the calls that exceeded their timeout.
    pub(crate) fn take_timed_out(&mut self) -> Vec<InFlightCall> {
        let is_late = |call: &mut InFlightCall| call.started.elapsed() >= timeout_of(&call.call);
        self.in_flight.extract_if(.., is_late).collect()
    }

    /// Returns the time until a call times out or becomes long-running while others are queued.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let ends = self.in_flight.iter().map(|call| timeout_of(&call.call).saturating_sub(call.started.elapsed()));
        let turns = self
            .in_flight
            .iter()
            .map(|call| LONG_RUNNING.saturating_sub(call.started.elapsed()))
            .filter(|left| !self.waiting.is_empty() && !left.is_zero());
        ends.chain(turns).min()
    }

    /// Whether a call of this kind is in flight or queued for the container.
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
    fn long_running_calls_do_not_count_against_the_concurrency_limit() {
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
    fn timed_out_calls_are_removed() {
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
