//! The kernel's entropy pool.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, c_ulong};

/// `_IOW('R', 0x01, int)`.
const ADD_TO_COUNT: c_ulong = 0x4004_5201;

/// `_IO('R', 0x07)`.
const RESEED: c_ulong = 0x5207;

/// Credits `bytes` that were written to `device` (`/dev/random`) as entropy.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOTTY` for another device; `EINVAL` for a
/// number of bits that overflows.
pub fn credit(device: impl AsFd, bytes: usize) -> io::Result<()> {
    let bits = bytes.checked_mul(8).and_then(|bits| c_int::try_from(bits).ok());
    let bits = bits.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the descriptor is open for as long as `device` is borrowed; the
    // request reads one `int` from the pointer, which is to a live local.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), ADD_TO_COUNT, &raw const bits) })
}

/// Reseeds the CRNG behind `device` (`/dev/random`) from the pool immediately.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOTTY` for another device; `ENODATA`
/// before the pool is ready.
pub fn reseed(device: impl AsFd) -> io::Result<()> {
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
    fn requests_match_the_kernels() {
        let size = c_ulong::try_from(std::mem::size_of::<c_int>()).unwrap();
        assert_eq!(ADD_TO_COUNT, (1 << 30) | (size << 16) | (0x52 << 8) | 1);
        assert_eq!(RESEED, (0x52 << 8) | 7);
    }

    #[test]
    fn other_device_node_is_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(credit(&null, 1).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(reseed(&null).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(credit(&null, usize::MAX).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
