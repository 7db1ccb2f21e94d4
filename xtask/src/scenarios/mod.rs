//! Runs the scenarios of `tests/e2e`: each in a process of its own, several at
//! a time, each with its duration.
//!
//! libtest runs the tests of one program in one process: a scenario that hangs
//! holds up the others, and none has a duration on the stable toolchain.

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

/// How one scenario ended.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) scenario: Scenario,
    pub(crate) duration: Duration,
    /// Why it failed, in a few words.
    pub(crate) failure: Option<String>,
    /// All that it printed.
    pub(crate) log: PathBuf,
}

/// Expected durations by name, in seconds.
pub(crate) type Durations = BTreeMap<String, f64>;

/// A scenario without a recorded duration is expected to take so long.
pub(crate) const DEFAULT_SECONDS: f64 = 12.0;

/// The expected wall-clock time of all of them, `jobs` at a time, in seconds.
pub(crate) fn estimate(scenarios: &[Scenario], durations: &Durations, jobs: usize) -> f64 {
    let seconds = |scenario: &Scenario| durations.get(&scenario.to_string()).copied().unwrap_or(DEFAULT_SECONDS);
    let (alone, shared): (Vec<_>, Vec<_>) = scenarios.iter().partition(|scenario| queue::runs_alone(scenario));
    let sum = |of: &[&Scenario]| of.iter().map(|scenario| seconds(scenario)).sum::<f64>();
    let jobs = u32::try_from(jobs.max(1)).unwrap_or(1);
    sum(&alone) + sum(&shared) / f64::from(jobs)
}
