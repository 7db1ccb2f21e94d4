//! What the server gives back when it has nothing to do.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use firstlight_sys::memory;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How long nobody has called by then. What an ended process wrote, and idle
/// threads of the pool, are kept for ten seconds.
pub const QUIET: Duration = Duration::from_secs(11);

/// Knows when somebody has called last.
#[derive(Debug)]
pub struct Rest {
    begin: Instant,
    /// Milliseconds after `begin`.
    last: AtomicU64,
    resting: AtomicBool,
    woken: Notify,
}

impl Default for Rest {
    fn default() -> Self {
        Self { begin: Instant::now(), last: AtomicU64::new(0), resting: AtomicBool::new(false), woken: Notify::new() }
    }
}

impl Rest {
    /// Somebody calls.
    pub fn called(&self) {
        self.last.store(self.now(), Ordering::Relaxed);
        if self.resting.swap(false, Ordering::Relaxed) {
            self.woken.notify_one();
        }
    }

    /// Rests whenever nobody has called for [`QUIET`]. Never ends.
    pub async fn keep(&self) {
        self.each(|| {
            if let Err(error) = memory::release_unused() {
                log::warn!("memory that is not needed cannot be given back: {error}");
            }
        })
        .await;
    }

    async fn each(&self, mut rest: impl FnMut()) {
        loop {
            let left = self.left();
            if !left.is_zero() {
                tokio::time::sleep(left).await;
                continue;
            }
            self.resting.store(true, Ordering::Relaxed);
            rest();
            self.woken.notified().await;
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn left(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        (last + QUIET).saturating_sub(self.begin.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn it_rests_once_after_the_last_call_of_each_burst() {
        let local = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        local.block_on(async {
            let (rest, begin) = (Rest::default(), Instant::now());
            let rested = Mutex::new(Vec::new());
            let calls = async {
                // Nobody calls, then two bursts.
                for pause in [0, 30, 5, 5, 100, 1, 1, 50] {
                    tokio::time::sleep(Duration::from_secs(pause)).await;
                    rest.called();
                }
                tokio::time::sleep(Duration::from_secs(1000)).await;
            };
            tokio::select! {
                () = calls => {}
                () = rest.each(|| rested.lock().unwrap().push(begin.elapsed().as_secs())) => unreachable!(),
            }
            assert_eq!(*rested.lock().unwrap(), [11, 51, 153, 203]);
        });
    }
}
