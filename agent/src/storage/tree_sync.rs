//! Incremental copy of a small tree: files and directories first, then links, which may point at
//! them, then deletions.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use super::safe_path::by_descriptor;
use crate::error::{Error, Result};

/// Limits; larger sources are bind-mounted instead of copied.
pub(super) const MAX_ENTRIES: usize = 16;

/// In bytes, all files together.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// Temporary name of a file until it is complete.
const TEMPORARY: &str = ".firstlight-unfinished";

const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// An entry of the tree; the empty path is its root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    kind: Kind,
    mode: u32,
    owner: (u32, u32),
    size: u64,
    /// Modification and change times, and inode: detect a change.
    version: (i64, u64, i64, u64, u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Directory,
    File,
    Link(PathBuf),
}

/// Snapshot of a tree.
pub(super) type Tree = BTreeMap<PathBuf, Entry>;

fn io(path: &Path) -> impl Fn(Errno) -> Error {
    move |error| Error::internal(format!("{}: {error}", path.display()))
}

fn open(dir: impl AsFd, name: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // Non-blocking: open of a FIFO must not block.
    rustix::fs::openat2(dir, name, flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty(), RESOLVE)
}

fn entry(data: &Stat, kind: Kind) -> Entry {
    let size = if kind == Kind::File { u64::try_from(data.st_size).unwrap_or(0) } else { 0 };
    Entry {
        kind,
        mode: data.st_mode & 0o7777,
        owner: (data.st_uid, data.st_gid),
        size,
        version: (data.st_mtime, data.st_mtime_nsec, data.st_ctime, data.st_ctime_nsec, data.st_ino),
    }
}

/// Takes a snapshot of a tree; `None` if it exceeds a limit. Sockets and other special files are
/// omitted.
pub(super) fn snapshot(root: &OwnedFd) -> Result<Option<Tree>> {
    let mut tree = Tree::new();
    let data = rustix::fs::fstat(root).map_err(io(Path::new("source")))?;
    if FileType::from_raw_mode(data.st_mode) != FileType::Directory {
        tree.insert(PathBuf::new(), entry(&data, Kind::File));
        return Ok((data.st_size <= i64::try_from(MAX_BYTES).unwrap_or(0)).then_some(tree));
    }
    tree.insert(PathBuf::new(), entry(&data, Kind::Directory));
    let mut dirs = vec![PathBuf::new()];
    let mut bytes = 0;
    while let Some(at) = dirs.pop() {
        let name = if at.as_os_str().is_empty() { OsStr::new(".") } else { at.as_os_str() };
        let dir = match open(root, name, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(dir) => dir,
            // Replaced by the host in the meantime: the next poll handles it.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            Err(error) => return Err(io(&at)(error)),
        };
        for found in Dir::read_from(&dir).map_err(io(&at))? {
            let found = found.map_err(io(&at))?;
            let name = OsStr::from_bytes(found.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let Ok(data) = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let path = at.join(name);
            let kind = match FileType::from_raw_mode(data.st_mode) {
                FileType::Directory => {
                    dirs.push(path.clone());
                    Kind::Directory
                }
                FileType::RegularFile => Kind::File,
                FileType::Symlink => {
                    let Ok(target) = rustix::fs::readlinkat(&dir, name, Vec::new()) else { continue };
                    Kind::Link(OsString::from_vec(target.into_bytes()).into())
                }
                _ => continue,
            };
            let entry = entry(&data, kind);
            bytes += entry.size;
            tree.insert(path, entry);
            // The root is not counted.
            if tree.len() > MAX_ENTRIES + 1 || bytes > MAX_BYTES {
                return Ok(None);
            }
        }
    }
    Ok(Some(tree))
}

/// Opens the parent directory of a path below `root`; returns it and the last component.
fn parent<'a>(root: &OwnedFd, path: &'a Path) -> Result<(OwnedFd, &'a OsStr)> {
    let name = path.file_name().ok_or_else(|| Error::internal("no name"))?;
    let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((open(root, above.as_os_str(), OFlags::RDONLY | OFlags::DIRECTORY).map_err(io(above))?, name))
}

/// Removes an entry and its content without following links.
pub(super) fn remove_tree(dir: &OwnedFd, name: &OsStr) -> Result<()> {
    let failed = |error: Errno| io(Path::new(name))(error);
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {
            // By descriptor; remove_dir_all does not follow links.
            let path = Path::new(&by_descriptor(dir)).join(name);
            std::fs::remove_dir_all(&path).map_err(|error| Error::internal(format!("{}: {error}", name.display())))
        }
        Err(error) => Err(failed(error)),
    }
}

fn set_attributes(fd: &OwnedFd, entry: &Entry) -> rustix::io::Result<()> {
    let (user, group) = entry.owner;
    rustix::fs::fchown(fd, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    rustix::fs::fchmod(fd, Mode::from_raw_mode(entry.mode))
}

/// Copies a file's content, up to the limit.
fn copy_content(source: OwnedFd, target: &OwnedFd) -> Result<()> {
    let failed = |error: std::io::Error| Error::internal(format!("failed to copy: {error}"));
    let mut data = Vec::new();
    std::fs::File::from(source).take(MAX_BYTES).read_to_end(&mut data).map_err(failed)?;
    let target = target.try_clone().map_err(failed)?;
    let mut target = std::fs::File::from(target);
    target.write_all(&data).map_err(failed)?;
    target.set_len(data.len() as u64).map_err(failed)
}

/// Updates a single file in place, so that bind mounts of it see the change.
pub(super) fn refresh_file(source: &OwnedFd, target: &OwnedFd, tree: &Tree) -> Result<()> {
    let reopened = |fd: &OwnedFd, flags: OFlags| {
        rustix::fs::open(by_descriptor(fd), flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
            .map_err(io(Path::new("file")))
    };
    let target = reopened(target, OFlags::WRONLY)?;
    copy_content(reopened(source, OFlags::RDONLY)?, &target)?;
    tree.values().try_for_each(|entry| set_attributes(&target, entry).map_err(io(Path::new("file"))))
}

/// Updates `target` to the snapshot `new` of `source`; `old` is its previous snapshot.
pub(super) fn refresh(source: &OwnedFd, target: &OwnedFd, old: &Tree, new: &Tree) -> Result<()> {
    let changed = |path: &Path, entry: &Entry| old.get(path) != Some(entry);
    let is_link = |entry: &Entry| matches!(entry.kind, Kind::Link(_));
    for (path, entry) in new.iter().filter(|(path, entry)| changed(path, entry) && !is_link(entry)) {
        if path.as_os_str().is_empty() {
            let root = open(target, OsStr::new("."), OFlags::RDONLY | OFlags::DIRECTORY).map_err(io(path))?;
            set_attributes(&root, entry).map_err(io(path))?;
            continue;
        }
        let (dir, name) = parent(target, path)?;
        if old.get(path).is_some_and(|old| old.kind != entry.kind) {
            remove_tree(&dir, name)?;
        }
        if entry.kind == Kind::Directory {
            match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(io(path)(error)),
            }
            let made = open(&dir, name, OFlags::RDONLY | OFlags::DIRECTORY).map_err(io(path))?;
            set_attributes(&made, entry).map_err(io(path))?;
        } else {
            copy_file(source, &dir, path, name, entry)?;
        }
    }
    for (path, entry) in new.iter().filter(|(path, entry)| changed(path, entry) && is_link(entry)) {
        let (dir, name) = parent(target, path)?;
        let Kind::Link(to) = &entry.kind else { continue };
        if old.get(path).is_some_and(|old| old.kind == Kind::Directory) {
            remove_tree(&dir, name)?;
        }
        remove_tree(&dir, OsStr::new(TEMPORARY))?;
        rustix::fs::symlinkat(to, &dir, TEMPORARY).map_err(io(path))?;
        rustix::fs::renameat(&dir, TEMPORARY, &dir, name).map_err(io(path))?;
    }
    for path in old.keys().filter(|path| !new.contains_key(*path)) {
        // It may have been removed with its directory.
        if let Ok((dir, name)) = parent(target, path) {
            remove_tree(&dir, name)?;
        }
    }
    Ok(())
}

/// Copies a file to a temporary name and renames it when complete.
fn copy_file(source: &OwnedFd, dir: &OwnedFd, path: &Path, name: &OsStr, entry: &Entry) -> Result<()> {
    let from = match open(source, path.as_os_str(), OFlags::RDONLY) {
        Ok(from) => from,
        // Removed in the meantime: the next poll handles it.
        Err(Errno::NOENT | Errno::LOOP) => return Ok(()),
        Err(error) => return Err(io(path)(error)),
    };
    remove_tree(dir, OsStr::new(TEMPORARY))?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let unfinished =
        rustix::fs::openat2(dir, TEMPORARY, flags, Mode::from_raw_mode(0o600), RESOLVE).map_err(io(path))?;
    copy_content(from, &unfinished)?;
    set_attributes(&unfinished, entry).map_err(io(path))?;
    rustix::fs::renameat(dir, TEMPORARY, dir, name).map_err(io(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn opened(path: &Path) -> OwnedFd {
        fs::File::open(path).unwrap().into()
    }

    /// Writes a volume as kubelet does.
    fn version(root: &Path, name: &str, text: &str) {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join("key"), text).unwrap();
        symlink(name, root.join("..tmp")).unwrap();
        fs::rename(root.join("..tmp"), root.join("..data")).unwrap();
        let _ = symlink("..data/key", root.join("key"));
    }

    #[test]
    fn copy_is_updated_from_its_source() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (from, to) = (opened(source.path()), opened(target.path()));
        version(source.path(), "..1", "one");
        let first = snapshot(&from).unwrap().unwrap();
        refresh(&from, &to, &Tree::new(), &first).unwrap();
        assert_eq!(fs::read_to_string(target.path().join("key")).unwrap(), "one");
        assert_eq!(snapshot(&from).unwrap().unwrap(), first, "nothing changed");

        version(source.path(), "..2", "two");
        fs::remove_dir_all(source.path().join("..1")).unwrap();
        let second = snapshot(&from).unwrap().unwrap();
        refresh(&from, &to, &first, &second).unwrap();
        assert_eq!(fs::read_to_string(target.path().join("key")).unwrap(), "two");
        let mut names: Vec<_> = fs::read_dir(target.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["..2", "..data", "key"]);
    }

    #[test]
    fn changed_file_types_are_copied() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (from, to) = (opened(source.path()), opened(target.path()));
        let mut old = Tree::new();
        let at = source.path().join("x");
        let turns: [&dyn Fn(); 4] = [
            &|| fs::write(&at, "file").unwrap(),
            &|| {
                fs::remove_file(&at).unwrap();
                fs::create_dir(&at).unwrap();
                fs::write(at.join("y"), "inner").unwrap();
            },
            &|| {
                fs::remove_dir_all(&at).unwrap();
                symlink("nowhere", &at).unwrap();
            },
            &|| {
                fs::remove_file(&at).unwrap();
                fs::write(&at, "file again").unwrap();
            },
        ];
        for turn in turns {
            turn();
            let new = snapshot(&from).unwrap().unwrap();
            refresh(&from, &to, &old, &new).unwrap();
            old = new;
        }
        assert_eq!(fs::read_to_string(target.path().join("x")).unwrap(), "file again");
    }

    #[test]
    fn source_above_the_limits_is_not_copied() {
        let source = tempfile::tempdir().unwrap();
        let from = opened(source.path());
        for number in 0..MAX_ENTRIES {
            fs::write(source.path().join(number.to_string()), "").unwrap();
        }
        assert!(snapshot(&from).unwrap().is_some());
        fs::write(source.path().join("one more"), "").unwrap();
        assert!(snapshot(&from).unwrap().is_none());
        let large = tempfile::tempdir().unwrap();
        fs::File::create(large.path().join("f")).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(snapshot(&opened(large.path())).unwrap().is_none());
        assert!(snapshot(&opened(&large.path().join("f"))).unwrap().is_none());
    }

    #[test]
    fn symlink_in_the_copy_is_not_followed() {
        let (source, target, outside) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (from, to) = (opened(source.path()), opened(target.path()));
        fs::create_dir(source.path().join("a")).unwrap();
        fs::write(source.path().join("a/f"), "x").unwrap();
        // A user of the copy has put a link into it.
        symlink(outside.path(), target.path().join("a")).unwrap();
        refresh(&from, &to, &Tree::new(), &snapshot(&from).unwrap().unwrap()).unwrap_err();
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
