//! Directories for what a container writes, in the agent's own memory file system.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::place::{self, Kind, Place};
use crate::error::{Error, Result};

/// A directory that was made. Dropped, it goes away with all that is in it.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes a directory below `run`. One that was there, or that is on another
    /// file system, is not ours to take away: then there is none.
    ///
    /// # Errors
    /// The path is outside, or has a link in it.
    pub fn make(run: &Path, path: &Path) -> Result<Option<Self>> {
        let place = Place::make(run, path, Kind::Directory)?;
        let failed = |error: std::io::Error| Error::internal(format!("{}: {error}", path.display()));
        let ours = std::fs::metadata(run).map_err(failed)?.dev();
        let device = rustix::fs::fstat(&place).map_err(|error| failed(error.into()))?.st_dev;
        let (path, _, made) = place.into_parts();
        // Not then_some: a value that is not returned would be dropped, and the directory with it.
        Ok(if made && device == ours { Some(Self(path)) } else { None })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is in it is a container's work; the standard library does not follow its links.
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            log::warn!("{}: cannot be removed: {error}", self.0.display());
        }
    }
}

/// A path in the guest that nobody else uses, for a layer of something.
#[must_use]
pub(super) fn fresh(run: &Path, what: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    run.join(format!("sandbox/layers/{}-{what}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// A directory in a mount of ours, whose contents somebody else may have made; its descriptor.
///
/// # Errors
/// It is no directory, or a part of the path is a link.
pub(super) fn inside(mount: &Path, name: &str) -> Result<Place> {
    Place::make(mount, &mount.join(name), Kind::Directory)
}

/// A directory that has to be there, in a mount of ours.
///
/// # Errors
/// It is not there, or a part of the path is a link.
pub(super) fn required(mount: &Path, name: &str) -> Result<()> {
    place::open_below(mount, &mount.join(name), rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_made_goes_away() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/upper");
        let scratch = Scratch::make(root.path(), &path).unwrap().unwrap();
        std::fs::write(path.join("x"), "y").unwrap();
        assert!(Scratch::make(root.path(), &path).unwrap().is_none());
        assert!(path.join("x").exists());
        drop(scratch);
        assert!(!path.exists() && root.path().join("a").exists());
        assert_ne!(fresh(root.path(), "upper"), fresh(root.path(), "upper"));
    }
}
