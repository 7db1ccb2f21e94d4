//! The output directory, in which every file is complete.
//!
//! Files are written to a staging directory in it, synced, and renamed one after
//! the other; the record that describes them comes last. Leftovers of a killed
//! build are removed by the next one.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use firstlight_progress::Progress;

use crate::cache::{self, io_error};

/// Name of the staging directory in the output directory.
const STAGING: &str = ".building";

/// Results being written. It locks the output directory until it is dropped.
#[derive(Debug)]
pub(super) struct Output {
    dir: PathBuf,
    staging_dir: PathBuf,
    names: Vec<String>,
    lock: File,
}

impl Output {
    /// Locks the output directory `dir`, creating it if absent, and creates the staging directory.
    ///
    /// # Errors
    /// A failed file operation.
    pub(super) fn begin(dir: &Path, progress: Progress) -> Result<Self, cache::Error> {
        fs::create_dir_all(dir).map_err(io_error("create directory", dir))?;
        let lock = File::open(dir).map_err(io_error("open", dir))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.say(format_args!("waiting for another build into {}", dir.display()));
                lock.lock().map_err(io_error("lock", dir))?;
            }
            Err(TryLockError::Error(source)) => return Err(io_error("lock", dir)(source)),
        }
        let staging_dir = dir.join(STAGING);
        remove(&staging_dir)?;
        fs::create_dir(&staging_dir).map_err(io_error("create directory", &staging_dir))?;
        Ok(Self { dir: dir.to_owned(), staging_dir, names: Vec::new(), lock })
    }

    /// Returns the staging directory.
    #[must_use]
    pub(super) fn staging_dir(&self) -> &Path {
        &self.staging_dir
    }

    /// Adds the result `name` and returns its path in the staging directory.
    pub(super) fn add(&mut self, name: &str) -> PathBuf {
        self.names.push(name.to_owned());
        self.staging_dir.join(name)
    }

    /// Renames every result into place, in the order of [`Output::add`], and
    /// removes the `stale` results of earlier builds.
    ///
    /// # Errors
    /// A failed file operation. Every result is then either the old or the new one.
    pub(super) fn finish(mut self, stale: &[String]) -> Result<(), cache::Error> {
        for name in &self.names {
            let path = self.staging_dir.join(name);
            File::open(&path).and_then(|file| file.sync_all()).map_err(io_error("write to disk", &path))?;
        }
        for name in std::mem::take(&mut self.names) {
            let path = self.dir.join(&name);
            fs::rename(self.staging_dir.join(&name), &path).map_err(io_error("rename into place", &path))?;
        }
        for name in stale {
            remove(&self.dir.join(name))?;
        }
        self.lock.sync_all().map_err(io_error("write to disk", &self.dir))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Best effort: the next build removes it as well.
        let _ = fs::remove_dir_all(&self.staging_dir);
    }
}

fn remove(path: &Path) -> Result<(), cache::Error> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|data| data.is_dir());
    let removed = if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_appear_when_complete() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("a/out");
        let mut output = Output::begin(&dir, Progress::quiet()).unwrap();
        fs::write(output.add("one"), "1").unwrap();
        fs::write(output.staging_dir().join("scrap"), "x").unwrap();
        assert!(!dir.join("one").exists());
        output.finish(&[]).unwrap();
        let names = || {
            let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(), ["one"]);
        // A build that fails, and one that was killed.
        let mut failed = Output::begin(&dir, Progress::quiet()).unwrap();
        fs::write(failed.add("one"), "half").unwrap();
        drop(failed);
        fs::create_dir_all(dir.join(STAGING).join("junk")).unwrap();
        assert_eq!(fs::read_to_string(dir.join("one")).unwrap(), "1");
        let mut next = Output::begin(&dir, Progress::quiet()).unwrap();
        assert_eq!(fs::read_dir(next.staging_dir()).unwrap().count(), 0);
        fs::write(next.add("two"), "2").unwrap();
        next.finish(&["one".to_owned(), "never".to_owned()]).unwrap();
        assert_eq!(names(), ["two"]);
    }

    #[test]
    fn builds_into_one_directory_are_serialized() {
        let dir = tempfile::tempdir().unwrap();
        let first = Output::begin(dir.path(), Progress::quiet()).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = dir.path().to_owned();
        let second = std::thread::spawn(move || {
            let mut output = Output::begin(&path, Progress::quiet()).unwrap();
            sender.send(()).unwrap();
            fs::write(output.add("x"), "second").unwrap();
            output.finish(&[]).unwrap();
        });
        // The second build is waiting for the lock.
        assert!(receiver.recv_timeout(std::time::Duration::from_millis(100)).is_err());
        first.finish(&[]).unwrap();
        second.join().unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("x")).unwrap(), "second");
    }

    #[test]
    fn missing_result_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut output = Output::begin(dir.path(), Progress::quiet()).unwrap();
        output.add("never-made");
        let error = output.finish(&[]).unwrap_err().to_string();
        assert!(error.contains("never-made"), "{error}");
    }
}
