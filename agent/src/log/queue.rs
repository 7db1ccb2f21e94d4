//! The bounded queue of the log port.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::json;

/// Maximum number of queued records.
const MAX_RECORDS: usize = 1024;

/// Maximum number of queued bytes.
const MAX_BYTES: usize = 256 * 1024;

/// A bounded queue: when full, the oldest records are dropped and their number is reported in their
/// place. Adding never waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    lines: VecDeque<String>,
    bytes: usize,
    /// Dropped records not yet reported to the reader.
    missing: u64,
    /// Dropped records since the start.
    dropped: u64,
}

impl Queue {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a line.
    pub(super) fn push(&self, line: String) {
        {
            let mut inner = self.inner();
            inner.bytes += line.len();
            inner.lines.push_back(line);
            while inner.lines.len() > MAX_RECORDS || inner.bytes > MAX_BYTES {
                let Some(oldest) = inner.lines.pop_front() else { break };
                inner.bytes -= oldest.len();
                inner.missing += 1;
                inner.dropped += 1;
            }
        }
        self.added.notify_one();
    }

    /// Returns the number of records dropped since the agent's start.
    pub(crate) fn dropped(&self) -> u64 {
        self.inner().dropped
    }

    /// Returns the next line, or the message about dropped records before it. Cancel-safe. For one
    /// reader.
    pub(super) async fn next(&self) -> String {
        loop {
            {
                let mut inner = self.inner();
                if inner.missing > 0 {
                    let missing = std::mem::take(&mut inner.missing);
                    return json::notice(&format!(
                        "{missing} records were dropped here: the client did not read them in time"
                    ));
                }
                if let Some(line) = inner.lines.pop_front() {
                    inner.bytes -= line.len();
                    return line;
                }
            }
            // `Notify` stores a permit, so a notification in between is not lost.
            self.added.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn dropped_records_are_counted_in_their_place() {
        run(async {
            let queue = Queue::default();
            for number in 0..MAX_RECORDS + 7 {
                queue.push(format!("{number}\n"));
            }
            assert_eq!(queue.dropped(), 7);
            assert!(queue.next().await.contains("7 records were dropped"));
            assert_eq!(queue.next().await, "7\n");
            for _ in 8..MAX_RECORDS + 7 {
                queue.next().await;
            }
            let waiting = tokio::time::timeout(std::time::Duration::from_millis(20), queue.next()).await;
            assert!(waiting.is_err(), "it is reported once");
            let (line, ()) = tokio::join!(queue.next(), async { queue.push("x\n".into()) });
            assert_eq!(line, "x\n");
        });
    }

    #[test]
    fn queued_bytes_are_bounded() {
        let queue = Queue::default();
        let figures = || {
            let inner = queue.inner();
            (inner.lines.len(), inner.bytes, inner.dropped)
        };
        for _ in 0..100 {
            queue.push("x".repeat(MAX_BYTES / 10));
        }
        assert_eq!(figures(), (10, MAX_BYTES / 10 * 10, 90));
        queue.push("x".repeat(2 * MAX_BYTES));
        assert_eq!(figures(), (0, 0, 101));
    }
}
