//! Resolves the destination of CopyFile: below one directory, and through no link.
//!
//! Containers write below that directory concurrently, as parts of it are mounted into them. So
//! every step starts from a descriptor and takes one name, and a name that is a link is an error,
//! even if it became one in between.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use super::StepError;

/// A directory descriptor and a name in it.
#[derive(Debug)]
pub(super) struct Destination {
    pub(super) dir: OwnedFd,
    pub(super) name: String,
}

/// Properties of missing directories that are created.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewDirectory {
    pub(super) mode: Mode,
    /// Of the last directory only, as Kata's agent does.
    pub(super) owner: Owner,
}

/// A user and a group; `None` means unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) user: Option<Uid>,
    pub(super) group: Option<Gid>,
}

impl Owner {
    /// Converts from the request: ids above 2^31 arrive negative, and -1 means unchanged, as in
    /// chown(2).
    pub(super) fn of(user: i32, group: i32) -> Self {
        let id = |id: i32| Some(id.cast_unsigned()).filter(|id| *id != u32::MAX);
        Self { user: id(user).map(Uid::from_raw), group: id(group).map(Gid::from_raw) }
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Splits `path` below `share` into names.
///
/// # Errors
/// It is not below `share`, or contains `..` or NUL.
pub fn names<'a>(share: &Path, path: &'a str) -> std::result::Result<Vec<&'a str>, String> {
    let share_text = share.to_string_lossy();
    let below = path.strip_prefix(share_text.as_ref()).and_then(|rest| rest.strip_prefix('/'));
    let below = below.ok_or_else(|| format!("not below {share_text}"))?;
    let names: Vec<&str> = below.split('/').filter(|name| !name.is_empty() && *name != ".").collect();
    if names.is_empty() {
        return Err(format!("not below {share_text}"));
    }
    if names.contains(&"..") {
        return Err("contains \"..\"".to_owned());
    }
    if path.contains('\0') {
        return Err("contains a NUL byte".to_owned());
    }
    Ok(names)
}

/// Opens a subdirectory without following a link.
pub(super) fn dir(parent: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    let strict = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(parent, name, DIRECTORY, Mode::empty(), strict)
}

/// Opens the parent directory of the last of `names`, creating missing directories.
pub(super) fn open_parent(
    share: &Path,
    names: &[&str],
    missing: NewDirectory,
) -> std::result::Result<Destination, StepError> {
    let step = |what: String| move |error: Errno| StepError::new(what, error.into());
    let [parents @ .., name] = names else {
        return Err(StepError::new("path".to_owned(), io::ErrorKind::InvalidInput.into()));
    };
    std::fs::create_dir_all(share).map_err(|error| StepError::new("create the shared directory".to_owned(), error))?;
    let mut at = rustix::fs::open(share, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
        .map_err(step("open the shared directory".to_owned()))?;
    for (index, parent) in parents.iter().enumerate() {
        at = match dir(&at, parent) {
            Err(Errno::NOENT) => {
                let is_last = index + 1 == parents.len();
                let owner = if is_last { missing.owner } else { Owner::default() };
                create_dir(&at, parent, missing.mode, owner)
                    .map_err(step(format!("create the directory {parent:?}")))?
            }
            opened => opened.map_err(step(format!("open the directory {parent:?}")))?,
        };
    }
    Ok(Destination { dir: at, name: (*name).to_owned() })
}

/// Creates a directory or opens the existing one, and sets mode and owner.
pub(super) fn create_dir(parent: &OwnedFd, name: &str, mode: Mode, owner: Owner) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let made = dir(parent, name)?;
    rustix::fs::fchown(&made, owner.user, owner.group)?;
    // After chown, which clears mode bits; not by mkdir, because of the umask.
    rustix::fs::fchmod(&made, mode)?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_outside_the_share_are_rejected() {
        fn of(path: &str) -> Option<Vec<&str>> {
            names(Path::new("/run/kata-containers/shared/containers"), path).ok()
        }
        assert_eq!(of("/run/kata-containers/shared/containers/a/b"), Some(vec!["a", "b"]));
        assert_eq!(of("/run/kata-containers/shared/containers//a/./b/"), Some(vec!["a", "b"]));
        for bad in [
            "",
            "/",
            "a",
            "/etc/passwd",
            "/run/kata-containers/shared/containers",
            "/run/kata-containers/shared/containers/",
            "/run/kata-containers/shared/containers/.",
            "/run/kata-containers/shared/containersX/a",
            "/run/kata-containers/shared/containers/../x",
            "/run/kata-containers/shared/containers/a/../../x",
            "/run/kata-containers/shared/containers/a/..",
            "/run/kata-containers/shared/./containers/a",
            "/run/kata-containers/shared/containers/a\0b",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn owners_are_parsed_as_in_chown() {
        let owner = Owner::of(-1, 7);
        assert_eq!((owner.user, owner.group.map(Gid::as_raw)), (None, Some(7)));
        assert_eq!(Owner::of(-2, -1).user.map(Uid::as_raw), Some(4_294_967_294));
    }

    proptest! {
        #[test]
        fn accepted_names_are_plain_components(path in "(/s|/\\.\\.|/\\.|/|a|\\PC){0,8}") {
            if let Ok(names) = names(Path::new("/s"), &path) {
                for name in &names {
                    prop_assert!(!name.contains('/') && !["", ".", ".."].contains(name));
                }
            }
        }
    }
}
