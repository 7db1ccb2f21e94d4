//! Runs scenarios as processes and reports each as it ends.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use firstlight_lab::binaries::workspace;
use firstlight_vm::or_interrupted;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::queue::Queue;
use super::{Durations, Outcome, Scenario};

/// Options of a run.
#[derive(Debug)]
pub(crate) struct Options {
    /// Number of scenarios that run in parallel.
    pub(crate) jobs: usize,
    /// Directory of the output files.
    pub(crate) logs: PathBuf,
    /// Expected durations, in seconds.
    pub(crate) durations: Durations,
    /// Timeout of a scenario; after it, the scenario and its descendants are killed, and it counts as failed.
    pub(crate) limit: Duration,
}

/// Interval of progress lines while no scenario ends.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(60);

/// Number of lines of a failed scenario's log that are printed.
const SHOWN_LINES: usize = 300;

/// Set for scenarios because the lab is already prepared, see [`firstlight_lab::Lab::prepare`].
const PREPARED: (&str, &str) = ("FIRSTLIGHT_LAB_PREPARED", "1");

/// Runs the scenarios; returns the outcomes in the order in which they ended.
///
/// # Errors
/// A process could not be started, or a signal interrupted the run; running scenarios are then killed.
pub(crate) fn run(scenarios: Vec<Scenario>, options: &Options) -> anyhow::Result<Vec<Outcome>> {
    fs::create_dir_all(&options.logs).with_context(|| options.logs.display().to_string())?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start tokio")?;
    runtime.block_on(async {
        match or_interrupted(run_all(scenarios, options)).await {
            Ok(outcomes) => outcomes,
            Err(signal) => anyhow::bail!("interrupted by signal {}", signal.0),
        }
    })
}

async fn run_all(scenarios: Vec<Scenario>, options: &Options) -> anyhow::Result<Vec<Outcome>> {
    let total = scenarios.len();
    let mut queue = Queue::new(scenarios, &options.durations);
    let (mut tasks, mut running) = (JoinSet::new(), Vec::<(Scenario, Instant)>::new());
    let mut outcomes = Vec::with_capacity(total);
    loop {
        let busy: Vec<Scenario> = running.iter().map(|(scenario, _)| scenario.clone()).collect();
        if let Some(scenario) = queue.next(&busy, options.jobs) {
            println!("start            {scenario}");
            running.push((scenario.clone(), Instant::now()));
            tasks.spawn(run_one(scenario, options.logs.clone(), options.limit));
            continue;
        }
        let ended = match timeout(PROGRESS_INTERVAL, tasks.join_next()).await {
            Ok(None) => break,
            Ok(Some(ended)) => ended.context("a scenario's task failed")??,
            Err(_) => {
                for (scenario, begin) in &running {
                    println!("running {:6.0} s {scenario}", begin.elapsed().as_secs_f64());
                }
                continue;
            }
        };
        running.retain(|(scenario, _)| *scenario != ended.scenario);
        outcomes.push(ended);
        if let Some(ended) = outcomes.last() {
            report(ended, outcomes.len(), total);
        }
    }
    debug_assert_eq!(queue.len(), 0, "nothing is left to run");
    Ok(outcomes)
}

fn report(ended: &Outcome, count: usize, total: usize) {
    let seconds = ended.duration.as_secs_f64();
    match &ended.failure {
        None => println!("ok      {seconds:6.1} s {} ({count} of {total})", ended.scenario),
        Some(why) => {
            println!("FAILED  {seconds:6.1} s {} ({count} of {total}): {why}", ended.scenario);
            let log = fs::read(&ended.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            let first = lines.len().saturating_sub(SHOWN_LINES);
            lines[first..].iter().for_each(|line| println!("    | {line}"));
            println!("    full output: {}", ended.log.display());
        }
    }
}

/// A process group that is killed on drop: a scenario and its descendants.
struct Group(rustix::process::Pid);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process_group(self.0, rustix::process::Signal::KILL);
    }
}

async fn run_one(scenario: Scenario, logs: PathBuf, limit: Duration) -> anyhow::Result<Outcome> {
    let name = format!("{}-{}.log", scenario.program, scenario.name.replace("::", "-"));
    let log = logs.join(name);
    let out = fs::File::create(&log).with_context(|| log.display().to_string())?;
    let begin = Instant::now();
    let mut command = Command::new(&scenario.executable);
    // Tests that share a guest run at the same time: the guest stops when none uses it.
    let threads = scenario.tests.len();
    command.arg("--exact").args(&scenario.tests).args(["--nocapture", &format!("--test-threads={threads}")]);
    command.current_dir(workspace().join("tests/e2e")).env(PREPARED.0, PREPARED.1);
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).process_group(0);
    let mut child = command.spawn().with_context(|| format!("failed to start {}", scenario.executable.display()))?;
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    let _group = pid.map(Group);
    let failure = tokio::select! {
        status = child.wait() => failure_of(status.context("failed to wait for a scenario")?, &log, threads),
        () = sleep(limit) => Some(format!("killed after {} s, the timeout of a scenario", limit.as_secs())),
    };
    Ok(Outcome { scenario, duration: begin.elapsed(), failure, log })
}

/// Returns the cause of a failure, or none if all `tests` passed. A process that did not run them has failed.
fn failure_of(status: ExitStatus, log: &Path, tests: usize) -> Option<String> {
    if let Some(signal) = status.signal() {
        return Some(format!("killed by signal {signal}"));
    }
    let log = fs::read(log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    if !status.success() {
        let failed = failed_tests(&log);
        return Some(if tests > 1 { format!("{status}: {}", failed.join(", ")) } else { status.to_string() });
    }
    let passed = log.contains(&format!("test result: ok. {tests} passed; 0 failed; 0 ignored;"));
    (!passed).then(|| format!("the process did not run its {tests} tests"))
}

/// Returns the names in libtest's last list of failed tests.
fn failed_tests(log: &str) -> Vec<&str> {
    let Some((_, list)) = log.rsplit_once("\nfailures:\n") else { return Vec::new() };
    list.lines().map_while(|line| line.strip_prefix("    ")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn program(dir: &Path, text: &str) -> PathBuf {
        let path = dir.join("program");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn outcome(text: &str, limit: Duration) -> Outcome {
        let dir = tempfile::tempdir().unwrap();
        let executable = program(dir.path(), text);
        let scenario = Scenario { program: "p".into(), name: "a::b".into(), tests: vec!["a::b".into()], executable };
        let options = Options { jobs: 2, logs: dir.path().join("logs"), durations: Durations::new(), limit };
        run(vec![scenario], &options).unwrap().remove(0)
    }

    const LONG: Duration = Duration::from_secs(60);
    const OK: &str = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 4 filtered out";

    #[test]
    fn only_a_process_that_ran_its_test_passes() {
        assert_eq!(outcome(&format!("echo '{OK}'"), LONG).failure, None);
        assert!(outcome("exit 0", LONG).failure.unwrap().contains("did not run its 1 tests"));
        assert!(outcome(&format!("echo '{}'", OK.replace("1 passed", "0 passed")), LONG).failure.is_some());
        assert!(outcome(&format!("echo '{OK}'; exit 101"), LONG).failure.unwrap().contains("101"));
        assert!(outcome("kill -9 $$", LONG).failure.unwrap().contains("signal 9"));
    }

    #[test]
    fn failed_tests_of_a_shared_guest_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let text = "test s::a ... ok\n\nfailures:\n\nfailures:\n    s::b\n    s::c\n\ntest result: FAILED. 1 passed";
        let executable = program(dir.path(), &format!("echo '{text}'; exit 101"));
        let tests = ["s::a", "s::b", "s::c"].map(str::to_owned).into();
        let scenario = Scenario { program: "p".into(), name: "s".into(), tests, executable };
        let options = Options { jobs: 1, logs: dir.path().join("logs"), durations: Durations::new(), limit: LONG };
        let failure = run(vec![scenario], &options).unwrap().remove(0).failure.unwrap();
        assert_eq!(failure, "exit status: 101: s::b, s::c");
    }

    #[test]
    fn scenario_that_exceeds_its_timeout_has_failed() {
        let ended = outcome("exec sleep 600", Duration::from_millis(100));
        assert!(ended.failure.unwrap().contains("timeout"));
    }

    #[test]
    fn dropped_scenario_is_killed_with_its_descendants() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let text = format!("sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        let executable = program(dir.path(), &text);
        let scenario = Scenario { executable, ..crate::scenarios::tests::scenario("p", "t") };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let until_started = async {
                while !file.exists() {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::select! {
                _ = run_one(scenario, dir.path().to_owned(), LONG) => panic!("it has ended"),
                () = until_started => {}
            }
        });
        let pid = fs::read_to_string(&file).unwrap();
        let stat = PathBuf::from(format!("/proc/{}/stat", pid.trim()));
        let begin = Instant::now();
        while fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(begin.elapsed() < LONG, "its child has not been killed");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
