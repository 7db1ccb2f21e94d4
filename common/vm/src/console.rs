//! Guest console: log file, recent lines and boot record.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firstlight_boot_record::{Assembler, BootRecord};
use tokio::fs::File;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::watch;

use crate::VmError;

/// Number of recent lines for error messages.
const TAIL_LINES: usize = 30;

/// Maximum line length, bytes; longer lines of a guest are split.
const MAX_LINE: u64 = 64 * 1024;

/// Maximum size of the log file, bytes: a hostile guest must not fill the host's disk.
const MAX_LOG: u64 = 64 * 1024 * 1024;

#[derive(Debug, Default)]
struct Received {
    assembler: Assembler,
    lines: std::collections::VecDeque<String>,
}

/// The console of a running or ended guest.
#[derive(Debug, Clone)]
pub struct Console {
    received: Arc<Mutex<Received>>,
    changed: watch::Receiver<u64>,
}

impl Console {
    /// Spawns a task that reads `stream` and writes it to `log`.
    ///
    /// # Errors
    /// The log file cannot be created.
    pub(crate) async fn follow<S>(stream: S, log: &Path) -> Result<Self, VmError>
    where
        S: AsyncRead + Unpin + Send + 'static,
    {
        let file = File::create(log).await.map_err(|source| VmError::File { path: log.to_owned(), source })?;
        let (sender, changed) = watch::channel(0);
        let received = Arc::new(Mutex::new(Received::default()));
        let console = Self { received: Arc::clone(&received), changed };
        tokio::spawn(async move { process_stream(stream, file, &received, &sender).await });
        Ok(console)
    }

    fn received(&self) -> MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the boot record as received on the console so far.
    #[must_use]
    pub fn record(&self) -> Option<BootRecord> {
        self.received().assembler.record().cloned()
    }

    /// Returns the last lines of the console, indented.
    #[must_use]
    pub fn tail(&self) -> String {
        let received = self.received();
        if received.lines.is_empty() {
            return "  (no output: the kernel did not start, or its console is another device)".to_owned();
        }
        let lines: Vec<_> = received.lines.iter().map(|line| format!("  {line}")).collect();
        lines.join("\n")
    }

    /// Waits until `done` holds for the record; returns `false` if the console closed first.
    pub async fn wait_for(&self, done: impl Fn(&BootRecord) -> bool) -> bool {
        let mut changed = self.changed.clone();
        loop {
            if self.received().assembler.record().is_some_and(&done) {
                return true;
            }
            if changed.changed().await.is_err() {
                return self.received().assembler.record().is_some_and(&done);
            }
        }
    }

    /// Waits until the guest has closed the console and all of it is read.
    pub async fn ended(&self) {
        let mut changed = self.changed.clone();
        while changed.changed().await.is_ok() {}
    }
}

async fn process_stream<S: AsyncRead + Unpin>(
    stream: S,
    mut file: File,
    received: &Mutex<Received>,
    changed: &watch::Sender<u64>,
) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    let mut written = 0;
    loop {
        line.clear();
        match (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        let length = u64::try_from(line.len()).unwrap_or(u64::MAX);
        // A full disk must not stop the monitoring of the guest.
        if written + length <= MAX_LOG && file.write_all(&line).await.is_ok() {
            written += length;
        }
        let text = printable(&line);
        {
            let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
            received.assembler.feed(&text);
            if !text.is_empty() {
                if received.lines.len() == TAIL_LINES {
                    received.lines.pop_front();
                }
                received.lines.push_back(text.chars().take(400).collect());
            }
        }
        changed.send_modify(|count| *count += 1);
    }
    let _ = file.flush().await;
}

/// Removes the control characters from a console line, with which a guest could
/// redraw the reader's terminal.
fn printable(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    text.trim_end().chars().filter(|c| !c.is_control() || *c == '\t').collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Line, State};

    #[tokio::test]
    async fn console_text_becomes_a_record_and_a_tail() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        let boot = Line::Boot { init_version: "1".into(), kernel: "k".into(), pid1_start_us: 3 }.encode().unwrap();
        let ready = Line::State(State::Ready).encode().unwrap();
        let text = format!("\x1b[2Jkernel says\r\n{boot}\n{ready}\nunfinished");
        let console = Console::follow(std::io::Cursor::new(text.clone()), &log).await.unwrap();
        assert!(console.wait_for(|record| record.state == State::Ready).await);
        console.ended().await;
        assert!(!console.wait_for(|record| record.state == State::Failed).await);
        assert!(console.tail().contains("[2Jkernel says"));
        assert!(!console.tail().contains('\x1b'));
        assert!(console.tail().ends_with("unfinished"));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
    }

    #[tokio::test]
    async fn overlong_line_is_split() {
        let dir = tempfile::tempdir().unwrap();
        let text = "x".repeat(200_000);
        let console = Console::follow(std::io::Cursor::new(text), &dir.path().join("l")).await.unwrap();
        console.ended().await;
        assert_eq!(console.tail().lines().count(), 4);
    }
}
