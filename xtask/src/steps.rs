//! The steps of a long command: printed with their expected durations, timed,
//! and summarised at the end. Durations are saved for the next run's estimates.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

/// A step: name, description, expected duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    /// Expected duration without caches, on two idle processors, in seconds.
    pub(crate) cold_seconds: u32,
}

/// Durations of earlier runs on this machine, in seconds.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct History {
    #[serde(default)]
    pub(crate) steps: BTreeMap<String, f64>,
    #[serde(default)]
    pub(crate) scenarios: BTreeMap<String, f64>,
}

fn file() -> anyhow::Result<PathBuf> {
    Ok(firstlight_lab::cache_root()?.join("durations.json"))
}

impl History {
    /// Loads the durations of earlier runs. An unreadable file counts as empty: only estimates depend on it.
    pub(crate) fn load() -> Self {
        let text = file().ok().and_then(|path| fs::read(path).ok());
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Saves the durations for the next run.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        let path = file()?;
        let text = serde_json::to_vec_pretty(self)?;
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        }
        let new = path.with_extension(format!("new-{}", std::process::id()));
        fs::write(&new, text).with_context(|| new.display().to_string())?;
        fs::rename(&new, &path).with_context(|| path.display().to_string())
    }
}

/// Measured duration of a step.
#[derive(Debug, Clone, PartialEq)]
struct StepTime {
    name: &'static str,
    wall: Duration,
    /// Processor time of the step's processes.
    cpu: Duration,
}

/// What could not be checked on this machine.
static NOT_RUN: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Reports that a check was not run, now and in the summary: it must not look like a pass.
pub(crate) fn not_run(what: impl Into<String>) {
    let what = what.into();
    eprintln!("xtask: NOT RUN: {what}");
    NOT_RUN.lock().unwrap_or_else(PoisonError::into_inner).push(what);
}

/// Runs steps one after the other.
#[derive(Debug)]
pub(crate) struct Steps {
    begin: Instant,
    times: Vec<StepTime>,
    pub(crate) history: History,
}

/// Formats a duration in seconds or minutes.
pub(crate) fn format_duration(seconds: f64) -> String {
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.0} min", seconds / 60.0) }
}

/// Returns the steps and their expected durations, as text.
fn format_plan(steps: &[Step], history: &History) -> String {
    let mut text = String::new();
    let mut sum = 0.0;
    let mut recorded = true;
    for step in steps {
        let last = history.steps.get(step.name).copied();
        recorded &= last.is_some();
        let seconds = last.unwrap_or_else(|| f64::from(step.cold_seconds));
        sum += seconds;
        let _ = writeln!(text, "  {:10} {:>7}  {}", step.name, format_duration(seconds), step.description);
    }
    let source = if recorded { "as in the last run on this machine" } else { "without caches, on two idle processors" };
    let _ = writeln!(text, "  {:10} {:>7}  {source}", "total", format_duration(sum));
    text
}

impl Steps {
    /// Prints the steps with their expected durations.
    pub(crate) fn announce(steps: &[Step]) -> Self {
        let history = History::load();
        eprint!("xtask: {} steps:\n{}", steps.len(), format_plan(steps, &history));
        Self { begin: Instant::now(), times: Vec::new(), history }
    }

    /// Runs and times one step; saves the duration if it succeeded.
    pub(crate) fn run<T>(
        &mut self,
        step: &Step,
        work: impl FnOnce(&mut History) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        eprintln!("xtask: step {}: {}", step.name, step.description);
        let (begin, before) = (Instant::now(), children_cpu());
        let result = work(&mut self.history);
        let (wall, cpu) = (begin.elapsed(), children_cpu().saturating_sub(before));
        let verdict = if result.is_ok() { "done" } else { "FAILED" };
        eprintln!("xtask: step {}: {verdict} after {}", step.name, format_duration(wall.as_secs_f64()));
        self.times.push(StepTime { name: step.name, wall, cpu });
        if result.is_ok() {
            self.history.steps.insert(step.name.to_owned(), wall.as_secs_f64());
            self.history.save()?;
        }
        result
    }

    /// Returns the durations of the steps, as text.
    pub(crate) fn summary(&self) -> String {
        let mut text = format!("{:10} {:>9} {:>9}\n", "STEP", "SECONDS", "CPU");
        let mut row = |name: &str, wall: Duration, cpu: Duration| {
            let _ = writeln!(text, "{name:10} {:9.1} {:9.1}", wall.as_secs_f64(), cpu.as_secs_f64());
        };
        for time in &self.times {
            row(time.name, time.wall, time.cpu);
        }
        row("total", self.begin.elapsed(), self.times.iter().map(|time| time.cpu).sum());
        for what in NOT_RUN.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(text, "NOT RUN: {what}");
        }
        text
    }
}

/// Returns the processor time of all waited-for descendants of this process.
fn children_cpu() -> Duration {
    times_of_this_process().1
}

/// Returns the processor time of this process and all its waited-for descendants.
pub(crate) fn processor_time() -> Duration {
    let (own, children) = times_of_this_process();
    own + children
}

fn times_of_this_process() -> (Duration, Duration) {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let (own, children) = ticks(&stat).unwrap_or_default();
    let time = |ticks: u64| Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second());
    (time(own), time(children))
}

/// Returns `utime` plus `stime` and `cutime` plus `cstime`, fields 14 to 17 of proc_pid_stat(5).
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    let mut sum = || Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?);
    Some((sum()?, sum()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINT: Step = Step { name: "lint", description: "lints", cold_seconds: 300 };
    const UNIT: Step = Step { name: "unit", description: "unit tests", cold_seconds: 30 };

    #[test]
    fn plan_has_total_and_source_of_durations() {
        let mut history = History::default();
        let text = format_plan(&[LINT, UNIT], &history);
        assert!(text.contains("5 min") && text.contains("30 s") && text.contains("6 min  without caches"), "{text}");
        history.steps.extend([("lint".to_owned(), 12.0), ("unit".to_owned(), 8.2)]);
        let text = format_plan(&[LINT, UNIT], &history);
        assert!(text.contains("12 s") && text.contains("20 s  as in the last run on this machine"), "{text}");
    }

    #[test]
    fn ticks_are_parsed_after_a_command_name_with_spaces() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 10 11 250 50 20 0 1 0 99";
        assert_eq!(ticks(stat), Some((21, 300)));
        assert_eq!(ticks("7 (a"), None);
    }
}
