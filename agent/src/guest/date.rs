//! SetGuestDateTime.

use rustix::time::{ClockId, Timespec, clock_settime};

use crate::error::{Error, Result};

/// The kernel takes no time after this, in seconds: its clock counts
/// nanoseconds in 63 bits and keeps 30 years for what runs from then on.
const LATEST: i64 = i64::MAX / 1_000_000_000 - 30 * 365 * 24 * 3600;

/// The time as the kernel takes it.
///
/// # Errors
/// `INVALID_ARGUMENT` for a time that no clock can show.
fn checked(seconds: i64, micros: i64) -> Result<Timespec> {
    if (0..=LATEST).contains(&seconds) && (0..1_000_000).contains(&micros) {
        return Ok(Timespec { tv_sec: seconds, tv_nsec: micros * 1000 });
    }
    Err(Error::invalid(format!(
        "SetGuestDateTime: {seconds} s and {micros} µs are no time of day (0 to {LATEST} s, 0 to 999999 µs)"
    )))
}

/// Sets the guest's clock: seconds and microseconds since 1970.
///
/// # Errors
/// The time makes no sense, or the kernel refuses it.
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
    fn times_that_no_clock_shows_are_refused() {
        let time = checked(1_795_000_000, 999_999).unwrap();
        assert_eq!((time.tv_sec, time.tv_nsec), (1_795_000_000, 999_999_000));
        for (seconds, micros) in
            [(-1, 0), (0, -1), (0, 1_000_000), (LATEST + 1, 0), (i64::MAX, i64::MAX), (i64::MIN, i64::MIN)]
        {
            let error = set(seconds, micros).unwrap_err();
            assert_eq!(error.code, ttrpc::Code::INVALID_ARGUMENT, "{seconds} {micros}");
        }
    }
}
