//! `cargo xtask test`: runs checks, unit tests and scenarios, as a list of timed steps.

use std::cmp::Reverse;
use std::os::unix::fs::MetadataExt as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use firstlight_lab::Lab;
use firstlight_lab::binaries::target;

use crate::cargo::cargo;
use crate::scenarios::{self, Options, Outcome, Scenario};
use crate::steps::{History, Step, Steps, format_duration, not_run};
use crate::{check, fuzz, size};

/// Options of `test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Install missing system packages without asking.
    #[arg(long)]
    yes: bool,
    /// Run only the checks and tests that need no guest.
    #[arg(long)]
    no_lab: bool,
    /// Run only checks, unit tests and one scenario with a boot.
    #[arg(long, conflicts_with = "no_lab")]
    quick: bool,
    /// Print the scenarios' names and expected durations without running them.
    #[arg(long, conflicts_with_all = ["no_lab", "quick"])]
    list: bool,
    /// Number of scenarios to run in parallel.
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Run only scenarios whose name contains one of these strings, and no other step.
    #[arg(value_name = "SCENARIO", conflicts_with_all = ["no_lab", "quick"])]
    filters: Vec<String>,
}

const PACKAGES: Step = Step { name: "packages", description: "install missing Debian packages", cold_seconds: 30 };
const CHECK: Step =
    Step { name: "check", description: "formatting, clippy, licences, crates, words, documents", cold_seconds: 420 };
const UNIT: Step =
    Step { name: "unit", description: "unit and integration tests that need no guest", cold_seconds: 420 };
const FUZZ: Step = Step { name: "fuzz", description: "each fuzz target for some seconds", cold_seconds: 420 };
const LAB: Step =
    Step { name: "lab", description: "QEMU, kernel, guest programs and images for the scenarios", cold_seconds: 500 };
const SIZE: Step =
    Step { name: "size", description: "sizes of the guest's programs against their budgets", cold_seconds: 5 };
const BOOT: Step =
    Step { name: "boot", description: "one scenario: a boot with four GPUs and a container", cold_seconds: 60 };
const SCENARIOS: Step =
    Step { name: "scenarios", description: "all scenarios of tests/e2e, each in its own process", cold_seconds: 1500 };

/// The scenario that `--quick` runs.
const QUICK_SCENARIO: &str = "first_light::container_gets_its_gpus";

/// Timeout of one scenario.
pub(crate) const LIMIT: Duration = Duration::from_mins(20);

/// Number of the longest scenarios that are listed at the end.
const LONGEST: usize = 10;

/// Runs the steps, or lists or runs scenarios only.
pub(crate) fn test(args: &Args) -> anyhow::Result<ExitCode> {
    if args.list {
        return list(args);
    }
    if !args.filters.is_empty() {
        return only_scenarios(args);
    }
    let plan: &[Step] = match (args.no_lab, args.quick) {
        (true, _) => &[PACKAGES, CHECK, UNIT, FUZZ],
        (_, true) => &[PACKAGES, CHECK, UNIT, LAB, BOOT],
        _ => &[PACKAGES, CHECK, UNIT, FUZZ, LAB, SIZE, SCENARIOS],
    };
    let mut steps = Steps::announce(plan);
    let result = run(args, plan, &mut steps);
    println!("{}", steps.summary());
    result
}

/// Whether later steps are useful after this one failed: a failed test does not hide the others.
fn continues_after_failure(step: &Step) -> bool {
    [UNIT, FUZZ, SIZE].contains(step)
}

fn run(args: &Args, plan: &[Step], steps: &mut Steps) -> anyhow::Result<ExitCode> {
    let mut failed = Vec::new();
    for step in plan {
        let result = steps.run(step, |history| match *step {
            PACKAGES => packages(args),
            CHECK => check::check(&check::Args {}).map(drop),
            UNIT => unit(),
            FUZZ => fuzz::smoke(),
            LAB => lab(args.yes, args.quick),
            SIZE => size::check_budgets(),
            BOOT => scenarios_matching(&[QUICK_SCENARIO.to_owned()], args.jobs, history),
            _ => scenarios_matching(&[], args.jobs, history),
        });
        match result {
            Err(error) if continues_after_failure(step) => {
                eprintln!("xtask: step {}: {error:#}; the other steps follow", step.name);
                failed.push(step.name);
            }
            other => other?,
        }
    }
    if !failed.is_empty() {
        bail!("failed steps: {}; their output is above", failed.join(", "));
    }
    Ok(ExitCode::SUCCESS)
}

fn packages(args: &Args) -> anyhow::Result<()> {
    Lab::install_packages(args.yes)?;
    if !args.quick {
        // The tests configure kernels from their source.
        Lab::install_kernel_packages(args.yes)?;
    }
    Ok(())
}

fn unit() -> anyhow::Result<()> {
    // Two commands: the first shows which crates it compiles, the second prints a dot for each test.
    let workspace = ["test", "--locked", "--workspace", "--exclude", "firstlight-e2e"];
    cargo(&[&workspace[..], &["--no-run"]].concat())?;
    let tests = cargo(&[&workspace[..], &["--quiet", "--no-fail-fast"]].concat());
    tests.and(daemons())
}

/// Runs PID 1's tests with real daemons, which need permission to create cgroups; without it, only a scenario covers
/// them.
fn daemons() -> anyhow::Result<()> {
    let cgroup2 = std::fs::read_to_string("/proc/self/mounts")?.lines().any(|line| line.contains(" cgroup2 rw"));
    if std::fs::metadata("/proc/self")?.uid() != 0 || !cgroup2 {
        not_run("firstlight-init's tests with real daemons: they need root and a mounted cgroup2");
        return Ok(());
    }
    cargo(&["test", "--quiet", "--locked", "--package", "firstlight-init", "--features", "real", "--test", "daemons"])
}

fn lab(yes: bool, quick: bool) -> anyhow::Result<()> {
    if !quick {
        Lab::install_libvirt_packages(yes)?;
    }
    // Prepared once, so that no scenario's duration includes a download or a compilation.
    let lab = Lab::prepare(yes)?;
    if !quick {
        lab.agent_tests()?;
    }
    Ok(())
}

/// Builds the test programs and returns the scenarios whose names contain one of `filters`, or all without filters;
/// tests that share a guest are one scenario.
pub(crate) fn all_scenarios(filters: &[String]) -> anyhow::Result<Vec<Scenario>> {
    let mut found = Vec::new();
    for program in scenarios::build()? {
        found.extend(program.scenarios()?);
    }
    if !filters.is_empty() {
        found.retain(|scenario| filters.iter().any(|filter| scenario.to_string().contains(filter.as_str())));
        if found.is_empty() {
            bail!("no scenario name contains {}: `cargo xtask test --list` prints the names", filters.join(" or "));
        }
    }
    Ok(scenarios::merge_shared(found))
}

fn list(args: &Args) -> anyhow::Result<ExitCode> {
    let history = History::load();
    let all = all_scenarios(&args.filters)?;
    for scenario in &all {
        match history.scenarios.get(&scenario.to_string()) {
            Some(seconds) => println!("{seconds:7.1} s  {scenario}"),
            None => println!("        ?  {scenario}"),
        }
        if scenario.tests.len() > 1 {
            scenario.tests.iter().for_each(|test| println!("             {} {test}", scenario.program));
        }
    }
    let seconds = scenarios::estimate(&all, &history.scenarios, args.jobs);
    println!("{} scenarios, expected {} with {} in parallel", all.len(), format_duration(seconds), args.jobs);
    Ok(ExitCode::SUCCESS)
}

fn only_scenarios(args: &Args) -> anyhow::Result<ExitCode> {
    Lab::install_packages(args.yes)?;
    let mut history = History::load();
    Lab::prepare(args.yes)?;
    scenarios_matching(&args.filters, args.jobs, &mut history)?;
    Ok(ExitCode::SUCCESS)
}

fn scenarios_matching(filters: &[String], jobs: usize, history: &mut History) -> anyhow::Result<()> {
    let scenarios = all_scenarios(filters)?;
    let seconds = scenarios::estimate(&scenarios, &history.scenarios, jobs);
    println!("{} scenarios, {jobs} in parallel, expected {}", scenarios.len(), format_duration(seconds));
    let logs = target().join("lab/scenarios");
    let options = Options { jobs, logs, durations: history.scenarios.clone(), limit: LIMIT };
    let outcomes = scenarios::run(scenarios, &options)?;
    for outcome in outcomes.iter().filter(|outcome| outcome.failure.is_none()) {
        history.scenarios.insert(outcome.scenario.to_string(), outcome.duration.as_secs_f64());
    }
    history.save()?;
    println!("{}", summary(&outcomes));
    let failed = outcomes.iter().filter(|outcome| outcome.failure.is_some()).count();
    if failed > 0 {
        bail!("{failed} of {} scenarios failed", outcomes.len());
    }
    Ok(())
}

/// Returns the longest scenarios, the failed ones and the counts, as text.
fn summary(outcomes: &[Outcome]) -> String {
    let mut by_time: Vec<&Outcome> = outcomes.iter().collect();
    by_time.sort_by_key(|outcome| Reverse(outcome.duration));
    let mut lines = vec![format!("the longest {}:", LONGEST.min(outcomes.len()))];
    let line = |outcome: &Outcome| format!("{:7.1} s  {}", outcome.duration.as_secs_f64(), outcome.scenario);
    lines.extend(by_time.iter().take(LONGEST).map(|outcome| line(outcome)));
    let (failed, passed): (Vec<&Outcome>, Vec<&Outcome>) =
        by_time.into_iter().partition(|outcome| outcome.failure.is_some());
    for outcome in &failed {
        let why = outcome.failure.as_deref().unwrap_or_default();
        lines.push(format!("FAILED: {}: {why}; output in {}", outcome.scenario, outcome.log.display()));
    }
    lines.push(format!("{} passed, {} failed", passed.len(), failed.len()));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_has_longest_scenarios_failures_and_counts() {
        let outcome = |test: &str, seconds, failure: Option<&str>| Outcome {
            scenario: Scenario {
                program: "guest".into(),
                name: test.into(),
                tests: vec![test.into()],
                executable: "/t".into(),
            },
            duration: Duration::from_secs(seconds),
            failure: failure.map(str::to_owned),
            log: "/logs/x".into(),
        };
        let mut outcomes: Vec<Outcome> = (1..=11).map(|at| outcome(&format!("t{at}"), at, None)).collect();
        outcomes.push(outcome("bad", 0, Some("exit status: 101")));
        let text = summary(&outcomes);
        assert!(text.starts_with("the longest 10:\n   11.0 s  guest t11\n"), "{text}");
        assert!(!text.contains("guest t1\n"), "{text}");
        assert!(
            text.ends_with("FAILED: guest bad: exit status: 101; output in /logs/x\n11 passed, 1 failed"),
            "{text}"
        );
    }
}
