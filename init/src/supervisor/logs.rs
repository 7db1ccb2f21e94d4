//! Log forwarding: reads the log sources and applies levels and rate limits.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, BorrowedFd};

use firstlight_boot_record::Level;
use firstlight_pci::Address;

use super::effect::Effect;
use crate::kmsg::{Entry, Log, Reader, printed_below};
use crate::log::devlog::DevLog;
use crate::log::{Forwarder, Source};
use crate::root::Root;

/// Maximum number of records of the kernel log, and of datagrams of `/dev/log`, read per loop
/// iteration.
const TURN: usize = 64;

/// Maximum number of batches of `/dev/log` read before the final boot record: senders may keep
/// writing.
const LAST_BATCHES: usize = 16;

/// Maximum number of batches read by [`Logs::read_whole_kernel_log`]: the kernel log may grow
/// faster than it is read.
const WHOLE_LOG_BATCHES: usize = 64;

/// The log sources.
#[derive(Debug, Default)]
pub(super) struct Logs {
    kmsg: Option<Reader>,
    /// The data that the boot record uses from the kernel log.
    kernel: Log,
    /// The kernel's console log level. The kernel prints messages with a numerically lower level on
    /// the console itself.
    printed_below: u32,
    devlog: Option<DevLog>,
    forwarder: Forwarder,
}

impl Logs {
    /// Returns the descriptors to poll.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.kmsg.iter().map(Reader::as_fd).chain(self.devlog.iter().map(DevLog::as_fd))
    }

    /// Returns when [`Logs::read`] reports dropped lines next, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.forwarder.next_deadline()
    }

    /// Returns the data extracted from the kernel log.
    pub(super) fn kernel(&self) -> &Log {
        &self.kernel
    }

    /// Returns the GPUs about which the driver has logged a message since the last call.
    pub(super) fn take_gpus_with_messages(&mut self) -> BTreeSet<Address> {
        self.kernel.take_gpus_with_messages()
    }

    /// Creates `/dev/log`.
    ///
    /// # Errors
    /// The socket could not be created.
    pub(super) fn open_devlog(&mut self, root: &Root) -> Result<(), String> {
        self.devlog = Some(DevLog::open(root)?);
        Ok(())
    }

    /// Opens the kernel log, once, and reads a batch. The log has hundreds of records from before
    /// the start of PID 1, so the main loop opens it only after the agent listens, or earlier if a
    /// failure needs the driver's messages.
    pub(super) fn open_kernel_log(&mut self, now: u64, root: &Root, most: Level) -> Vec<Effect> {
        if self.kmsg.is_some() {
            return Vec::new();
        }
        self.kmsg = Reader::open().ok();
        self.printed_below = printed_below(root);
        self.read_kernel_log(now, most).0
    }

    /// Reads the kernel log to its end, so that the driver's last messages about each GPU are up to
    /// date.
    pub(super) fn read_whole_kernel_log(&mut self, now: u64, root: &Root, most: Level) -> Vec<Effect> {
        let mut effects = self.open_kernel_log(now, root, most);
        for _ in 0..WHOLE_LOG_BATCHES {
            let (lines, more) = self.read_kernel_log(now, most);
            effects.extend(lines);
            if !more {
                break;
            }
        }
        effects
    }

    /// Reads a batch of each log and reports the dropped lines that are due.
    pub(super) fn read(&mut self, now: u64, most: Level) -> Vec<Effect> {
        let mut effects = self.read_kernel_log(now, most).0;
        effects.extend(self.read_devlog(now, most).0);
        if self.next_deadline().is_some_and(|at| at <= now) {
            effects.extend(self.dropped_lines(now, false));
        }
        effects
    }

    /// Reads the remaining lines, up to a limit, before the final boot record, and reports all
    /// dropped lines.
    pub(super) fn read_last(&mut self, now: u64, most: Level) -> Vec<Effect> {
        let mut effects = self.read_kernel_log(now, most).0;
        for _ in 0..LAST_BATCHES {
            let (lines, more) = self.read_devlog(now, most);
            effects.extend(lines);
            if !more {
                break;
            }
        }
        effects.extend(self.dropped_lines(now, true));
        effects
    }

    /// Reads a batch of the kernel log; returns its effects and whether more may be left.
    fn read_kernel_log(&mut self, now: u64, most: Level) -> (Vec<Effect>, bool) {
        let Some(kmsg) = &mut self.kmsg else { return (Vec::new(), false) };
        let (mut effects, printed) = (Vec::new(), self.printed_below);
        let (kernel, forwarder) = (&mut self.kernel, &mut self.forwarder);
        let read = kmsg.read(TURN, |record| {
            kernel.feed(record);
            let Some(entry) = Entry::parse(record) else { return };
            let (level, (source, text)) = (entry.level(), entry.source());
            if is_forwarded(&source, level, most) {
                let console = u32::from(level as u8) >= printed;
                effects.extend(forward(forwarder, now, entry.at_us, &source, level, text.to_owned(), console));
            }
        });
        let more = read.unwrap_or_else(|_| {
            // Closed, because poll would report the failed descriptor as ready in every loop
            // iteration.
            self.kmsg = None;
            false
        });
        (effects, more)
    }

    /// Reads a batch of `/dev/log`; returns its effects and whether more may be left.
    fn read_devlog(&mut self, now: u64, most: Level) -> (Vec<Effect>, bool) {
        let Some(log) = &mut self.devlog else { return (Vec::new(), false) };
        let messages = log.read(now, TURN).unwrap_or_else(|_| {
            // Closed, because poll would report the failed socket as ready in every loop iteration.
            self.devlog = None;
            Vec::new()
        });
        let more = !messages.is_empty();
        let messages = messages.into_iter().filter(|(_, message)| message.level <= most);
        let lines = messages.filter_map(|(source, message)| {
            forward(&mut self.forwarder, now, now, &source, message.level, message.text, true)
        });
        (lines.collect(), more)
    }

    /// Forwards an output line of a supervised program, at level info, within the source's rate
    /// limit.
    pub(super) fn program_line(&mut self, now: u64, most: Level, source: &Source, text: String) -> Option<Effect> {
        let forwarder = &mut self.forwarder;
        (Level::Info <= most).then(|| forward(forwarder, now, now, source, Level::Info, text, true)).flatten()
    }

    fn dropped_lines(&mut self, now: u64, all: bool) -> Vec<Effect> {
        let lines = self.forwarder.dropped_lines(now, all).into_iter();
        lines.map(|line| Effect::Log { line, console: true, clients: true }).collect()
    }
}

/// Returns whether a line of the kernel log is forwarded: at the chosen level `most` or more
/// severe. Lines of the kernel other than the GPU driver's have to be warnings or worse, unless
/// `most` is debug.
fn is_forwarded(source: &Source, level: Level, most: Level) -> bool {
    match source {
        Source::Kernel if most < Level::Debug => level <= most.min(Level::Warning),
        _ => level <= most,
    }
}

/// Returns the effect of a line if its source is within its rate limit. `console` is `false` if the
/// kernel has already printed the line on the console.
fn forward(
    forwarder: &mut Forwarder,
    now: u64,
    at_us: u64,
    source: &Source,
    level: Level,
    text: String,
    console: bool,
) -> Option<Effect> {
    let line = forwarder.take(now, at_us, source, level, text)?;
    // The clients that subscribed to the log are the agent's, which has its own lines already.
    Some(Effect::Log { line, console, clients: *source != Source::Agent })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn kernel_lines_are_forwarded_from_warning_and_driver_lines_from_the_chosen_level() {
        for (source, level, most, expected) in [
            (Source::Kernel, Level::Info, Level::Info, false),
            (Source::Kernel, Level::Warning, Level::Info, true),
            (Source::Kernel, Level::Warning, Level::Error, false),
            (Source::Kernel, Level::Info, Level::Debug, true),
            (Source::Driver, Level::Info, Level::Info, true),
            (Source::Driver, Level::Info, Level::Warning, false),
        ] {
            assert_eq!(is_forwarded(&source, level, most), expected, "{source:?} {level:?} {most:?}");
        }
    }

    #[test]
    fn agent_lines_go_to_the_console_only() {
        let mut forwarder = Forwarder::default();
        let mut clients_of =
            |source: &Source| match forward(&mut forwarder, 1, 1, source, Level::Info, "x".into(), true) {
                Some(Effect::Log { clients, .. }) => clients,
                other => panic!("{other:?}"),
            };
        assert!(!clients_of(&Source::Agent) && clients_of(&Source::Kmsg));
    }

    #[test]
    fn program_lines_beyond_the_rate_limit_are_counted_and_reported() {
        let mut logs = Logs::default();
        let source = Source::Daemon("imex");
        assert_eq!(logs.program_line(1, Level::Warning, &source, "x".into()), None);
        let passed = (0..1000).filter_map(|_| logs.program_line(1, Level::Info, &source, "x".into())).count();
        assert!((1..1000).contains(&passed));
        let at = logs.next_deadline().unwrap();
        let effects = logs.read(at, Level::Info);
        assert!(
            matches!(&effects[..], [Effect::Log { line, clients: true, .. }] if line.text.contains("left out")),
            "{effects:?}"
        );
    }

    #[test]
    fn datagrams_of_dev_log_are_forwarded_up_to_the_level() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("dev")).unwrap();
        let mut logs = Logs::default();
        logs.open_devlog(&Root::at(dir.path())).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        for text in ["<14>x: shown", "<15>x: hidden"] {
            sender.send_to(text.as_bytes(), dir.path().join("dev/log")).unwrap();
        }
        let effects = logs.read_last(1, Level::Info);
        assert!(matches!(&effects[..], [Effect::Log { line, .. }] if line.text.contains("shown")), "{effects:?}");
    }
}
