//! The NVIDIA driver's ioctl that waits for a GPU's attach.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::c_ulong;

/// `_IOWR('F', 218, 8 bytes)`.
const WAIT_OPEN_COMPLETE: c_ulong = 0xC008_46DA;

/// The driver's result of a completed open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenComplete {
    /// 0 or a negative errno.
    pub rc: i32,
    /// The resource manager (RM) status; 0 is OK.
    pub adapter_status: u32,
}

/// The driver's argument, laid out as it copies it.
#[repr(C)]
struct Argument {
    rc: i32,
    adapter_status: u32,
}

/// Blocks until the open that returned `device` has initialised its GPU.
///
/// The descriptor comes from an open of `/dev/nvidiaN` with `O_NONBLOCK`.
///
/// # Errors
/// `EINTR` if a signal arrived first; `ENOTTY` or `EINVAL` from a driver without
/// non-blocking open (before 550), whose open has already blocked.
pub fn wait_open_complete(device: impl AsFd) -> io::Result<OpenComplete> {
    let mut argument = Argument { rc: 0, adapter_status: 0 };
    // SAFETY: the descriptor is open for as long as `device` is borrowed. The
    // request encodes an 8-byte read-write argument, which is the size of
    // `Argument`, and the pointer is to a live local that nothing else uses.
    let answer = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), WAIT_OPEN_COMPLETE, &raw mut argument) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(OpenComplete { rc: argument.rc, adapter_status: argument.adapter_status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_matches_the_drivers() {
        let size = c_ulong::try_from(std::mem::size_of::<Argument>()).unwrap();
        assert_eq!(WAIT_OPEN_COMPLETE, (3 << 30) | (size << 16) | (0x46 << 8) | 218);
    }

    #[test]
    fn other_device_node_is_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = wait_open_complete(&null).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
