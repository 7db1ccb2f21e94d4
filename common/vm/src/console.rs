//! What a guest printed: as text, and as a boot record.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firstlight_boot_record::{Assembler, BootRecord};
use tokio::fs::File;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::watch;

use crate::VmError;

/// Lines kept for error messages.
const KEPT_LINES: usize = 30;

/// The longest line kept; a guest that prints no line end is cut here.
const MAX_LINE: u64 = 64 * 1024;

/// Bytes of console after which nothing more is written to the log file: a
/// hostile guest must not fill the host's disk.
const MAX_LOG: u64 = 64 * 1024 * 1024;

#[derive(Debug, Default)]
struct Seen {
    assembler: Assembler,
    last: std::collections::VecDeque<String>,
}

/// The console of a running or ended guest.
#[derive(Debug, Clone)]
pub struct Console {
    seen: Arc<Mutex<Seen>>,
    changed: watch::Receiver<u64>,
}

impl Console {
    /// Follows `stream` in a task of its own, writing all of it to `log`.
    ///
    /// # Errors
    /// The log file cannot be made.
    pub(crate) async fn follow<S>(stream: S, log: &Path) -> Result<Self, VmError>
    where
        S: AsyncRead + Unpin + Send + 'static,
    {
        let file = File::create(log).await.map_err(|source| VmError::File { path: log.to_owned(), source })?;
        let (sender, changed) = watch::channel(0);
        let seen = Arc::new(Mutex::new(Seen::default()));
        let console = Self { seen: Arc::clone(&seen), changed };
        tokio::spawn(async move { pump(stream, file, &seen, &sender).await });
        Ok(console)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The boot record as far as the console tells it.
    #[must_use]
    pub fn record(&self) -> Option<BootRecord> {
        self.seen().assembler.record().cloned()
    }

    /// The last lines that are worth reading: ours and the kernel's.
    #[must_use]
    pub fn last_words(&self) -> String {
        let seen = self.seen();
        if seen.last.is_empty() {
            return "  (nothing: the kernel did not come up, or its console is elsewhere)".to_owned();
        }
        let lines: Vec<_> = seen.last.iter().map(|line| format!("  {line}")).collect();
        lines.join("\n")
    }

    /// Waits until `done` holds for the record; `false` if the console ended first.
    pub async fn wait_for(&self, done: impl Fn(&BootRecord) -> bool) -> bool {
        let mut changed = self.changed.clone();
        loop {
            if self.seen().assembler.record().is_some_and(&done) {
                return true;
            }
            if changed.changed().await.is_err() {
                return self.seen().assembler.record().is_some_and(&done);
            }
        }
    }

    /// Waits until the guest's end of the console is closed and all of it read.
    pub async fn ended(&self) {
        let mut changed = self.changed.clone();
        while changed.changed().await.is_ok() {}
    }
}

async fn pump<S: AsyncRead + Unpin>(stream: S, mut file: File, seen: &Mutex<Seen>, changed: &watch::Sender<u64>) {
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
        // A full disk must not stop the guest from being watched.
        if written + length <= MAX_LOG && file.write_all(&line).await.is_ok() {
            written += length;
        }
        let text = printable(&line);
        {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.assembler.feed(&text);
            if !text.is_empty() {
                if seen.last.len() == KEPT_LINES {
                    seen.last.pop_front();
                }
                seen.last.push_back(text.chars().take(400).collect());
            }
        }
        changed.send_modify(|count| *count += 1);
    }
    let _ = file.flush().await;
}

/// A console line without the control characters that a guest could use to
/// redraw the terminal of whoever reads it.
fn printable(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    text.trim_end().chars().filter(|c| !c.is_control() || *c == '\t').collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Line, State};

    #[tokio::test]
    async fn text_becomes_a_record_and_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        let boot = Line::Boot { init_version: "1".into(), kernel: "k".into(), pid1_start_us: 3 }.encode().unwrap();
        let ready = Line::State(State::Ready).encode().unwrap();
        let text = format!("\x1b[2Jkernel says\r\n{boot}\n{ready}\nunfinished");
        let console = Console::follow(std::io::Cursor::new(text.clone()), &log).await.unwrap();
        assert!(console.wait_for(|record| record.state == State::Ready).await);
        console.ended().await;
        assert!(!console.wait_for(|record| record.state == State::Failed).await);
        assert!(console.last_words().contains("[2Jkernel says"));
        assert!(!console.last_words().contains('\x1b'));
        assert!(console.last_words().ends_with("unfinished"));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
    }

    #[tokio::test]
    async fn endless_line_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let text = "x".repeat(200_000);
        let console = Console::follow(std::io::Cursor::new(text), &dir.path().join("l")).await.unwrap();
        console.ended().await;
        assert_eq!(console.last_words().lines().count(), 4);
    }
}
