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
const ABREAST: usize = 8;

/// From here on a call takes long: it waits for something else than a processor.
const LONG: Duration = Duration::from_secs(1);

/// Calls at all that run at once. Above it something is wrong with the guest.
const MOST: usize = 256;

/// Calls that wait for their turn.
const MOST_WAITING: usize = 4096;

/// A call that waits for its turn.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// The server's number, if it wants an answer.
    pub(crate) request: Option<u64>,
    pub(crate) call: Call,
    pub(crate) fds: Vec<OwnedFd>,
}

/// A call that is being carried out.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Counts calls in the order in which they began.
    pub(crate) number: u64,
    /// The process that does it; none if it is the container's own that does.
    pub(crate) pid: Option<Pid>,
    pub(crate) request: Option<u64>,
    pub(crate) call: Call,
    /// Where its answer comes from; without a process, the container's last words.
    pub(crate) answer: OwnedFd,
    /// What the container's first process says before it becomes its program.
    pub(crate) words: Option<OwnedFd>,
    /// What has come of an answer that comes in pieces.
    pub(crate) said: Vec<u8>,
    began: Instant,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    pub(crate) flying: Vec<Flight>,
    waiting: VecDeque<Waiting>,
    last: u64,
}

/// How long a call may take. Hooks and slow file systems are in it.
pub(crate) fn patience(call: &Call) -> Duration {
    Duration::from_secs(match call {
        Call::Create { .. } => 120,
        Call::Start { .. } | Call::Exec { .. } | Call::Delete { .. } => 60,
        Call::Namespaces { .. } | Call::Signal { .. } | Call::Kill { .. } => 10,
    })
}

impl Flights {
    /// Puts a call into the line; gives it back if the line is too long.
    pub(crate) fn queue(&mut self, waiting: Waiting) -> Result<(), Box<Waiting>> {
        if self.waiting.len() >= MOST_WAITING {
            return Err(Box::new(waiting));
        }
        self.waiting.push_back(waiting);
        Ok(())
    }

    /// The next call whose turn it is.
    pub(crate) fn next(&mut self) -> Option<Waiting> {
        let abreast = self.flying.iter().filter(|flight| flight.began.elapsed() < LONG).count();
        if abreast >= ABREAST || self.flying.len() >= MOST {
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
        self.flying.iter().map(|flight| flight.number).min()
    }

    /// Whether none is under way or waits.
    pub(crate) fn none(&self) -> bool {
        self.flying.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn begun(&mut self, pid: Option<Pid>, waiting: Waiting, answer: OwnedFd, words: Option<OwnedFd>) {
        self.last += 1;
        let Waiting { request, call, .. } = waiting;
        let (number, began) = (self.last, Instant::now());
        self.flying.push(Flight { number, pid, request, call, answer, words, said: Vec::new(), began });
    }

    /// Takes out the calls whose time is over.
    pub(crate) fn late(&mut self) -> Vec<Flight> {
        let is_late = |flight: &mut Flight| flight.began.elapsed() >= patience(&flight.call);
        self.flying.extract_if(.., is_late).collect()
    }

    /// When to look again although nothing has happened.
    pub(crate) fn next_look(&self) -> Option<Duration> {
        let ends = self.flying.iter().map(|flight| patience(&flight.call).saturating_sub(flight.began.elapsed()));
        let turns = self
            .flying
            .iter()
            .map(|flight| LONG.saturating_sub(flight.began.elapsed()))
            .filter(|left| !self.waiting.is_empty() && !left.is_zero());
        ends.chain(turns).min()
    }

    /// Whether another call of this kind is under way for the container.
    pub(crate) fn any(&self, container: &str, kind: impl Fn(&Call) -> bool) -> bool {
        let calls = self.flying.iter().map(|flight| &flight.call).chain(self.waiting.iter().map(|one| &one.call));
        calls.into_iter().any(|call| call.container() == container && kind(call))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(container: &str) -> Waiting {
        Waiting { request: None, call: Call::Start { container: container.into() }, fds: Vec::new() }
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn calls_that_take_long_leave_room_for_others() {
        let mut flights = Flights::default();
        for number in 0..=ABREAST {
            flights.queue(waiting(&number.to_string())).unwrap();
        }
        for number in 0..ABREAST {
            let next = flights.next().unwrap();
            assert_eq!(next.call.container(), number.to_string());
            flights.begun(Pid::from_raw(1), next, null(), None);
        }
        assert!(flights.next().is_none());
        assert!(flights.next_look().unwrap() <= LONG);
        flights.flying[0].began = Instant::now().checked_sub(LONG).unwrap();
        assert_eq!(flights.next().unwrap().call.container(), ABREAST.to_string());
        assert_eq!((flights.oldest(), flights.next_number()), (Some(1), u64::try_from(ABREAST).unwrap() + 1));
    }

    #[test]
    fn late_ones_are_taken_out() {
        let mut flights = Flights::default();
        flights.begun(Pid::from_raw(1), waiting("a"), null(), None);
        flights.begun(Pid::from_raw(2), waiting("b"), null(), None);
        let call = flights.flying[0].call.clone();
        flights.flying[0].began = Instant::now().checked_sub(patience(&call)).unwrap();
        let late = flights.late();
        assert_eq!(late.iter().map(|flight| flight.pid).collect::<Vec<_>>(), [Pid::from_raw(1)]);
        assert!(flights.any("b", |call| matches!(call, Call::Start { .. })));
        assert!(!flights.any("a", |_| true) && !flights.any("b", |call| matches!(call, Call::Kill { .. })));
    }
}
