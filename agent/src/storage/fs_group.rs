//! Sets the owning group of a storage (Kubernetes fsGroup).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use firstlight_agent_api::types::FSGroupChangePolicy;
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use super::Job;
use super::safe_path::by_descriptor;
use crate::error::{Error, Result};

/// Depth limit: each level of a tree uses a descriptor during the walk.
const MAX_DEPTH: usize = 256;

/// MemoryWatcher neither links nor other mounts.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Changes the group of a storage, if it has one: `fsgid=N` changes the root only, a group with a
/// policy the whole tree.
///
/// # Errors
/// The kernel refuses, or the tree is too deep.
pub(super) fn apply(root: &impl AsFd, job: &Job<'_>) -> Result<()> {
    let readonly = job.options.readonly();
    if let Some(group) = job.storage.fs_group.as_ref() {
        if readonly {
            log::debug!("{} is read-only: fsGroup is not applied", job.storage.mount_point);
            return Ok(());
        }
        let always = group.group_change_policy.enum_value_or_default() == FSGroupChangePolicy::Always;
        return change_tree(root.as_fd(), group.group_id, always);
    }
    apply_to_root(root, job.options.group.filter(|_| !readonly))
}

/// Changes the group of the root only.
///
/// # Errors
/// The kernel refuses, or the tree is too deep.
pub(super) fn apply_to_root(root: &impl AsFd, group: Option<u32>) -> Result<()> {
    let Some(group) = group else { return Ok(()) };
    let found = rustix::fs::fstat(root).map_err(failed(group))?;
    one(root.as_fd(), group, FileType::from_raw_mode(found.st_mode), found.st_mode).map_err(failed(group))
}

fn failed(group: u32) -> impl Fn(Errno) -> Error {
    move |error| Error::internal(format!("failed to set group {group}: {error}"))
}

/// Returns the mode with group permissions added; directories get set-group-ID, so new files
/// inherit the group.
fn permissions(kind: FileType, mode: u32) -> Option<Mode> {
    let more = match kind {
        FileType::Directory => 0o2770,
        FileType::RegularFile => 0o660,
        // Links have no mode, and the permissions of other types are not extended.
        _ => return None,
    };
    Some(Mode::from_raw_mode((mode & 0o7777) | more))
}

fn one(fd: BorrowedFd<'_>, group: u32, kind: FileType, mode: u32) -> rustix::io::Result<()> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::chownat(fd, "", None::<Uid>, Some(Gid::from_raw(group)), flags)?;
    // After chown, which clears the set-group-ID bit. By path, as fchmod fails on an O_PATH
    // descriptor.
    match permissions(kind, mode) {
        Some(mode) => rustix::fs::chmod(by_descriptor(fd), mode),
        None => Ok(()),
    }
}

/// Returns whether the root already has the group and mode.
fn matches(root: BorrowedFd<'_>, group: u32) -> rustix::io::Result<bool> {
    let found = rustix::fs::fstat(root)?;
    let expected = permissions(FileType::from_raw_mode(found.st_mode), found.st_mode);
    Ok(found.st_gid == group && expected.is_none_or(|mode| mode.as_raw_mode() == found.st_mode & 0o7777))
}

fn open(dir: BorrowedFd<'_>, name: &std::ffi::CStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(dir, name, flags | OFlags::CLOEXEC, Mode::empty(), RESOLVE)
}

/// Changes a tree; the root last, so an interrupted walk is repeated.
fn change_tree(root: BorrowedFd<'_>, group: u32, always: bool) -> Result<()> {
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
            if let Some(inner) = change_entry(dir, name, group).map_err(&failed)? {
                if open_directories.len() >= MAX_DEPTH {
                    return Err(Error::internal(format!(
                        "failed to set group {group}: deeper than {MAX_DEPTH} directories"
                    )));
                }
                open_directories.push(inner);
            }
        }
    }
    one(root, group, kind, found.st_mode).map_err(&failed)
}

/// Changes a directory entry; returns it opened if it is a directory.
fn change_entry(dir: &Dir, name: &std::ffi::CStr, group: u32) -> rustix::io::Result<Option<Dir>> {
    let at = dir.fd()?;
    // Links are changed themselves; entries deleted in the meantime are skipped.
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
    fn tree_gets_group_permissions_and_links_are_not_followed() {
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

        change_tree(File::open(root.path()).unwrap().as_fd(), group, true).unwrap();
        assert_eq!(mode(&root.path().join("a/b/file")), 0o664);
        assert_eq!(mode(&root.path().join("a/b")) & 0o2770, 0o2770);
        assert_eq!(mode(root.path()) & 0o2770, 0o2770);
        assert_eq!((mode(&secret), mode(outside.path())), (0o600, before));
        assert_eq!(fs::metadata(root.path()).unwrap().gid(), group);
    }

    #[test]
    fn matching_root_skips_the_walk_unless_the_policy_is_always() {
        let root = tempfile::tempdir().unwrap();
        let group = rustix::process::getgid().as_raw();
        let file = root.path().join("file");
        fs::write(&file, "x").unwrap();
        let walk = |always| {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
            change_tree(File::open(root.path()).unwrap().as_fd(), group, always).unwrap();
            mode(&file)
        };
        assert_eq!(walk(false), 0o660, "the root did not match");
        assert_eq!(walk(false), 0o600, "now it does");
        assert_eq!(walk(true), 0o660);
    }

    #[test]
    fn too_deep_tree_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("d/".repeat(300))).unwrap();
        let group = rustix::process::getgid().as_raw();
        let error = change_tree(File::open(root.path()).unwrap().as_fd(), group, true).unwrap_err();
        assert!(error.message.contains("deeper"), "{error}");
    }
}
