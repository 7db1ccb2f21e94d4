//! The last words of libcontainer's helpers.
//!
//! A helper process that fails tells its parent only the name of the step,
//! e.g. "failed to prepare rootfs". What went wrong is in its log events, so
//! those go into a pipe that every helper inherits, and the parent empties it
//! when a call has failed. The pipe is open before the helper changes its
//! root, and it is never waited for: what does not fit is dropped.

use std::os::fd::OwnedFd;

use log::{LevelFilter, Log, Metadata, Record};
use rustix::pipe::{PipeFlags, pipe_with};

/// How many events an error message quotes, and how much of each, in characters.
const QUOTED: usize = 3;
const LONGEST: usize = 300;

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
            let text: String = text.chars().take(LONGEST).chain(['\n']).collect();
            let _ = rustix::io::write(&self.0, text.as_bytes());
        }
    }

    fn flush(&self) {}
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct LastWords {
    pipe: Option<OwnedFd>,
}

impl LastWords {
    /// Makes the pipe and sends this process's log records into it. If there
    /// is a logger already (tests), there are simply no last words.
    pub(crate) fn listen() -> Self {
        let Ok((reader, writer)) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) else {
            return Self { pipe: None };
        };
        if log::set_boxed_logger(Box::new(Writer(writer))).is_err() {
            return Self { pipe: None };
        }
        log::set_max_level(LevelFilter::Warn);
        Self { pipe: Some(reader) }
    }

    /// Everything since the last time.
    pub(crate) fn take(&self) -> String {
        let mut all = Vec::new();
        let mut buffer = [0; 4096];
        if let Some(pipe) = &self.pipe {
            while let Ok(len @ 1..) = rustix::io::read(pipe, &mut buffer) {
                all.extend_from_slice(&buffer[..len]);
            }
        }
        String::from_utf8_lossy(&all).into_owned()
    }
}

/// An error as one line: what libcontainer said, then the events that explain it.
/// The first event is the closest to the cause; later ones repeat it in wider words.
pub(crate) fn explain(error: &dyn std::error::Error, events: &str) -> String {
    let mut text = chain(error);
    let mut quoted = Vec::<&str>::new();
    for line in events.lines().filter_map(|line| line.strip_prefix('E')) {
        if quoted.len() < QUOTED && !text.contains(line) && !quoted.iter().any(|known| known.contains(line)) {
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
