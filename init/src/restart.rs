//! Decides whether and when the agent or a daemon is restarted.

use std::collections::VecDeque;
use std::time::Duration;

/// The first restart delay; each further one within [`WINDOW`] is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The period in which restarts are counted.
pub const WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of restarts in [`WINDOW`].
pub const MOST: usize = 5;

/// The decision about a process that has exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Restart it after the delay `pause`; this is restart number `number` in the window.
    Restart {
        /// The delay.
        pause: Duration,
        /// Number of this restart, 1 to [`MOST`].
        number: usize,
    },
    /// The restart limit is reached: the failure policy applies.
    LimitReached,
}

/// The restarts in the current window.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restarts {
    recent: VecDeque<u64>,
}

impl Restarts {
    /// Handles an exit at `now`, µs.
    pub fn step(&mut self, now: u64) -> Decision {
        let window = u64::try_from(WINDOW.as_micros()).unwrap_or(u64::MAX);
        while self.recent.front().is_some_and(|at| now.saturating_sub(*at) >= window) {
            self.recent.pop_front();
        }
        self.step_unserved(now)
    }

    /// Handles an exit at `now`, µs, of a process that was never ready: the exit counts even if the
    /// process ran for longer than the window.
    pub fn step_unserved(&mut self, now: u64) -> Decision {
        if self.recent.len() >= MOST {
            return Decision::LimitReached;
        }
        let pause = FIRST_PAUSE * (1 << self.recent.len());
        self.recent.push_back(now);
        Decision::Restart { pause, number: self.recent.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_and_the_sixth_exit_in_a_minute_is_the_limit() {
        let mut restarts = Restarts::default();
        let pauses: Vec<_> = (0..6)
            .map(|n| match restarts.step(n * 1_000_000) {
                Decision::Restart { pause, number } => (pause.as_millis(), number),
                Decision::LimitReached => (0, 0),
            })
            .collect();
        assert_eq!(pauses, [(100, 1), (200, 2), (400, 3), (800, 4), (1600, 5), (0, 0)]);
    }

    #[test]
    fn restarts_are_forgotten_after_a_minute() {
        let mut restarts = Restarts::default();
        for n in 0..100 {
            let decision = restarts.step(n * 60_000_000);
            assert_eq!(decision, Decision::Restart { pause: FIRST_PAUSE, number: 1 });
        }
    }
}
