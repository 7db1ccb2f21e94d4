//! The last words of libcontainer's helpers.
//!
//! A helper process that fails tells its parent only the name of the step,
//! e.g. "failed to prepare rootfs". What went wrong is in its log events, so
//! those go into a pipe that the helpers of one call inherit. It is open before
//! a helper changes its root, and nobody waits to write into it: what does not
//! fit is dropped. Its end tells that a helper has become its program, because
//! the program does not get it.

use std::os::fd::OwnedFd;

use log::{LevelFilter, Log, Metadata, Record};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::{PipeFlags, pipe_with};

/// How many events an error message quotes, and how much of each, in characters.
const MAX_QUOTED_EVENTS: usize = 3;
const MAX_EVENT_CHARS: usize = 300;

/// What is kept of one helper's words, bytes.
const MAX_BYTES: usize = 64 << 10;

struct Writer(OwnedFd);

impl Log for Writer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let mark = if record.level() == log::Level::Error { 'E' } else { 'W' };
            let text = format!("{mark}{}", record.args()).replace('\n', " ");
            // The length is well below what a pipe takes at once, so lines do not mix.
            let text: String = text.chars().take(MAX_EVENT_CHARS).chain(['\n']).collect();
            let _ = rustix::io::write(&self.0, text.as_bytes());
        }
    }

    fn flush(&self) {}
}

/// The two ends of a pipe for last words, reading end first. A program that a
/// helper becomes has neither.
pub(crate) fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct HelperLog {
    pipe: OwnedFd,
}

impl HelperLog {
    /// Listens at a pipe, into which this process's log records go from now on.
    pub(crate) fn install(pipe: OwnedFd, writer: OwnedFd) -> Self {
        // There is no other logger: a helper is a copy of a process that has none.
        if log::set_boxed_logger(Box::new(Writer(writer))).is_ok() {
            log::set_max_level(LevelFilter::Warn);
        }
        Self { pipe }
    }

    /// Listens to another helper.
    pub(crate) fn new(pipe: OwnedFd) -> Self {
        Self { pipe }
    }

    /// Everything since the last time.
    pub(crate) fn take(&self) -> String {
        let mut all = Vec::new();
        read_available(&self.pipe, &mut all);
        String::from_utf8_lossy(&all).into_owned()
    }

    /// Everything until nobody can say anything any more: until the last helper
    /// has ended or become a program.
    pub(crate) fn read_to_end(&self) -> String {
        let mut all = Vec::new();
        while !read_available(&self.pipe, &mut all) {
            let mut poll_fds = [PollFd::new(&self.pipe, PollFlags::IN)];
            if poll(&mut poll_fds, None).is_err_and(|error| error != rustix::io::Errno::INTR) {
                break;
            }
        }
        String::from_utf8_lossy(&all).into_owned()
    }
}

/// Reads what is there; `true` at the end.
pub(crate) fn read_available(pipe: &OwnedFd, all: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) => return true,
            Ok(len) if all.len() < MAX_BYTES => all.extend_from_slice(&buffer[..len]),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return error != rustix::io::Errno::AGAIN,
        }
    }
}

/// An error as one line: what libcontainer said, then the events that explain it.
/// The first event is the closest to the cause; later ones repeat it in wider words.
pub(crate) fn explain(error: &dyn std::error::Error, events: &str) -> String {
    let mut text = chain(error);
    let mut quoted = Vec::<&str>::new();
    for line in events.lines().filter_map(|line| line.strip_prefix('E')) {
        if quoted.len() < MAX_QUOTED_EVENTS && !text.contains(line) && !quoted.iter().any(|known| known.contains(line)) {
            quoted.push(line);
        }
    }
    for line in quoted {
        text.push_str("; ");
        text.push_str(line);
    }
    // Some of libcontainer's texts come through buffers with NULs at the end.
    text.replace('\0', "").replace('\n', " ")
}

/// The error event closest to the cause; nothing if there is none.
pub(crate) fn first_error(events: &str) -> &str {
    events.lines().find_map(|line| line.strip_prefix('E')).unwrap_or_default()
}

/// The error events alone, as one line.
pub(crate) fn errors(events: &str) -> String {
    events.lines().filter_map(|line| line.strip_prefix('E')).collect::<Vec<_>>().join("; ")
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        // Transparent errors repeat their cause word for word.
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn an_error_is_one_line_with_its_cause_first() {
        let error = Outer(std::io::Error::other("inner\nline"));
        let events = "Wunrelated\nEmount failed errno=EINVAL\nEmount failed errno=EINVAL\nEfailed to prepare rootfs\n";
        assert_eq!(explain(&error, events), "outer: inner line; mount failed errno=EINVAL; failed to prepare rootfs");
    }
}
