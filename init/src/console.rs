//! Writes lines to the console on a thread: a slow console does not delay a unit.
//!
//! Lines of the boot record have priority over forwarded log lines; both queues
//! are bounded.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::clock::thread_us;

/// The device. Not `/dev/kmsg`, whose messages are hidden by `quiet`.
const DEVICE: &str = "/dev/console";

/// Maximum number of queued lines of the record. A console that does not accept output uses no more
/// memory.
const MOST: usize = 2048;

/// Maximum size of queued log lines, bytes.
const MOST_LOG: usize = 128 << 10;

/// The queued lines.
#[derive(Debug, Default)]
struct Queues {
    /// Lines of the boot record and of PID 1.
    record: VecDeque<String>,
    /// Forwarded log lines.
    log: VecDeque<String>,
    log_bytes: usize,
    /// Number of lines of each kind that were dropped because the queue was full.
    dropped: usize,
    log_dropped: usize,
    /// Waiters of [`Console::flush`].
    flushes: Vec<Sender<()>>,
}

impl Queues {
    fn push(&mut self, line: String) {
        if self.record.len() >= MOST {
            self.dropped += 1;
            return;
        }
        if self.dropped > 0 {
            self.record.push_back(missing("", std::mem::take(&mut self.dropped)));
        }
        self.record.push_back(line);
    }

    fn push_log(&mut self, line: String) {
        if self.log_bytes + line.len() > MOST_LOG {
            self.log_dropped += 1;
            return;
        }
        if self.log_dropped > 0 {
            let note = missing("log ", std::mem::take(&mut self.log_dropped));
            self.log_bytes += note.len();
            self.log.push_back(note);
        }
        self.log_bytes += line.len();
        self.log.push_back(line);
    }

    fn pop(&mut self) -> Option<String> {
        self.record.pop_front().or_else(|| {
            let line = self.log.pop_front()?;
            self.log_bytes -= line.len();
            Some(line)
        })
    }
}

fn missing(kind: &str, lines: usize) -> String {
    format!("firstlight: the console was too slow, {lines} {kind}lines are missing here")
}

#[derive(Debug, Default)]
struct Shared {
    queues: Mutex<Queues>,
    changed: Condvar,
    /// Processor time of the writer so far, µs.
    spent_us: AtomicU64,
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The console writer. Lines are queued until [`Console::start`].
#[derive(Debug, Default)]
pub struct Console {
    shared: Arc<Shared>,
    started: bool,
}

impl Console {
    /// Creates a console that queues its lines.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts the writer.
    pub fn start(&mut self) {
        if self.started {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("console".to_owned()).stack_size(32 << 10);
        self.started = thread.spawn(move || write_all(&shared)).is_ok();
    }

    /// Queues a line, given without newline, after the queued lines of the record.
    pub fn line(&mut self, line: String) {
        self.shared.queues().push(line);
        self.shared.changed.notify_one();
    }

    /// Queues a forwarded log line after all queued log lines.
    pub fn log(&mut self, line: String) {
        self.shared.queues().push_log(line);
        self.shared.changed.notify_one();
    }

    /// Queues a line before all queued lines except the first, which has the version. Once the
    /// writer runs, after all queued lines.
    pub fn urgent(&mut self, line: String) {
        if self.started {
            self.line(line);
        } else {
            let mut queues = self.shared.queues();
            let at = queues.record.len().min(1);
            queues.record.insert(at, line);
        }
    }

    /// Returns whether the writer is started.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.started
    }

    /// Returns the processor time of the writer so far, µs; most of it is the kernel's, which polls
    /// until the host has received a line.
    #[must_use]
    pub fn spent_us(&self) -> u64 {
        self.shared.spent_us.load(Ordering::Relaxed)
    }

    /// Waits until all lines are written, at most for `limit`.
    pub fn flush(&mut self, limit: Duration) {
        self.start();
        let (sender, receiver) = channel();
        self.shared.queues().flushes.push(sender);
        self.shared.changed.notify_one();
        let _ = receiver.recv_timeout(limit);
    }
}

/// Opens the console so that neither the open nor a write blocks in the kernel.
fn open() -> io::Result<File> {
    OpenOptions::new().write(true).custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK).open(DEVICE)
}

fn write_all(shared: &Shared) {
    // Without a console the lines are dropped; the boot record has all of them.
    let mut console = open().ok();
    let mut queues = shared.queues();
    loop {
        if let Some(mut line) = queues.pop() {
            drop(queues);
            line.push('\n');
            if let Some(console) = &mut console {
                write(console, line.as_bytes());
            }
            shared.spent_us.store(thread_us(), Ordering::Relaxed);
            queues = shared.queues();
        } else if !queues.flushes.is_empty() {
            let done = std::mem::take(&mut queues.flushes);
            drop(queues);
            if let Some(console) = &console {
                // Bytes that the terminal driver accepted may not have been transmitted.
                let _ = rustix::termios::tcdrain(console);
            }
            for waiting in done {
                let _ = waiting.send(());
            }
            queues = shared.queues();
        } else {
            queues = shared.changed.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn write(console: &mut File, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match console.write(bytes) {
            Ok(0) => return,
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(console, PollFlags::OUT)];
                if poll(&mut fds, None).is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// Writes one message to the console and the kernel log without a thread, for a panic. It is shown
/// under `quiet` too, as kernel messages of priority 3 and less are.
pub fn write_final_message(text: &str) {
    if let Ok(mut console) = open() {
        let _ = console.write_all(format!("{text}\n").as_bytes());
    }
    if let Ok(mut kmsg) = OpenOptions::new().write(true).open("/dev/kmsg") {
        let _ = kmsg.write_all(format!("<2>{text}").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(console: &Console) -> Vec<String> {
        std::iter::from_fn(|| console.shared.queues().pop()).collect()
    }

    #[test]
    fn lines_are_queued_until_the_writer_starts() {
        let mut console = Console::new();
        console.line("one".into());
        assert!(!console.is_started());
        console.line("two".into());
        console.urgent("now".into());
        assert_eq!(waiting(&console), ["one", "now", "two"]);
    }

    #[test]
    fn record_lines_precede_log_lines() {
        let mut console = Console::new();
        for n in 0..3 {
            console.log(format!("log {n}"));
        }
        console.line("record".into());
        assert_eq!(waiting(&console), ["record", "log 0", "log 1", "log 2"]);
    }

    #[test]
    fn blocked_console_uses_bounded_memory() {
        let mut console = Console::new();
        for _ in 0..MOST + 10 {
            console.line("x".into());
        }
        assert_eq!(waiting(&console).len(), MOST);
        console.line("later".into());
        let rest = waiting(&console);
        assert!(rest[0].contains(", 10 lines are missing here") && rest[1] == "later", "{rest:?}");
    }

    #[test]
    fn log_flood_is_bounded_and_drops_no_record_line() {
        let mut console = Console::new();
        for _ in 0..10_000 {
            console.log("x".repeat(1000));
            console.line("record".into());
            console.shared.queues().record.pop_front().unwrap();
        }
        assert_eq!(console.shared.queues().dropped, 0);
        let kept = waiting(&console).len();
        assert_eq!(kept, MOST_LOG / 1000);
        console.log("later".into());
        let rest = waiting(&console);
        assert!(rest[0].contains(&format!(", {} log lines are missing here", 10_000 - kept)), "{rest:?}");
        assert_eq!((rest[1].as_str(), console.shared.queues().log_bytes), ("later", 0));
    }
}
