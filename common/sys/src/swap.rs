//! Swap areas.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Swaps to an open file or block device, with the kernel's choice of priority.
/// Any kind of descriptor does, also one of `O_PATH`; `/proc` has to be mounted.
///
/// # Errors
/// The kernel's: `EINVAL` without a swap area on it, `EBUSY`, `EPERM`.
pub fn on(file: impl AsFd) -> io::Result<()> {
    let path = CString::new(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))?;
    // SAFETY: the path is a live string that ends with a NUL; the call reads nothing else of ours.
    if unsafe { libc::swapon(path.as_ptr(), 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
