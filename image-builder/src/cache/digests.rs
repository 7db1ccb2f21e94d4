//! Digests of the files of a cache entry: recorded when it is created, compared when a file is used.
//!
//! A cache outlives the builds that filled it. A file that was damaged in between must not get into an image as if
//! it came from its package.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use serde::{Deserialize, Serialize};

use crate::cache::{self, io_error};

/// A cached file is not the one that was cached.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cached file {} has SHA-256 {found}, but {expected} was recorded: remove {} and build again",
    file.display(), dir.display()
)]
pub struct Damaged {
    /// The file.
    pub file: PathBuf,
    /// The recorded SHA-256, or `none`.
    pub expected: String,
    /// The actual SHA-256.
    pub found: String,
    /// The directory to remove.
    pub dir: PathBuf,
}

/// A file of a cache entry, with the SHA-256 that was recorded when it was cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedFile {
    /// The cache entry's directory.
    pub dir: PathBuf,
    /// The file.
    pub file: PathBuf,
    /// Lower-case hexadecimal, or `none`.
    pub sha256: String,
}

impl CachedFile {
    /// Compares the recorded hash with that of the content.
    ///
    /// # Errors
    /// They differ.
    pub fn verify(&self, found: &str) -> Result<(), Box<Damaged>> {
        if self.sha256 == found {
            return Ok(());
        }
        Err(Box::new(Damaged {
            file: self.file.clone(),
            expected: self.sha256.clone(),
            found: found.to_owned(),
            dir: self.dir.clone(),
        }))
    }
}

/// SHA-256 of every regular file below a directory, by relative path.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Digests(BTreeMap<String, String>);

impl Digests {
    /// Hashes all regular files below `dir`. Files whose names are not UTF-8 are left out: no image can contain them.
    ///
    /// # Errors
    /// A file or directory cannot be read.
    pub(crate) fn of(dir: &Path) -> Result<Self, cache::Error> {
        let mut digests = BTreeMap::new();
        let mut dirs = vec![PathBuf::new()];
        while let Some(part) = dirs.pop() {
            let path = dir.join(&part);
            for entry in fs::read_dir(&path).map_err(io_error("list", &path))? {
                let entry = entry.map_err(io_error("list", &path))?;
                let (kind, name) =
                    (entry.file_type().map_err(io_error("inspect", &path))?, part.join(entry.file_name()));
                if kind.is_dir() {
                    dirs.push(name);
                } else if kind.is_file()
                    && let Some(text) = name.to_str()
                {
                    let (sha256, _) = digest::of_file(&entry.path()).map_err(io_error("read", &entry.path()))?;
                    digests.insert(text.to_owned(), sha256);
                }
            }
        }
        Ok(Self(digests))
    }

    /// Writes the digests to `file`, which must be outside of the directory that they describe.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self, file: &Path) -> Result<(), cache::Error> {
        let text = serde_json::to_vec(self).map_err(io::Error::other).map_err(io_error("write", file))?;
        fs::write(file, text).map_err(io_error("write", file))
    }

    /// Reads the digests from `file`.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub(crate) fn read(file: &Path) -> Result<Self, cache::Error> {
        let text = fs::read(file).map_err(io_error("read", file))?;
        serde_json::from_slice(&text).map_err(io::Error::other).map_err(io_error("parse", file))
    }

    /// Returns the file `name` below `dir`, in the cache entry `entry`.
    #[must_use]
    pub(crate) fn file(&self, entry: &Path, dir: &Path, name: &str) -> CachedFile {
        let sha256 = self.0.get(name).cloned().unwrap_or_else(|| "none".to_owned());
        CachedFile { dir: entry.to_owned(), file: dir.join(name), sha256 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_file_and_added_file_are_damaged() {
        let entry = tempfile::tempdir().unwrap();
        let dir = entry.path().join("files");
        fs::create_dir_all(dir.join("a")).unwrap();
        fs::write(dir.join("a/b"), "good").unwrap();
        std::os::unix::fs::symlink("b", dir.join("a/link")).unwrap();
        let list = entry.path().join("digests.json");
        Digests::of(&dir).unwrap().write(&list).unwrap();
        let digests = Digests::read(&list).unwrap();
        assert_eq!(digests.0.len(), 1, "links have no content of their own");
        let file = digests.file(entry.path(), &dir, "a/b");
        assert_eq!(file.verify(&digest::of_bytes(b"good")), Ok(()));
        let error = file.verify(&digest::of_bytes(b"evil")).unwrap_err().to_string();
        for part in ["files/a/b has SHA-256", &digest::of_bytes(b"good"), "remove", "build again"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        let added = digests.file(entry.path(), &dir, "a/c").verify("x").unwrap_err();
        assert_eq!(added.expected, "none");
    }
}
