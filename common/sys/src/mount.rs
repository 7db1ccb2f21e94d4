//! Mount attributes, and threads that enter another mount namespace.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, c_long};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};

/// A change of a mount's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttributeChange {
    /// Attributes to set.
    pub set: MountAttrFlags,
    /// Attributes to clear; applied first.
    pub clear: MountAttrFlags,
    /// Propagation type; empty leaves it unchanged.
    pub propagation: MountPropagationFlags,
    /// Whether to change the mounts below it too.
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

/// Changes the attributes of a mount, attached or detached, by a descriptor of its root.
///
/// # Errors
/// `EINVAL`: the descriptor is not a mount's root, or an attribute is unsupported;
/// `EPERM`: an attribute is locked.
pub fn set_attributes(mount: impl AsFd, change: &AttributeChange) -> io::Result<()> {
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

/// Gives the calling thread its own root and working directory (`CLONE_FS`), which
/// the kernel requires before a thread enters another mount namespace. The thread
/// must then end: it must not be reused for other work.
///
/// # Errors
/// Out of memory.
pub fn unshare_fs() -> io::Result<()> {
    // SAFETY: CLONE_FS takes nothing from other threads; it copies root, working
    // directory and umask. Descriptors stay shared.
    if unsafe { libc::unshare(libc::CLONE_FS) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_is_not_a_mount_is_refused() {
        let dir = std::fs::File::open("/proc/self").unwrap();
        let nothing = AttributeChange {
            set: MountAttrFlags::empty(),
            clear: MountAttrFlags::empty(),
            propagation: MountPropagationFlags::PRIVATE,
            recursive: false,
        };
        // Without privileges the answer is EPERM.
        let error = set_attributes(&dir, &nothing).unwrap_err().raw_os_error();
        assert!(matches!(error, Some(libc::EINVAL | libc::EPERM)), "{error:?}");
    }

    #[test]
    fn unshared_thread_does_not_change_the_working_directory_of_others() {
        let before = std::env::current_dir().unwrap();
        std::thread::spawn(|| {
            unshare_fs().unwrap();
            std::env::set_current_dir("/proc").unwrap();
        })
        .join()
        .unwrap();
        assert_eq!(std::env::current_dir().unwrap(), before);
    }
}
