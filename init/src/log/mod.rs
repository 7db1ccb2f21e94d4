//! Log forwarding to the console and the host: lines of the kernel, the daemons, the agent, and
//! processes that write to `/dev/log`.
//!
//! Logs are never used as a readiness or failure signal. All text is untrusted input: its length
//! and rate are limited, and it is escaped when it becomes a line
//! ([`firstlight_boot_record::LogLine`]).

pub mod devlog;
pub mod limit;
pub mod syslog;

use firstlight_boot_record::{Level, LogLine};

use limit::{DroppedLines, Limiter};

/// The source of a log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The kernel.
    Kernel,
    /// The NVIDIA driver, in the kernel log. Its first errors are the important ones; its own
    /// budget prevents that lines of other sources cause them to be dropped.
    Driver,
    /// The agent, in the kernel log.
    Agent,
    /// Another process that writes to the kernel log (`/dev/kmsg`).
    Kmsg,
    /// A daemon, through its standard output and error or `/dev/log`.
    Daemon(&'static str),
    /// A daemon's log file, with its own budget, separate from that of the daemon's other output.
    DaemonFile(&'static str),
    /// Another process that writes to `/dev/log`.
    Peer(Peer),
}

/// A process that writes to `/dev/log`, with the credentials that the kernel attaches to its
/// messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The process id.
    pub pid: i32,
    /// The user id.
    pub user: u32,
    /// The program's name (`comm`), which the process can change.
    pub program: String,
}

impl Source {
    /// Returns the source's name as printed on the console.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Kernel => "kernel".to_owned(),
            Self::Driver => "driver".to_owned(),
            Self::Agent => "agent".to_owned(),
            Self::Kmsg => "kmsg".to_owned(),
            Self::Daemon(name) | Self::DaemonFile(name) => (*name).to_owned(),
            Self::Peer(Peer { pid, user, program }) => format!("{program}[{pid},{user}]"),
        }
    }
}

/// Forwards lines within the rate limits of their sources.
#[derive(Debug, Default)]
pub struct Forwarder {
    limiter: Limiter,
}

impl Forwarder {
    /// Returns the line with the time `at_us` if its source is within its rate limit.
    pub fn take(&mut self, now: u64, at_us: u64, source: &Source, level: Level, text: String) -> Option<LogLine> {
        self.limiter.take(now, source).then(|| LogLine { at_us, level, source: source.name(), text })
    }

    /// Returns when [`Forwarder::dropped_lines`] has a report next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.limiter.next_deadline()
    }

    /// Returns the reports of dropped lines that are due; with `all`, all reports.
    pub fn dropped_lines(&mut self, now: u64, all: bool) -> Vec<LogLine> {
        let rows = self.limiter.take_dropped(now, all).into_iter();
        rows.map(|DroppedLines { name, lines, since }| {
            let seconds = now.saturating_sub(since).div_ceil(1_000_000).max(1);
            let text = format!("{lines} lines of {name} left out in the last {seconds} s");
            LogLine { at_us: now, level: Level::Warning, source: "init".to_owned(), text }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_source_time_and_text_and_drops_are_reported() {
        let mut forwarder = Forwarder::default();
        let peer = Peer { pid: 7, user: 901, program: "x y".into() };
        let line = forwarder.take(9, 5, &Source::Peer(peer), Level::Error, "a\nb".into()).unwrap();
        assert_eq!(line.encode(), "firstlight: 0.000005 err x_y[7,901]: a\\x0ab");
        let imex = Source::Daemon("imex");
        let passed = (0..1000).filter(|_| forwarder.take(9, 9, &imex, Level::Info, "x".into()).is_some()).count();
        assert!(forwarder.dropped_lines(9, false).is_empty());
        let at = forwarder.next_deadline().unwrap();
        let dropped_lines: Vec<_> = forwarder.dropped_lines(at, false).iter().map(LogLine::encode).collect();
        let expected = format!(" warning init: {} lines of imex left out in the last 5 s", 1000 - passed);
        assert!(matches!(&dropped_lines[..], [one] if one.ends_with(&expected)), "{dropped_lines:?}");
        assert_eq!((forwarder.next_deadline(), forwarder.dropped_lines(at, true)), (None, vec![]));
    }
}
