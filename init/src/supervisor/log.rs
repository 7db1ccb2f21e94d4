//! Log forwarding: sources and destinations.

use firstlight_boot_record::{Level, LogLine};
use firstlight_init_control::FromInit;

use super::Supervisor;
use crate::clock::now_us;
use crate::executor::End;
use crate::kmsg::{Entry, Log, Reader, printed_below};
use crate::log::devlog::{self, DevLog};
use crate::log::{Forwarder, Source};
use crate::unit_id::UnitId;

/// Records of the kernel's log, and datagrams of `/dev/log`, that are read before others have their turn.
const TURN: usize = 64;

/// The log sources.
#[derive(Debug, Default)]
pub(super) struct LogSources {
    kmsg: Option<Reader>,
    /// What the record takes from the kernel's log.
    pub(super) kernel: Log,
    /// Levels below this one are printed by the kernel itself.
    printed_below: u32,
    devlog: Option<DevLog>,
    forwarder: Forwarder,
}

impl LogSources {
    pub(super) fn descriptors(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        use std::os::fd::AsFd as _;
        self.kmsg.iter().map(Reader::as_fd).chain(self.devlog.iter().map(DevLog::as_fd))
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.forwarder.next_deadline()
    }
}

impl Supervisor {
    /// Makes `/dev/log`. The unit has ended when daemons may write to it.
    pub(super) fn start_syslog_unit(&mut self, unit: UnitId) {
        let end = match DevLog::open(&self.root) {
            Ok(log) => {
                self.logs.devlog = Some(log);
                End::Ok(devlog::PATH.to_owned())
            }
            Err(text) => End::Failed(text),
        };
        self.end_unit(unit, end);
    }

    /// Opens the kernel's log. It has hundreds of records from before us, so
    /// this waits until the agent serves.
    pub(super) fn open_log(&mut self) {
        if self.logs.kmsg.is_none() {
            self.logs.kmsg = Reader::open().ok();
            self.logs.printed_below = printed_below(&self.root);
            self.read_log();
        }
    }

    /// Reads a batch of each log and reports dropped lines.
    pub(super) fn read_logs(&mut self) {
        self.read_log();
        self.read_devlog();
        let now = now_us();
        if self.logs.next_deadline().is_some_and(|at| at <= now) {
            self.report_dropped_lines(false);
        }
    }

    /// Forwards all remaining lines before the final record.
    pub(super) fn drain_logs(&mut self) {
        self.read_log();
        // Senders that do not stop have an end here.
        let _ = (0..16).all(|_| self.read_devlog());
        self.report_dropped_lines(true);
    }

    /// Reads a turn's worth of the kernel's log; `false` when nothing is left.
    fn read_log(&mut self) -> bool {
        let Some(kmsg) = &mut self.logs.kmsg else { return false };
        let (mut said, kernel) = (Vec::new(), &mut self.logs.kernel);
        let printed = self.logs.printed_below;
        let most = self.params.log;
        let read = kmsg.read(TURN, |record| {
            kernel.feed(record);
            let Some(entry) = Entry::parse(record) else { return };
            let (level, (source, text)) = (entry.level(), entry.source());
            // Of the kernel's own talk only what is wrong; of its driver's all.
            let worth = match source {
                Source::Kernel if most < Level::Debug => level <= most.min(Level::Warning),
                _ => level <= most,
            };
            if worth {
                said.push((entry.at_us, source, level, u32::from(level as u8) >= printed, text.to_owned()));
            }
        });
        // One that cannot be read would wake the loop for ever.
        let more = read.unwrap_or_else(|_| {
            self.logs.kmsg = None;
            false
        });
        for (at_us, source, level, show, text) in said {
            self.log_line(at_us, &source, level, text, show);
        }
        more
    }

    /// Reads the whole kernel log, so that the last driver message is current.
    pub(super) fn read_whole_log(&mut self) {
        self.open_log();
        // A log that grows faster than it is read has an end here.
        let _ = (0..64).all(|_| self.read_log());
    }

    /// Reads a turn's worth of `/dev/log`; `false` when nothing is left.
    fn read_devlog(&mut self) -> bool {
        let Some(log) = &mut self.logs.devlog else { return false };
        let now = now_us();
        // One that cannot be read would wake the loop for ever.
        let messages = log.read(now, TURN).unwrap_or_else(|_| {
            self.logs.devlog = None;
            Vec::new()
        });
        let more = !messages.is_empty();
        for (source, message) in messages {
            if message.level <= self.params.log {
                self.log_line(now, &source, message.level, message.text, true);
            }
        }
        more
    }

    /// A line of a daemon's outputs, or of its file.
    pub(super) fn log_daemon_line(&mut self, source: &Source, text: String) {
        if Level::Info <= self.params.log {
            self.log_line(now_us(), source, Level::Info, text, true);
        }
    }

    /// Forwards a line within its source's rate limit; `show` is
    /// whether the kernel has not printed it to the console itself.
    fn log_line(&mut self, at_us: u64, source: &Source, level: Level, text: String, show: bool) {
        let Some(line) = self.logs.forwarder.take(now_us(), at_us, source, level, text) else { return };
        if show {
            self.recorder.log(&line);
        }
        // The agent's readers have the agent's own lines.
        if *source != Source::Agent {
            self.publish_line(line);
        }
    }

    fn report_dropped_lines(&mut self, all: bool) {
        for line in self.logs.forwarder.dropped_lines(now_us(), all) {
            self.recorder.log(&line);
            self.publish_line(line);
        }
    }

    fn publish_line(&mut self, line: LogLine) {
        if let Some(server) = self.server.as_mut().filter(|server| server.has_readers()) {
            let LogLine { at_us, level, source, text } = line;
            server.publish_log(&FromInit::Log { at_us, level: level.as_str().to_owned(), source, text });
        }
    }
}
