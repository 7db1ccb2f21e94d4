//! A content-addressed store of downloaded files.
//!
//! An archive removes replaced packages within weeks, but images built from them
//! must stay reproducible. So downloads are stored under their SHA-256:
//! `store/ab/ab12.../NAME`, where the name is informational. A file is renamed to
//! its final name when it is complete and synced, and hashed at every lookup; a
//! corrupt one counts as absent.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::digest;

use crate::cache::{self, io_error};

/// Why a file could not be stored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its hash is wrong.
    #[error("{}: SHA-256 is {found}, expected {expected}", file.display())]
    WrongHash {
        /// The file.
        file: PathBuf,
        /// The expected SHA-256.
        expected: String,
        /// The actual SHA-256.
        found: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// The store directory. Any number of processes may use it concurrently.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
}

/// Name prefix of files that are being written.
const PARTIAL_PREFIX: &str = ".half-";

fn is_partial(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(PARTIAL_PREFIX.as_bytes()))
}

/// Returns whether this is a SHA-256 in lower-case hexadecimal.
#[must_use]
pub fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

impl Store {
    /// Returns the store of a cache directory, which is created by the first `put`.
    #[must_use]
    pub fn of(cache: &Path) -> Self {
        Self { dir: cache.join("store") }
    }

    fn directory_of(&self, sha256: &str) -> PathBuf {
        self.dir.join(sha256.get(..2).unwrap_or("--")).join(sha256)
    }

    /// Returns the file with this hash, under any name, if it is stored and intact.
    #[must_use]
    pub fn get(&self, sha256: &str) -> Option<PathBuf> {
        let entries = fs::read_dir(self.directory_of(sha256)).ok()?.flatten();
        entries.map(|entry| entry.path()).find(|file| match digest::of_file(file) {
            Ok((found, _)) if found == sha256 => true,
            Ok(_) => {
                // Remove a corrupt file, but not one that another process is writing.
                if !is_partial(file) {
                    let _ = fs::remove_file(file);
                }
                false
            }
            Err(_) => false,
        })
    }

    /// Moves a file into the store if it has that hash. `name` is an informational file name.
    ///
    /// # Errors
    /// It has another hash and is not moved, or a file operation failed.
    pub fn put(&self, file: &Path, sha256: &str, name: &str) -> Result<PathBuf, Error> {
        let (found, _) = digest::of_file(file).map_err(io_error("read", file))?;
        if found != sha256 {
            return Err(Error::WrongHash { file: file.to_owned(), expected: sha256.to_owned(), found });
        }
        let dir = &self.directory_of(sha256);
        let path = dir.join(name);
        fs::create_dir_all(dir).map_err(io_error("create directory", dir))?;
        File::open(file).and_then(|open| open.sync_all()).map_err(io_error("sync", file))?;
        match fs::rename(file, &path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                let new = tempfile::Builder::new()
                    .prefix(PARTIAL_PREFIX)
                    .tempfile_in(dir)
                    .map_err(io_error("create a file in", dir))?;
                fs::copy(file, new.path()).map_err(io_error("copy a file to", &path))?;
                new.as_file().sync_all().map_err(io_error("sync", &path))?;
                new.persist(&path).map_err(|error| io_error("rename into place", &path)(error.error))?;
                fs::remove_file(file).map_err(io_error("remove", file))?;
            }
            Err(error) => return Err(io_error("rename into place", &path)(error).into()),
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_found_by_its_hash_unless_corrupt() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let hash = digest::of_bytes(b"package");
        assert_eq!(store.get(&hash), None);
        let file = dir.path().join("fetched");
        fs::write(&file, "package").unwrap();
        let path = store.put(&file, &hash, "a.deb").unwrap();
        assert!(!file.exists());
        assert_eq!(store.get(&hash), Some(path.clone()));
        // Storing it again is idempotent.
        fs::write(&file, "package").unwrap();
        assert_eq!(store.put(&file, &hash, "a.deb").unwrap(), path);
        for damage in ["packagE", "pack", ""] {
            fs::write(&path, damage).unwrap();
            assert_eq!(store.get(&hash), None, "{damage:?}");
            fs::write(&file, "package").unwrap();
            store.put(&file, &hash, "a.deb").unwrap();
        }
    }

    #[test]
    fn file_with_another_hash_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let file = dir.path().join("fetched");
        fs::write(&file, "something else").unwrap();
        let hash = digest::of_bytes(b"package");
        assert!(matches!(store.put(&file, &hash, "a.deb"), Err(Error::WrongHash { .. })));
        assert!(file.exists() && store.get(&hash).is_none());
        assert!(is_hash(&hash) && !is_hash(&hash[1..]) && !is_hash(&hash.to_uppercase()));
    }

    #[test]
    fn concurrent_put_and_get_of_one_file_succeed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let text = "x".repeat(100_000);
        let hash = digest::of_bytes(text.as_bytes());
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (store, text, hash, file) = (&store, &text, &hash, dir.path().join(format!("{worker}")));
                scope.spawn(move || {
                    for _ in 0..20 {
                        fs::write(&file, text).unwrap();
                        let path = store.put(&file, hash, "a").unwrap();
                        assert_eq!(store.get(hash), Some(path));
                    }
                });
            }
        });
    }
}
