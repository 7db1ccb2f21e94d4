//! Selects the next scenario to run. Pure.

use super::{DEFAULT_SECONDS, Durations, Scenario};

/// Scenarios that run exclusively: program, prefix of the test's path, reason.
const ALONE: &[(&str, &str, &str)] = &[
    ("guest", "first_light::container_gets_its_gpus", "asserts the time from QEMU's start to its end"),
    ("nested", "", "a host of two emulated guests: 4 GiB, three QEMUs, and a limit on silence"),
];

/// Programs of which one scenario runs at a time: program, reason.
const ONE_AT_A_TIME: &[(&str, &str)] = &[
    ("kernels", "configures and compiles with all processors, in one shared source tree"),
    ("service_vm", "each starts a libvirt daemon with its QEMU"),
];

/// Returns whether no other scenario may run at the same time.
pub(super) fn runs_alone(scenario: &Scenario) -> bool {
    ALONE.iter().any(|(program, prefix, _)| scenario.program == *program && scenario.name.starts_with(prefix))
}

/// Returns whether the two may run at the same time.
fn compatible(one: &Scenario, other: &Scenario) -> bool {
    let grouped = |program: &str| ONE_AT_A_TIME.iter().any(|(name, _)| *name == program);
    let alone = runs_alone(one) || runs_alone(other);
    !alone && (one.program != other.program || !grouped(&one.program))
}

/// Waiting scenarios: longest first, so that no long one runs last by itself; then those that run alone.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: Vec<Scenario>,
}

impl Queue {
    pub(super) fn new(mut scenarios: Vec<Scenario>, durations: &Durations) -> Self {
        let seconds = |scenario: &Scenario| durations.get(&scenario.to_string()).copied().unwrap_or(DEFAULT_SECONDS);
        scenarios.sort_by(|one, other| {
            let by_time = seconds(other).total_cmp(&seconds(one));
            runs_alone(one).cmp(&runs_alone(other)).then(by_time).then_with(|| one.cmp(other))
        });
        Self { waiting: scenarios }
    }

    /// Removes and returns the next scenario that may run while `running` are.
    pub(super) fn next(&mut self, running: &[Scenario], jobs: usize) -> Option<Scenario> {
        if running.len() >= jobs.max(1) {
            return None;
        }
        let at = self.waiting.iter().position(|scenario| running.iter().all(|other| compatible(scenario, other)))?;
        Some(self.waiting.remove(at))
    }

    /// Returns the number of waiting scenarios.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::tests::scenario;

    fn started(queue: &mut Queue, running: &[Scenario], jobs: usize) -> Option<String> {
        queue.next(running, jobs).map(|scenario| scenario.name)
    }

    #[test]
    fn longest_scenario_starts_first_and_exclusive_ones_last() {
        let durations = Durations::from([("guest b".to_owned(), 40.0), ("guest c".to_owned(), 1.0)]);
        let all = ["a", "b", "c"].map(|test| scenario("guest", test));
        let alone = scenario("nested", "x");
        let mut queue = Queue::new([std::slice::from_ref(&alone), &all[..]].concat(), &durations);
        assert_eq!(started(&mut queue, &[], 2).as_deref(), Some("b"));
        assert_eq!(started(&mut queue, &all[1..2], 2).as_deref(), Some("a"));
        assert_eq!(started(&mut queue, &all[..2], 2), None, "two at a time");
        assert_eq!(started(&mut queue, &all[..1], 2).as_deref(), Some("c"));
        assert_eq!(started(&mut queue, &all[2..], 2), None, "the last one waits until nothing runs");
        assert_eq!(started(&mut queue, &[], 2).as_deref(), Some("x"));
        assert_eq!(started(&mut queue, &[alone], 2), None);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn nothing_starts_while_an_exclusive_scenario_runs() {
        let mut queue = Queue::new(vec![scenario("guest", "a")], &Durations::new());
        assert_eq!(started(&mut queue, &[scenario("nested", "x")], 2), None);
    }

    #[test]
    fn scenarios_of_one_group_run_one_at_a_time() {
        let all = vec![scenario("kernels", "a"), scenario("kernels", "b"), scenario("guest", "z")];
        let mut queue = Queue::new(all.clone(), &Durations::from([("guest z".to_owned(), 1.0)]));
        assert_eq!(started(&mut queue, &[], 2).as_deref(), Some("a"));
        assert_eq!(started(&mut queue, &all[..1], 2).as_deref(), Some("z"), "not the second of the group");
    }
}
