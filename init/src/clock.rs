//! The one clock: microseconds since the kernel's start.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_BOOTTIME` in µs.
#[must_use]
pub fn now_us() -> u64 {
    read_us(ClockId::Boottime)
}

/// A moment, by the clock and by what this process has worked.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// [`now_us`].
    pub at_us: u64,
    /// [`process_us`].
    pub processor_us: u64,
}

impl Moment {
    /// This one.
    #[must_use]
    pub fn now() -> Self {
        Self { at_us: now_us(), processor_us: process_us() }
    }
}

/// Processor time of the calling thread so far, µs.
#[must_use]
pub fn thread_us() -> u64 {
    read_us(ClockId::ThreadCPUTime)
}

/// Processor time of all threads of this process so far, those that ended
/// included, µs. That of process 1 begins with what the kernel did as it.
#[must_use]
pub fn process_us() -> u64 {
    read_us(ClockId::ProcessCPUTime)
}

fn read_us(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds.saturating_mul(1_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or_default() / 1000)
}

/// Returns a duration in microseconds.
#[must_use]
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
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

    #[test]
    fn processor_time_counts_work_and_no_waiting() {
        let (thread, process) = (super::thread_us(), super::process_us());
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(super::thread_us() - thread < 100_000);
        while super::thread_us() - thread < 2000 {}
        assert!(super::process_us() - process >= 2000);
    }
}
