//! Attributes of mounts, and threads that look at another mount namespace.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, c_long};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};

/// What to change about a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Attributes it shall have.
    pub set: MountAttrFlags,
    /// Attributes it shall no longer have; applied first.
    pub clear: MountAttrFlags,
    /// How mounts below it spread; empty leaves that as it is.
    pub propagation: MountPropagationFlags,
    /// Whether the mounts below it change as well.
    pub recursive: bool,
}

/// `struct mount_attr` of linux/mount.h, version 0.
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Changes a mount, attached or not, by a descriptor of its root.
///
/// # Errors
/// `EINVAL`: the descriptor is no mount's root, or the kernel does not know an
/// attribute; `EPERM`: an attribute is locked.
pub fn change(mount: impl AsFd, change: &Change) -> io::Result<()> {
    let attributes = Attributes {
        set: change.set.bits().into(),
        clear: change.clear.bits().into(),
        propagation: change.propagation.bits().into(),
        user_namespace: 0,
    };
    let recursive = if change.recursive { libc::AT_RECURSIVE } else { 0 };
    let flags: c_int = libc::AT_EMPTY_PATH | recursive;
    // SAFETY: the path is an empty C string and the structure is readable for
    // the size that is passed with it; the kernel keeps neither.
    let code: c_long = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            std::mem::size_of::<Attributes>(),
        )
    };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives the calling thread a root and a working directory of its own, which
/// the kernel demands before a thread enters another mount namespace. The thread
/// must end after that: it is no place for anybody else's work.
///
/// # Errors
/// No memory.
pub fn separate_thread() -> io::Result<()> {
    // SAFETY: CLONE_FS takes nothing from other threads; it copies root, working
    // directory and umask. Descriptors stay shared.
    if unsafe { libc::unshare(libc::CLONE_FS) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mount_is_refused() {
        let dir = std::fs::File::open("/proc/self").unwrap();
        let nothing = Change {
            set: MountAttrFlags::empty(),
            clear: MountAttrFlags::empty(),
            propagation: MountPropagationFlags::PRIVATE,
            recursive: false,
        };
        // Without privileges the answer is EPERM.
        let error = change(&dir, &nothing).unwrap_err().raw_os_error();
        assert!(matches!(error, Some(libc::EINVAL | libc::EPERM)), "{error:?}");
    }

    #[test]
    fn a_separate_thread_leaves_the_others_where_they_are() {
        let before = std::env::current_dir().unwrap();
        std::thread::spawn(|| {
            separate_thread().unwrap();
            std::env::set_current_dir("/proc").unwrap();
        })
        .join()
        .unwrap();
        assert_eq!(std::env::current_dir().unwrap(), before);
    }
}
