//! Progress of long steps: one plain line each, and a progress bar on a terminal.
//!
//! Lines and bars go to standard error. One bar is active at a time in a process, and
//! lines are written above it.
#![forbid(unsafe_code)]

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The active progress bar, if any: lines are written above it.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Refresh interval of a progress bar.
const REFRESH_INTERVAL: Duration = Duration::from_millis(100);

const BYTES: &str = "{prefix}: {wide_msg} [{bar:24}] {decimal_bytes:>9} of {decimal_total_bytes}";
const STEPS: &str = "{prefix}: {wide_msg} {spinner} {pos} steps, {elapsed}";

/// Reports progress of long steps.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    area: Option<&'static str>,
}

impl Progress {
    /// Reports to standard error with the prefix `area`.
    #[must_use]
    pub fn stderr(area: &'static str) -> Self {
        Self { area: Some(area) }
    }

    /// Reports nothing.
    #[must_use]
    pub fn quiet() -> Self {
        Self { area: None }
    }

    /// Logs one line.
    pub fn say(&self, line: impl std::fmt::Display) {
        let Some(area) = self.area else { return };
        let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match shown {
            Some(bar) => bar.suspend(|| eprintln!("{area}: {line}")),
            None => eprintln!("{area}: {line}"),
        }
    }

    /// Shows a progress bar for `total` bytes until it is dropped; an inactive bar
    /// if standard error is not a terminal or another bar is active.
    #[must_use]
    pub fn bytes(&self, what: impl Into<String>, total: u64) -> Bar {
        self.bar(what, Some(total), BYTES)
    }

    /// Shows a progress bar for an unknown number of steps.
    #[must_use]
    pub fn steps(&self, what: impl Into<String>) -> Bar {
        self.bar(what, None, STEPS)
    }

    fn bar(&self, what: impl Into<String>, total: Option<u64>, form: &str) -> Bar {
        let Some(area) = self.area else { return Bar::none() };
        let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        if shown.is_some() || bar.is_hidden() {
            return Bar::none();
        }
        let style = ProgressStyle::with_template(form).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = bar.with_style(style.progress_chars("=> ")).with_prefix(area).with_message(what.into());
        bar.tick();
        bar.enable_steady_tick(REFRESH_INTERVAL);
        *shown = Some(bar.clone());
        Bar { shown: Some(bar) }
    }
}

/// A progress bar, possibly inactive.
#[derive(Debug)]
pub struct Bar {
    shown: Option<ProgressBar>,
}

impl Bar {
    /// Returns an inactive bar.
    #[must_use]
    pub fn none() -> Self {
        Self { shown: None }
    }

    /// Returns whether the bar is visible, so that no other progress output is needed.
    #[must_use]
    pub fn is_shown(&self) -> bool {
        self.shown.is_some()
    }

    /// Sets the position.
    pub fn set(&self, done: u64) {
        if let Some(bar) = &self.shown {
            bar.set_position(done);
        }
    }

    /// Advances the position.
    pub fn add(&self, more: u64) {
        if let Some(bar) = &self.shown {
            bar.inc(more);
        }
    }

    /// Wraps a reader so that reading advances the bar.
    pub fn reading<R: Read>(&self, inner: R) -> Reading<'_, R> {
        Reading { inner, bar: self }
    }

    /// Runs `work` while polling `done` for the position of the bar.
    pub fn following<T>(&self, done: impl Fn() -> u64 + Sync, work: impl FnOnce() -> T) -> T {
        if !self.is_shown() {
            return work();
        }
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    self.set(done());
                    thread::sleep(REFRESH_INTERVAL);
                }
            });
            let result = work();
            over.store(true, Ordering::Relaxed);
            result
        })
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = self.shown.take() {
            bar.finish_and_clear();
            *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// A reader that advances a bar; see [`Bar::reading`].
#[derive(Debug)]
pub struct Reading<'a, R> {
    inner: R,
    bar: &'a Bar,
}

impl<R: Read> Read for Reading<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.bar.add(read as u64);
        Ok(read)
    }
}

/// Formats a size: `173 MB`.
#[must_use]
pub fn megabytes(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} kB", bytes.div_ceil(1_000)),
        1_000_000..10_000_000 => format!("{}.{} MB", bytes / 1_000_000, bytes / 100_000 % 10),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

/// Formats a duration: `1.4 s`.
#[must_use]
pub fn seconds(span: Duration) -> String {
    format!("{}.{} s", span.as_secs(), span.subsec_millis() / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_are_formatted() {
        assert_eq!(megabytes(0), "0 kB");
        assert_eq!(megabytes(1), "1 kB");
        assert_eq!(megabytes(999_999), "1000 kB");
        assert_eq!(megabytes(2_345_678), "2.3 MB");
        assert_eq!(megabytes(173_900_000), "173 MB");
        assert_eq!(seconds(Duration::from_millis(1_450)), "1.4 s");
    }

    #[test]
    fn bar_templates_are_valid() {
        for form in [BYTES, STEPS] {
            assert!(ProgressStyle::with_template(form).is_ok(), "{form}");
        }
    }

    #[test]
    fn inactive_bar_does_not_change_the_work() {
        let bar = Progress::quiet().bytes("x", 10);
        assert!(!bar.is_shown());
        assert_eq!(bar.following(|| 1, || 7), 7);
        let mut text = String::new();
        bar.reading(&b"text"[..]).read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
    }
}
