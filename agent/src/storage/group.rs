//! Groups: who may use a storage beside root.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use firstlight_agent_api::types::FSGroupChangePolicy;
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use super::Job;
use super::place::by_descriptor;
use crate::error::{Error, Result};

/// Each level of a tree costs a descriptor while it is walked.
const DEEPEST: usize = 256;

/// Neither links nor other mounts are entered.
const STEP: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Gives what a storage offers to the group that it names, if it names one:
/// `fsgid=N` the root alone, a group with a policy everything in it.
///
/// # Errors
/// The file system refuses, or the tree is too deep.
pub(super) fn give(root: &impl AsFd, job: &Job<'_>) -> Result<()> {
    let readonly = job.options.readonly();
    if let Some(group) = job.storage.fs_group.as_ref() {
        if readonly {
            log::debug!("{} is read-only: its files keep their groups", job.storage.mount_point);
            return Ok(());
        }
        let always = group.group_change_policy.enum_value_or_default() == FSGroupChangePolicy::Always;
        return whole(root.as_fd(), group.group_id, always);
    }
    self::root(root, job.options.group.filter(|_| !readonly))
}

/// Gives the root alone to a group.
///
/// # Errors
/// The file system refuses.
pub(super) fn root(root: &impl AsFd, group: Option<u32>) -> Result<()> {
    let Some(group) = group else { return Ok(()) };
    let found = rustix::fs::fstat(root).map_err(failed(group))?;
    one(root.as_fd(), group, FileType::from_raw_mode(found.st_mode), found.st_mode).map_err(failed(group))
}

fn failed(group: u32) -> impl Fn(Errno) -> Error {
    move |error| Error::internal(format!("cannot give it to group {group}: {error}"))
}

/// The permissions that a member of the group gets: what is in a directory belongs to the group as well.
fn permissions(kind: FileType, mode: u32) -> Option<Mode> {
    let more = match kind {
        FileType::Directory => 0o2770,
        FileType::RegularFile => 0o660,
        // A link has none, and other things are not opened to more people than before.
        _ => return None,
    };
    Some(Mode::from_raw_mode((mode & 0o7777) | more))
}

fn one(fd: BorrowedFd<'_>, group: u32, kind: FileType, mode: u32) -> rustix::io::Result<()> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::chownat(fd, "", None::<Uid>, Some(Gid::from_raw(group)), flags)?;
    // After the change of the owner, which takes the set-group bit away. The
    // descriptor may be one that only names, on which fchmod does not work.
    match permissions(kind, mode) {
        Some(mode) => rustix::fs::chmod(by_descriptor(fd), mode),
        None => Ok(()),
    }
}

/// Whether the root already is as we would make it.
fn matches(root: BorrowedFd<'_>, group: u32) -> rustix::io::Result<bool> {
    let found = rustix::fs::fstat(root)?;
    let wanted = permissions(FileType::from_raw_mode(found.st_mode), found.st_mode);
    Ok(found.st_gid == group && wanted.is_none_or(|mode| mode.as_raw_mode() == found.st_mode & 0o7777))
}

fn open(dir: BorrowedFd<'_>, name: &std::ffi::CStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(dir, name, flags | OFlags::CLOEXEC, Mode::empty(), STEP)
}

/// Changes a tree; the root last, so that a walk that was cut short is walked again.
fn whole(root: BorrowedFd<'_>, group: u32, always: bool) -> Result<()> {
    let failed = failed(group);
    if !always && matches(root, group).map_err(&failed)? {
        return Ok(());
    }
    let found = rustix::fs::fstat(root).map_err(&failed)?;
    let kind = FileType::from_raw_mode(found.st_mode);
    if kind == FileType::Directory {
        let top = rustix::fs::openat(root, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let mut open_directories = vec![Dir::new(top.map_err(&failed)?).map_err(&failed)?];
        while let Some(dir) = open_directories.last_mut() {
            let Some(entry) = dir.read() else {
                open_directories.pop();
                continue;
            };
            let entry = entry.map_err(&failed)?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if let Some(inner) = entered(dir, name, group).map_err(&failed)? {
                if open_directories.len() >= DEEPEST {
                    return Err(Error::internal(format!(
                        "cannot give it to group {group}: deeper than {DEEPEST} directories"
                    )));
                }
                open_directories.push(inner);
            }
        }
    }
    one(root, group, kind, found.st_mode).map_err(&failed)
}

/// Changes an entry of a directory; opens it if it is a directory itself.
fn entered(dir: &Dir, name: &std::ffi::CStr, group: u32) -> rustix::io::Result<Option<Dir>> {
    let at = dir.fd()?;
    // Links are changed themselves; what vanishes meanwhile needs no group.
    let entry = match open(at, name, OFlags::PATH) {
        Ok(entry) => entry,
        Err(Errno::LOOP) => {
            let done =
                rustix::fs::chownat(at, name, None::<Uid>, Some(Gid::from_raw(group)), AtFlags::SYMLINK_NOFOLLOW);
            return done.map(|()| None);
        }
        Err(Errno::NOENT | Errno::XDEV) => return Ok(None),
        Err(error) => return Err(error),
    };
    let found = rustix::fs::fstat(&entry)?;
    let kind = FileType::from_raw_mode(found.st_mode);
    one(entry.as_fd(), group, kind, found.st_mode)?;
    if kind != FileType::Directory {
        return Ok(None);
    }
    match rustix::fs::openat(&entry, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(inner) => Dir::new(inner).map(Some),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn mode(path: &std::path::Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_tree_is_opened_to_the_group_and_links_are_not_followed() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let group = rustix::process::getgid().as_raw();
        let before = mode(outside.path());
        let secret = outside.path().join("secret");
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        fs::write(root.path().join("a/b/file"), "x").unwrap();
        fs::set_permissions(root.path().join("a/b/file"), fs::Permissions::from_mode(0o604)).unwrap();
        symlink(&secret, root.path().join("a/link")).unwrap();
        symlink(outside.path(), root.path().join("a/b/directory")).unwrap();

        whole(File::open(root.path()).unwrap().as_fd(), group, true).unwrap();
        assert_eq!(mode(&root.path().join("a/b/file")), 0o664);
        assert_eq!(mode(&root.path().join("a/b")) & 0o2770, 0o2770);
        assert_eq!(mode(root.path()) & 0o2770, 0o2770);
        assert_eq!((mode(&secret), mode(outside.path())), (0o600, before));
        assert_eq!(fs::metadata(root.path()).unwrap().gid(), group);
    }

    #[test]
    fn a_root_that_matches_ends_the_walk_unless_it_shall_always_be_walked() {
        let root = tempfile::tempdir().unwrap();
        let group = rustix::process::getgid().as_raw();
        let file = root.path().join("file");
        fs::write(&file, "x").unwrap();
        let walk = |always| {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
            whole(File::open(root.path()).unwrap().as_fd(), group, always).unwrap();
            mode(&file)
        };
        assert_eq!(walk(false), 0o660, "the root did not match");
        assert_eq!(walk(false), 0o600, "now it does");
        assert_eq!(walk(true), 0o660);
    }

    #[test]
    fn a_tree_that_is_too_deep_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("d/".repeat(300))).unwrap();
        let group = rustix::process::getgid().as_raw();
        let error = whole(File::open(root.path()).unwrap().as_fd(), group, true).unwrap_err();
        assert!(error.message.contains("deeper"), "{error}");
    }
}
