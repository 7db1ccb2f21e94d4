//! Telling of what somebody else can make happen as often as they like.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two tellings.
const PAUSE: Duration = Duration::from_secs(1);

/// Counts, and says at most once a second how often it was; otherwise such
/// records would push all others out of the log.
#[derive(Debug)]
pub(crate) struct Seldom(Mutex<(Option<Instant>, u64)>);

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// It happened at `now`: how often since it was last told, if it is to be told.
    pub(crate) fn count(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (told, times) = &mut *state;
        *times += 1;
        if told.is_some_and(|told| now.saturating_duration_since(told) < PAUSE) {
            return None;
        }
        *told = Some(now);
        Some(std::mem::take(times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_the_others_once_a_second() {
        let (seldom, begin) = (Seldom::new(), Instant::now());
        let told: Vec<_> =
            (0..3500).filter_map(|at| Some((at, seldom.count(begin + Duration::from_millis(at))?))).collect();
        assert_eq!(told, [(0, 1), (1000, 1000), (2000, 1000), (3000, 1000)]);
    }
}
