//! Mounts by the kernel's fsopen API: created detached, fully configured, and then attached by
//! descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use firstlight_sys::mount::AttributeChange;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};

use super::options::{MAX_LEN, Options};
use super::safe_path::{Kind, MountPoint, by_descriptor};
use crate::error::{Error, Result};

/// A detached mount; destroyed on drop.
#[derive(Debug)]
pub struct Detached(OwnedFd);

/// An attached mount; unmounted on drop, even if its mount point was moved.
#[derive(Debug)]
pub struct Mounted {
    fd: OwnedFd,
    trusted: PathBuf,
    path: PathBuf,
    kind: Kind,
    made: bool,
}

/// A failed step of the setup of a file system.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SetupError {
    /// The file system rejects an option.
    #[error("{error}")]
    Option {
        /// The option's name.
        name: String,
        /// The kernel's error; `EINVAL` also stands for an unknown option.
        errno: Errno,
        /// The error for the caller, with the kernel's messages.
        error: Error,
    },
    /// Another step failed.
    #[error(transparent)]
    Step(#[from] Error),
}

impl SetupError {
    /// Returns whether the file system may not know this option.
    #[must_use]
    pub fn may_not_know(&self, option: &str) -> bool {
        matches!(self, Self::Option { name, errno: Errno::INVAL, .. } if name == option)
    }
}

impl From<SetupError> for Error {
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::Option { error, .. } | SetupError::Step(error) => error,
        }
    }
}

/// A file system context (fsopen, fspick).
struct Setup<'a> {
    fd: OwnedFd,
    kind: &'a str,
}

impl Setup<'_> {
    /// Returns the kernel's messages about the last step: lines such as `e tmpfs: Bad value for
    /// 'size'`.
    fn kernel_messages(&self) -> String {
        let mut all: Vec<String> = Vec::new();
        let mut buffer = [0_u8; 512];
        // Bounded: the kernel stores eight messages.
        for _ in 0..16 {
            let Ok(len) = rustix::io::read(&self.fd, &mut buffer) else { break };
            let line = String::from_utf8_lossy(&buffer[..len]);
            let line = line.trim().split_once(' ').map_or(line.trim(), |(_, text)| text).to_owned();
            all.push(line);
        }
        if all.is_empty() { String::new() } else { format!(" ({})", all.join("; ")) }
    }

    fn set(&self, name: &str, value: Option<&str>) -> std::result::Result<(), SetupError> {
        let shown = value.map_or(name.to_owned(), |value| format!("{name}={value}"));
        if name.len() > MAX_LEN || value.is_some_and(|value| value.len() > MAX_LEN) {
            let shown: String = shown.chars().take(80).collect();
            return Err(Error::invalid(format!("option {shown}...: longer than {MAX_LEN} bytes")).into());
        }
        let done = match value {
            Some(value) => rustix::mount::fsconfig_set_string(&self.fd, name, value),
            None => rustix::mount::fsconfig_set_flag(&self.fd, name),
        };
        done.map_err(|errno| {
            let messages = self.kernel_messages();
            let error = Error::invalid(format!("{} rejects the option {shown}: {errno}{messages}", self.kind));
            SetupError::Option { name: name.to_owned(), errno, error }
        })
    }
}

/// Returns the likely cause of a failed mount, and the next step.
fn advice(error: Errno, kind: &str) -> &'static str {
    match error {
        Errno::ACCESS | Errno::ROFS => "; if the source is read-only, add the option ro",
        Errno::BUSY => "; it may be in use with other options",
        Errno::INVAL if kind == "virtiofs" => "; check that the VM has a share with this tag",
        Errno::NOTBLK | Errno::NXIO => "; check that the source is a block device",
        Errno::INVAL | Errno::BADMSG | Errno::UCLEAN => {
            "; check that the source has this file system, and the kernel log"
        }
        _ => "",
    }
}

impl Detached {
    /// Creates a detached mount of a file system.
    ///
    /// # Errors
    /// The kernel does not support the file system, an option is invalid, or the file system is not
    /// readable; with the kernel's message if there is one.
    pub fn filesystem(kind: &str, source: Option<&str>, options: &Options) -> std::result::Result<Self, SetupError> {
        let fd = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|error| match error {
            Errno::NODEV => Error::internal(format!(
                "the guest's kernel does not support {kind}: add its module to the image and load it at boot"
            )),
            error => Error::internal(format!("failed to set up {kind}: {error}")),
        })?;
        let setup = Setup { fd, kind };
        if let Some(source) = source {
            setup.set("source", Some(source))?;
        }
        for (name, value) in &options.data {
            setup.set(name, value.as_deref())?;
        }
        rustix::mount::fsconfig_create(&setup.fd).map_err(|error| {
            let (messages, advice) = (setup.kernel_messages(), advice(error, kind));
            Error::internal(format!("failed to mount {kind}: {error}{messages}{advice}"))
        })?;
        let mount = rustix::mount::fsmount(&setup.fd, FsMountFlags::FSMOUNT_CLOEXEC, options.set)
            .map_err(|error| Error::internal(format!("failed to mount {kind}: {error}{}", setup.kernel_messages())))?;
        Ok(Self(mount))
    }

    /// Creates a detached bind mount.
    ///
    /// # Errors
    /// The system call fails.
    pub fn bind(source: impl AsFd, options: &Options) -> Result<Self> {
        let mut flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        flags.set(OpenTreeFlags::AT_RECURSIVE, options.recursive);
        let mount = rustix::mount::open_tree(source, "", flags)
            .map_err(|error| Error::internal(format!("failed to bind: {error}")))?;
        let change = AttributeChange {
            set: options.set,
            clear: options.clear,
            propagation: MountPropagationFlags::empty(),
            recursive: options.recursive_attributes,
        };
        if !(options.set.is_empty() && options.clear.is_empty()) {
            firstlight_sys::mount::set_attributes(&mount, &change)
                .map_err(|error| Error::internal(format!("failed to set the options of a bind mount: {error}")))?;
        }
        Ok(Self(mount))
    }

    /// Attaches it to its mount point.
    ///
    /// # Errors
    /// The system call fails.
    pub fn attach(self, trusted: &Path, place: MountPoint, options: &Options) -> Result<Mounted> {
        let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        let moved = rustix::mount::move_mount(&self.0, "", &place, "", both);
        let shown = place.path().display().to_string();
        let (path, kind, made) = place.into_parts();
        if let Err(error) = moved {
            if made {
                MountPoint::remove(trusted, &path, kind);
            }
            return Err(Error::internal(format!("failed to mount on {shown}: {error}")));
        }
        let mounted = Mounted { fd: self.0, trusted: trusted.to_owned(), path, kind, made };
        if let Some(propagation) = options.propagation {
            let change = AttributeChange {
                set: MountAttrFlags::empty(),
                clear: MountAttrFlags::empty(),
                propagation: propagation - MountPropagationFlags::REC,
                recursive: propagation.contains(MountPropagationFlags::REC),
            };
            firstlight_sys::mount::set_attributes(&mounted.fd, &change)
                .map_err(|error| Error::internal(format!("failed to set the mount propagation: {error}")))?;
        }
        Ok(mounted)
    }
}

impl AsFd for Detached {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Mounted {
    /// Leaves it mounted when this is dropped.
    pub fn leave(mut self) {
        self.path.clear();
    }

    /// Returns the mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Mounted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.path.as_os_str().is_empty() {
            return;
        }
        match rustix::mount::unmount(by_descriptor(&self.fd), UnmountFlags::DETACH) {
            // Unmounted already.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(error) => log::warn!("storage {}: failed to unmount: {error}", self.path.display()),
        }
        if self.made {
            MountPoint::remove(&self.trusted, &self.path, self.kind);
        }
    }
}

/// Changes options of a mounted file system.
///
/// # Errors
/// The file system rejects an option or cannot change it on remount.
pub fn reconfigure(mount: impl AsFd, kind: &str, options: &[(String, Option<String>)]) -> Result<()> {
    let fd = rustix::mount::fspick(mount, "", FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH)
        .map_err(|error| Error::internal(format!("failed to reconfigure {kind}: {error}")))?;
    let setup = Setup { fd, kind };
    for (name, value) in options {
        setup.set(name, value.as_deref())?;
    }
    rustix::mount::fsconfig_reconfigure(&setup.fd)
        .map_err(|error| Error::internal(format!("failed to reconfigure {kind}: {error}{}", setup.kernel_messages())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_invalid_option_of_this_name_may_be_unknown() {
        let rejected = |name: &str, errno| {
            let error = Error::invalid("overlay rejects the option lowerdir+=/a");
            SetupError::Option { name: name.to_owned(), errno, error }
        };
        assert!(rejected("lowerdir+", Errno::INVAL).may_not_know("lowerdir+"));
        assert!(!rejected("lowerdir+", Errno::NOENT).may_not_know("lowerdir+"));
        assert!(!rejected("upperdir", Errno::INVAL).may_not_know("lowerdir+"));
        assert!(!SetupError::from(Error::internal("lowerdir+")).may_not_know("lowerdir+"));
        let error = Error::from(rejected("lowerdir+", Errno::INVAL));
        assert_eq!(error.message, "overlay rejects the option lowerdir+=/a");
    }
}
