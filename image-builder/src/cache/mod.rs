//! The cache directory of downloads and build products, and how entries are published.
//!
//! An entry is a directory that is either complete or absent: it is created
//! under a temporary name and renamed. A lock file beside it serializes
//! processes that create the same entry.

pub(crate) mod digests;

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use firstlight_progress::Progress;

/// Why the cache could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No environment variable determines the cache directory.
    #[error("no cache directory: none of FIRSTLIGHT_CACHE, XDG_CACHE_HOME and HOME is set; set FIRSTLIGHT_CACHE")]
    NoCacheDir,
    /// A file operation on the cache failed.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// Returns the cache directory: `$FIRSTLIGHT_CACHE`, else `$XDG_CACHE_HOME/firstlight`,
/// else `~/.cache/firstlight`. The directory itself may not exist yet.
///
/// # Errors
/// [`Error::NoCacheDir`] when none of the variables is set.
pub fn root() -> Result<PathBuf, Error> {
    root_from(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

fn root_from(var: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, Error> {
    if let Some(own) = var("FIRSTLIGHT_CACHE") {
        return Ok(own.into());
    }
    // The XDG specification requires ignoring relative values.
    if let Some(xdg) = var("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute()) {
        return Ok(xdg.join("firstlight"));
    }
    var("HOME").map(|home| PathBuf::from(home).join(".cache/firstlight")).ok_or(Error::NoCacheDir)
}

/// A held lock file, released on drop.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Returns an empty stdin for a child process that works on the locked entry.
    /// If this process is killed, the child holds the lock until it exits.
    ///
    /// # Errors
    /// The limit of open files is reached.
    pub fn input(&self) -> Result<Stdio, Error> {
        Ok(self.file.try_clone().map_err(io_error("open", &self.path))?.into())
    }
}

/// Acquires the lock file at `path`, creating it if absent; logs a line if it has
/// to wait for another holder.
///
/// # Errors
/// The file cannot be created or locked.
pub fn lock(path: &Path, progress: &Progress) -> Result<Lock, Error> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(io_error("create directory", parent))?;
    }
    let file =
        File::options().create(true).read(true).append(true).open(path).map_err(io_error("open lock file", path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress.say(format_args!("waiting for another process that holds {}", path.display()));
            file.lock().map_err(io_error("lock", path))?;
        }
        Err(TryLockError::Error(source)) => return Err(Error::Io { what: "lock", path: path.to_owned(), source }),
    }
    Ok(Lock { file, path: path.to_owned() })
}

/// Ensures that the directory `target` exists: if it does not, `fill` creates
/// its contents in a temporary directory, which is renamed to `target`.
///
/// An interrupted `fill` leaves nothing under `target`. Returns whether `fill`
/// ran.
///
/// # Errors
/// The error of `fill`, or a failed file operation.
pub fn publish<E: From<Error>>(
    target: &Path,
    progress: &Progress,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<bool, E> {
    if target.is_dir() {
        return Ok(false);
    }
    let _lock = lock(&with_suffix(target, ".lock"), progress)?;
    if target.is_dir() {
        return Ok(false);
    }
    // We hold the lock, so a partial directory belongs to a dead process.
    let half = with_suffix(target, ".half");
    if half.exists() {
        fs::remove_dir_all(&half).map_err(io_error("remove partial directory", &half))?;
    }
    fs::create_dir_all(&half).map_err(io_error("create directory", &half))?;
    if let Err(error) = fill(&half) {
        // Best effort: the next attempt removes it as well.
        let _ = fs::remove_dir_all(&half);
        return Err(error);
    }
    fs::rename(&half, target).map_err(io_error("rename into place", target))?;
    Ok(true)
}

/// Writes `bytes` to `path` through a temporary file and a rename, so that readers
/// never see a partial file.
///
/// # Errors
/// A file operation failed.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let mut new = tempfile::NamedTempFile::new_in(parent).map_err(io_error("make a file in", parent))?;
    new.write_all(bytes).map_err(io_error("write", path))?;
    // Temporary files are private by default; published ones are readable.
    let readable = fs::Permissions::from_mode(0o644);
    new.as_file().set_permissions(readable).map_err(io_error("set permissions of", path))?;
    new.persist(path).map_err(|error| Error::Io {
        what: "rename into place",
        path: path.to_owned(),
        source: error.error,
    })?;
    Ok(())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns a closure for `map_err` that adds the operation and the path.
pub(crate) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Result<PathBuf, Error> {
        root_from(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn cache_root_follows_the_variables_in_order() {
        let all = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("FIRSTLIGHT_CACHE", "/f")];
        assert_eq!(vars(&all).unwrap(), Path::new("/f"));
        assert_eq!(vars(&all[..2]).unwrap(), Path::new("/x/firstlight"));
        assert_eq!(vars(&all[..1]).unwrap(), Path::new("/h/.cache/firstlight"));
        assert_eq!(vars(&[("HOME", "/h"), ("XDG_CACHE_HOME", "rel")]).unwrap(), Path::new("/h/.cache/firstlight"));
        assert!(matches!(vars(&[]), Err(Error::NoCacheDir)));
    }

    #[test]
    fn failed_fill_leaves_nothing_and_the_next_one_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a/b");
        let quiet = Progress::quiet();
        let failed: Result<bool, Error> = publish(&target, &quiet, |half| {
            fs::write(half.join("file"), "half").unwrap();
            Err(Error::NoCacheDir)
        });
        assert!(matches!(failed, Err(Error::NoCacheDir)));
        assert!(!target.exists());
        // Leftover of a killed process.
        fs::create_dir_all(dir.path().join("a/b.half/junk")).unwrap();
        assert!(
            publish::<Error>(&target, &quiet, |half| {
                fs::write(half.join("file"), "whole").unwrap();
                Ok(())
            })
            .unwrap()
        );
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "whole");
        assert!(!target.join("junk").exists());
        assert!(!publish::<Error>(&target, &quiet, |_| Err(Error::NoCacheDir)).unwrap());
    }

    #[test]
    fn child_that_outlives_its_parent_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        let lock = lock(&path, &Progress::quiet()).unwrap();
        let program = |script: &str| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]).stdin(lock.input().unwrap());
            command
        };
        assert!(program("test $(wc -c) = 0").status().unwrap().success(), "there is nothing to read");
        let mut child = program("exec sleep 3600").spawn().unwrap();
        drop(lock);
        let other = File::open(&path).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        child.kill().unwrap();
        child.wait().unwrap();
        other.lock().unwrap();
    }

    #[test]
    fn concurrent_publishers_fill_once() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("entry");
        let ran: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        publish::<Error>(&target, &Progress::quiet(), |half| {
                            std::thread::sleep(std::time::Duration::from_millis(20));
                            fs::write(half.join("x"), "x").unwrap();
                            Ok(())
                        })
                        .unwrap()
                    })
                })
                .collect();
            workers.into_iter().map(|worker| usize::from(worker.join().unwrap())).sum()
        });
        assert_eq!(ran, 1);
    }
}
