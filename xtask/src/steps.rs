//! The steps of a long command: announced with their expected durations, timed,
//! and listed at the end. What each took is kept for the next run's estimate.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;

/// A step, before it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    /// Expected duration without any cache, on two processors with nothing else to do, in seconds.
    pub(crate) cold: u32,
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
    /// What earlier runs left. A file that cannot be read counts as none: only estimates depend on it.
    pub(crate) fn load() -> Self {
        let text = file().ok().and_then(|path| fs::read(path).ok());
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Keeps it for the next run.
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

/// What a step took.
#[derive(Debug, Clone, PartialEq)]
struct Taken {
    name: &'static str,
    wall: Duration,
    /// Processor time of the step's processes.
    cpu: Duration,
}

/// Runs steps one after the other.
#[derive(Debug)]
pub(crate) struct Steps {
    begin: Instant,
    taken: Vec<Taken>,
    pub(crate) history: History,
}

/// A duration as a person says it.
pub(crate) fn shown(seconds: f64) -> String {
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.0} min", seconds / 60.0) }
}

/// What will run and for how long, as text.
fn plan(steps: &[Step], history: &History) -> String {
    let mut text = String::new();
    let mut sum = 0.0;
    let mut recorded = true;
    for step in steps {
        let last = history.steps.get(step.name).copied();
        recorded &= last.is_some();
        let seconds = last.unwrap_or_else(|| f64::from(step.cold));
        sum += seconds;
        let _ = writeln!(text, "  {:10} {:>7}  {}", step.name, shown(seconds), step.description);
    }
    let source = if recorded { "as in the last run here" } else { "without caches, on two idle processors" };
    let _ = writeln!(text, "  {:10} {:>7}  {source}", "in all", shown(sum));
    text
}

impl Steps {
    /// Announces them.
    pub(crate) fn announce(steps: &[Step]) -> Self {
        let history = History::load();
        eprint!("xtask: {} steps:\n{}", steps.len(), plan(steps, &history));
        Self { begin: Instant::now(), taken: Vec::new(), history }
    }

    /// Runs one.
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
        eprintln!("xtask: step {}: {verdict} after {}", step.name, shown(wall.as_secs_f64()));
        self.taken.push(Taken { name: step.name, wall, cpu });
        if result.is_ok() {
            self.history.steps.insert(step.name.to_owned(), wall.as_secs_f64());
            self.history.save()?;
        }
        result
    }

    /// What each took, as text.
    pub(crate) fn summary(&self) -> String {
        let mut text = format!("{:10} {:>9} {:>9}\n", "STEP", "SECONDS", "CPU");
        let mut row = |name: &str, wall: Duration, cpu: Duration| {
            let _ = writeln!(text, "{name:10} {:9.1} {:9.1}", wall.as_secs_f64(), cpu.as_secs_f64());
        };
        for taken in &self.taken {
            row(taken.name, taken.wall, taken.cpu);
        }
        row("in all", self.begin.elapsed(), self.taken.iter().map(|taken| taken.cpu).sum());
        text
    }
}

/// Processor time of this process's children that have been waited for, and theirs.
fn children_cpu() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    Duration::from_millis(children_ticks(&stat).unwrap_or_default() * 1000 / rustix::param::clock_ticks_per_second())
}

/// `cutime` and `cstime`, fields 16 and 17 of proc_pid_stat(5).
fn children_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(13);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINT: Step = Step { name: "lint", description: "lints", cold: 300 };
    const UNIT: Step = Step { name: "unit", description: "unit tests", cold: 30 };

    #[test]
    fn plan_sums_recorded_durations_and_says_where_they_are_from() {
        let mut history = History::default();
        let text = plan(&[LINT, UNIT], &history);
        assert!(text.contains("5 min") && text.contains("30 s") && text.contains("6 min  without caches"), "{text}");
        history.steps.extend([("lint".to_owned(), 12.0), ("unit".to_owned(), 8.2)]);
        let text = plan(&[LINT, UNIT], &history);
        assert!(text.contains("12 s") && text.contains("20 s  as in the last run here"), "{text}");
    }

    #[test]
    fn processor_time_of_children_is_read_behind_a_name_with_spaces() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 10 11 250 50 20 0 1 0 99";
        assert_eq!(children_ticks(stat), Some(300));
        assert_eq!(children_ticks("7 (a"), None);
    }
}
