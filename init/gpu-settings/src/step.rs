//! Steps: what is looked at first and changed then, and what is said about both.

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use firstlight_gpu_settings_protocol::{Outcome, StepReport};

/// The change of a step; what it says is in the place of what was planned.
pub(crate) type Act<'a> = Box<dyn FnOnce() -> Result<String, String> + 'a>;

/// What is left to do when everything has been looked at.
pub(crate) enum Todo<'a> {
    /// Nothing: it is as asked.
    Nothing(String),
    /// This, in words and as it is done.
    Change(String, Act<'a>),
}

impl<'a> Todo<'a> {
    pub(crate) fn change(words: String, act: impl FnOnce() -> Result<String, String> + 'a) -> Self {
        Self::Change(words, Box::new(act))
    }
}

/// All steps of this run.
pub(crate) struct Steps {
    apply: bool,
    failed: AtomicBool,
}

impl Steps {
    pub(crate) fn new(apply: bool) -> Self {
        Self { apply, failed: AtomicBool::new(false) }
    }

    /// Whether anything is changed at all.
    pub(crate) fn applies(&self) -> bool {
        self.apply
    }

    pub(crate) fn all_good(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// Looks, changes unless this is a check, and says both when it begins and how it ended.
    pub(crate) fn run<'a>(&self, object: &str, step: &str, prepare: impl FnOnce() -> Result<Todo<'a>, String>) {
        let begin = Instant::now();
        say(object, step, Outcome::Started, 0, String::new());
        let (outcome, detail) = match prepare() {
            Ok(Todo::Nothing(words)) => (Outcome::Unchanged, words),
            Ok(Todo::Change(words, _)) if !self.apply => (Outcome::WouldChange, words),
            Ok(Todo::Change(_, act)) => match act() {
                Ok(words) => (Outcome::Done, words),
                Err(error) => (Outcome::Failed, error),
            },
            Err(error) => (Outcome::Failed, error),
        };
        if outcome == Outcome::Failed {
            self.failed.store(true, Ordering::Relaxed);
        }
        say(object, step, outcome, u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX), detail);
    }

    /// A step that could not even begin.
    pub(crate) fn failed(&self, object: &str, step: &str, error: &str) {
        self.failed.store(true, Ordering::Relaxed);
        say(object, step, Outcome::Failed, 0, error.to_owned());
    }
}

fn say(object: &str, step: &str, result: Outcome, us: u64, detail: String) {
    let line = StepReport { object: object.to_owned(), step: step.to_owned(), result, elapsed_us: us, detail };
    let mut text = serde_json::to_string(&line).unwrap_or_default();
    text.push('\n');
    // One write: other threads write too, and the library may. A failure cannot be reported anywhere.
    let mut output = std::io::stdout().lock();
    let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
}
