//! Runs the scenarios repeatedly under CPU load, to find rare failures.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use firstlight_lab::Lab;
use firstlight_lab::binaries::target;

use super::load::Load;
use crate::scenarios::{self, Options};
use crate::steps::{History, format_duration};
use crate::test::{LIMIT, all_scenarios};

/// Result of one turn.
struct Turn {
    passed: usize,
    failed: Vec<String>,
    seconds: f64,
}

/// Runs the scenarios whose names contain one of `filters`, or all, `turns` times; the exit code is 1 if any failed.
pub(super) fn run(turns: u32, filters: &[String], jobs: usize) -> anyhow::Result<ExitCode> {
    Lab::prepare(false)?.agent_tests()?;
    let all = all_scenarios(filters)?;
    let durations = History::load().scenarios;
    let once = scenarios::estimate(&all, &durations, jobs);
    println!(
        "soak: {} scenarios, {turns} times, with two compilers as load; expected more than {}",
        all.len(),
        format_duration(once * f64::from(turns))
    );
    let dir = tempfile::tempdir().context("failed to make a directory")?;
    let mut load = Load::start(dir.path())?;
    let mut results = Vec::new();
    for turn in 1..=turns {
        let begin = Instant::now();
        let logs = target().join(format!("lab/soak-{turn}"));
        let options = Options { jobs, logs, durations: durations.clone(), limit: LIMIT };
        let outcomes = scenarios::run(all.clone(), &options)?;
        load.check()?;
        let failure = |outcome: &scenarios::Outcome| {
            let why = outcome.failure.as_ref()?;
            Some(format!("{}: {why}; {}", outcome.scenario, outcome.log.display()))
        };
        let failed: Vec<String> = outcomes.iter().filter_map(failure).collect();
        let passed = outcomes.len() - failed.len();
        results.push(Turn { passed, failed, seconds: begin.elapsed().as_secs_f64() });
        println!("{}", table(&results));
    }
    let fine = results.iter().all(|turn| turn.failed.is_empty());
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(turns: &[Turn]) -> String {
    let mut lines = vec![format!("{:>4} {:>7} {:>7} {:>9}", "TURN", "PASSED", "FAILED", "SECONDS")];
    for (at, turn) in turns.iter().enumerate() {
        lines.push(format!("{:>4} {:>7} {:>7} {:>9.0}", at + 1, turn.passed, turn.failed.len(), turn.seconds));
        lines.extend(turn.failed.iter().map(|failed| format!("     {failed}")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists_each_failure_below_its_turn() {
        let turns = [
            Turn { passed: 3, failed: Vec::new(), seconds: 61.4 },
            Turn { passed: 2, failed: vec!["guest a: exit status: 101; /logs/a".into()], seconds: 70.0 },
        ];
        let text = table(&turns);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>(), ["1", "3", "0", "61"]);
        assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>(), ["2", "2", "1", "70"]);
        assert_eq!(lines[3].trim(), "guest a: exit status: 101; /logs/a");
    }
}
