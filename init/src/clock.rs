//! The one clock: microseconds since the kernel's start.

use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_BOOTTIME` in µs.
#[must_use]
pub fn now_us() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds.saturating_mul(1_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or_default() / 1000)
}

/// Microseconds as whole milliseconds, for people.
#[must_use]
pub fn ms(us: u64) -> u64 {
    us / 1000
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_goes_forward() {
        let one = super::now_us();
        assert!(one > 0 && super::now_us() >= one);
    }
}
