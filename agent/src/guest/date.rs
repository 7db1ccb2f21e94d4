//! SetGuestDateTime.

use rustix::time::{ClockId, Timespec, clock_settime};

use crate::error::{Error, Result};

/// The kernel's upper limit, in seconds: its clock counts nanoseconds in 63 bits, minus 30 years of
/// uptime.
const MAX_SECONDS: i64 = i64::MAX / 1_000_000_000 - 30 * 365 * 24 * 3600;

/// Validates and converts the time.
///
/// # Errors
/// `INVALID_ARGUMENT` for a time out of range.
fn checked(seconds: i64, micros: i64) -> Result<Timespec> {
    if (0..=MAX_SECONDS).contains(&seconds) && (0..1_000_000).contains(&micros) {
        return Ok(Timespec { tv_sec: seconds, tv_nsec: micros * 1000 });
    }
    Err(Error::invalid(format!(
        "SetGuestDateTime: {seconds} s and {micros} µs are out of range (0 to {MAX_SECONDS} s, 0 to 999999 µs)"
    )))
}

/// Sets the guest's clock to seconds and microseconds since 1970.
///
/// # Errors
/// The time is out of range, or the kernel rejects it.
pub fn set(seconds: i64, micros: i64) -> Result<()> {
    clock_settime(ClockId::Realtime, checked(seconds, micros)?).map_err(|error| {
        let hint = "the agent needs CAP_SYS_TIME, and the time must not be before the guest's start";
        Error::internal(format!("SetGuestDateTime: {seconds} s: {error}; {hint}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_times_are_rejected() {
        let time = checked(1_795_000_000, 999_999).unwrap();
        assert_eq!((time.tv_sec, time.tv_nsec), (1_795_000_000, 999_999_000));
        for (seconds, micros) in
            [(-1, 0), (0, -1), (0, 1_000_000), (MAX_SECONDS + 1, 0), (i64::MAX, i64::MAX), (i64::MIN, i64::MIN)]
        {
            let error = set(seconds, micros).unwrap_err();
            assert_eq!(error.code, ttrpc::Code::INVALID_ARGUMENT, "{seconds} {micros}");
        }
    }
}
