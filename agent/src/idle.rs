//! Returns unused memory to the kernel while the agent is idle.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use firstlight_sys::memory;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Time without calls after which the agent is idle. Output of exited processes, and idle threads
/// of the pool, are retained for ten seconds.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(11);

/// Tracks the time of the last call.
#[derive(Debug)]
pub struct Idle {
    begin: Instant,
    /// Milliseconds after `begin`.
    last: AtomicU64,
    idle: AtomicBool,
    woken: Notify,
}

impl Default for Idle {
    fn default() -> Self {
        Self { begin: Instant::now(), last: AtomicU64::new(0), idle: AtomicBool::new(false), woken: Notify::new() }
    }
}

impl Idle {
    /// Records a call.
    pub fn called(&self) {
        self.last.store(self.now(), Ordering::Relaxed);
        if self.idle.swap(false, Ordering::Relaxed) {
            self.woken.notify_one();
        }
    }

    /// Returns memory once per idle period, [`IDLE_TIMEOUT`] after the last call. Never returns.
    pub async fn run(&self) {
        self.on_idle(|| {
            if let Err(error) = memory::release_unused() {
                log::warn!("failed to return free memory to the kernel: {error}");
            }
        })
        .await;
    }

    async fn on_idle(&self, mut release: impl FnMut()) {
        loop {
            let left = self.left();
            if !left.is_zero() {
                tokio::time::sleep(left).await;
                continue;
            }
            self.idle.store(true, Ordering::Relaxed);
            release();
            self.woken.notified().await;
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn left(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        (last + IDLE_TIMEOUT).saturating_sub(self.begin.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn memory_is_returned_once_after_the_last_call_of_each_burst() {
        let local = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        local.block_on(async {
            let (idle, begin) = (Idle::default(), Instant::now());
            let released = Mutex::new(Vec::new());
            let calls = async {
                // No call, then two bursts.
                for pause in [0, 30, 5, 5, 100, 1, 1, 50] {
                    tokio::time::sleep(Duration::from_secs(pause)).await;
                    idle.called();
                }
                tokio::time::sleep(Duration::from_secs(1000)).await;
            };
            tokio::select! {
                () = calls => {}
                () = idle.on_idle(|| released.lock().unwrap().push(begin.elapsed().as_secs())) => unreachable!(),
            }
            assert_eq!(*released.lock().unwrap(), [11, 51, 153, 203]);
        });
    }
}
