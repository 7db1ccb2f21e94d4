//! The boot record's clock.

use rustix::time::{ClockId, clock_gettime};

/// Returns microseconds of `CLOCK_BOOTTIME`, whose zero is the kernel's start.
#[must_use]
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0) / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_equals_the_uptime() {
        let uptime: f64 = std::fs::read_to_string("/proc/uptime").unwrap().split(' ').next().unwrap().parse().unwrap();
        let now = std::time::Duration::from_micros(now_us()).as_secs_f64();
        assert!((now - uptime).abs() < 1.0, "{now} {uptime}");
    }
}
