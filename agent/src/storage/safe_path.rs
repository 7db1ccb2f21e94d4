//! Opens paths below directories that containers and the host may change concurrently: component by
//! component, never through a symbolic link.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Upper bound on path components (untrusted input).
const MAX_DEPTH: usize = 64;

/// The kernel's PATH_MAX, in bytes.
const MAX_PATH: usize = 4096;

const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Type of a mount point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A file: mount point of sockets, device nodes and files.
    File,
}

/// A mount point, held by a descriptor: later changes of the tree do not redirect it.
#[derive(Debug)]
pub struct MountPoint {
    fd: OwnedFd,
    path: PathBuf,
    kind: Kind,
    made: bool,
}

/// Splits the path below `trusted` into components.
fn parts<'a>(trusted: &Path, path: &'a Path) -> Result<Vec<&'a OsStr>> {
    if path.as_os_str().len() >= MAX_PATH {
        return Err(Error::invalid(format!("a path is longer than {MAX_PATH} bytes")));
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
        None => refuse("contains '..'".to_owned()),
        Some(parts) if parts.is_empty() => refuse("is the agent's own directory".to_owned()),
        Some(parts) if parts.len() > MAX_DEPTH => refuse(format!("is deeper than {MAX_DEPTH} directories")),
        Some(parts) => Ok(parts),
    }
}

/// Describes why a component cannot be opened.
fn component_error(path: &Path, part: &OsStr, error: Errno) -> Error {
    let part = part.display();
    let why = match error {
        Errno::LOOP => format!("{part:?} is a symbolic link, which the agent does not follow"),
        Errno::NOTDIR => format!("{part:?} is not a directory"),
        Errno::NOENT => format!("{part:?} does not exist"),
        error => format!("at {part:?}: {error}"),
    };
    Error::internal(format!("{}: {why}", path.display()))
}

fn step(dir: BorrowedFd<'_>, part: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(dir, part, flags | OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), RESOLVE)
}

/// Opens a directory, creating it if missing; returns whether it was created.
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

/// Opens a file of any type, creating it if missing; returns whether it was created.
fn file(parent: BorrowedFd<'_>, part: &OsStr) -> rustix::io::Result<(OwnedFd, bool)> {
    match step(parent, part, OFlags::empty()) {
        Err(Errno::NOENT) => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let made = match rustix::fs::openat2(parent, part, flags, Mode::from_raw_mode(0o644), RESOLVE) {
                Ok(_) => true,
                Err(Errno::EXIST) => false,
                Err(error) => return Err(error),
            };
            step(parent, part, OFlags::empty()).map(|fd| (fd, made))
        }
        found => found.map(|fd| (fd, false)),
    }
}

/// Opens the parent directory of `path`; returns it and the last component. Creates missing
/// directories if `make`.
fn parent<'a>(trusted: &Path, path: &'a Path, make: bool) -> Result<(OwnedFd, &'a OsStr)> {
    let all = parts(trusted, path)?;
    let cannot =
        |error: &dyn std::fmt::Display| Error::internal(format!("failed to open {}: {error}", trusted.display()));
    if make {
        fs::create_dir_all(trusted).map_err(|error| cannot(&error))?;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = rustix::fs::openat(CWD, trusted, flags, Mode::empty()).map_err(|error| cannot(&error))?;
    let (last, above) = all.split_last().ok_or_else(|| Error::invalid("no path"))?;
    for part in above {
        let next =
            if make { dir(at.as_fd(), part).map(|(fd, _)| fd) } else { step(at.as_fd(), part, OFlags::DIRECTORY) };
        at = next.map_err(|error| component_error(path, part, error))?;
    }
    Ok((at, last))
}

impl MountPoint {
    /// Opens a mount point below `trusted`, which only the guest itself may change. Missing
    /// components are created.
    ///
    /// # Errors
    /// The path is not below `trusted`, or a component is a link or has the wrong type.
    pub fn create(trusted: &Path, path: &Path, kind: Kind) -> Result<Self> {
        let (above, last) = parent(trusted, path, true)?;
        let made = match kind {
            Kind::Directory => dir(above.as_fd(), last),
            Kind::File => file(above.as_fd(), last),
        };
        let (fd, made) = made.map_err(|error| component_error(path, last, error))?;
        Ok(Self { fd, path: path.to_owned(), kind, made })
    }

    /// Returns its path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the mount point that was created, if it is empty.
    pub fn remove(trusted: &Path, path: &Path, kind: Kind) {
        let flags = if kind == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        if let Ok((above, last)) = parent(trusted, path, false) {
            let _ = rustix::fs::unlinkat(&above, last, flags);
        }
    }

    /// Returns path, type, and whether it was created.
    #[must_use]
    pub fn into_parts(self) -> (PathBuf, Kind, bool) {
        (self.path, self.kind, self.made)
    }
}

impl AsFd for MountPoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens an existing file without following links.
///
/// # Errors
/// It does not exist, or a component of the path is a link.
pub fn existing(path: &Path) -> Result<OwnedFd> {
    open_below(Path::new("/"), path, OFlags::PATH)
}

/// Returns the parent directory of a path below `trusted`, and the last component: operations by
/// these two are not redirected by later changes of the tree.
///
/// # Errors
/// As [`existing`].
pub fn above<'a>(trusted: &Path, path: &'a Path) -> Result<(OwnedFd, &'a OsStr)> {
    parent(trusted, path, false)
}

/// Opens an entry of a directory without following it if it is a link.
///
/// # Errors
/// The system call fails.
pub fn in_directory(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    step(dir.as_fd(), name, OFlags::empty())
}

/// Opens a path below `trusted` with `flags`, without following links.
///
/// # Errors
/// As [`existing`].
pub fn open_below(trusted: &Path, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    let (above, last) = parent(trusted, path, false)?;
    rustix::fs::openat2(&above, last, flags | OFlags::CLOEXEC, Mode::empty(), RESOLVE)
        .map_err(|error| component_error(path, last, error))
}

/// Returns the file type of a descriptor.
///
/// # Errors
/// The system call fails.
pub fn kind(fd: impl AsFd) -> Result<FileType> {
    let data = rustix::fs::fstat(fd).map_err(|error| Error::internal(format!("fstat failed: {error}")))?;
    Ok(FileType::from_raw_mode(data.st_mode))
}

/// Returns the /proc path of a descriptor.
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
    fn only_created_components_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/c");
        let place = MountPoint::create(root.path(), &path, Kind::Directory).unwrap();
        assert!(path.is_dir());
        let (at, kind, made) = place.into_parts();
        assert!(made);
        MountPoint::remove(root.path(), &at, kind);
        assert!(!path.exists() && path.parent().unwrap().exists());
        let path = root.path().join("a/file");
        assert!(MountPoint::create(root.path(), &path, Kind::File).unwrap().into_parts().2);
        assert!(!MountPoint::create(root.path(), &path, Kind::File).unwrap().into_parts().2);
        assert!(
            MountPoint::create(root.path(), &path, Kind::Directory)
                .unwrap_err()
                .to_string()
                .contains("not a directory")
        );
    }

    #[test]
    fn symlink_at_any_component_is_reported_and_not_followed() {
        for link in ["a", "a/b", "a/b/c", "a/b/c/d"] {
            let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let at = root.path().join(link);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            symlink(outside.path(), &at).unwrap();
            let path = root.path().join("a/b/c/d");
            for kind in [Kind::Directory, Kind::File] {
                let error = MountPoint::create(root.path(), &path, kind).unwrap_err().to_string();
                let name = Path::new(link).file_name().unwrap().to_str().unwrap();
                let named = error.contains(&format!("{name:?} is a symbolic link"))
                    || error.contains(&format!("{name:?} is not a directory"));
                assert!(named, "{link}: {error}");
            }
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{link}");
            assert!(existing(&path).is_err());
        }
    }

    #[test]
    fn paths_outside_are_rejected() {
        let root = tempfile::tempdir().unwrap();
        let inside = root.path().join("x/../../y");
        for (path, part) in [
            (Path::new("relative"), "absolute"),
            (Path::new("/etc"), "not below"),
            (&inside, "'..'"),
            (root.path(), "own directory"),
        ] {
            let error = MountPoint::create(root.path(), path, Kind::Directory).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let long = root.path().join("d".repeat(5000));
        assert!(MountPoint::create(root.path(), &long, Kind::Directory).unwrap_err().to_string().len() < 100);
        let deep = root.path().join("d/".repeat(65));
        assert!(MountPoint::create(root.path(), &deep, Kind::Directory).unwrap_err().to_string().contains("deeper"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn created_mount_points_are_below_the_trusted_directory(path in "(/|\\.|\\.\\.|a|b|\\PC){0,12}") {
            let root = tempfile::tempdir().unwrap();
            let trusted = root.path().join("t/u");
            let path = trusted.join(path.trim_start_matches('/'));
            if let Ok(place) = MountPoint::create(&trusted, &path, Kind::Directory) {
                let found = fs::read_link(by_descriptor(&place)).unwrap();
                prop_assert!(found.starts_with(&trusted) && found != trusted);
            }
            prop_assert_eq!(fs::read_dir(root.path().join("t")).map_or(1, Iterator::count), 1);
        }
    }
}
