//! Counts, outcomes and durations of changes, for metrics.

use std::time::Duration;

use crate::error::EngineError;
use crate::snapshot::FabricSnapshot;
use crate::state::Change;

/// Upper bounds of the duration buckets, in milliseconds; the last bucket is unbounded.
pub const BOUNDS_MS: [u64; 10] = [5, 20, 50, 100, 250, 500, 1000, 5000, 15_000, 60_000];

/// The kinds of changes.
pub const KINDS: [&str; 2] = ["activate", "deactivate"];
/// Their outcomes.
pub const OUTCOMES: [&str; 3] = ["done", "failed", "unknown"];

/// Statistics of one kind of change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Counts by outcome, in the order of [`OUTCOMES`].
    pub outcomes: [u64; OUTCOMES.len()],
    /// Counts by duration: one bucket for each bound, and the unbounded one.
    pub durations: [u64; BOUNDS_MS.len() + 1],
    /// The sum of all durations.
    pub total: Duration,
}

/// Statistics since the daemon's start, by [`KINDS`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeStats {
    /// Activations and deactivations.
    pub kinds: [Changes; KINDS.len()],
}

impl ChangeStats {
    pub(crate) fn count(&mut self, change: &Change, ended: &Result<FabricSnapshot, EngineError>, took: Duration) {
        let outcome = match ended {
            Ok(_) => 0,
            // FM has replied, and the fabric is unchanged.
            Err(EngineError::FabricManager { .. }) => 1,
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
    fn each_change_is_counted_once_with_its_outcome() {
        let mut change_stats = ChangeStats::default();
        let one = Change::Deactivate { partition: 3 };
        let unsettled = || Err(EngineError::OutcomeUnknown { number: 1, partition: 3, reason: String::new() });
        change_stats.count(&one, &Ok(FabricSnapshot::default()), Duration::from_millis(5));
        change_stats.count(&one, &unsettled(), Duration::from_millis(6));
        change_stats.count(&one, &unsettled(), Duration::from_secs(3600));
        let [none, some] = &change_stats.kinds;
        assert_eq!((none, some.outcomes), (&Changes::default(), [1, 0, 2]));
        assert_eq!((some.durations[0], some.durations[1], some.durations[10]), (1, 1, 1));
        assert_eq!(some.total, Duration::from_millis(3_600_011));
    }
}
