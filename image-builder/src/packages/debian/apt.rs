//! Runs apt on a private directory tree for one suite, and downloads packages.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firstlight_progress::{Progress, megabytes};

use super::keyring::Keyring;
use super::messages::{self, Task};
use super::{Candidate, Error, PackageRequest, config, index, mirror, release};
use crate::cache::{self, io_error};
use crate::packages::lock::Release;
use crate::packages::store::{self, Store};

/// Maximum age of package lists before they are refreshed.
const MAX_LIST_AGE: Duration = Duration::from_hours(24);
/// Minimum interval between attempts to refresh after a failure: without a
/// network each attempt takes the full timeout of the resolver.
const RETRY_AFTER: Duration = Duration::from_mins(10);

/// A private apt tree for one suite of Debian, locked until dropped.
#[derive(Debug)]
pub struct Apt {
    suite: String,
    keyring: Keyring,
    tree: PathBuf,
    /// The download directory; earlier versions also stored packages here.
    debs: PathBuf,
    store: Store,
    progress: Progress,
    lock: cache::Lock,
}

/// A verified package file in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// The entry of the package list.
    pub candidate: Candidate,
    /// The path of the `.deb`.
    pub deb: PathBuf,
}

impl Apt {
    /// Opens the tree of `suite` in the cache directory, creating it if needed,
    /// and refreshes package lists that are older than a day.
    ///
    /// If the refresh fails but older lists exist, they are used, and a progress
    /// line reports that.
    ///
    /// # Errors
    /// No mirror, keyring or apt, or no package lists at all.
    pub fn open(cache: &Path, suite: &str, progress: Progress) -> Result<Self, Error> {
        let keyring = Keyring::of_environment()?;
        let tree = cache.join("apt").join(keyring.tree_of(suite));
        let lock = cache::lock(&tree.with_extension("lock"), &progress)?;
        let apt = Self {
            suite: suite.to_owned(),
            keyring,
            debs: cache.join("debs"),
            store: Store::of(cache),
            tree,
            progress,
            lock,
        };
        apt.create()?;
        apt.refresh()?;
        Ok(apt)
    }

    /// Returns the suite of this tree.
    #[must_use]
    pub fn suite(&self) -> &str {
        &self.suite
    }

    fn create(&self) -> Result<(), Error> {
        for dir in ["lists/partial", "cache/archives/partial", "state"] {
            let dir = self.tree.join(dir);
            fs::create_dir_all(&dir).map_err(io_error("create directory", &dir))?;
        }
        fs::create_dir_all(&self.debs).map_err(io_error("create directory", &self.debs))?;
        let mirror = mirror()?;
        self.write_if_changed("status", "")?;
        self.write_if_changed("apt.conf", &config::apt_conf(&self.tree, &config::host_options()))?;
        let sources = config::sources_list(&mirror, &self.suite, self.keyring.file());
        if !self.has_content("sources.list", &sources) {
            // The mirror changed, so the lists must be refreshed. The stamp is removed before
            // the new list is written, in case this process is killed in between.
            let _ = fs::remove_file(self.tree.join("refreshed"));
        }
        self.write_if_changed("sources.list", &sources)
    }

    fn has_content(&self, name: &str, text: &str) -> bool {
        fs::read_to_string(self.tree.join(name)).is_ok_and(|old| old == text)
    }

    fn write_if_changed(&self, name: &str, text: &str) -> Result<(), Error> {
        match self.has_content(name, text) {
            true => Ok(()),
            false => Ok(cache::write_atomically(&self.tree.join(name), text.as_bytes())?),
        }
    }

    fn refresh(&self) -> Result<(), Error> {
        let refreshed = self.tree.join("refreshed");
        let failed = self.tree.join("refresh-failed");
        let age = age_of(&refreshed);
        if age.is_some_and(|age| age < MAX_LIST_AGE) {
            return Ok(());
        }
        let usable = age.is_some();
        if usable && age_of(&failed).is_some_and(|age| age < RETRY_AFTER) {
            return Ok(());
        }
        if !self.keyring.exists() {
            return Err(Error::NoKeyring { file: self.keyring.file().into() });
        }
        self.progress.say(format_args!("package lists of {}: refreshing", self.suite));
        let update = ["-qq", "-o", "APT::Update::Error-Mode=any", "update"];
        match self.run("apt-get", &self.tree, update, Task::Refresh) {
            Ok(_) => {
                if let Err(error) = self.release().and_then(|release| release::refuse_older(&self.tree, &release)) {
                    // The new lists must not be used, and they replaced the old ones.
                    let _ = fs::remove_file(&refreshed);
                    return Err(error);
                }
                cache::write_atomically(&refreshed, b"")?;
                let _ = fs::remove_file(&failed);
                Ok(())
            }
            Err(error) if usable => {
                let hours = age.unwrap_or_default().as_secs() / 3600;
                self.progress.say(format_args!("using package lists that are {hours} hours old: {error}"));
                cache::write_atomically(&failed, b"")?;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the suite's release file, and verifies its signatures again.
    ///
    /// # Errors
    /// It is missing, or has no valid signature by a key of the keyring.
    pub fn release(&self) -> Result<Release, Error> {
        release::read(&self.tree, &self.suite, &self.keyring)
    }

    /// Returns the newest version of the package `name` that matches `request`.
    ///
    /// # Errors
    /// [`Error::NoPackage`] with the available versions.
    pub fn candidate(&self, name: &str, request: PackageRequest<'_>) -> Result<Candidate, Error> {
        let missing = |available: &[Candidate]| Error::NoPackage {
            suite: self.suite.clone(),
            name: name.to_owned(),
            constraint: request.constraint_text(),
            available: match available {
                [] => "none".to_owned(),
                some => some.iter().map(|one| one.version.as_str()).collect::<Vec<_>>().join(", "),
            },
        };
        let output = match self.run("apt-cache", &self.tree, ["show", "--", name], Task::LookUp) {
            Ok(output) => output,
            // The error message of apt-cache for an unknown package.
            Err(Error::Failed { message, .. }) if message.contains("No packages found") => return Err(missing(&[])),
            Err(error) => return Err(error),
        };
        let all = index::parse(&self.suite, &String::from_utf8_lossy(&output.stdout))?;
        match all.iter().find(|one| one.name == name && request.matches(&one.version)) {
            Some(found) => Ok(found.clone()),
            None => Err(missing(&all)),
        }
    }

    /// Returns the newest versions of `names` and all their dependencies.
    ///
    /// # Errors
    /// apt finds no consistent set.
    pub fn closure(&self, names: &[&str]) -> Result<Vec<Candidate>, Error> {
        let mut arguments = vec!["-qq", "-y", "--no-install-recommends", "--print-uris", "install", "--"];
        arguments.extend(names);
        let output = self.run("apt-get", &self.tree, arguments, Task::Resolve)?;
        let pairs = index::parse_closure(&String::from_utf8_lossy(&output.stdout));
        let exact: Vec<String> = pairs.iter().map(|(name, version)| format!("{name}={version}")).collect();
        let mut show = vec!["show".to_owned(), "--".to_owned()];
        show.extend(exact);
        let output = self.run("apt-cache", &self.tree, show, Task::LookUp)?;
        let all = index::parse(&self.suite, &String::from_utf8_lossy(&output.stdout))?;
        pairs
            .iter()
            .map(|(name, version)| {
                all.iter()
                    .find(|one| one.name == *name && one.version == *version)
                    .cloned()
                    .ok_or_else(|| Error::BadEntry { suite: self.suite.clone(), name: name.clone(), field: "Version" })
            })
            .collect()
    }

    /// Returns the package files of `candidates`, downloads those that are not in the
    /// cache, and verifies their hashes. `label` begins the progress line.
    ///
    /// # Errors
    /// A failed download or a wrong hash.
    pub fn fetch(&self, label: &str, candidates: &[Candidate]) -> Result<Vec<Package>, Error> {
        let cached: Vec<Option<PathBuf>> = candidates.iter().map(|one| self.cached(one)).collect();
        let missing: Vec<&Candidate> =
            candidates.iter().zip(&cached).filter(|(_, cached)| cached.is_none()).map(|(one, _)| one).collect();
        if !missing.is_empty() {
            let total = missing.iter().map(|one| one.size).sum();
            let plural = if missing.len() == 1 { "package" } else { "packages" };
            self.progress.say(format_args!(
                "{label} ({}): downloading {} {plural}, {}",
                self.suite,
                missing.len(),
                megabytes(total)
            ));
            self.download(&missing)?;
        }
        let packages = candidates.iter().zip(cached).map(|(one, cached)| {
            let removed = || {
                let what = io::Error::other("removed by another process");
                Error::from(io_error("find in the store", Path::new(&one.file_name()))(what))
            };
            Ok(Package { candidate: one.clone(), deb: cached.or_else(|| self.cached(one)).ok_or_else(removed)? })
        });
        packages.collect()
    }

    fn download(&self, missing: &[&Candidate]) -> Result<(), Error> {
        // In the cache, so that a rename can publish the files; one name per tree,
        // so that leftovers of a killed process are removed.
        let dir = self.debs.join(format!(".download-{}", self.keyring.tree_of(&self.suite)));
        if dir.exists() {
            fs::remove_dir_all(&dir).map_err(io_error("remove", &dir))?;
        }
        fs::create_dir(&dir).map_err(io_error("create directory", &dir))?;
        let result = self.download_into(&dir, missing);
        // Best effort: the next download removes it as well.
        let _ = fs::remove_dir_all(&dir);
        result
    }

    fn download_into(&self, dir: &Path, missing: &[&Candidate]) -> Result<(), Error> {
        let mut arguments = vec!["-qq".to_owned(), "download".to_owned(), "--".to_owned()];
        arguments.extend(missing.iter().map(|one| format!("{}={}", one.name, one.version)));
        let total = missing.iter().map(|one| one.size).sum();
        let bar = self.progress.bytes(format!("downloading from {}", self.suite), total);
        let fetched = bar.following(|| size_of_files(dir), || self.run("apt-get", dir, arguments, Task::Download));
        drop(bar);
        if let Err(error) = fetched {
            // Most likely the archive replaced a version after the lists were
            // fetched: force a refresh at the next run.
            let _ = fs::remove_file(self.tree.join("refresh-failed"));
            let _ = File::options()
                .write(true)
                .open(self.tree.join("refreshed"))
                .and_then(|stamp| stamp.set_modified(UNIX_EPOCH));
            return Err(error);
        }
        for one in missing {
            let downloaded = dir.join(one.file_name());
            match self.store.put(&downloaded, &one.sha256, &one.file_name()) {
                Err(store::Error::WrongHash { file, expected, found }) => {
                    // For file: mirrors, apt does not detect that a copy failed on a full disk.
                    let disk_full = out_of_space(&file, one.size).map(Error::from);
                    let suite = self.suite.clone();
                    return Err(disk_full.unwrap_or(Error::WrongHash { file, suite, expected, found }));
                }
                stored => drop(stored?),
            }
        }
        Ok(())
    }

    /// Returns the file of a candidate if it is in the store with the right hash.
    fn cached(&self, candidate: &Candidate) -> Option<PathBuf> {
        self.store.get(&candidate.sha256).or_else(|| {
            // The location in caches of earlier versions.
            let old = self.debs.join(candidate.file_name());
            if !old.exists() {
                return None;
            }
            self.store.put(&old, &candidate.sha256, &candidate.file_name()).ok()
        })
    }

    fn run<I, S>(&self, program: &'static str, dir: &Path, arguments: I, task: Task) -> Result<Output, Error>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let output = Command::new(program)
            .args(arguments)
            .env("APT_CONFIG", self.tree.join("apt.conf"))
            // The parsers expect English messages.
            .env("LC_ALL", "C.UTF-8")
            .current_dir(dir)
            .stdin(self.lock.input()?)
            .output()
            .map_err(|source| Error::Start { program, source })?;
        if output.status.success() {
            return Ok(output);
        }
        let message = messages::errors(&output.stderr);
        Err(Error::Failed {
            program,
            suite: self.suite.clone(),
            task: task.description(),
            advice: task.advice(&message, &self.tree, &self.keyring),
            message,
        })
    }
}

/// Returns the total size of the files in a directory.
fn size_of_files(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|data| data.len()).sum()
}

/// Returns `ENOSPC` if the disk has no space for the missing rest of a file of `size` bytes.
fn out_of_space(file: &Path, size: u64) -> Option<cache::Error> {
    let missing = size.checked_sub(fs::metadata(file).ok()?.len()).filter(|missing| *missing > 0)?;
    let disk = rustix::fs::statvfs(file).ok()?;
    let full = disk.f_bavail.saturating_mul(disk.f_frsize) < missing;
    full.then(|| io_error("write", file)(rustix::io::Errno::NOSPC.into()))
}

/// Returns the time since `path` was modified; `None` if it does not exist.
fn age_of(path: &Path) -> Option<Duration> {
    let written = fs::metadata(path).and_then(|data| data.modified()).ok()?;
    // A time in the future, after the clock was set back, counts as new.
    Some(SystemTime::now().duration_since(written).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_of_missing_new_and_future_files() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(age_of(&dir.path().join("none")), None);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(age_of(&file).unwrap() < Duration::from_mins(1));
        let future = SystemTime::now() + Duration::from_hours(2);
        fs::File::options().write(true).open(&file).unwrap().set_modified(future).unwrap();
        assert_eq!(age_of(&file), Some(Duration::ZERO));
    }
}
