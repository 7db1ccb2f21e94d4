//! Rate limit for log messages about events that clients can trigger.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum interval between messages.
const INTERVAL: Duration = Duration::from_secs(1);

/// Counts events and reports them at most once a second; otherwise such messages would displace all
/// others in the log.
#[derive(Debug)]
pub(crate) struct RateLimit(Mutex<(Option<Instant>, u64)>);

impl RateLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// Counts an event at `now`; returns the number of events since the last report, if a report is
    /// due.
    pub(crate) fn count(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (reported, times) = &mut *state;
        *times += 1;
        if reported.is_some_and(|reported| now.saturating_duration_since(reported) < INTERVAL) {
            return None;
        }
        *reported = Some(now);
        Some(std::mem::take(times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_event_is_reported_at_once_and_later_ones_once_a_second() {
        let (limit, begin) = (RateLimit::new(), Instant::now());
        let reported: Vec<_> =
            (0..3500).filter_map(|at| Some((at, limit.count(begin + Duration::from_millis(at))?))).collect();
        assert_eq!(reported, [(0, 1), (1000, 1000), (2000, 1000), (3000, 1000)]);
    }
}
