//! Packages for an image: selected from the suites' current state, or exactly those
//! of a lock; always added to the store and recorded.

pub(crate) mod date;
pub mod debian;
pub mod lock;
pub mod store;
pub mod tools;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use firstlight_progress::Progress;

use crate::cache;
use debian::{Apt, PackageRequest};
use lock::{Lock, Pinned, Release};
use store::Store;

/// Why a package is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Downloading it from the archive failed.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// Adding it to the store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The lock does not name it.
    #[error(
        "the lock has no package {name} of {suite}{constraint}: the manifest has changed since; run image-builder lock"
    )]
    NotLocked {
        /// The package.
        name: String,
        /// The suite.
        suite: String,
        /// The version constraint as text, with a leading space.
        constraint: String,
    },
    /// Neither the store nor the archive has it.
    #[error(
        "{name} {version} of {suite} is neither in the store nor in the archive any more ({archive_error}): add a copy of \
         the file with SHA-256 {sha256} with image-builder store add FILE, or run image-builder lock to use \
         the archive's current version"
    )]
    Unavailable {
        /// The package.
        name: String,
        /// Its version.
        version: String,
        /// Its suite.
        suite: String,
        /// Its required SHA-256.
        sha256: String,
        /// The error of the download.
        archive_error: String,
    },
}

/// Selects, downloads and records an image's packages.
#[derive(Debug)]
pub struct Packages<'a> {
    cache: PathBuf,
    store: Store,
    lock: Option<&'a Lock>,
    progress: Progress,
    used: Vec<Pinned>,
    tools: Vec<Pinned>,
    kits: BTreeMap<String, Vec<String>>,
    suites: Vec<Release>,
}

impl<'a> Packages<'a> {
    /// Uses the suites' current packages, or those of `lock`.
    #[must_use]
    pub fn new(cache: &Path, lock: Option<&'a Lock>, progress: Progress) -> Self {
        Self {
            cache: cache.to_owned(),
            store: Store::of(cache),
            lock,
            progress,
            used: Vec::new(),
            tools: Vec::new(),
            kits: BTreeMap::new(),
            suites: Vec::new(),
        }
    }

    /// Returns the cache directory.
    #[must_use]
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Returns the progress reporter.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Returns the packages recorded so far, in order, without duplicates.
    #[must_use]
    pub fn used(&self) -> &[Pinned] {
        &self.used
    }

    /// Returns the packages of build tools, without duplicates.
    #[must_use]
    pub fn tools(&self) -> &[Pinned] {
        &self.tools
    }

    /// Returns the requested tool sets, in the format of a lock.
    #[must_use]
    pub fn kits(&self) -> &BTreeMap<String, Vec<String>> {
        &self.kits
    }

    /// Returns the suites of the packages: those that were queried,
    /// or with a lock those that it lists.
    #[must_use]
    pub fn suites(&self) -> &[Release] {
        self.lock.map_or(&self.suites, |lock| &lock.suites)
    }

    /// Opens a suite's archive and records its release file.
    fn open(&mut self, suite: &str) -> Result<Apt, Error> {
        let apt = Apt::open(&self.cache, suite, self.progress)?;
        if !self.suites.iter().any(|known| known.name == suite) {
            self.suites.push(apt.release()?);
            self.suites.sort_by(|a, b| a.name.cmp(&b.name));
        }
        Ok(apt)
    }

    fn locked(&self, suite: &str, name: &str, request: PackageRequest<'_>) -> Option<Result<Pinned, Error>> {
        let lock = self.lock?;
        let matches = |one: &&Pinned| {
            one.suite == suite
                && (one.name == name || one.requested.as_deref() == Some(name))
                && request.matches(&one.version)
        };
        Some(lock.packages.iter().chain(&lock.tools).find(matches).cloned().ok_or_else(|| Error::NotLocked {
            name: name.to_owned(),
            suite: suite.to_owned(),
            constraint: request.constraint_text(),
        }))
    }

    /// Selects the version of a package.
    ///
    /// # Errors
    /// Neither the suite nor the lock has a matching version.
    pub fn find(&mut self, suite: &str, name: &str, request: PackageRequest<'_>) -> Result<Pinned, Error> {
        if let Some(locked) = self.locked(suite, name, request) {
            return locked;
        }
        let apt = self.open(suite)?;
        Ok(Pinned::of(suite, &apt.candidate(name, request)?))
    }

    /// Resolves a metapackage: returns the package `name` itself or the first of
    /// its dependencies for which `is_it` returns true.
    ///
    /// # Errors
    /// As [`Packages::find`]; [`debian::Error::NoTarget`] if no dependency matches.
    pub fn find_through(
        &mut self,
        suite: &str,
        name: &str,
        request: PackageRequest<'_>,
        is_it: impl Fn(&str) -> bool,
    ) -> Result<Pinned, Error> {
        if let Some(locked) = self.locked(suite, name, request) {
            return locked;
        }
        let apt = self.open(suite)?;
        let named = apt.candidate(name, request)?;
        if is_it(&named.name) {
            return Ok(Pinned::of(suite, &named));
        }
        let target = named.depends_on().find(|name| is_it(name)).ok_or_else(|| debian::Error::NoTarget {
            name: named.name.clone(),
            suite: suite.to_owned(),
            depends: named.depends.clone(),
        })?;
        // Both packages have the same version; the suite's newest may already differ.
        let found = apt.candidate(target, PackageRequest::Exact(&named.version))?;
        Ok(Pinned { requested: Some(name.to_owned()), ..Pinned::of(suite, &found) })
    }

    /// Returns `names` of a suite with all dependencies and records them as tools:
    /// the suite's current versions, or those of the lock.
    ///
    /// # Errors
    /// There is no consistent set, or the lock lacks one of `names`.
    pub fn find_tools(&mut self, suite: &str, names: &[&str]) -> Result<Vec<Pinned>, Error> {
        // A lock may have several tool sets; those of one suite share packages.
        let kit = format!("{suite}:{}", names.join("+"));
        let found = match self.lock {
            Some(lock) => kit_of(lock, &kit, suite)?,
            None => self.closure(suite, names)?,
        };
        self.kits.insert(kit, found.iter().map(|one| one.name.clone()).collect());
        self.note_tools(&found);
        Ok(found)
    }

    /// Records packages of build tools.
    pub fn note_tools(&mut self, packages: &[Pinned]) {
        for package in packages {
            if !self.tools.contains(package) {
                self.tools.push(package.clone());
            }
        }
    }

    /// Returns the files of tool packages of one suite, in order; those missing in
    /// the store are downloaded together. `label` begins the progress line.
    ///
    /// # Errors
    /// As [`Packages::fetch_one`].
    pub fn fetch_tools(&mut self, label: &str, packages: &[Pinned]) -> Result<Vec<PathBuf>, Error> {
        self.note_tools(packages);
        let stored = |one: &Pinned| self.store.get(&one.sha256);
        let missing: Vec<_> = packages.iter().filter(|one| stored(one).is_none()).collect();
        // With a lock they are downloaded one by one, so that the error names the missing one.
        if let (Some(first), None) = (missing.first(), self.lock) {
            let candidates: Vec<_> = missing.iter().map(|one| one.candidate()).collect();
            self.open(&first.suite)?.fetch(label, &candidates)?;
        }
        packages.iter().map(|one| self.fetch_tool(label, one)).collect()
    }

    /// Returns the dependency closure in the suite's current state, cached per
    /// release file because apt takes seconds.
    fn closure(&mut self, suite: &str, names: &[&str]) -> Result<Vec<Pinned>, Error> {
        let apt = self.open(suite)?;
        let release = self.suites.iter().find(|known| known.name == suite);
        let release = release.map(|release| release.sha256.as_str()).unwrap_or_default();
        let key = digest::of_bytes(format!("{release} {}", names.join(" ")).as_bytes());
        let dir = self.cache.join("closures");
        let file = dir.join(format!("{}.json", &key[..32]));
        let known = fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Vec<Pinned>>(&text).ok());
        if let Some(known) = known {
            return Ok(known);
        }
        let mut found: Vec<Pinned> = apt.closure(names)?.iter().map(|one| Pinned::of(suite, one)).collect();
        found.sort();
        let text = serde_json::to_vec(&found).map_err(std::io::Error::other);
        let text = text.map_err(cache::io_error("write", &file)).map_err(debian::Error::from)?;
        fs::create_dir_all(&dir).map_err(cache::io_error("create directory", &dir)).map_err(debian::Error::from)?;
        cache::write_atomically(&file, &text).map_err(debian::Error::from)?;
        Ok(found)
    }

    /// Records a package that contributed to the image.
    pub fn note(&mut self, package: &Pinned) {
        if !self.used.contains(package) {
            self.used.push(package.clone());
        }
    }

    /// Records a package and returns its file from the store or the archive.
    /// `label` begins the progress line.
    ///
    /// # Errors
    /// The archive no longer has it, or its hash is wrong.
    pub fn fetch_one(&mut self, label: &str, package: &Pinned) -> Result<PathBuf, Error> {
        self.note(package);
        self.fetch_tool(label, package)
    }

    /// Returns the file of a tool package, which is recorded already.
    ///
    /// # Errors
    /// As [`Packages::fetch_one`].
    pub fn fetch_tool(&mut self, label: &str, package: &Pinned) -> Result<PathBuf, Error> {
        match self.store.get(&package.sha256) {
            Some(file) => Ok(file),
            None => self.download(label, package),
        }
    }

    /// Adds every recorded package to the store, including those whose
    /// unpacked files were already in the cache.
    ///
    /// # Errors
    /// As [`Packages::fetch_one`].
    pub fn store_all(&mut self) -> Result<(), Error> {
        for package in self.used.clone() {
            self.fetch_one(&package.name, &package)?;
        }
        for package in self.tools.clone() {
            self.fetch_tool(&package.name, &package)?;
        }
        Ok(())
    }

    fn download(&mut self, label: &str, package: &Pinned) -> Result<PathBuf, Error> {
        let candidate = package.candidate();
        let apt = self.open(&package.suite)?;
        match apt.fetch(label, std::slice::from_ref(&candidate)) {
            Ok(fetched) => Ok(fetched.into_iter().next().map(|one| one.deb).unwrap_or_default()),
            Err(error @ debian::Error::Failed { .. }) if self.lock.is_some() => Err(Error::Unavailable {
                name: package.name.clone(),
                version: package.version.clone(),
                suite: package.suite.clone(),
                sha256: package.sha256.clone(),
                archive_error: error.to_string(),
            }),
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns the packages of a tool set in the lock.
fn kit_of(lock: &Lock, kit: &str, suite: &str) -> Result<Vec<Pinned>, Error> {
    let missing = |name: &str| {
        let (name, suite) = (name.to_owned(), suite.to_owned());
        Error::NotLocked { name, suite, constraint: " among its tools".to_owned() }
    };
    let names = lock.kits.get(kit).ok_or_else(|| missing(kit))?;
    let pinned = |name: &String| {
        let found = lock.tools.iter().find(|one| one.suite == suite && one.name == *name);
        found.cloned().ok_or_else(|| missing(name))
    };
    names.iter().map(pinned).collect()
}

/// Adds a file of the user to the store, such as a package that the archive no longer has.
///
/// # Errors
/// It cannot be read or copied.
pub fn add(cache: &Path, file: &Path) -> Result<(String, PathBuf), Error> {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or("file").to_owned();
    let dir = tempfile::tempdir()
        .map_err(cache::io_error("create a temporary directory for", file))
        .map_err(store::Error::from)?;
    let copy = dir.path().join("copy");
    std::fs::copy(file, &copy).map_err(cache::io_error("copy", file)).map_err(store::Error::from)?;
    let (sha256, _) =
        firstlight_image::digest::of_file(&copy).map_err(cache::io_error("read", file)).map_err(store::Error::from)?;
    let path = Store::of(cache).put(&copy, &sha256, &name)?;
    Ok((sha256, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned(name: &str, suite: &str) -> Pinned {
        Pinned {
            suite: suite.to_owned(),
            name: name.to_owned(),
            requested: None,
            version: "1".to_owned(),
            architecture: "amd64".to_owned(),
            source: None,
            size: 1,
            sha256: firstlight_image::digest::of_bytes(name.as_bytes()),
        }
    }

    #[test]
    fn locked_tool_set_is_complete_and_exact() {
        let dir = tempfile::tempdir().unwrap();
        let tools = ["gcc-14", "make", "erofs-utils"].map(|name| pinned(name, "trixie"));
        let mut lock = Lock { tools: tools.to_vec(), ..Lock::default() };
        let [name, date, sha256] = ["trixie", "then", "ab"].map(str::to_owned);
        lock.suites.push(Release { name, date, sha256, valid_until: None, signed_by: Vec::new() });
        let kit = |lock: &Lock, names: &[&str]| {
            let mut packages = Packages::new(dir.path(), Some(lock), Progress::quiet());
            let found = packages.find_tools("trixie", names)?;
            assert_eq!((packages.tools(), packages.used().len()), (&found[..], 0));
            assert_eq!(packages.kits(), &lock.kits, "a new lock would be identical");
            assert_eq!(packages.suites(), lock.suites, "no archive was queried");
            Ok::<_, Error>(found)
        };
        let error = kit(&lock, &["gcc-14", "make"]).unwrap_err().to_string();
        assert!(error.contains("trixie:gcc-14+make of trixie among its tools"), "{error}");
        lock.kits.insert("trixie:gcc-14+make".to_owned(), vec!["gcc-14".to_owned(), "make".to_owned()]);
        assert_eq!(kit(&lock, &["gcc-14", "make"]).unwrap(), tools[..2]);
        lock.tools[1].suite = "sid".to_owned();
        let error = kit(&lock, &["gcc-14", "make"]).unwrap_err().to_string();
        assert!(error.contains("make of trixie"), "packages of another suite do not match: {error}");
    }

    #[test]
    fn tools_are_recorded_separately_and_read_from_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "make").unwrap();
        let tool = pinned("make", "trixie");
        let path = Store::of(dir.path()).put(&file, &tool.sha256, &tool.candidate().file_name()).unwrap();
        let mut packages = Packages::new(dir.path(), None, Progress::quiet());
        assert_eq!(packages.fetch_tools("x", std::slice::from_ref(&tool)).unwrap(), [path]);
        assert_eq!((packages.used().len(), packages.tools()), (0, &[tool][..]));
    }
}
