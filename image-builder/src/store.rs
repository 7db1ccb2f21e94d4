//! Files by what is in them.
//!
//! A package that an archive has replaced is gone from there within weeks; an
//! image that was built from it must build again all the same. So what was
//! fetched stays, under its SHA-256: `store/ab/ab12.../NAME`, where the name is
//! for people and finds nothing. A file has its final name only when it is whole
//! and on the disk, and is hashed whenever it is taken out; one that is damaged
//! counts as absent.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::cache::{self, io_error};
use crate::digest;

/// Why a file could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not what it should be.
    #[error("{}: SHA-256 is {found}, expected {expected}", file.display())]
    WrongHash {
        /// The file.
        file: PathBuf,
        /// What it should have.
        expected: String,
        /// What it has.
        found: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// The directory of kept files. Any number of processes may use it at once.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
}

/// How the names of files begin that are being written.
const HALF: &str = ".half-";

fn is_half(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(HALF.as_bytes()))
}

/// Whether this is a SHA-256 as this crate writes them.
#[must_use]
pub fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

impl Store {
    /// The store of a cache directory. It is made when something is put in.
    #[must_use]
    pub fn of(cache: &Path) -> Self {
        Self { dir: cache.join("store") }
    }

    fn place(&self, sha256: &str) -> PathBuf {
        self.dir.join(sha256.get(..2).unwrap_or("--")).join(sha256)
    }

    /// The file with this hash, if it is there and whole, whatever it is called.
    #[must_use]
    pub fn get(&self, sha256: &str) -> Option<PathBuf> {
        let entries = fs::read_dir(self.place(sha256)).ok()?.flatten();
        entries.map(|entry| entry.path()).find(|file| match digest::of_file(file) {
            Ok((found, _)) if found == sha256 => true,
            Ok(_) => {
                // What a disk has damaged helps nobody. Not one that another process is just writing.
                if !is_half(file) {
                    let _ = fs::remove_file(file);
                }
                false
            }
            Err(_) => false,
        })
    }

    /// Moves a file in, if it has that hash. `name` is one component, for people.
    ///
    /// # Errors
    /// It has another hash and stays where it is, or a file operation failed.
    pub fn put(&self, file: &Path, sha256: &str, name: &str) -> Result<PathBuf, Error> {
        let (found, _) = digest::of_file(file).map_err(io_error("read", file))?;
        if found != sha256 {
            return Err(Error::WrongHash { file: file.to_owned(), expected: sha256.to_owned(), found });
        }
        let dir = &self.place(sha256);
        let place = dir.join(name);
        fs::create_dir_all(dir).map_err(io_error("create directory", dir))?;
        File::open(file).and_then(|open| open.sync_all()).map_err(io_error("write to the disk", file))?;
        match fs::rename(file, &place) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                let new =
                    tempfile::Builder::new().prefix(HALF).tempfile_in(dir).map_err(io_error("make a file in", dir))?;
                fs::copy(file, new.path()).map_err(io_error("copy a file to", &place))?;
                new.as_file().sync_all().map_err(io_error("write to the disk", &place))?;
                new.persist(&place).map_err(|error| io_error("rename into place", &place)(error.error))?;
                fs::remove_file(file).map_err(io_error("remove", file))?;
            }
            Err(error) => return Err(io_error("rename into place", &place)(error).into()),
        }
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_by_its_hash_and_a_damaged_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let hash = digest::of_bytes(b"package");
        assert_eq!(store.get(&hash), None);
        let file = dir.path().join("fetched");
        fs::write(&file, "package").unwrap();
        let place = store.put(&file, &hash, "a.deb").unwrap();
        assert!(!file.exists());
        assert_eq!(store.get(&hash), Some(place.clone()));
        // Twice is no harm.
        fs::write(&file, "package").unwrap();
        assert_eq!(store.put(&file, &hash, "a.deb").unwrap(), place);
        for damage in ["packagE", "pack", ""] {
            fs::write(&place, damage).unwrap();
            assert_eq!(store.get(&hash), None, "{damage:?}");
            fs::write(&file, "package").unwrap();
            store.put(&file, &hash, "a.deb").unwrap();
        }
    }

    #[test]
    fn another_file_does_not_get_in() {
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
    fn many_at_once_put_and_take_one_file() {
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
                        let place = store.put(&file, hash, "a").unwrap();
                        assert_eq!(store.get(hash), Some(place));
                    }
                });
            }
        });
    }
}
