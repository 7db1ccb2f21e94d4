//! What changes there were, what came of them, and how long they took.

use std::time::Duration;

use crate::look::Look;
use crate::refused::Refused;
use crate::state::Change;

/// Upper bounds of durations, in milliseconds; above the last there is no bound.
pub const BOUNDS_MS: [u64; 10] = [5, 20, 50, 100, 250, 500, 1000, 5000, 15_000, 60_000];

/// What can be changed.
pub const KINDS: [&str; 2] = ["activate", "deactivate"];
/// What can come of it.
pub const OUTCOMES: [&str; 3] = ["done", "undone", "unknown"];

/// Changes of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// By what came of them, as [`OUTCOMES`] has it.
    pub outcomes: [u64; OUTCOMES.len()],
    /// How many took no longer than each bound, and no shorter than the one before; the last are the longest.
    pub durations: [u64; BOUNDS_MS.len() + 1],
    /// How long all took together.
    pub total: Duration,
}

/// Everything in this life of the daemon, by [`KINDS`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Activations, deactivations.
    pub kinds: [Changes; KINDS.len()],
}

impl Tally {
    pub(crate) fn count(&mut self, change: &Change, ended: &Result<Look, Refused>, took: Duration) {
        let outcome = match ended {
            Ok(_) => 0,
            // FM has answered, and the fabric is as it was.
            Err(Refused::Fabric { .. }) => 1,
            Err(_) => 2,
        };
        let [activations, deactivations] = &mut self.kinds;
        let changes = if matches!(change, Change::Activate { .. }) { activations } else { deactivations };
        let bound = |most: &u64| took <= Duration::from_millis(*most);
        let at = BOUNDS_MS.iter().position(bound).unwrap_or(BOUNDS_MS.len());
        if let (Some(outcome), Some(duration)) = (changes.outcomes.get_mut(outcome), changes.durations.get_mut(at)) {
            (*outcome, *duration) = (*outcome + 1, *duration + 1);
        }
        changes.total = changes.total.saturating_add(took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_counted_once_with_what_came_of_it() {
        let mut tally = Tally::default();
        let one = Change::Deactivate { partition: 3 };
        let unsettled = || Err(Refused::Unsettled { number: 1, partition: 3, why: String::new() });
        tally.count(&one, &Ok(Look::default()), Duration::from_millis(5));
        tally.count(&one, &unsettled(), Duration::from_millis(6));
        tally.count(&one, &unsettled(), Duration::from_secs(3600));
        let [none, some] = &tally.kinds;
        assert_eq!((none, some.outcomes), (&Changes::default(), [1, 0, 2]));
        assert_eq!((some.durations[0], some.durations[1], some.durations[10]), (1, 1, 1));
        assert_eq!(some.total, Duration::from_millis(3_600_011));
    }
}
