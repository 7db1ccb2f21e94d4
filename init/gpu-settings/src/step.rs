//! Runs steps: each reads the current setting, changes it if needed, and reports both.

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use firstlight_gpu_settings_protocol::{Outcome, StepReport};

/// The action of a step; returns the description of the result.
pub(crate) type Action<'a> = Box<dyn FnOnce() -> Result<String, String> + 'a>;

/// The plan of a step after reading the current setting.
pub(crate) enum Plan<'a> {
    /// No change is needed; describes the current setting.
    Nothing(String),
    /// A change with its description.
    Change(String, Action<'a>),
}

impl<'a> Plan<'a> {
    pub(crate) fn change(description: String, action: impl FnOnce() -> Result<String, String> + 'a) -> Self {
        Self::Change(description, Box::new(action))
    }
}

/// The steps of a run.
pub(crate) struct Steps {
    apply: bool,
    failed: AtomicBool,
}

impl Steps {
    pub(crate) fn new(apply: bool) -> Self {
        Self { apply, failed: AtomicBool::new(false) }
    }

    /// Returns whether settings are changed, in contrast to a check.
    pub(crate) fn applies(&self) -> bool {
        self.apply
    }

    pub(crate) fn all_succeeded(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// Runs a step: plans, applies the change unless this is a check, and reports start and result.
    pub(crate) fn run<'a>(&self, object: &str, step: &str, prepare: impl FnOnce() -> Result<Plan<'a>, String>) {
        let begin = Instant::now();
        report(object, step, Outcome::Started, 0, String::new());
        let (outcome, detail) = match prepare() {
            Ok(Plan::Nothing(description)) => (Outcome::Unchanged, description),
            Ok(Plan::Change(description, _)) if !self.apply => (Outcome::WouldChange, description),
            Ok(Plan::Change(_, action)) => match action() {
                Ok(description) => (Outcome::Done, description),
                Err(error) => (Outcome::Failed, error),
            },
            Err(error) => (Outcome::Failed, error),
        };
        if outcome == Outcome::Failed {
            self.failed.store(true, Ordering::Relaxed);
        }
        report(object, step, outcome, u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX), detail);
    }

    /// Reports a step that could not be started.
    pub(crate) fn failed(&self, object: &str, step: &str, error: &str) {
        self.failed.store(true, Ordering::Relaxed);
        report(object, step, Outcome::Failed, 0, error.to_owned());
    }
}

fn report(object: &str, step: &str, result: Outcome, us: u64, detail: String) {
    let line = StepReport { object: object.to_owned(), step: step.to_owned(), result, elapsed_us: us, detail };
    let mut text = serde_json::to_string(&line).unwrap_or_default();
    text.push('\n');
    // A single write, as other threads and the library may write as well. Write errors cannot be reported.
    let mut output = std::io::stdout().lock();
    let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
}
