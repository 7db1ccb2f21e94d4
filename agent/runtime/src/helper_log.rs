//! The log of libcontainer's helper processes.
//!
//! A helper process that fails reports only the name of the step to its parent, e.g. "failed to prepare rootfs".
//! The cause is in its log events, so those go into a pipe that the helpers of one call inherit. It is opened
//! before a helper changes its root, and writes never block: what does not fit is dropped. End of file shows that
//! a helper has exec'ed its program, because the pipe is close-on-exec.

use std::os::fd::OwnedFd;

use log::{LevelFilter, Log, Metadata, Record};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::{PipeFlags, pipe_with};

/// How many events an error message quotes, and the length of each in characters.
const MAX_QUOTED_EVENTS: usize = 3;
const MAX_EVENT_CHARS: usize = 300;

/// The most that is read from one helper's log, bytes.
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
            // Shorter than PIPE_BUF, so lines of several helpers do not interleave.
            let text: String = text.chars().take(MAX_EVENT_CHARS).chain(['\n']).collect();
            let _ = rustix::io::write(&self.0, text.as_bytes());
        }
    }

    fn flush(&self) {}
}

/// Returns the two ends of a helper log pipe, reading end first. Both are close-on-exec.
pub(crate) fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// The reading end of a helper log.
#[derive(Debug)]
pub(crate) struct HelperLog {
    pipe: OwnedFd,
}

impl HelperLog {
    /// Directs this process's log records into the pipe from now on.
    pub(crate) fn install(pipe: OwnedFd, writer: OwnedFd) -> Self {
        // There is no other logger: the process was forked from one that has none.
        if log::set_boxed_logger(Box::new(Writer(writer))).is_ok() {
            log::set_max_level(LevelFilter::Warn);
        }
        Self { pipe }
    }

    /// Wraps the reading end of another helper's log.
    pub(crate) fn new(pipe: OwnedFd) -> Self {
        Self { pipe }
    }

    /// Returns everything logged since the last call.
    pub(crate) fn take(&self) -> String {
        let mut all = Vec::new();
        read_available(&self.pipe, &mut all);
        String::from_utf8_lossy(&all).into_owned()
    }

    /// Reads until end of file: until the last helper has exited or exec'ed its program.
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

/// Reads what is available; `true` at end of file.
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

/// Formats an error as one line: libcontainer's error, then the log events that explain it. The first event is
/// closest to the cause; later ones repeat it in more general terms.
pub(crate) fn explain(error: &dyn std::error::Error, events: &str) -> String {
    let mut text = chain(error);
    let mut quoted = Vec::<&str>::new();
    for line in events.lines().filter_map(|line| line.strip_prefix('E')) {
        if quoted.len() < MAX_QUOTED_EVENTS && !text.contains(line) && !quoted.iter().any(|known| known.contains(line))
        {
            quoted.push(line);
        }
    }
    for line in quoted {
        text.push_str("; ");
        text.push_str(line);
    }
    // Some of libcontainer's texts come from buffers with trailing NULs.
    text.replace('\0', "").replace('\n', " ")
}

/// Returns the error event closest to the cause; empty if there is none.
pub(crate) fn first_error(events: &str) -> &str {
    events.lines().find_map(|line| line.strip_prefix('E')).unwrap_or_default()
}

/// Returns the error events as one line.
pub(crate) fn errors(events: &str) -> String {
    events.lines().filter_map(|line| line.strip_prefix('E')).collect::<Vec<_>>().join("; ")
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        // Transparent errors repeat their cause verbatim.
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
    fn error_is_one_line_with_the_cause_first() {
        let error = Outer(std::io::Error::other("inner\nline"));
        let events = "Wunrelated\nEmount failed errno=EINVAL\nEmount failed errno=EINVAL\nEfailed to prepare rootfs\n";
        assert_eq!(explain(&error, events), "outer: inner line; mount failed errno=EINVAL; failed to prepare rootfs");
    }
}
