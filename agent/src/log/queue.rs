//! Records on their way to the log port.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::json;

/// Records that wait at most.
const MOST: usize = 1024;

/// Bytes that wait at most.
const BYTES: usize = 256 * 1024;

/// A bounded queue: the oldest records go first when it is full, and their
/// number is told in their place. Adding never waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    lines: VecDeque<String>,
    bytes: usize,
    /// Dropped since the reader was told.
    missing: u64,
    /// Dropped ever.
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
            while inner.lines.len() > MOST || inner.bytes > BYTES {
                let Some(oldest) = inner.lines.pop_front() else { break };
                inner.bytes -= oldest.len();
                inner.missing += 1;
                inner.dropped += 1;
            }
        }
        self.news.notify_one();
    }

    /// How many records were dropped since the agent's start.
    pub(crate) fn dropped(&self) -> u64 {
        self.inner().dropped
    }

    /// The next line, or the one that says how many are missing before it.
    /// Dropping the future loses nothing. For one reader.
    pub(super) async fn next(&self) -> String {
        loop {
            {
                let mut inner = self.inner();
                if inner.missing > 0 {
                    let missing = std::mem::take(&mut inner.missing);
                    return json::remark(&format!("{missing} records were dropped here: nobody read them in time"));
                }
                if let Some(line) = inner.lines.pop_front() {
                    inner.bytes -= line.len();
                    return line;
                }
            }
            // A notice that came since is kept, so none is missed.
            self.news.notified().await;
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
    fn what_does_not_fit_is_counted_in_its_place() {
        run(async {
            let queue = Queue::default();
            for number in 0..MOST + 7 {
                queue.push(format!("{number}\n"));
            }
            assert_eq!(queue.dropped(), 7);
            assert!(queue.next().await.contains("7 records were dropped"));
            assert_eq!(queue.next().await, "7\n");
            for _ in 8..MOST + 7 {
                queue.next().await;
            }
            let waiting = tokio::time::timeout(std::time::Duration::from_millis(20), queue.next()).await;
            assert!(waiting.is_err(), "it is told once");
            let (line, ()) = tokio::join!(queue.next(), async { queue.push("x\n".into()) });
            assert_eq!(line, "x\n");
        });
    }

    #[test]
    fn bytes_are_bounded_too() {
        let queue = Queue::default();
        let figures = || {
            let inner = queue.inner();
            (inner.lines.len(), inner.bytes, inner.dropped)
        };
        for _ in 0..100 {
            queue.push("x".repeat(BYTES / 10));
        }
        assert_eq!(figures(), (10, BYTES / 10 * 10, 90));
        queue.push("x".repeat(2 * BYTES));
        assert_eq!(figures(), (0, 0, 101));
    }
}
