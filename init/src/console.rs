//! Lines to the console, through a thread: a slow console never delays a unit.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

/// The device. Not `/dev/kmsg`, whose messages `quiet` hides.
const DEVICE: &str = "/dev/console";

/// Lines that may wait. A console that takes none any more costs no more memory than these.
const MOST: usize = 2048;

enum Message {
    Line(String),
    Flush(Sender<()>),
}

/// The way to the console. Lines are kept until [`Console::start`].
#[derive(Debug)]
pub struct Console {
    early: Vec<String>,
    writer: Option<Sender<Message>>,
    waiting: Arc<AtomicUsize>,
    dropped: usize,
}

impl Default for Console {
    fn default() -> Self {
        Self::new()
    }
}

impl Console {
    /// A console that keeps its lines for now.
    #[must_use]
    pub fn new() -> Self {
        Self { early: Vec::new(), writer: None, waiting: Arc::default(), dropped: 0 }
    }

    /// Starts the writer and hands it what was kept.
    pub fn start(&mut self) {
        if self.writer.is_some() {
            return;
        }
        let (sender, receiver) = channel();
        let waiting = Arc::clone(&self.waiting);
        let thread = std::thread::Builder::new().name("console".to_owned()).stack_size(32 << 10);
        if thread.spawn(move || write_all(&receiver, &waiting)).is_ok() {
            self.writer = Some(sender);
            for line in std::mem::take(&mut self.early) {
                self.line(line);
            }
        }
    }

    /// Puts one line, given without its end, behind those that wait.
    pub fn line(&mut self, line: String) {
        let Some(writer) = &self.writer else {
            self.early.push(line);
            return;
        };
        if self.waiting.load(Ordering::Relaxed) >= MOST {
            self.dropped += 1;
            return;
        }
        if self.dropped > 0 {
            let note = format!("firstlight: the console was too slow, {} lines are missing here", self.dropped);
            self.dropped = 0;
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let _ = writer.send(Message::Line(note));
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // The writer never ends while we hold its sender.
        let _ = writer.send(Message::Line(line));
    }

    /// Puts one line before all that are kept, except the first, which says who
    /// speaks. Behind those that wait once the writer runs.
    pub fn urgent(&mut self, line: String) {
        if self.writer.is_none() {
            self.early.insert(self.early.len().min(1), line);
        } else {
            self.line(line);
        }
    }

    /// Whether lines are written, not kept.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.writer.is_some()
    }

    /// Waits until everything is written, but no longer than `limit`.
    pub fn flush(&mut self, limit: Duration) {
        self.start();
        let (sender, receiver) = channel();
        if let Some(writer) = &self.writer
            && writer.send(Message::Flush(sender)).is_ok()
        {
            let _ = receiver.recv_timeout(limit);
        }
    }
}

/// Opens the console so that neither the open nor a write ever waits in the kernel.
fn open() -> io::Result<File> {
    OpenOptions::new().write(true).custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK).open(DEVICE)
}

fn write_all(lines: &Receiver<Message>, waiting: &AtomicUsize) {
    // Without a console the lines go nowhere; the record has them all.
    let mut console = open().ok();
    for message in lines {
        match message {
            Message::Line(mut line) => {
                line.push('\n');
                if let Some(console) = &mut console {
                    write(console, line.as_bytes());
                }
                waiting.fetch_sub(1, Ordering::Relaxed);
            }
            Message::Flush(done) => {
                if let Some(console) = &console {
                    // What the terminal has taken is not yet on the wire.
                    let _ = rustix::termios::tcdrain(console);
                }
                let _ = done.send(());
            }
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

/// One message to whoever looks, without any thread: for a panic. Shown under
/// `quiet` too, as kernel messages of priority 3 and less are.
pub fn last_gasp(text: &str) {
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

    #[test]
    fn lines_are_kept_until_the_writer_starts() {
        let mut console = Console::new();
        console.line("one".into());
        assert_eq!(console.early, ["one"]);
        assert!(!console.is_started());
        console.line("two".into());
        console.urgent("now".into());
        assert_eq!(console.early, ["one", "now", "two"]);
    }

    #[test]
    fn a_console_that_takes_nothing_costs_bounded_memory() {
        let mut console = Console::new();
        let (sender, receiver) = channel();
        console.writer = Some(sender);
        for _ in 0..MOST + 10 {
            console.line("x".into());
        }
        assert_eq!((receiver.try_iter().count(), console.dropped), (MOST, 10));
        console.waiting.store(0, Ordering::Relaxed);
        console.line("later".into());
        let rest: Vec<_> =
            receiver.try_iter().map(|m| if let Message::Line(line) = m { line } else { panic!() }).collect();
        assert!(rest[0].contains("10 lines are missing") && rest[1] == "later");
    }
}
