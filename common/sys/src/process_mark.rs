//! Distinguishes the marked process from its forked children.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

/// A byte of memory that is zero in forked children (`MADV_WIPEONFORK`). Unlike the
/// process id, it distinguishes a child that is process 1 of a new PID namespace
/// from the original.
#[derive(Debug)]
pub struct ProcessMark {
    byte: &'static AtomicU8,
}

impl ProcessMark {
    /// Marks this process. The mark stays for as long as the process lives.
    ///
    /// # Errors
    /// Out of memory, or the kernel is older than 4.14.
    pub fn mark() -> io::Result<Self> {
        const SIZE: usize = 4096;
        // SAFETY: maps new memory at any address, so no existing memory is touched.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the page was mapped above and has no other owner.
        if unsafe { libc::madvise(page, SIZE, libc::MADV_WIPEONFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the page is zero, which is a value of the type, suits its
        // alignment, and is never unmapped, so the reference is valid forever.
        let byte = unsafe { &*page.cast::<AtomicU8>() };
        byte.store(1, Ordering::Relaxed);
        Ok(Self { byte })
    }

    /// Returns whether this is the marked process.
    #[must_use]
    pub fn is_original(&self) -> bool {
        self.byte.load(Ordering::Relaxed) == 1
    }
}
