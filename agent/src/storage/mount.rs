//! Mounts: made where nobody sees them, complete with all their options, and
//! then put in place by descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use firstlight_sys::mount::AttributeChange;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};

use super::options::{LONGEST, Options};
use super::place::{Kind, Place, by_descriptor};
use crate::error::{Error, Result};

/// A mount that is attached nowhere. Dropped, it is gone.
#[derive(Debug)]
pub struct Detached(OwnedFd);

/// A mount in its place. Dropped, it is unmounted, wherever its place is then.
#[derive(Debug)]
pub struct Mounted {
    fd: OwnedFd,
    trusted: PathBuf,
    path: PathBuf,
    kind: Kind,
    made: bool,
}

/// A file system that is being set up.
struct Setup<'a> {
    fd: OwnedFd,
    kind: &'a str,
}

impl Setup<'_> {
    /// What the kernel says about the last step: lines such as `e tmpfs: Bad value for 'size'`.
    fn said(&self) -> String {
        let mut all: Vec<String> = Vec::new();
        let mut buffer = [0_u8; 512];
        // Bounded: the kernel keeps eight lines.
        for _ in 0..16 {
            let Ok(len) = rustix::io::read(&self.fd, &mut buffer) else { break };
            let line = String::from_utf8_lossy(&buffer[..len]);
            let line = line.trim().split_once(' ').map_or(line.trim(), |(_, text)| text).to_owned();
            all.push(line);
        }
        if all.is_empty() { String::new() } else { format!(" ({})", all.join("; ")) }
    }

    fn set(&self, name: &str, value: Option<&str>) -> Result<()> {
        let shown = value.map_or(name.to_owned(), |value| format!("{name}={value}"));
        if name.len() > LONGEST || value.is_some_and(|value| value.len() > LONGEST) {
            let shown: String = shown.chars().take(80).collect();
            return Err(Error::invalid(format!("option {shown}...: longer than {LONGEST} bytes")));
        }
        let done = match value {
            Some(value) => rustix::mount::fsconfig_set_string(&self.fd, name, value),
            None => rustix::mount::fsconfig_set_flag(&self.fd, name),
        };
        done.map_err(|error| {
            Error::invalid(format!("{} does not take the option {shown}: {error}{}", self.kind, self.said()))
        })
    }
}

/// Why a file system could not be made, and the next thing to try.
fn advice(error: Errno, kind: &str) -> &'static str {
    match error {
        Errno::ACCESS | Errno::ROFS => "; is the source read-only? then add the option ro",
        Errno::BUSY => "; is it in use with other options?",
        Errno::INVAL if kind == "virtiofs" => "; has the VM a share with this tag?",
        Errno::NOTBLK | Errno::NXIO => "; is the source a block device?",
        Errno::INVAL | Errno::BADMSG | Errno::UCLEAN => {
            "; is there such a file system on the source? see the kernel log"
        }
        _ => "",
    }
}

impl Detached {
    /// A file system.
    ///
    /// # Errors
    /// The kernel has no such file system, an option is wrong, or the file
    /// system cannot be read; with the kernel's own words where it has any.
    pub fn filesystem(kind: &str, source: Option<&str>, options: &Options) -> Result<Self> {
        let fd = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|error| match error {
            Errno::NODEV => Error::internal(format!(
                "the guest's kernel has no file system {kind}: put its module into the image and load it at boot"
            )),
            error => Error::internal(format!("cannot set up {kind}: {error}")),
        })?;
        let setup = Setup { fd, kind };
        if let Some(source) = source {
            setup.set("source", Some(source))?;
        }
        for (name, value) in &options.data {
            setup.set(name, value.as_deref())?;
        }
        rustix::mount::fsconfig_create(&setup.fd).map_err(|error| {
            let (said, advice) = (setup.said(), advice(error, kind));
            Error::internal(format!("cannot mount {kind}: {error}{said}{advice}"))
        })?;
        let mount = rustix::mount::fsmount(&setup.fd, FsMountFlags::FSMOUNT_CLOEXEC, options.set)
            .map_err(|error| Error::internal(format!("cannot mount {kind}: {error}{}", setup.said())))?;
        Ok(Self(mount))
    }

    /// Something that is there, at a second place.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn bind(source: impl AsFd, options: &Options) -> Result<Self> {
        let mut flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        flags.set(OpenTreeFlags::AT_RECURSIVE, options.recursive);
        let mount = rustix::mount::open_tree(source, "", flags)
            .map_err(|error| Error::internal(format!("cannot bind: {error}")))?;
        let change = AttributeChange {
            set: options.set,
            clear: options.clear,
            propagation: MountPropagationFlags::empty(),
            recursive: options.deep,
        };
        if !(options.set.is_empty() && options.clear.is_empty()) {
            firstlight_sys::mount::set_attributes(&mount, &change)
                .map_err(|error| Error::internal(format!("cannot set the options of a bind: {error}")))?;
        }
        Ok(Self(mount))
    }

    /// Puts it in its place.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn attach(self, trusted: &Path, place: Place, options: &Options) -> Result<Mounted> {
        let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        let moved = rustix::mount::move_mount(&self.0, "", &place, "", both);
        let shown = place.path().display().to_string();
        let (path, kind, made) = place.into_parts();
        if let Err(error) = moved {
            if made {
                Place::remove(trusted, &path, kind);
            }
            return Err(Error::internal(format!("cannot mount on {shown}: {error}")));
        }
        let mounted = Mounted { fd: self.0, trusted: trusted.to_owned(), path, kind, made };
        if let Some(spread) = options.spread {
            let change = AttributeChange {
                set: MountAttrFlags::empty(),
                clear: MountAttrFlags::empty(),
                propagation: spread - MountPropagationFlags::REC,
                recursive: spread.contains(MountPropagationFlags::REC),
            };
            firstlight_sys::mount::set_attributes(&mounted.fd, &change)
                .map_err(|error| Error::internal(format!("cannot set how mounts spread: {error}")))?;
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
    /// Lets it stay when this is dropped.
    pub fn leave(mut self) {
        self.path.clear();
    }

    /// Where it was mounted.
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
            // Somebody else has unmounted it.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(error) => log::warn!("storage {}: cannot unmount: {error}", self.path.display()),
        }
        if self.made {
            Place::remove(&self.trusted, &self.path, self.kind);
        }
    }
}

/// Changes options of a mounted file system.
///
/// # Errors
/// An option that the file system does not take or cannot change any more.
pub fn reconfigure(mount: impl AsFd, kind: &str, options: &[(String, Option<String>)]) -> Result<()> {
    let fd = rustix::mount::fspick(mount, "", FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH)
        .map_err(|error| Error::internal(format!("cannot change {kind}: {error}")))?;
    let setup = Setup { fd, kind };
    for (name, value) in options {
        setup.set(name, value.as_deref())?;
    }
    rustix::mount::fsconfig_reconfigure(&setup.fd)
        .map_err(|error| Error::internal(format!("cannot change {kind}: {error}{}", setup.said())))
}
