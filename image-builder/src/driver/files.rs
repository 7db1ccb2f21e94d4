//! Extracts firmware and libraries of the driver from their packages.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use serde::{Deserialize, Serialize};

use super::Error;
use super::profile::{self, Selected};
use crate::cache::digests::CachedFile;
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::debian::{self, PackageRequest};
use crate::packages::lock::Pinned;
use crate::tree::closure::rules::Rules;
use crate::tree::{Content, Node};

/// Layout version of the cache directory; increment it to invalidate cached ones.
const LAYOUT: u32 = 2;

/// File name of the record in the cache directory.
const RECORD: &str = "record.json";

/// The selected files, in the cache.
#[derive(Debug, Clone)]
pub struct Files {
    dir: PathBuf,
    /// Rules for the closure check of an image with these files.
    pub rules: Rules,
    /// The record of the extracted files.
    pub record: Record,
}

/// The record of extracted files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this format.
    pub schema: u32,
    /// The packages of the files.
    pub packages: Vec<Pinned>,
    /// The image entries.
    pub entries: Vec<DriverEntry>,
}

/// An image entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverEntry {
    /// Its group.
    pub group: String,
    /// Its package.
    pub package: String,
    /// The path in the image.
    pub path: String,
    /// The type.
    pub kind: Kind,
}

/// The type of an image entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A file.
    File {
        /// Permission bits.
        mode: u32,
        /// Size in bytes.
        size: u64,
        /// SHA-256 of the extracted file.
        sha256: String,
    },
    /// A symbolic link.
    Link {
        /// The link target.
        target: String,
    },
}

impl Files {
    /// Extracts the `selected` files from packages of `suite`, unless cached.
    ///
    /// # Errors
    /// A package is not available or lacks a file.
    pub fn prepare(packages: &mut Packages<'_>, suite: &str, selected: &[Selected]) -> Result<Self, Error> {
        let found = find_packages(packages, suite, selected)?;
        let dir = packages.cache().join("driver-files").join(&key(&found, selected)?[..16]);
        let progress = packages.progress();
        cache::publish(&dir, &progress, |staging| {
            let unpacked = staging.join("packages");
            for package in found.values() {
                let deb = packages.fetch_one(&format!("package {}", package.name), package)?;
                let into = unpacked.join(&package.name);
                fs::create_dir_all(&into).map_err(io_error("create directory", &into))?;
                progress.say(format_args!("package {} {}: unpacking", package.name, package.version));
                debian::unpack(&deb, &into, |path| !path.starts_with("usr/share"))?;
            }
            let names = found.iter().map(|(first, one)| (first.clone(), one.name.clone())).collect();
            let entries = extract(selected, &names, &unpacked, &staging.join("tree"))?;
            fs::remove_dir_all(&unpacked).map_err(io_error("remove", &unpacked))?;
            let mut pinned: Vec<Pinned> = found.values().cloned().collect();
            pinned.sort();
            let path = staging.join(RECORD);
            let record = Record { schema: 1, packages: pinned, entries };
            let text =
                serde_json::to_vec_pretty(&record).map_err(io::Error::other).map_err(io_error("write", &path))?;
            fs::write(&path, text).map_err(io_error("write", &path))?;
            Ok::<(), Error>(())
        })?;
        let path = dir.join(RECORD);
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let record = serde_json::from_slice(&text).map_err(io::Error::other).map_err(io_error("parse", &path))?;
        Ok(Self { dir, rules: profile::rules(selected), record })
    }

    /// Returns the image entries and their paths.
    pub fn entries(&self) -> impl Iterator<Item = (&str, Node)> {
        self.record.entries.iter().map(|entry| {
            let node = match &entry.kind {
                Kind::File { mode, sha256, .. } => {
                    let file = self.dir.join("tree").join(&entry.path);
                    let cached = CachedFile { dir: self.dir.clone(), file, sha256: sha256.clone() };
                    Node::File { mode: *mode, content: Content::Cached(cached) }
                }
                Kind::Link { target } => Node::Symlink { target: target.clone() },
            };
            (entry.path.as_str(), node)
        })
    }

    /// Returns the total file size of each group in bytes.
    #[must_use]
    pub fn sizes(&self) -> BTreeMap<&str, u64> {
        let mut sizes = BTreeMap::new();
        for entry in &self.record.entries {
            if let Kind::File { size, .. } = entry.kind {
                *sizes.entry(entry.group.as_str()).or_default() += size;
            }
        }
        sizes
    }
}

/// Finds and records the package of each file. A package may have several names, of which the suite
/// has one; the result is keyed by the first.
fn find_packages(
    packages: &mut Packages<'_>,
    suite: &str,
    selected: &[Selected],
) -> Result<BTreeMap<String, Pinned>, Error> {
    let mut found = BTreeMap::new();
    for file in selected {
        let Some((first, others)) = file.package.split_first() else { continue };
        if found.contains_key(first) {
            continue;
        }
        let request = file.version.as_deref().map_or(PackageRequest::Newest, PackageRequest::Series);
        let mut package = packages.find(suite, first, request);
        for other in others {
            if package.is_err() {
                package = packages.find(suite, other, request);
            }
        }
        let package = package?;
        packages.note(&package);
        found.insert(first.clone(), package);
    }
    Ok(found)
}

fn key(found: &BTreeMap<String, Pinned>, selected: &[Selected]) -> Result<String, Error> {
    let mut text = format!("{LAYOUT}\n");
    for package in found.values() {
        text.push_str(&format!("{}\n", package.sha256));
    }
    let files = serde_json::to_string(selected).map_err(|error| {
        let what = io::Error::other(error);
        Error::Cache(io_error("serialize", Path::new("the driver's files"))(what))
    })?;
    text.push_str(&files);
    Ok(digest::of_bytes(text.as_bytes()))
}

/// Moves the selected files from `unpacked` to their paths in `tree`. `names` maps
/// the first name of each package to its name in this suite.
fn extract(
    selected: &[Selected],
    names: &BTreeMap<String, String>,
    unpacked: &Path,
    tree: &Path,
) -> Result<Vec<DriverEntry>, Error> {
    let mut entries = Vec::new();
    let mut paths = BTreeSet::new();
    for file in selected {
        let package = file.package.first().and_then(|first| names.get(first)).cloned().unwrap_or_default();
        let missing = || Error::NoFile { package: package.clone(), file: file.from.clone() };
        let mut from = find(&unpacked.join(&package), &file.from).ok_or_else(missing)?;
        let mut to = file.to.clone();
        let mut add = |path: &str, kind: Kind| {
            let entry =
                DriverEntry { group: file.group.clone(), package: package.clone(), path: path.to_owned(), kind };
            if !paths.insert(path.to_owned()) {
                return Err(Error::DuplicatePath { path: path.to_owned() });
            }
            entries.push(entry);
            Ok(())
        };
        // The soname of a library is a link to the file with the full version.
        if from.is_symlink() {
            let target = fs::read_link(&from).map_err(io_error("read link", &from))?;
            let target =
                target.to_str().filter(|target| !target.contains('/') && *target != "..").ok_or_else(missing)?;
            add(&to, Kind::Link { target: target.to_owned() })?;
            from.set_file_name(target);
            to = sibling(&to, target);
        }
        // No further links are followed: a package must not include files of the host.
        fs::symlink_metadata(&from).ok().filter(fs::Metadata::is_file).ok_or_else(missing)?;
        let (sha256, size) = digest::of_file(&from).map_err(io_error("read", &from))?;
        add(&to, Kind::File { mode: file.mode, size, sha256 })?;
        for link in &file.links {
            add(link, Kind::Link { target: relative(link, &to) })?;
        }
        let target_path = tree.join(&to);
        if let Some(parent) = target_path.parent() {
            fs::create_dir_all(parent).map_err(io_error("create directory", parent))?;
        }
        fs::rename(&from, &target_path).map_err(io_error("move", &from))?;
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(entries)
}

/// Finds a file in an unpacked package, also in `/lib` instead of `/usr/lib`, as until
/// Debian 12. Directories that are links are refused, as they may point outside.
fn find(package: &Path, path: &str) -> Option<PathBuf> {
    [Some(path), path.strip_prefix("usr/")].into_iter().flatten().find_map(|path| {
        let mut at = package.to_owned();
        for part in path.split('/') {
            if at.is_symlink() {
                return None;
            }
            at.push(part);
        }
        at.symlink_metadata().is_ok().then_some(at)
    })
}

fn sibling(path: &str, name: &str) -> String {
    path.rsplit_once('/').map_or_else(|| name.to_owned(), |(dir, _)| format!("{dir}/{name}"))
}

/// Returns the relative target of a link at `link` to `to`, both paths in the image;
/// relative, so that it is also valid if the image is not mounted at `/`.
fn relative(link: &str, to: &str) -> String {
    let dirs = |path: &str| path.split('/').map(str::to_owned).collect::<Vec<_>>();
    let (link, to) = (dirs(link), dirs(to));
    let common = link[..link.len() - 1].iter().zip(&to[..to.len() - 1]).take_while(|(a, b)| a == b).count();
    let mut parts = vec!["..".to_owned(); link.len() - 1 - common];
    parts.extend_from_slice(&to[common..]);
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn file(package: &str, from: &str, to: &str, links: &[&str]) -> Selected {
        Selected {
            group: "g".to_owned(),
            package: vec![package.to_owned()],
            version: None,
            from: from.to_owned(),
            to: to.to_owned(),
            mode: 0o644,
            links: links.iter().map(|link| (*link).to_owned()).collect(),
            opens: Vec::new(),
        }
    }

    /// Creates unpacked packages in `dir` with these files; a text `-> x` creates a link.
    fn packages(dir: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = dir.join("packages").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match text.strip_prefix("-> ") {
                Some(target) => symlink(target, &path).unwrap(),
                None => fs::write(&path, text).unwrap(),
            }
        }
    }

    fn extracted(dir: &Path, selected: &[Selected]) -> Result<Vec<DriverEntry>, Error> {
        let names = selected.iter().map(|file| (file.package[0].clone(), file.package[0].clone())).collect();
        extract(selected, &names, &dir.join("packages"), &dir.join("tree"))
    }

    #[test]
    fn files_and_links_are_extracted_to_their_paths() {
        let dir = tempfile::tempdir().unwrap();
        packages(
            dir.path(),
            &[
                ("libcuda1/usr/lib/nvidia/current/libcuda.so.1.2", "cuda"),
                ("firmware/lib/firmware/nvidia/1.2/gsp.bin", "gsp"),
                ("tirpc/lib/libtirpc.so.3", "-> libtirpc.so.3.0.0"),
                ("tirpc/lib/libtirpc.so.3.0.0", "tirpc"),
            ],
        );
        let entries = extracted(
            dir.path(),
            &[
                file(
                    "libcuda1",
                    "usr/lib/nvidia/current/libcuda.so.1.2",
                    "usr/lib/libcuda.so.1.2",
                    &["usr/lib/libcuda.so.1", "lib64/cuda"],
                ),
                file("firmware", "usr/lib/firmware/nvidia/1.2/gsp.bin", "lib/firmware/nvidia/1.2/gsp.bin", &[]),
                file("tirpc", "usr/lib/libtirpc.so.3", "usr/lib/libtirpc.so.3", &[]),
            ],
        )
        .unwrap();
        let shown: Vec<String> = entries
            .iter()
            .map(|entry| match &entry.kind {
                Kind::File { size, .. } => format!("{} {size}", entry.path),
                Kind::Link { target } => format!("{} -> {target}", entry.path),
            })
            .collect();
        assert_eq!(
            shown,
            [
                "lib/firmware/nvidia/1.2/gsp.bin 3",
                "lib64/cuda -> ../usr/lib/libcuda.so.1.2",
                "usr/lib/libcuda.so.1 -> libcuda.so.1.2",
                "usr/lib/libcuda.so.1.2 4",
                "usr/lib/libtirpc.so.3 -> libtirpc.so.3.0.0",
                "usr/lib/libtirpc.so.3.0.0 5",
            ]
        );
        let record = Record { schema: 1, packages: Vec::new(), entries };
        let files = Files { dir: dir.path().to_owned(), rules: Rules::default(), record };
        assert_eq!(files.sizes(), BTreeMap::from([("g", 12)]));
        let mut image = crate::tree::Tree::default();
        for (path, node) in files.entries() {
            if let Node::File { content, .. } = &node {
                assert!(content.path().unwrap().is_file(), "{content:?}");
            }
            image.add(path, node).unwrap();
        }
    }

    #[test]
    fn links_out_of_the_package_then_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        let outside = dir.path().display().to_string();
        packages(
            dir.path(),
            &[
                ("p/usr/absolute", &format!("-> {outside}/secret")),
                ("p/usr/up", "-> ../../../secret"),
                ("p/usr/directory", &format!("-> {outside}")),
                ("p/usr/chain", "-> absolute"),
                ("p/usr/dots", "-> .."),
                ("p/usr/dir/x", ""),
            ],
        );
        for from in ["usr/absolute", "usr/up", "usr/directory/secret", "usr/chain", "usr/dots", "usr/dir", "usr/none"] {
            let error = extracted(dir.path(), &[file("p", from, "to", &[])]).unwrap_err().to_string();
            assert!(error.contains("package p") && error.contains(from), "{error}");
        }
        assert!(!dir.path().join("tree/to").exists());
    }

    #[test]
    fn duplicate_path_then_error() {
        let dir = tempfile::tempdir().unwrap();
        packages(dir.path(), &[("p/a", "a"), ("p/b", "b")]);
        let error = extracted(dir.path(), &[file("p", "a", "x", &[]), file("p", "b", "y", &["x"])]).unwrap_err();
        assert!(error.to_string().contains("/x"), "{error}");
    }

    #[test]
    fn link_targets_are_relative() {
        assert_eq!(relative("usr/lib/a.so.1", "usr/lib/a.so.1.2"), "a.so.1.2");
        assert_eq!(relative("lib64/ld.so", "usr/lib/x/ld.so"), "../usr/lib/x/ld.so");
        assert_eq!(relative("usr/bin/a", "usr/lib/b"), "../lib/b");
        assert_eq!(relative("a", "b"), "b");
    }
}
