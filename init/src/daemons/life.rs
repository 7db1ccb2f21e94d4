//! One daemon's life as a state machine: when it is started, killed, started
//! again, and given up.
//!
//! Pure: time and what happened come in through [`Life::step`], what has to be
//! done comes out. An instance counts as there from [`Effect::Launch`] until
//! [`Event::Gone`] says that none of its processes is left, so there are never two.

use std::time::Duration;

use crate::restart::{Decision, MOST, Restarts};

/// How long a daemon may take to end once it was asked to, µs.
pub const GRACE_US: u64 = 5_000_000;

/// The pause of one that would be given up and is kept.
pub const KEPT_PAUSE: Duration = Duration::from_secs(30);

/// How long killed processes may take to be gone, µs. Longer takes only one that the kernel holds.
pub const REAP_US: u64 = 2_000_000;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It is to be started for the first time.
    Start,
    /// It could not be started.
    NotStarted,
    /// It serves.
    Ready,
    /// The process that was started has ended, and not because all is well.
    MainEnded,
    /// No process of it is left.
    Gone,
    /// It is to be stopped for good.
    Stop,
    /// Time went by.
    Clock,
}

/// What has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start it.
    Launch,
    /// Ask all its processes to end.
    Terminate,
    /// Kill all its processes.
    Kill,
    /// It serves, this many µs after its start.
    Ready(u64),
    /// It did not serve in time; it is being killed.
    Hung,
    /// It has ended, this many µs after its start.
    Ended {
        /// How long it lived.
        lived: u64,
        /// Whether it had served.
        served: bool,
        /// What follows.
        next: Decision,
    },
    /// It was killed, and the kernel still holds it.
    Stuck,
    /// It is stopped, as far as that was possible.
    Stopped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Starting {
        since: u64,
    },
    Ready {
        since: u64,
    },
    /// Killed, and waited for.
    Ending {
        since: u64,
        served: bool,
        until: Option<u64>,
    },
    Pausing {
        until: u64,
    },
    Stopping {
        until: u64,
        killed: bool,
    },
    /// Stopped or given up.
    Over,
}

/// A daemon's life so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    phase: Phase,
    deadline_us: u64,
    restarts: Restarts,
    /// It is never given up.
    kept: bool,
}

impl Life {
    /// One that has not begun; each start may take `deadline`.
    #[must_use]
    pub fn new(deadline: Duration) -> Self {
        let deadline_us = u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX);
        Self { phase: Phase::New, deadline_us, restarts: Restarts::default(), kept: false }
    }

    /// From now on it is never given up: others depend on what it has made, and would lose that with the machine.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Whether it is between its start and [`Event::Ready`].
    #[must_use]
    pub fn is_starting(&self) -> bool {
        matches!(self.phase, Phase::Starting { .. })
    }

    /// Whether it serves.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready { .. })
    }

    /// Whether it will never be started again.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// When [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::Starting { since } => Some(since.saturating_add(self.deadline_us)),
            Phase::Ending { until, .. } => until,
            Phase::Pausing { until } | Phase::Stopping { until, .. } => Some(until),
            Phase::New | Phase::Ready { .. } | Phase::Over => None,
        }
    }

    /// Takes what happened at `now` and says what has to be done, in order.
    pub fn step(&mut self, now: u64, event: Event) -> Vec<Effect> {
        let due = event == Event::Clock && self.next_deadline().is_some_and(|at| at <= now);
        let killed = Some(now.saturating_add(REAP_US));
        let (phase, effects) = match (self.phase, event) {
            (Phase::New, Event::Start) => (Phase::Starting { since: now }, vec![Effect::Launch]),
            (Phase::Pausing { .. }, _) if due => (Phase::Starting { since: now }, vec![Effect::Launch]),
            (Phase::New | Phase::Pausing { .. }, Event::Stop) => (Phase::Over, vec![Effect::Stopped]),

            (Phase::Starting { since }, Event::Ready) => {
                (Phase::Ready { since }, vec![Effect::Ready(now.saturating_sub(since))])
            }
            (Phase::Starting { since }, Event::NotStarted) => self.ended(now, since, false),
            (Phase::Starting { since }, _) if due => {
                (Phase::Ending { since, served: false, until: killed }, vec![Effect::Hung, Effect::Kill])
            }
            (Phase::Starting { since }, Event::MainEnded) => {
                (Phase::Ending { since, served: false, until: killed }, vec![Effect::Kill])
            }
            (Phase::Ready { since }, Event::MainEnded) => {
                (Phase::Ending { since, served: true, until: killed }, vec![Effect::Kill])
            }
            (Phase::Starting { since }, Event::Gone) => self.ended(now, since, false),
            (Phase::Ready { since }, Event::Gone) => self.ended(now, since, true),
            (Phase::Ending { since, served, .. }, Event::Gone) => self.ended(now, since, served),
            // It is said once; another instance does not start beside it.
            (Phase::Ending { since, served, .. }, _) if due => {
                (Phase::Ending { since, served, until: None }, vec![Effect::Stuck])
            }

            (Phase::Starting { .. } | Phase::Ready { .. }, Event::Stop) => {
                (Phase::Stopping { until: now.saturating_add(GRACE_US), killed: false }, vec![Effect::Terminate])
            }
            (Phase::Ending { .. }, Event::Stop) => {
                (Phase::Stopping { until: now.saturating_add(REAP_US), killed: true }, vec![Effect::Kill])
            }
            (Phase::Stopping { .. }, Event::Gone) => (Phase::Over, vec![Effect::Stopped]),
            (Phase::Stopping { killed: false, .. }, _) if due => {
                (Phase::Stopping { until: now.saturating_add(REAP_US), killed: true }, vec![Effect::Kill])
            }
            (Phase::Stopping { .. }, _) if due => (Phase::Over, vec![Effect::Stuck, Effect::Stopped]),
            (Phase::Over, Event::Stop) => (Phase::Over, vec![Effect::Stopped]),
            _ => return Vec::new(),
        };
        self.phase = phase;
        effects
    }

    fn ended(&mut self, now: u64, since: u64, served: bool) -> (Phase, Vec<Effect>) {
        // One that never serves would otherwise be started for ever, if only its ends are far enough apart.
        let next = if served || self.kept { self.restarts.step(now) } else { self.restarts.step_unserved(now) };
        let next = match next {
            Decision::GiveUp if self.kept => Decision::Again { pause: KEPT_PAUSE, number: MOST + 1 },
            next => next,
        };
        let phase = match next {
            Decision::Again { pause, .. } => {
                let pause = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
                Phase::Pausing { until: now.saturating_add(pause) }
            }
            Decision::GiveUp => Phase::Over,
        };
        (phase, vec![Effect::Ended { lived: now.saturating_sub(since), served, next }])
    }
}

#[cfg(test)]
mod tests;
