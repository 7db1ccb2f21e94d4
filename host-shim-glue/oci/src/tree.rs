//! A directory in which the paths of a layer are resolved as in a container: the
//! kernel resolves every link inside the directory (`RESOLVE_IN_ROOT`).

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, mkdirat, open, openat2, unlinkat};
use rustix::io::Errno;

/// The root of an unpacked image.
#[derive(Debug)]
pub(crate) struct Tree {
    root: OwnedFd,
}

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC).union(OFlags::RDONLY);

/// Splits a path into parent and name; `None` if it has a `..` or is the root itself.
pub(crate) fn split(path: &Path) -> Option<(PathBuf, &OsStr)> {
    let mut parent = PathBuf::new();
    let mut last: Option<&OsStr> = None;
    for component in path.components() {
        match component {
            Component::Normal(name) => {
                if let Some(previous) = last.replace(name) {
                    parent.push(previous);
                }
            }
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    last.map(|name| (parent, name))
}

impl Tree {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { root: open(path, DIRECTORY, Mode::empty())? })
    }

    /// Opens the directory at `path`; creates it and its parents if missing.
    pub(crate) fn dir(&self, path: &Path) -> io::Result<OwnedFd> {
        match self.resolve(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let Some((parent, name)) = split(path) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path escapes the image"));
        };
        let parent = self.dir(&parent)?;
        match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        self.resolve(path)
    }

    fn resolve(&self, path: &Path) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        Ok(openat2(&self.root, path, DIRECTORY, Mode::empty(), ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)?)
    }
}

/// Removes the entry `name` of `dir` recursively, without following links.
/// Succeeds if it does not exist.
pub(crate) fn remove(dir: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    let inner = openat2(dir, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    clear(&inner)?;
    Ok(unlinkat(dir, name, AtFlags::REMOVEDIR)?)
}

/// Removes all entries of `dir`.
pub(crate) fn clear(dir: &OwnedFd) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    names.iter().try_for_each(|name| remove(dir, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_resolved_inside_the_tree() {
        let outside = tempfile::tempdir().unwrap();
        let inside = tempfile::tempdir().unwrap();
        symlink(outside.path(), inside.path().join("abs")).unwrap();
        symlink("../../../../..", inside.path().join("up")).unwrap();
        let tree = Tree::open(inside.path()).unwrap();
        tree.dir(Path::new("up/made")).unwrap();
        assert!(inside.path().join("made").is_dir(), ".. stops at the image's root");
        // An absolute link refers to a path inside the image, which does not exist.
        assert!(tree.dir(Path::new("abs/made")).is_err());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        assert!(split(Path::new("a/../b")).is_none());
    }

    #[test]
    fn remove_does_not_follow_links() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("keep"), "").unwrap();
        let inside = tempfile::tempdir().unwrap();
        fs::create_dir_all(inside.path().join("d/e")).unwrap();
        symlink(outside.path(), inside.path().join("d/e/link")).unwrap();
        let root = Tree::open(inside.path()).unwrap().dir(Path::new("")).unwrap();
        remove(&root, OsStr::new("d")).unwrap();
        remove(&root, OsStr::new("never-there")).unwrap();
        assert!(!inside.path().join("d").exists());
        assert!(outside.path().join("keep").exists());
    }
}
