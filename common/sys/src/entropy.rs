//! The kernel's pool of random numbers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, c_ulong};

/// `_IOW('R', 0x01, int)`.
const ADD_TO_COUNT: c_ulong = 0x4004_5201;

/// `_IO('R', 0x07)`.
const RESEED: c_ulong = 0x5207;

/// Counts `bytes` that were written to `device`, `/dev/random`, as random.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOTTY` for another device; `EINVAL` for a
/// number of bits that is none.
pub fn credit(device: impl AsFd, bytes: usize) -> io::Result<()> {
    let bits = bytes.checked_mul(8).and_then(|bits| c_int::try_from(bits).ok());
    let bits = bits.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the descriptor is open for as long as `device` is borrowed; the
    // request reads one `int` from the pointer, which is to a live local.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), ADD_TO_COUNT, &raw const bits) })
}

/// Has the generator behind `device`, `/dev/random`, take a new key from the pool at once.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOTTY` for another device; `ENODATA`
/// before the pool is ready.
pub fn restart(device: impl AsFd) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `device` is borrowed; the request takes no argument.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), RESEED) })
}

fn check(answer: c_int) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_are_the_kernels() {
        let size = c_ulong::try_from(std::mem::size_of::<c_int>()).unwrap();
        assert_eq!(ADD_TO_COUNT, (1 << 30) | (size << 16) | (0x52 << 8) | 1);
        assert_eq!(RESEED, (0x52 << 8) | 7);
    }

    #[test]
    fn another_device_does_not_know_them() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(credit(&null, 1).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(restart(&null).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(credit(&null, usize::MAX).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
