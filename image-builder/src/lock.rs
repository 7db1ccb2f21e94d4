//! The lock file: exactly what an image is built from, and what came of it.
//!
//! TOML, written by `image-builder lock`, meant to be kept beside the manifest
//! under version control. A build with a lock takes the packages that it names
//! and no others, from the store if the archive has moved on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cache;
use crate::debian::{Candidate, is_plain};
use crate::record::ArchiveRecord;
use crate::store::is_hash;

/// The version of this file's shape.
pub const SCHEMA: u32 = 1;

/// A lock file larger than this is none.
const LARGEST: u64 = 4 << 20;

/// What is wrong with a lock file.
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
    /// It is not TOML, or not of this shape.
    #[error("lock file {} is not as it should be; write it anew with image-builder lock", file.display())]
    Parse {
        /// The lock file.
        file: PathBuf,
        /// Line, column, and what is wrong there.
        source: Box<toml::de::Error>,
    },
    /// A value in it cannot be.
    #[error("lock file {}: {what}; write it anew with image-builder lock", file.display())]
    Value {
        /// The lock file.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// What a lock file says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Lock {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The image's name in its manifest.
    pub image: String,
    /// SHA-256 of the manifest's text.
    pub manifest_sha256: String,
    /// SHA-256 over all that no package decides: path, mode and content of the
    /// manifest's own entries (our programs, for one), name and content of
    /// `[[extra-modules]]`, and the `vmlinux` of a kernel made by a recipe.
    pub own_files_sha256: String,
    /// The root hash of the image's dm-verity tree, if it has one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub root_hash: Option<String>,
    /// What was built.
    #[serde(default)]
    pub outputs: BTreeMap<String, Output>,
    /// The suites, as they were when the packages were chosen.
    #[serde(default, rename = "suite")]
    pub suites: Vec<Release>,
    /// Every package that something was taken from, or that built something.
    #[serde(default, rename = "package")]
    pub packages: Vec<Pinned>,
    /// Every archive that was supplied.
    #[serde(default, rename = "archive", skip_serializing_if = "Vec::is_empty")]
    pub archives: Vec<ArchiveRecord>,
    /// Sets of tools, by what they are for, with the names of their packages.
    #[serde(default)]
    pub kits: BTreeMap<String, Vec<String>>,
    /// Every package of the programs that made the image's format or compiled
    /// something for it; several may be among the others too.
    #[serde(default, rename = "tool")]
    pub tools: Vec<Pinned>,
}

/// A file that was built.
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
    /// Fingerprints of the keys whose signatures hold.
    pub signed_by: Vec<String>,
}

/// One version of one package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pinned {
    /// The suite it came from.
    pub suite: String,
    /// Package name.
    pub name: String,
    /// The name that was asked for, where that is a package which only points at this one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub asked: Option<String>,
    /// Full version, epoch included.
    pub version: String,
    /// `amd64` or `all`.
    pub architecture: String,
    /// Its source package, `NAME=VERSION`, where that has another name or version.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub source: Option<String>,
    /// Size of the package file in bytes.
    pub size: u64,
    /// SHA-256 of the package file.
    pub sha256: String,
}

impl Pinned {
    /// What an archive offers, pinned.
    #[must_use]
    pub fn of(suite: &str, candidate: &Candidate) -> Self {
        Self {
            suite: suite.to_owned(),
            name: candidate.name.clone(),
            asked: None,
            version: candidate.version.clone(),
            architecture: candidate.architecture.clone(),
            source: candidate.source.clone(),
            size: candidate.size,
            sha256: candidate.sha256.clone(),
        }
    }

    /// As the archive would offer it.
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
        false => Err(format!("{what} has {text:?} in the place of a SHA-256")),
    }
}

impl Lock {
    /// Reads and checks a lock file.
    ///
    /// # Errors
    /// It cannot be read, or says what no builder wrote.
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

    /// Names become file names and arguments of programs: they are judged
    /// before anything is done with them.
    fn check(&self) -> Result<(), String> {
        if self.schema != SCHEMA {
            return Err(format!("it has schema {}, this program reads {SCHEMA}", self.schema));
        }
        hash("manifest-sha256", &self.manifest_sha256)?;
        hash("own-files-sha256", &self.own_files_sha256)?;
        for (name, output) in &self.outputs {
            hash(name, &output.sha256)?;
        }
        for (kit, names) in &self.kits {
            if let Some(odd) = names.iter().chain([kit]).find(|word| !is_plain(word)) {
                return Err(format!("kit {kit} has the odd word {odd:?}"));
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
            let words = [&package.suite, &package.name, &package.version, &package.architecture];
            let words = words.into_iter().chain(&package.asked).map(String::as_str);
            let source = package.source.iter().flat_map(|source| source.splitn(2, '='));
            if let Some(odd) = words.chain(source).find(|word| !is_plain(word)) {
                return Err(format!("package {} has the odd word {odd:?}", package.name));
            }
            hash(&format!("package {}", package.name), &package.sha256)?;
            let same = |other: &&Pinned| (&other.suite, &other.name) == (&package.suite, &package.name);
            if packages[..at].iter().any(|other| same(&other)) {
                return Err(format!("package {} of {} is in it twice", package.name, package.suite));
            }
        }
        Ok(())
    }

    /// The text of the file.
    ///
    /// # Errors
    /// Never for these types; serialisation is fallible by type.
    pub fn text(&self) -> Result<String, toml::ser::Error> {
        let head = "# Written by image-builder lock. What the image is built from, and what came of it.\n";
        Ok(format!("{head}{}", toml::to_string(self)?))
    }

    /// Writes the file, whole or not at all.
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
                asked: Some("linux-image-cloud-amd64".into()),
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
                asked: None,
                version: "1.8.6-1".into(),
                architecture: "amd64".into(),
                source: None,
                size: 9,
                sha256: hash,
            }],
        }
    }

    #[test]
    fn what_is_written_is_read() {
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
    fn what_no_builder_wrote_is_refused_by_name() {
        let with = |change: &dyn Fn(&mut Lock)| {
            let mut lock = sample();
            change(&mut lock);
            Lock::parse(&lock.text().unwrap(), Path::new("x.lock")).unwrap_err().to_string()
        };
        for (error, word) in [
            (with(&|lock| lock.schema = 9), "schema 9"),
            (with(&|lock| lock.packages[0].name = "../../etc/passwd".into()), "odd word"),
            (with(&|lock| lock.packages[0].version = "-oDebug=1".into()), "odd word"),
            (with(&|lock| lock.packages[0].source = Some("linux=../1".into())), "odd word \"../1\""),
            (with(&|lock| lock.packages[0].sha256 = "ab".into()), "SHA-256"),
            (with(&|lock| lock.archives[0].sha256 = "x".into()), "archive fabricmanager"),
            (with(&|lock| lock.packages.push(lock.packages[0].clone())), "twice"),
            (with(&|lock| drop(lock.kits.insert("../x".into(), Vec::new()))), "kit ../x has the odd word"),
            (with(&|lock| drop(lock.kits.insert("x".into(), vec!["a/b".into()]))), "\"a/b\""),
            (with(&|lock| lock.tools.push(lock.tools[0].clone())), "twice"),
            (with(&|lock| lock.tools[0].suite = "..".into()), "odd word"),
            (with(&|lock| lock.manifest_sha256 = "x".repeat(64)), "manifest-sha256"),
        ] {
            assert!(error.contains(word) && error.contains("x.lock"), "{error}");
        }
        assert!(matches!(Lock::parse("schema = 1\nodd = 2\n", Path::new("x")), Err(Error::Parse { .. })));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(?s).{0,300}", at in 0usize..900, byte in any::<char>()) {
            let _ = Lock::parse(&text, Path::new("x"));
            let mut whole: Vec<char> = sample().text().unwrap().chars().collect();
            let place = at.min(whole.len() - 1);
            whole[place] = byte;
            let _ = Lock::parse(&whole.into_iter().collect::<String>(), Path::new("x"));
        }
    }
}
