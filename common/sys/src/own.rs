//! Whether this is the process that something was made in, or a copy of it.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

/// A byte of memory that copies of this process find to be zero. Unlike the
/// process's number it tells a copy in a namespace of its own, where that is
/// process 1 too, from the original.
#[derive(Debug)]
pub struct Own {
    byte: &'static AtomicU8,
}

impl Own {
    /// Marks this process. The mark stays for as long as the process lives.
    ///
    /// # Errors
    /// There is no memory, or the kernel is older than 4.14.
    pub fn mark() -> io::Result<Self> {
        const SIZE: usize = 4096;
        // SAFETY: asks for new memory at no place in particular, so nobody else's is touched.
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
        // SAFETY: the page was mapped above and is nobody else's.
        if unsafe { libc::madvise(page, SIZE, libc::MADV_WIPEONFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the page is zero, which is a value of the type, suits its
        // alignment, and is never unmapped, so the reference is good for ever.
        let byte = unsafe { &*page.cast::<AtomicU8>() };
        byte.store(1, Ordering::Relaxed);
        Ok(Self { byte })
    }

    /// Whether this is the process that was marked.
    #[must_use]
    pub fn is_original(&self) -> bool {
        self.byte.load(Ordering::Relaxed) == 1
    }
}
