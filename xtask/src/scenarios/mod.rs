//! Runs the scenarios of `tests/e2e`: each in its own process, several in
//! parallel, each with its duration.
//!
//! libtest runs the tests of one program in one process: a scenario that hangs
//! blocks the others, and the stable toolchain measures no durations.

mod programs;
mod queue;
mod run;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) use programs::build;
pub(crate) use run::{Options, run};

/// One test of one program of `tests/e2e`, or all selected tests that share a guest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Scenario {
    /// The test program's name, such as `guest`.
    pub(crate) program: String,
    /// The test's path in it, such as `faults::hung_gpu`; of a shared guest, its module, such as `shared_gpus`.
    pub(crate) name: String,
    /// Paths of the tests that run in one process: one, or those of a shared guest.
    pub(crate) tests: Vec<String>,
    /// The executable.
    pub(crate) executable: PathBuf,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.program, self.name)
    }
}

/// Prefix of modules whose tests share one guest, see `firstlight_e2e::Shared`.
const SHARED: &str = "shared_";

/// Merges tests that share a guest into one scenario each.
pub(crate) fn merge_shared(scenarios: Vec<Scenario>) -> Vec<Scenario> {
    let mut merged: Vec<Scenario> = Vec::with_capacity(scenarios.len());
    for mut scenario in scenarios {
        if let Some((module, _)) = scenario.name.split_once("::").filter(|(module, _)| module.starts_with(SHARED)) {
            let name = module.to_owned();
            let first = merged.iter_mut().find(|first| first.program == scenario.program && first.name == name);
            if let Some(first) = first {
                first.tests.append(&mut scenario.tests);
                continue;
            }
            scenario.name = name;
        }
        merged.push(scenario);
    }
    merged
}

/// Result of one scenario.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) scenario: Scenario,
    pub(crate) duration: Duration,
    /// Cause of the failure; none if it passed.
    pub(crate) failure: Option<String>,
    /// File with its output.
    pub(crate) log: PathBuf,
}

/// Expected durations by name, in seconds.
pub(crate) type Durations = BTreeMap<String, f64>;

/// Expected duration of a scenario without a recorded one.
pub(crate) const DEFAULT_SECONDS: f64 = 12.0;

/// Returns the expected wall-clock time of `scenarios` with `jobs` in parallel, in seconds.
pub(crate) fn estimate(scenarios: &[Scenario], durations: &Durations, jobs: usize) -> f64 {
    let seconds = |scenario: &Scenario| durations.get(&scenario.to_string()).copied().unwrap_or(DEFAULT_SECONDS);
    let (alone, shared): (Vec<_>, Vec<_>) = scenarios.iter().partition(|scenario| queue::runs_alone(scenario));
    let sum = |of: &[&Scenario]| of.iter().map(|scenario| seconds(scenario)).sum::<f64>();
    let jobs = u32::try_from(jobs.max(1)).unwrap_or(1);
    sum(&alone) + sum(&shared) / f64::from(jobs)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn scenario(program: &str, test: &str) -> Scenario {
        let tests = vec![test.into()];
        Scenario { program: program.into(), name: test.into(), tests, executable: "/t".into() }
    }

    #[test]
    fn tests_of_a_shared_guest_become_one_scenario() {
        let all = ["shared_x::a", "y::a", "shared_x::b", "shared_z::a"].map(|test| scenario("guest", test));
        let other = scenario("images", "shared_x::a");
        let merged = merge_shared([&all[..], &[other]].concat());
        let shown: Vec<_> = merged.iter().map(|scenario| (scenario.to_string(), scenario.tests.join(" "))).collect();
        let expected = [
            ("guest shared_x", "shared_x::a shared_x::b"),
            ("guest y::a", "y::a"),
            ("guest shared_z", "shared_z::a"),
            ("images shared_x", "shared_x::a"),
        ];
        assert_eq!(shown, expected.map(|(name, tests)| (name.to_owned(), tests.to_owned())));
    }
}
