//! Places in the guest's tree that a container, the host or both may change
//! while we look: reached step by step, and never through a symbolic link.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Deeper places are somebody's trick.
const DEEPEST: usize = 64;

/// Longer paths the kernel does not take, in bytes.
const LONGEST: usize = 4096;

const STEP: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// What something is mounted on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A file: sockets, device nodes and files are bound on one.
    File,
}

/// A mount point: a descriptor, which no later change of the tree redirects.
#[derive(Debug)]
pub struct Place {
    fd: OwnedFd,
    path: PathBuf,
    kind: Kind,
    made: bool,
}

/// The path's parts below `trusted`.
fn parts<'a>(trusted: &Path, path: &'a Path) -> Result<Vec<&'a OsStr>> {
    if path.as_os_str().len() >= LONGEST {
        return Err(Error::invalid(format!("a path is longer than {LONGEST} bytes")));
    }
    let refuse = |why: String| Err(Error::invalid(format!("{}: {why}", path.display())));
    if !path.is_absolute() {
        return refuse("the path is not absolute".to_owned());
    }
    let Ok(inside) = path.strip_prefix(trusted) else {
        return refuse(format!("is not below {}, where the agent mounts", trusted.display()));
    };
    let parts: Option<Vec<&OsStr>> = inside
        .components()
        .map(|component| if let Component::Normal(name) = component { Some(name) } else { None })
        .collect();
    match parts {
        None => refuse("has '..' in it".to_owned()),
        Some(parts) if parts.is_empty() => refuse("is the agent's own directory".to_owned()),
        Some(parts) if parts.len() > DEEPEST => refuse(format!("is deeper than {DEEPEST} directories")),
        Some(parts) => Ok(parts),
    }
}

/// Says what stands in the way.
fn blocked(path: &Path, part: &OsStr, error: Errno) -> Error {
    let part = part.display();
    let why = match error {
        Errno::LOOP => format!("{part:?} is a symbolic link, which the agent does not follow"),
        Errno::NOTDIR => format!("{part:?} is no directory"),
        Errno::NOENT => format!("there is no {part:?}"),
        error => format!("at {part:?}: {error}"),
    };
    Error::internal(format!("{}: {why}", path.display()))
}

fn step(dir: BorrowedFd<'_>, part: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(dir, part, flags | OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), STEP)
}

/// Opens a directory, and makes it if it is missing; whether it did.
fn dir(parent: BorrowedFd<'_>, part: &OsStr) -> rustix::io::Result<(OwnedFd, bool)> {
    match step(parent, part, OFlags::DIRECTORY) {
        Err(Errno::NOENT) => {
            let made = match rustix::fs::mkdirat(parent, part, Mode::from_raw_mode(0o755)) {
                Ok(()) => true,
                Err(Errno::EXIST) => false,
                Err(error) => return Err(error),
            };
            step(parent, part, OFlags::DIRECTORY).map(|fd| (fd, made))
        }
        found => found.map(|fd| (fd, false)),
    }
}

/// Opens a file of any kind, and makes it if it is missing; whether it did.
fn file(parent: BorrowedFd<'_>, part: &OsStr) -> rustix::io::Result<(OwnedFd, bool)> {
    match step(parent, part, OFlags::empty()) {
        Err(Errno::NOENT) => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let made = match rustix::fs::openat2(parent, part, flags, Mode::from_raw_mode(0o644), STEP) {
                Ok(_) => true,
                Err(Errno::EXIST) => false,
                Err(error) => return Err(error),
            };
            step(parent, part, OFlags::empty()).map(|fd| (fd, made))
        }
        found => found.map(|fd| (fd, false)),
    }
}

/// The directory above `path` and the path's last part; missing directories are made if `make`.
fn parent<'a>(trusted: &Path, path: &'a Path, make: bool) -> Result<(OwnedFd, &'a OsStr)> {
    let all = parts(trusted, path)?;
    let cannot = |error: &dyn std::fmt::Display| Error::internal(format!("cannot open {}: {error}", trusted.display()));
    if make {
        fs::create_dir_all(trusted).map_err(|error| cannot(&error))?;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = rustix::fs::openat(CWD, trusted, flags, Mode::empty()).map_err(|error| cannot(&error))?;
    let (last, above) = all.split_last().ok_or_else(|| Error::invalid("no path"))?;
    for part in above {
        let next =
            if make { dir(at.as_fd(), part).map(|(fd, _)| fd) } else { step(at.as_fd(), part, OFlags::DIRECTORY) };
        at = next.map_err(|error| blocked(path, part, error))?;
    }
    Ok((at, last))
}

impl Place {
    /// A mount point below `trusted`, which only the guest itself may change.
    /// What is missing on the way is made.
    ///
    /// # Errors
    /// The path is not below `trusted`, or a part of it is a link or of the wrong kind.
    pub fn make(trusted: &Path, path: &Path, kind: Kind) -> Result<Self> {
        let (above, last) = parent(trusted, path, true)?;
        let made = match kind {
            Kind::Directory => dir(above.as_fd(), last),
            Kind::File => file(above.as_fd(), last),
        };
        let (fd, made) = made.map_err(|error| blocked(path, last, error))?;
        Ok(Self { fd, path: path.to_owned(), kind, made })
    }

    /// Where it is, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes away what was made to mount on, if it is empty. Whatever was there before stays.
    pub fn remove(trusted: &Path, path: &Path, kind: Kind) {
        let flags = if kind == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        if let Ok((above, last)) = parent(trusted, path, false) {
            let _ = rustix::fs::unlinkat(&above, last, flags);
        }
    }

    /// The parts that outlive the descriptor: path, kind, and whether it was made.
    #[must_use]
    pub fn into_parts(self) -> (PathBuf, Kind, bool) {
        (self.path, self.kind, self.made)
    }
}

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Something that is there, reached without following a link.
///
/// # Errors
/// It is not there, or a part of the path is a link.
pub fn existing(path: &Path) -> Result<OwnedFd> {
    open_below(Path::new("/"), path, OFlags::PATH)
}

/// The directory above something below `trusted`, and its name there: what is done
/// by these two no later change of the tree redirects.
///
/// # Errors
/// As [`existing`].
pub fn above<'a>(trusted: &Path, path: &'a Path) -> Result<(OwnedFd, &'a OsStr)> {
    parent(trusted, path, false)
}

/// Something in a directory, which is not followed if it is a link.
///
/// # Errors
/// The kernel's.
pub fn in_directory(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    step(dir.as_fd(), name, OFlags::empty())
}

/// Something below `trusted`, opened with `flags`, reached without following a link.
///
/// # Errors
/// As [`existing`].
pub fn open_below(trusted: &Path, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    let (above, last) = parent(trusted, path, false)?;
    rustix::fs::openat2(&above, last, flags | OFlags::CLOEXEC, Mode::empty(), STEP)
        .map_err(|error| blocked(path, last, error))
}

/// What a descriptor is of.
///
/// # Errors
/// The kernel's.
pub fn kind(fd: impl AsFd) -> Result<FileType> {
    let data = rustix::fs::fstat(fd).map_err(|error| Error::internal(format!("cannot look at it: {error}")))?;
    Ok(FileType::from_raw_mode(data.st_mode))
}

/// A path by which the kernel finds exactly what the descriptor is of.
#[must_use]
pub fn by_descriptor(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn missing_parts_are_made_and_only_they_are_taken_away() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/c");
        let place = Place::make(root.path(), &path, Kind::Directory).unwrap();
        assert!(path.is_dir());
        let (at, kind, made) = place.into_parts();
        assert!(made);
        Place::remove(root.path(), &at, kind);
        assert!(!path.exists() && path.parent().unwrap().exists());
        let path = root.path().join("a/file");
        assert!(Place::make(root.path(), &path, Kind::File).unwrap().into_parts().2);
        assert!(!Place::make(root.path(), &path, Kind::File).unwrap().into_parts().2);
        assert!(Place::make(root.path(), &path, Kind::Directory).unwrap_err().to_string().contains("no directory"));
    }

    #[test]
    fn a_link_at_any_part_is_named_and_nothing_is_made_behind_it() {
        for link in ["a", "a/b", "a/b/c", "a/b/c/d"] {
            let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let at = root.path().join(link);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            symlink(outside.path(), &at).unwrap();
            let path = root.path().join("a/b/c/d");
            for kind in [Kind::Directory, Kind::File] {
                let error = Place::make(root.path(), &path, kind).unwrap_err().to_string();
                let name = Path::new(link).file_name().unwrap().to_str().unwrap();
                let named = error.contains(&format!("{name:?} is a symbolic link"))
                    || error.contains(&format!("{name:?} is no directory"));
                assert!(named, "{link}: {error}");
            }
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{link}");
            assert!(existing(&path).is_err());
        }
    }

    #[test]
    fn places_outside_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let inside = root.path().join("x/../../y");
        for (path, part) in [
            (Path::new("relative"), "absolute"),
            (Path::new("/etc"), "not below"),
            (&inside, "'..'"),
            (root.path(), "own directory"),
        ] {
            let error = Place::make(root.path(), path, Kind::Directory).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let long = root.path().join("d".repeat(5000));
        assert!(Place::make(root.path(), &long, Kind::Directory).unwrap_err().to_string().len() < 100);
        let deep = root.path().join("d/".repeat(65));
        assert!(Place::make(root.path(), &deep, Kind::Directory).unwrap_err().to_string().contains("deeper"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn whatever_is_made_is_inside(path in "(/|\\.|\\.\\.|a|b|\\PC){0,12}") {
            let root = tempfile::tempdir().unwrap();
            let trusted = root.path().join("t/u");
            let path = trusted.join(path.trim_start_matches('/'));
            if let Ok(place) = Place::make(&trusted, &path, Kind::Directory) {
                let found = fs::read_link(by_descriptor(&place)).unwrap();
                prop_assert!(found.starts_with(&trusted) && found != trusted);
            }
            prop_assert_eq!(fs::read_dir(root.path().join("t")).map_or(1, Iterator::count), 1);
        }
    }
}
