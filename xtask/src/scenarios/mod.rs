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

/// One test of one program of `tests/e2e`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Scenario {
    /// The test program's name, such as `guest`.
    pub(crate) program: String,
    /// The test's path in it, such as `faults::failing_gpu`.
    pub(crate) test: String,
    /// The executable.
    pub(crate) executable: PathBuf,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.program, self.test)
    }
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
