//! The lock file: the exact inputs of an image and the hashes of its results.
//!
//! TOML, written by `image-builder lock`, to be committed with the manifest.
//! A build with a lock uses exactly the packages that it lists, from the store
//! if the archive no longer has them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image::{ArchiveRecord, PackageRecord, SuiteRecord};
use serde::{Deserialize, Serialize};

use crate::cache;
use crate::packages::debian::{Candidate, is_plain};
use crate::packages::store::is_hash;

/// Schema version of the file.
pub const SCHEMA: u32 = 1;

/// Maximum size of a lock file in bytes.
const LARGEST: u64 = 4 << 20;

/// Why a lock file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read.
    #[error("cannot read lock file {}", file.display())]
    Read {
        /// The lock file.
        file: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// It is not TOML, or has unknown or missing keys.
    #[error("cannot parse lock file {}; regenerate it with image-builder lock", file.display())]
    Parse {
        /// The lock file.
        file: PathBuf,
        /// Line, column and problem.
        source: Box<toml::de::Error>,
    },
    /// A value is invalid.
    #[error("lock file {}: {what}; regenerate it with image-builder lock", file.display())]
    Value {
        /// The lock file.
        file: PathBuf,
        /// The problem.
        what: String,
    },
}

/// Contents of a lock file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Lock {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The image's name in its manifest.
    pub image: String,
    /// SHA-256 of the manifest's text.
    pub manifest_sha256: String,
    /// SHA-256 over all inputs outside packages: path, mode and content of the
    /// manifest's own entries (such as `init`), name and content of
    /// `[[extra-modules]]`, and the `vmlinux` of a kernel built from a recipe.
    pub own_files_sha256: String,
    /// The root hash of the image's dm-verity tree, if it has one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub root_hash: Option<String>,
    /// Results by file name.
    #[serde(default)]
    pub outputs: BTreeMap<String, Output>,
    /// State of the suites when the packages were selected.
    #[serde(default, rename = "suite")]
    pub suites: Vec<Release>,
    /// Every package that contributed files or was compiled.
    #[serde(default, rename = "package")]
    pub packages: Vec<Pinned>,
    /// Every supplied archive.
    #[serde(default, rename = "archive", skip_serializing_if = "Vec::is_empty")]
    pub archives: Vec<ArchiveRecord>,
    /// Tool sets (`SUITE:NAMES`) with the names of all their packages.
    #[serde(default)]
    pub kits: BTreeMap<String, Vec<String>>,
    /// Every package of the build tools; may overlap with `packages`.
    #[serde(default, rename = "tool")]
    pub tools: Vec<Pinned>,
}

/// A result file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// In bytes.
    pub size: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// A suite's signed release file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Release {
    /// The suite.
    pub name: String,
    /// Its `Date`, as it is written there.
    pub date: String,
    /// Its `Valid-Until`, if it has one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub valid_until: Option<String>,
    /// SHA-256 of `InRelease`.
    pub sha256: String,
    /// Fingerprints of the keys with valid signatures.
    pub signed_by: Vec<String>,
}

impl Release {
    /// Returns the suite as an image's record lists it.
    #[must_use]
    pub fn record(&self) -> SuiteRecord {
        SuiteRecord { name: self.name.clone(), date: self.date.clone(), sha256: self.sha256.clone() }
    }
}

/// One version of one package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pinned {
    /// The suite it came from.
    pub suite: String,
    /// Package name.
    pub name: String,
    /// The requested name, if that is a metapackage that depends on this one.
    #[serde(skip_serializing_if = "Option::is_none", default, alias = "asked")]
    pub requested: Option<String>,
    /// Full version, epoch included.
    pub version: String,
    /// `amd64` or `all`.
    pub architecture: String,
    /// Its source package, `NAME=VERSION`, if its name or version differs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub source: Option<String>,
    /// Size of the package file in bytes.
    pub size: u64,
    /// SHA-256 of the package file.
    pub sha256: String,
}

impl Pinned {
    /// Pins a candidate of an archive.
    #[must_use]
    pub fn of(suite: &str, candidate: &Candidate) -> Self {
        Self {
            suite: suite.to_owned(),
            name: candidate.name.clone(),
            requested: None,
            version: candidate.version.clone(),
            architecture: candidate.architecture.clone(),
            source: candidate.source.clone(),
            size: candidate.size,
            sha256: candidate.sha256.clone(),
        }
    }

    /// Returns the package as an image's record lists it.
    #[must_use]
    pub fn record(&self) -> PackageRecord {
        PackageRecord {
            name: self.name.clone(),
            version: self.version.clone(),
            suite: self.suite.clone(),
            architecture: Some(self.architecture.clone()),
            source: self.source.clone(),
            sha256: self.sha256.clone(),
        }
    }

    /// Returns the candidate of the archive for this package.
    #[must_use]
    pub fn candidate(&self) -> Candidate {
        Candidate {
            name: self.name.clone(),
            version: self.version.clone(),
            architecture: self.architecture.clone(),
            source: self.source.clone(),
            size: self.size,
            sha256: self.sha256.clone(),
            depends: String::new(),
        }
    }
}

fn hash(what: &str, text: &str) -> Result<(), String> {
    match is_hash(text) {
        true => Ok(()),
        false => Err(format!("{what} has {text:?} instead of a SHA-256")),
    }
}

impl Lock {
    /// Reads and checks a lock file.
    ///
    /// # Errors
    /// It cannot be read or is invalid.
    pub fn read(file: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read { file: file.to_owned(), source };
        let size = fs::metadata(file).map_err(failed)?.len();
        if size > LARGEST {
            return Err(Error::Value { file: file.to_owned(), what: format!("it has {size} bytes") });
        }
        Self::parse(&fs::read_to_string(file).map_err(failed)?, file)
    }

    /// Reads a lock file's text; `file` is its name in messages.
    ///
    /// # Errors
    /// As [`Lock::read`].
    pub fn parse(text: &str, file: &Path) -> Result<Self, Error> {
        let lock: Self =
            toml::from_str(text).map_err(|source| Error::Parse { file: file.to_owned(), source: Box::new(source) })?;
        lock.check().map_err(|what| Error::Value { file: file.to_owned(), what })?;
        Ok(lock)
    }

    /// Validates all names before use: they become file names and program arguments.
    fn check(&self) -> Result<(), String> {
        if self.schema != SCHEMA {
            return Err(format!("it has schema {}, this program supports {SCHEMA}", self.schema));
        }
        hash("manifest-sha256", &self.manifest_sha256)?;
        hash("own-files-sha256", &self.own_files_sha256)?;
        for (name, output) in &self.outputs {
            hash(name, &output.sha256)?;
        }
        for (kit, names) in &self.kits {
            if let Some(invalid) = names.iter().chain([kit]).find(|name| !is_plain(name)) {
                return Err(format!("kit {kit} has the invalid name {invalid:?}"));
            }
        }
        for archive in &self.archives {
            hash(&format!("archive {}", archive.name), &archive.sha256)?;
        }
        Self::check_packages(&self.packages)?;
        Self::check_packages(&self.tools)
    }

    fn check_packages(packages: &[Pinned]) -> Result<(), String> {
        for (at, package) in packages.iter().enumerate() {
            let values = [&package.suite, &package.name, &package.version, &package.architecture];
            let values = values.into_iter().chain(&package.requested).map(String::as_str);
            let source = package.source.iter().flat_map(|source| source.splitn(2, '='));
            if let Some(invalid) = values.chain(source).find(|value| !is_plain(value)) {
                return Err(format!("package {} has the invalid value {invalid:?}", package.name));
            }
            hash(&format!("package {}", package.name), &package.sha256)?;
            let same = |other: &&Pinned| (&other.suite, &other.name) == (&package.suite, &package.name);
            if packages[..at].iter().any(|other| same(&other)) {
                return Err(format!("package {} of {} is listed twice", package.name, package.suite));
            }
        }
        Ok(())
    }

    /// Serializes the lock.
    ///
    /// # Errors
    /// Never for these types; serialisation is fallible by type.
    pub fn text(&self) -> Result<String, toml::ser::Error> {
        let head = "# Written by image-builder lock: the exact inputs of the image and the hashes of its results.\n";
        Ok(format!("{head}{}", toml::to_string(self)?))
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), cache::Error> {
        let text = self.text().map_err(std::io::Error::other).map_err(cache::io_error("write", file))?;
        cache::write_atomically(file, text.as_bytes())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn sample() -> Lock {
        let hash = "ab".repeat(32);
        let output = Output { size: 7, sha256: hash.clone() };
        Lock {
            schema: SCHEMA,
            image: "gpu-550".into(),
            manifest_sha256: hash.clone(),
            own_files_sha256: hash.clone(),
            root_hash: Some(hash.clone()),
            outputs: BTreeMap::from([("image.erofs".to_owned(), output)]),
            suites: vec![Release {
                name: "trixie".into(),
                date: "Sat, 14 Nov 2026 09:57:18 UTC".into(),
                valid_until: None,
                sha256: hash.clone(),
                signed_by: vec!["A".repeat(40)],
            }],
            packages: vec![Pinned {
                suite: "trixie".into(),
                name: "linux-image-6.12.107+deb13-cloud-amd64".into(),
                requested: Some("linux-image-cloud-amd64".into()),
                version: "6.12.107-1".into(),
                architecture: "amd64".into(),
                source: Some("linux-signed-amd64=6.12.107+1".into()),
                size: 9,
                sha256: hash.clone(),
            }],
            archives: vec![ArchiveRecord {
                name: "fabricmanager".into(),
                version: "550.163.01".into(),
                size: 9,
                sha256: hash.clone(),
                licence: "NVIDIA".into(),
                reason: "the fabric".into(),
            }],
            kits: BTreeMap::from([("trixie:erofs-utils".to_owned(), vec!["erofs-utils".to_owned()])]),
            tools: vec![Pinned {
                suite: "trixie".into(),
                name: "erofs-utils".into(),
                requested: None,
                version: "1.8.6-1".into(),
                architecture: "amd64".into(),
                source: None,
                size: 9,
                sha256: hash,
            }],
        }
    }

    #[test]
    fn written_lock_is_read_back() {
        let lock = sample();
        let text = lock.text().unwrap();
        assert_eq!(Lock::parse(&text, Path::new("x.lock")).unwrap(), lock);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.lock");
        lock.write(&file).unwrap();
        assert_eq!(Lock::read(&file).unwrap(), lock);
        assert!(matches!(Lock::read(&dir.path().join("none")), Err(Error::Read { .. })));
    }

    #[test]
    fn invalid_lock_is_refused_by_name() {
        let with = |change: &dyn Fn(&mut Lock)| {
            let mut lock = sample();
            change(&mut lock);
            Lock::parse(&lock.text().unwrap(), Path::new("x.lock")).unwrap_err().to_string()
        };
        for (error, word) in [
            (with(&|lock| lock.schema = 9), "schema 9"),
            (with(&|lock| lock.packages[0].name = "../../etc/passwd".into()), "invalid value"),
            (with(&|lock| lock.packages[0].version = "-oDebug=1".into()), "invalid value"),
            (with(&|lock| lock.packages[0].source = Some("linux=../1".into())), "invalid value \"../1\""),
            (with(&|lock| lock.packages[0].sha256 = "ab".into()), "SHA-256"),
            (with(&|lock| lock.archives[0].sha256 = "x".into()), "archive fabricmanager"),
            (with(&|lock| lock.packages.push(lock.packages[0].clone())), "twice"),
            (with(&|lock| drop(lock.kits.insert("../x".into(), Vec::new()))), "kit ../x has the invalid name"),
            (with(&|lock| drop(lock.kits.insert("x".into(), vec!["a/b".into()]))), "\"a/b\""),
            (with(&|lock| lock.tools.push(lock.tools[0].clone())), "twice"),
            (with(&|lock| lock.tools[0].suite = "..".into()), "invalid value"),
            (with(&|lock| lock.manifest_sha256 = "x".repeat(64)), "manifest-sha256"),
        ] {
            assert!(error.contains(word) && error.contains("x.lock"), "{error}");
        }
        assert!(matches!(Lock::parse("schema = 1\nunknown = 2\n", Path::new("x")), Err(Error::Parse { .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(?s).{0,300}", at in 0usize..900, byte in any::<char>()) {
            let _ = Lock::parse(&text, Path::new("x"));
            let mut whole: Vec<char> = sample().text().unwrap().chars().collect();
            let place = at.min(whole.len() - 1);
            whole[place] = byte;
            let _ = Lock::parse(&whole.into_iter().collect::<String>(), Path::new("x"));
        }
    }
}
