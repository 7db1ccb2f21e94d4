//! One suite's private apt tree, and the directory of downloaded packages.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firstlight_progress::{Progress, megabytes};

use super::keyring::Keyring;
use super::said::{self, Task};
use super::{Candidate, Error, Wish, config, index, mirror, release};
use crate::cache::{self, io_error};
use crate::lock::Release;
use crate::store::{self, Store};

/// Package lists older than this are fetched again.
const LISTS_LIVE: Duration = Duration::from_hours(24);
/// After a failed refresh, the next attempt waits this long: without a
/// network every one of them costs the resolver's whole patience.
const RETRY_AFTER: Duration = Duration::from_mins(10);

/// A private apt tree for one suite of Debian, held by this process until
/// dropped.
#[derive(Debug)]
pub struct Apt {
    suite: String,
    keyring: Keyring,
    tree: PathBuf,
    /// Where packages come down, and where they lay in caches of earlier versions.
    debs: PathBuf,
    store: Store,
    progress: Progress,
    lock: cache::Lock,
}

/// A package file in the cache, verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// What it is.
    pub candidate: Candidate,
    /// Where it lies.
    pub deb: PathBuf,
}

impl Apt {
    /// Opens the tree of `suite` under the cache directory, making it if needed,
    /// and refreshes package lists that are older than a day.
    ///
    /// When they cannot be refreshed but older ones are there, work goes on
    /// with those, and a line says so.
    ///
    /// # Errors
    /// No mirror, no keyring, no apt, or no package lists at all.
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
        apt.set_up()?;
        apt.refresh()?;
        Ok(apt)
    }

    /// The suite this tree follows.
    #[must_use]
    pub fn suite(&self) -> &str {
        &self.suite
    }

    fn set_up(&self) -> Result<(), Error> {
        for dir in ["lists/partial", "cache/archives/partial", "state"] {
            let dir = self.tree.join(dir);
            fs::create_dir_all(&dir).map_err(io_error("create directory", &dir))?;
        }
        fs::create_dir_all(&self.debs).map_err(io_error("create directory", &self.debs))?;
        let mirror = mirror()?;
        self.write_if_changed("status", "")?;
        self.write_if_changed("apt.conf", &config::apt_conf(&self.tree, &config::host_options()))?;
        let sources = config::sources_list(&mirror, &self.suite, self.keyring.file());
        if !self.is_written("sources.list", &sources) {
            // Another mirror: what it has is not known yet. Before the list says so, should this build be killed.
            let _ = fs::remove_file(self.tree.join("refreshed"));
        }
        self.write_if_changed("sources.list", &sources)
    }

    fn is_written(&self, name: &str, text: &str) -> bool {
        fs::read_to_string(self.tree.join(name)).is_ok_and(|old| old == text)
    }

    fn write_if_changed(&self, name: &str, text: &str) -> Result<(), Error> {
        match self.is_written(name, text) {
            true => Ok(()),
            false => Ok(cache::write_atomically(&self.tree.join(name), text.as_bytes())?),
        }
    }

    fn refresh(&self) -> Result<(), Error> {
        let refreshed = self.tree.join("refreshed");
        let failed = self.tree.join("refresh-failed");
        let age = age_of(&refreshed);
        if age.is_some_and(|age| age < LISTS_LIVE) {
            return Ok(());
        }
        let usable = age.is_some();
        if usable && age_of(&failed).is_some_and(|age| age < RETRY_AFTER) {
            return Ok(());
        }
        if !self.keyring.is_there() {
            return Err(Error::NoKeyring { file: self.keyring.file().into() });
        }
        self.progress.say(format_args!("package lists of {}: refreshing", self.suite));
        let update = ["-qq", "-o", "APT::Update::Error-Mode=any", "update"];
        match self.run("apt-get", &self.tree, update, Task::Refresh) {
            Ok(_) => {
                if let Err(error) = self.release().and_then(|release| release::refuse_older(&self.tree, &release)) {
                    // The lists that came are not to be used, and there are no others.
                    let _ = fs::remove_file(&refreshed);
                    return Err(error);
                }
                cache::write_atomically(&refreshed, b"")?;
                let _ = fs::remove_file(&failed);
                Ok(())
            }
            Err(error) if usable => {
                let hours = age.unwrap_or_default().as_secs() / 3600;
                self.progress.say(format_args!("going on with package lists that are {hours} hours old: {error}"));
                cache::write_atomically(&failed, b"")?;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The suite's release file, whose signatures are verified once more.
    ///
    /// # Errors
    /// It is not there, or no signature of the archive's keys holds.
    pub fn release(&self) -> Result<Release, Error> {
        release::read(&self.tree, &self.suite, &self.keyring)
    }

    /// What the suite offers under `name`, as `wish` narrows it.
    ///
    /// # Errors
    /// [`Error::NoPackage`] with the versions there are.
    pub fn candidate(&self, name: &str, wish: Wish<'_>) -> Result<Candidate, Error> {
        let missing = |available: &[Candidate]| Error::NoPackage {
            suite: self.suite.clone(),
            name: name.to_owned(),
            wanted: wish.phrase(),
            available: match available {
                [] => "no version of it".to_owned(),
                some => some.iter().map(|one| one.version.as_str()).collect::<Vec<_>>().join(", "),
            },
        };
        let output = match self.run("apt-cache", &self.tree, ["show", "--", name], Task::LookUp) {
            Ok(output) => output,
            // That is how apt-cache says that it knows no such package.
            Err(Error::Failed { said, .. }) if said.contains("No packages found") => return Err(missing(&[])),
            Err(error) => return Err(error),
        };
        let all = index::parse(&self.suite, &String::from_utf8_lossy(&output.stdout))?;
        match all.iter().find(|one| one.name == name && wish.fits(&one.version)) {
            Some(found) => Ok(found.clone()),
            None => Err(missing(&all)),
        }
    }

    /// `names` and everything they depend on, as the newest of the suite.
    ///
    /// # Errors
    /// When apt finds no consistent set.
    pub fn closure(&self, names: &[&str]) -> Result<Vec<Candidate>, Error> {
        let mut wanted = vec!["-qq", "-y", "--no-install-recommends", "--print-uris", "install", "--"];
        wanted.extend(names);
        let output = self.run("apt-get", &self.tree, wanted, Task::Resolve)?;
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

    /// The package files of `candidates`, downloaded unless they are in the
    /// cache, each checked against its hash. `label` begins the progress line.
    ///
    /// # Errors
    /// A failed download or a wrong hash.
    pub fn fetch(&self, label: &str, candidates: &[Candidate]) -> Result<Vec<Package>, Error> {
        let kept: Vec<Option<PathBuf>> = candidates.iter().map(|one| self.kept(one)).collect();
        let missing: Vec<&Candidate> =
            candidates.iter().zip(&kept).filter(|(_, kept)| kept.is_none()).map(|(one, _)| one).collect();
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
        let packages = candidates.iter().zip(kept).map(|(one, kept)| {
            let gone = || {
                let what = io::Error::other("it has just been put there, and is not there any more");
                Error::from(io_error("find in the store", Path::new(&one.file_name()))(what))
            };
            Ok(Package { candidate: one.clone(), deb: kept.or_else(|| self.kept(one)).ok_or_else(gone)? })
        });
        packages.collect()
    }

    fn download(&self, missing: &[&Candidate]) -> Result<(), Error> {
        // On the cache's own file system, so that a rename publishes; one name
        // per tree, so that what a killed process left goes away.
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
            // Most likely the archive has replaced a version since the lists
            // were fetched: the next run begins with new ones.
            let _ = fs::remove_file(self.tree.join("refresh-failed"));
            let _ = File::options()
                .write(true)
                .open(self.tree.join("refreshed"))
                .and_then(|stamp| stamp.set_modified(UNIX_EPOCH));
            return Err(error);
        }
        for one in missing {
            let got = dir.join(one.file_name());
            match self.store.put(&got, &one.sha256, &one.file_name()) {
                Err(store::Error::WrongHash { file, expected, found }) => {
                    // apt copies files of this machine without a look at how that went.
                    let full = out_of_space(&file, one.size).map(Error::from);
                    let suite = self.suite.clone();
                    return Err(full.unwrap_or(Error::WrongHash { file, suite, expected, found }));
                }
                kept => drop(kept?),
            }
        }
        Ok(())
    }

    /// A file of the right hash; anything else is fetched again.
    fn kept(&self, candidate: &Candidate) -> Option<PathBuf> {
        self.store.get(&candidate.sha256).or_else(|| {
            // Where it lay in caches of earlier versions.
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
            // Messages end up in ours, and the parsers read English.
            .env("LC_ALL", "C.UTF-8")
            .current_dir(dir)
            .stdin(self.lock.input()?)
            .output()
            .map_err(|source| Error::Start { program, source })?;
        if output.status.success() {
            return Ok(output);
        }
        let said = said::errors(&output.stderr);
        Err(Error::Failed {
            program,
            suite: self.suite.clone(),
            doing: task.phrase(),
            advice: task.advice(&said, &self.tree, &self.keyring),
            said,
        })
    }
}

/// Bytes of all files in a directory.
fn size_of_files(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|data| data.len()).sum()
}

/// What the system would have said, if the disk has no room for the rest of a file.
fn out_of_space(file: &Path, size: u64) -> Option<cache::Error> {
    let lacking = size.checked_sub(fs::metadata(file).ok()?.len()).filter(|lacking| *lacking > 0)?;
    let disk = rustix::fs::statvfs(file).ok()?;
    let full = disk.f_bavail.saturating_mul(disk.f_frsize) < lacking;
    full.then(|| io_error("write", file)(rustix::io::Errno::NOSPC.into()))
}

/// Time since `path` was written; `None` when it does not exist.
fn age_of(path: &Path) -> Option<Duration> {
    let written = fs::metadata(path).and_then(|data| data.modified()).ok()?;
    // A clock that was set back makes a file from the future: call it new.
    Some(SystemTime::now().duration_since(written).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages() {
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
