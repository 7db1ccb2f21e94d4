//! The lifecycle of a daemon as a state machine: start, kill, restart, restart limit.
//!
//! Pure: [`Lifecycle::step`] takes the time and an event and returns effects. An
//! instance exists from [`Effect::Launch`] until [`Event::Gone`], when none of its
//! processes is left, so there are never two.

use std::time::Duration;

use crate::restart::{Decision, MOST, Restarts};

/// Time between SIGTERM and SIGKILL, µs.
pub const GRACE_US: u64 = 5_000_000;

/// The restart delay of a daemon without restart limit, beyond that limit.
pub const NO_LIMIT_PAUSE: Duration = Duration::from_secs(30);

/// How long killed processes may take to exit, µs. Only a process blocked in the kernel takes longer.
pub const REAP_US: u64 = 2_000_000;

/// An input event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// First start.
    Start,
    /// The start failed.
    NotStarted,
    /// It is ready.
    Ready,
    /// The started process has ended unexpectedly.
    MainEnded,
    /// No process of it is left.
    Gone,
    /// Stop permanently.
    Stop,
    /// Time has passed.
    Clock,
}

/// An effect to carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start it.
    Launch,
    /// Send SIGTERM to all its processes.
    Terminate,
    /// Kill all its processes.
    Kill,
    /// It is ready, this many µs after its start.
    Ready(u64),
    /// It was not ready in time; it is being killed.
    Hung,
    /// It has ended, this many µs after its start.
    Ended {
        /// How long it lived.
        lived: u64,
        /// Whether it was ready.
        served: bool,
        /// The restart decision.
        next: Decision,
    },
    /// It was killed and its processes still exist.
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
    /// Killed; processes still exist.
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
    /// Stopped, or the restart limit is reached.
    Over,
}

/// The lifecycle state of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifecycle {
    phase: Phase,
    deadline_us: u64,
    restarts: Restarts,
    /// The restart limit does not apply.
    no_limit: bool,
}

impl Lifecycle {
    /// Creates the state of a daemon that is not started; each start may take `deadline`.
    #[must_use]
    pub fn new(deadline: Duration) -> Self {
        let deadline_us = u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX);
        Self { phase: Phase::New, deadline_us, restarts: Restarts::default(), no_limit: false }
    }

    /// Lifts the restart limit: tenants depend on the fabric that it set up, and would lose it with the VM.
    pub fn lift_restart_limit(&mut self) {
        self.no_limit = true;
    }

    /// Returns whether it is between its start and [`Event::Ready`].
    #[must_use]
    pub fn is_starting(&self) -> bool {
        matches!(self.phase, Phase::Starting { .. })
    }

    /// Returns whether it is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready { .. })
    }

    /// Returns whether it will never be started again.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Returns when [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::Starting { since } => Some(since.saturating_add(self.deadline_us)),
            Phase::Ending { until, .. } => until,
            Phase::Pausing { until } | Phase::Stopping { until, .. } => Some(until),
            Phase::New | Phase::Ready { .. } | Phase::Over => None,
        }
    }

    /// Applies an event at `now` and returns the effects in order.
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
            // Reported once; no second instance is started beside it.
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
        // Otherwise a daemon that never becomes ready would be restarted for ever if its exits are far enough apart.
        let next = if served || self.no_limit { self.restarts.step(now) } else { self.restarts.step_unserved(now) };
        let next = match next {
            Decision::LimitReached if self.no_limit => Decision::Restart { pause: NO_LIMIT_PAUSE, number: MOST + 1 },
            next => next,
        };
        let phase = match next {
            Decision::Restart { pause, .. } => {
                let pause = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
                Phase::Pausing { until: now.saturating_add(pause) }
            }
            Decision::LimitReached => Phase::Over,
        };
        (phase, vec![Effect::Ended { lived: now.saturating_sub(since), served, next }])
    }
}

#[cfg(test)]
mod tests;
