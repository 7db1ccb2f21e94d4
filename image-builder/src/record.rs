//! `image.json`: what an image is made of, and what came of it.
//!
//! Read back by `verify`, `diff` and `sbom`, from anybody's directory. Fields that
//! came later may be missing in it; what they say then is not known.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::digest::Bytes;
use crate::lock::{Pinned, Release};
use crate::tree::{Node, Tree};

/// The record's name among the results.
pub const RECORD: &str = "image.json";

/// A longer record describes no image.
const LONGEST: u64 = 256 << 20;

/// Why there is no record to go by.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error("cannot read {}: is this the directory that build wrote?", path.display())]
    Read {
        /// The record.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It is not one.
    #[error("{} is no record of an image: {what}", path.display())]
    Invalid {
        /// The record.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// What `image.json` says. It holds no path of the building machine and no
/// time of the build, so it is as reproducible as the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Version of this record's shape.
    pub schema: u32,
    /// The manifest's name for the image.
    pub name: String,
    /// The image's format.
    pub format: String,
    /// How it is packed.
    #[serde(default)]
    pub packing: String,
    /// The directory below `/run/kata-extensions` where a guest mounts it, if it is no root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extension: Option<String>,
    /// How its blocks are verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verity: Option<VerityRecord>,
    /// What a kernel that mounts it without help has to be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_line: Option<String>,
    /// `uname -r`.
    pub kernel_release: String,
    /// Where the kernel is from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Origin>,
    /// Wanted modules that the kernel has built in.
    pub built_in_modules: Vec<String>,
    /// NVIDIA's driver, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverRecord>,
    /// Every package something was taken from, or of which something was compiled.
    pub packages: Vec<PackageRecord>,
    /// Every archive that was supplied and that something was taken from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub archives: Vec<ArchiveRecord>,
    /// Every package of the programs that made the format or compiled something.
    #[serde(default)]
    pub tools: Vec<PackageRecord>,
    /// The suites, as they were when the packages were chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub suites: Vec<SuiteRecord>,
    /// SHA-256 over all that no package decides: path, kind, mode and content
    /// of the manifest's own entries, modules built out of the kernel's tree,
    /// and a kernel that was compiled for it.
    pub own_files_sha256: String,
    /// Libraries that no program of the image needs, with their sizes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unused: BTreeMap<String, u64>,
    /// The files beside this record.
    pub outputs: BTreeMap<String, Bytes>,
    /// Every file in the image, by path without leading slash.
    pub files: BTreeMap<String, FileRecord>,
    /// Everything else in the image, by path: `directory 755`,
    /// `link TARGET`, `character 600 5,1`; modes are octal.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub others: BTreeMap<String, String>,
    /// Entries of any kind in the image.
    pub entries: usize,
    /// Bytes of all files in the image together.
    pub file_bytes: u64,
}

/// A file in the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// In bytes.
    pub size: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
    /// For SPDX, which names files by it; lower-case hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha1: Option<String>,
    /// Permission bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Where it is from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// Where something in the image is from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The manifest names it: it is our own.
    Own,
    /// The builder wrote it, such as lists of modules.
    Builder,
    /// A package has it, by [`PackageRecord::id`].
    Package(String),
    /// It was compiled of this package.
    Source(String),
    /// An archive has it, by [`ArchiveRecord::id`].
    Archive(String),
}

/// An archive that whoever built the image has supplied.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchiveRecord {
    /// The manifest's name for it.
    pub name: String,
    /// The version of what is in it, as the manifest says.
    pub version: String,
    /// In bytes.
    pub size: u64,
    /// SHA-256 of the archive.
    pub sha256: String,
    /// Its licence, as the manifest says.
    pub licence: String,
    /// What it is for, as the manifest says.
    pub reason: String,
}

impl ArchiveRecord {
    /// What a file's [`Origin`] calls it: `NAME=VERSION`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}={}", self.name, self.version)
    }
}

/// A package that contributed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PackageRecord {
    /// Package name.
    pub name: String,
    /// Full version.
    pub version: String,
    /// The suite it came from.
    pub suite: String,
    /// `amd64` or `all`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Its source package, `NAME=VERSION`, where that has another name or version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// SHA-256 of the package file.
    pub sha256: String,
}

impl PackageRecord {
    /// A pinned package as the record has it.
    #[must_use]
    pub fn of(one: &Pinned) -> Self {
        Self {
            name: one.name.clone(),
            version: one.version.clone(),
            suite: one.suite.clone(),
            architecture: Some(one.architecture.clone()),
            source: one.source.clone(),
            sha256: one.sha256.clone(),
        }
    }

    /// What a file's [`Origin`] calls it: `SUITE/NAME=VERSION`.
    #[must_use]
    pub fn id(&self) -> String {
        id(&self.suite, &self.name, &self.version)
    }
}

/// As [`PackageRecord::id`].
pub(crate) fn id(suite: &str, name: &str, version: &str) -> String {
    format!("{suite}/{name}={version}")
}

/// NVIDIA's driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverRecord {
    /// Its version.
    pub version: String,
    /// The package that its modules were compiled of, by [`PackageRecord::id`].
    pub source: String,
    /// The compiler.
    pub compiler: String,
    /// Names of the patches that were applied.
    pub patches: Vec<String>,
}

/// A suite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuiteRecord {
    /// Its name.
    pub name: String,
    /// The `Date` of its release file.
    pub date: String,
    /// SHA-256 of `InRelease`.
    pub sha256: String,
}

impl SuiteRecord {
    /// A suite of a lock as the record has it.
    #[must_use]
    pub fn of(one: &Release) -> Self {
        Self { name: one.name.clone(), date: one.date.clone(), sha256: one.sha256.clone() }
    }
}

/// A dm-verity hash tree, in the second partition of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerityRecord {
    /// The disk.
    pub file: String,
    /// Lower-case hexadecimal.
    pub root_hash: String,
    /// All parameters, as Kata's settings have them.
    pub params: String,
    /// Where the first partition begins, in bytes.
    pub data_offset: u64,
    /// Where the second partition begins, in bytes.
    pub hash_offset: u64,
    /// Bytes of hashes.
    pub hash_size: u64,
}

impl Contents {
    /// Reads a record, or that in a directory of results.
    ///
    /// # Errors
    /// It cannot be read, or is no record.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let path = if path.is_dir() { path.join(RECORD) } else { path.to_owned() };
        let failed = |source| Error::Read { path: path.clone(), source };
        let mut text = Vec::new();
        File::open(&path).and_then(|file| file.take(LONGEST).read_to_end(&mut text)).map_err(failed)?;
        serde_json::from_slice(&text).map_err(|error| Error::Invalid { path, what: error.to_string() })
    }
}

/// What is in a tree and is no file, as [`Contents::others`] has it.
pub(crate) fn others(tree: &Tree) -> BTreeMap<String, String> {
    let text = |node: &Node| match node {
        Node::File { .. } => None,
        Node::Directory { mode } => Some(format!("directory {mode:o}")),
        Node::Symlink { target } => Some(format!("link {target}")),
        Node::Character { mode, major, minor } => Some(format!("character {mode:o} {major},{minor}")),
    };
    tree.iter().filter_map(|(path, node)| Some((path.to_owned(), text(node)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_records_are_read_and_lack_only_what_came_later() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"schema":1,"name":"x","format":"erofs","kernel_release":"6","built_in_modules":[],
            "packages":[{"name":"p","version":"1","suite":"sid","sha256":"ab"}],"own_files_sha256":"",
            "outputs":{},"files":{"init":{"size":1,"sha256":"cd"}},"entries":1,"file_bytes":1}"#;
        std::fs::write(dir.path().join(RECORD), text).unwrap();
        let read = Contents::read(dir.path()).unwrap();
        assert_eq!(read.files["init"], FileRecord { size: 1, sha256: "cd".into(), ..FileRecord::default() });
        assert_eq!((read.packages[0].id().as_str(), &read.packages[0].architecture), ("sid/p=1", &None));
        assert_eq!(Contents::read(&dir.path().join(RECORD)).unwrap(), read, "a directory, or its record");
        let error = Contents::read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("none") && error.contains("directory that build wrote"), "{error}");
        std::fs::write(dir.path().join("odd"), "[]").unwrap();
        assert!(matches!(Contents::read(&dir.path().join("odd")), Err(Error::Invalid { .. })));
    }

    #[test]
    fn origins_read_as_they_are_written() {
        for (origin, text) in [
            (Origin::Own, r#""own""#),
            (Origin::Builder, r#""builder""#),
            (Origin::Package(id("sid", "p", "1:2")), r#"{"package":"sid/p=1:2"}"#),
            (Origin::Source("s".into()), r#"{"source":"s"}"#),
            (Origin::Archive("a=1".into()), r#"{"archive":"a=1"}"#),
        ] {
            assert_eq!(serde_json::to_string(&origin).unwrap(), text);
            assert_eq!(serde_json::from_str::<Origin>(text).unwrap(), origin);
        }
    }
}
