//! The processor's time-stamp counter.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long its ticks are counted.
const COUNTED: Duration = Duration::from_millis(20);

fn ticks() -> u64 {
    // SAFETY: every processor of this architecture has the instruction, and it touches no memory. A kernel that
    // forbids it (PR_SET_TSC) kills the process with a signal, as it does for every other program.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Its ticks in a millisecond, to about one in a thousand on a quiet machine. Takes 20 ms.
#[must_use]
pub fn khz() -> u64 {
    let (begin, first) = (Instant::now(), ticks());
    sleep(COUNTED);
    let (elapsed, passed) = (begin.elapsed(), ticks().wrapping_sub(first));
    let per_ms = u128::from(passed) * 1_000_000 / elapsed.as_nanos().max(1);
    u64::try_from(per_ms).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ticks_at_one_rate_that_processors_have() {
        let mut all: Vec<u64> = (0..5).map(|_| khz()).collect();
        all.sort_unstable();
        // Not the outer ones: a busy machine may have stopped the test between two readings.
        assert!((500_000..8_000_000).contains(&all[2]), "{all:?}");
        assert!(all[3] - all[1] < all[2] / 20, "{all:?}");
    }
}
