//! The critical path of a boot: the chain of units that determined its duration.

use firstlight_boot_record::{BootRecord, Unit};

/// Returns when dependants of a unit could start: when it was ready, or its end.
fn finish(unit: &Unit) -> Option<u64> {
    unit.ready_us.or(unit.end_us)
}

/// Returns the names of the units on the critical path, first to last.
///
/// The path ends with the unit that finished last. Each unit's predecessor is the one whose end was the latest before the
/// unit's start: PID 1 starts a unit as soon as the last condition holds, which may be a dependency, a free thread or
/// the end of all GPU attaches. Units that were never started are not on it.
#[must_use]
pub fn critical_path(record: &BootRecord) -> Vec<&str> {
    let mut started: Vec<&Unit> =
        record.units.iter().filter(|unit| unit.start_us.is_some() && finish(unit).is_some()).collect();
    started.sort_by_key(|unit| finish(unit));
    let mut path = Vec::new();
    let mut current = started.pop();
    while let Some(unit) = current {
        path.push(unit.name.as_str());
        // A unit that finished together with its successor's start, and on ties one that the successor needs.
        let before = started.iter().enumerate().filter(|(_, other)| finish(other) <= unit.start_us);
        let last = before.max_by_key(|(_, other)| (finish(other), unit.need.contains(&other.name)));
        current = last.map(|(at, _)| at).map(|at| started.swap_remove(at));
    }
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Outcome, Severity};
    use proptest::prelude::*;

    fn unit(name: &str, need: &[&str], start: u64, end: u64) -> Unit {
        Unit {
            name: name.into(),
            need: need.iter().map(|name| (*name).to_owned()).collect(),
            severity: Severity::Required,
            deadline_us: 1,
            start_us: Some(start),
            ready_us: None,
            end_us: Some(end),
            processor_us: None,
            outcome: Outcome::Ok,
            detail: String::new(),
            pci: None,
        }
    }

    fn record(units: Vec<Unit>) -> BootRecord {
        BootRecord { units, ..BootRecord::new("1", 10) }
    }

    #[test]
    fn path_leads_from_the_last_unit_to_what_it_waited_for() {
        let mut agent = unit("agent", &["mounts"], 20, 90);
        agent.ready_us = Some(40);
        let mut never = unit("never", &[], 0, 95);
        never.start_us = None;
        let units = vec![
            unit("mounts", &[], 11, 20),
            unit("fast", &["mounts"], 20, 25),
            agent,
            unit("late", &["mounts"], 41, 70),
            // Ends when "late" ends; only the other one is needed by "done".
            unit("tie", &["mounts"], 30, 70),
            unit("done", &["tie"], 70, 80),
            never,
        ];
        assert_eq!(critical_path(&record(units)), ["mounts", "fast", "tie", "done"]);
        assert!(critical_path(&record(Vec::new())).is_empty());
    }

    proptest! {
        #[test]
        fn path_ends_for_any_record(times in proptest::collection::vec((0_u64..50, 0_u64..50), 0..12)) {
            let units = times.iter().enumerate().map(|(at, (start, end))| unit(&at.to_string(), &[], *start, *end));
            let record = record(units.collect());
            let path = critical_path(&record);
            prop_assert!(path.len() <= times.len());
            prop_assert_eq!(path.is_empty(), times.is_empty());
        }
    }
}
