//! Signals by signalfd.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libc::{c_int, sigset_t};

/// A descriptor that becomes readable when one of its signals is pending.
#[derive(Debug)]
pub struct SignalFd(OwnedFd);

fn set_of(signals: &[c_int]) -> io::Result<sigset_t> {
    let mut set = MaybeUninit::<sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set it is given and cannot fail for a valid pointer.
    let mut set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for signal in signals {
        // SAFETY: the set is initialised; an unknown number is refused with EINVAL.
        if unsafe { libc::sigaddset(&raw mut set, *signal) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(set)
}

impl SignalFd {
    /// Blocks `signals` in the calling thread and in all threads that it starts
    /// later, and makes them readable instead. Must be called before any thread is
    /// started.
    ///
    /// # Errors
    /// A number is not a signal, or the descriptor limit is reached.
    pub fn block(signals: &[c_int]) -> io::Result<Self> {
        let set = set_of(signals)?;
        // SAFETY: the set is initialised and the old mask is not returned.
        let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        // SAFETY: the set is initialised; -1 asks for a new descriptor, which is checked before it is owned.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just returned by the kernel and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Reads the next pending signal and its sender; `None` if none is pending.
    ///
    /// # Errors
    /// The read failed.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = std::mem::size_of::<libc::signalfd_siginfo>();
        loop {
            // SAFETY: the buffer is `size` bytes of writable memory, and the kernel writes whole structures only.
            let got = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size) };
            if got < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                }
            }
            if usize::try_from(got).ok() != Some(size) {
                return Ok(None);
            }
            // SAFETY: the kernel has written all `size` bytes of the structure.
            let info = unsafe { info.assume_init() };
            return Ok(Some(Signal { number: info.ssi_signo.cast_signed(), sender: info.ssi_pid }));
        }
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A signal that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    /// Its number.
    pub number: c_int,
    /// The sender's process id; 0 for the kernel.
    pub sender: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocked_signal_is_read_with_its_sender() {
        // In a separate thread: the mask is per thread, and the signal is sent to this thread only.
        std::thread::spawn(|| {
            let signals = SignalFd::block(&[libc::SIGUSR2]).unwrap();
            assert_eq!(signals.next().unwrap(), None);
            // SAFETY: sends a blocked signal to the calling thread.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
            assert_eq!(signals.next().unwrap(), Some(Signal { number: libc::SIGUSR2, sender: std::process::id() }));
            assert_eq!(signals.next().unwrap(), None);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn invalid_signal_number_is_refused() {
        assert_eq!(SignalFd::block(&[0]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
