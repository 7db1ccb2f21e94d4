//! Swap areas.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Enables swap on an open file or block device, with the kernel's choice of
/// priority. Accepts any descriptor, including `O_PATH`; `/proc` must be mounted.
///
/// # Errors
/// The kernel's: `EINVAL` without a swap signature, `EBUSY`, `EPERM`.
pub fn enable(file: impl AsFd) -> io::Result<()> {
    let path = CString::new(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))?;
    // SAFETY: the path is a live NUL-terminated string; the call reads no other memory of this process.
    if unsafe { libc::swapon(path.as_ptr(), 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
