//! The agent's log: one line per record, to the kernel's log in a guest, otherwise to standard
//! error.
//!
//! With a log port, full records go there, and only warnings and errors also to the kernel's log,
//! which is small.

mod json;
pub(crate) mod port;
mod queue;
mod rate_limit;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;

use log::{Level, LevelFilter, Log, Metadata, Record};

pub(crate) use queue::Queue;
pub(crate) use rate_limit::RateLimit;

/// The kernel truncates records at about 1 KiB.
const MAX_KMSG: usize = 900;

struct Logger {
    in_guest: bool,
    kmsg: OnceLock<Option<File>>,
}

impl Logger {
    /// Opened at the first record, which most boots never write.
    fn kmsg(&self) -> Option<&File> {
        let open = || OpenOptions::new().write(true).open("/dev/kmsg").ok();
        self.kmsg.get_or_init(|| if self.in_guest { open() } else { None }).as_ref()
    }
}

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        if let Some(queue) = QUEUE.get() {
            queue.push(json::line(record));
            if record.level() > Level::Warn {
                return;
            }
        }
        let line = line(priority(record.level()), &record.args().to_string(), self.kmsg().is_some());
        // One write per record, so that records do not interleave; write errors are ignored.
        let _ = match self.kmsg() {
            Some(mut kmsg) => kmsg.write_all(line.as_bytes()),
            None => std::io::stderr().write_all(line.as_bytes()),
        };
    }

    fn flush(&self) {}
}

fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

fn line(priority: u8, text: &str, kernel: bool) -> String {
    // The kernel prints errors on the console, where untrusted text must not pass for a line of the
    // boot record.
    let text: String = firstlight_boot_record::sanitize(text.as_bytes()).chars().take(MAX_KMSG).collect();
    if kernel { format!("<{priority}>agent: {text}\n") } else { format!("agent: {text}\n") }
}

/// Records for the log port, if there is one.
static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Returns the queue of the log port, if there is one.
pub(crate) fn queue() -> Option<&'static Queue> {
    QUEUE.get()
}

/// Forwards a message of another source, as received from PID 1, to the log port.
pub(crate) fn forward(level: &str, source: &str, text: &str) {
    if let Some(queue) = QUEUE.get() {
        queue.push(json::forwarded(level, source, text));
    }
}

/// Initialises the log; `port` enables the log port's queue. A second call has no effect.
pub fn start(level: LevelFilter, in_guest: bool, port: bool) {
    if port {
        QUEUE.get_or_init(Queue::default);
    }
    if log::set_boxed_logger(Box::new(Logger { in_guest, kmsg: OnceLock::new() })).is_ok() {
        log::set_max_level(level);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Line, State};

    #[test]
    fn record_is_one_short_line_without_control_characters() {
        assert_eq!(line(3, "a\nb\u{1b}[2J", true), "<3>agent: a\\x0ab\\x1b[2J\n");
        let forged = Line::State(State::Failed).encode().unwrap();
        assert!(Line::decode(&line(3, &format!("container {forged:?}: no"), true)).is_none());
        assert!(Line::decode(&line(3, &forged, true)).is_none());
        assert_eq!(line(3, "a", false), "agent: a\n");
        assert!(line(3, &"x".repeat(5000), true).len() < 1000);
    }
}
