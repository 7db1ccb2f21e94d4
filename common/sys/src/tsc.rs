//! The CPU's time-stamp counter (TSC).

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Measurement interval.
const INTERVAL: Duration = Duration::from_millis(20);

fn ticks() -> u64 {
    // SAFETY: every processor of this architecture has the instruction, and it touches no memory. A kernel that
    // forbids it (PR_SET_TSC) kills the process with a signal, as it does for every other program.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Measures the TSC frequency, kHz, to about 0.1 % on an idle machine. Takes 20 ms.
#[must_use]
pub fn khz() -> u64 {
    let (begin, first) = (Instant::now(), ticks());
    sleep(INTERVAL);
    let (elapsed, passed) = (begin.elapsed(), ticks().wrapping_sub(first));
    let per_ms = u128::from(passed) * 1_000_000 / elapsed.as_nanos().max(1);
    u64::try_from(per_ms).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequency_is_plausible_and_stable() {
        let mut all: Vec<u64> = (0..5).map(|_| khz()).collect();
        all.sort_unstable();
        // Without the extremes: a busy machine may have preempted the test between two readings.
        assert!((500_000..8_000_000).contains(&all[2]), "{all:?}");
        assert!(all[3] - all[1] < all[2] / 20, "{all:?}");
    }
}
