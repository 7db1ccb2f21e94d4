//! The clock of PID 1: microseconds since the kernel's start.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns `CLOCK_BOOTTIME` in µs.
#[must_use]
pub fn now_us() -> u64 {
    read_us(ClockId::Boottime)
}

/// A point in time, with the processor time of this process until then.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// [`now_us`].
    pub at_us: u64,
    /// [`process_us`].
    pub processor_us: u64,
}

impl Moment {
    /// Returns the current moment.
    #[must_use]
    pub fn now() -> Self {
        Self { at_us: now_us(), processor_us: process_us() }
    }
}

/// Returns the processor time of the calling thread so far, µs.
#[must_use]
pub fn thread_us() -> u64 {
    read_us(ClockId::ThreadCPUTime)
}

/// Returns the processor time of all threads of this process so far, including exited ones, µs.
/// That of process 1 includes the kernel's initialisation.
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

/// Converts microseconds to whole milliseconds, for texts.
#[must_use]
pub fn ms(us: u64) -> u64 {
    us / 1000
}

#[cfg(test)]
mod tests {
    #[test]
    fn clock_is_monotonic() {
        let one = super::now_us();
        assert!(one > 0 && super::now_us() >= one);
    }

    #[test]
    fn processor_time_excludes_waiting() {
        let (thread, process) = (super::thread_us(), super::process_us());
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(super::thread_us() - thread < 100_000);
        while super::thread_us() - thread < 2000 {}
        assert!(super::process_us() - process >= 2000);
    }
}
