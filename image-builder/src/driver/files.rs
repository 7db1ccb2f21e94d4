//! Firmware and libraries of the driver, out of their packages.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use serde::{Deserialize, Serialize};

use super::Error;
use super::profile::{self, Selected};
use crate::cache::{self, io_error};
use crate::closure::rules::Rules;
use crate::debian::{self, PackageRequest};
use crate::lock::Pinned;
use crate::packages::Packages;
use crate::tree::{Content, Node};

/// Changes when the directory is made differently, so that old ones are made anew.
const LAYOUT: u32 = 1;

/// What the directory says about itself.
const RECORD: &str = "record.json";

/// The selected files, in the cache.
#[derive(Debug, Clone)]
pub struct Files {
    dir: PathBuf,
    /// What the check of an image with these files has to know and cannot see.
    pub rules: Rules,
    /// What was recorded about them.
    pub record: Record,
}

/// What is known about the selected files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this record's shape.
    pub schema: u32,
    /// Every package that something was taken from.
    pub packages: Vec<Pinned>,
    /// Everything that goes into the image.
    pub pieces: Vec<Piece>,
}

/// One thing that goes into the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The group it belongs to.
    pub group: String,
    /// The package it is from.
    pub package: String,
    /// Where it goes.
    pub path: String,
    /// What it is.
    pub kind: Kind,
}

/// What a piece is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A file.
    File {
        /// Permission bits.
        mode: u32,
        /// In bytes.
        size: u64,
    },
    /// A symbolic link.
    Link {
        /// What it points to.
        target: String,
    },
}

impl Files {
    /// Takes `selected` files out of the packages of `suite`, unless that was
    /// done before.
    ///
    /// # Errors
    /// A package that cannot be had or does not hold what it should.
    pub fn prepare(packages: &mut Packages<'_>, suite: &str, selected: &[Selected]) -> Result<Self, Error> {
        let found = choose(packages, suite, selected)?;
        let dir = packages.cache().join("driver-files").join(&key(&found, selected)?[..16]);
        let progress = packages.progress();
        cache::publish(&dir, &progress, |half| {
            let unpacked = half.join("packages");
            for package in found.values() {
                let deb = packages.fetch_one(&format!("package {}", package.name), package)?;
                let into = unpacked.join(&package.name);
                fs::create_dir_all(&into).map_err(io_error("create directory", &into))?;
                progress.say(format_args!("package {} {}: unpacking", package.name, package.version));
                debian::unpack(&deb, &into, |path| !path.starts_with("usr/share"))?;
            }
            let names = found.iter().map(|(wanted, one)| (wanted.clone(), one.name.clone())).collect();
            let pieces = pick(selected, &names, &unpacked, &half.join("tree"))?;
            fs::remove_dir_all(&unpacked).map_err(io_error("remove", &unpacked))?;
            let mut pinned: Vec<Pinned> = found.values().cloned().collect();
            pinned.sort();
            let path = half.join(RECORD);
            let record = Record { schema: 1, packages: pinned, pieces };
            let text =
                serde_json::to_vec_pretty(&record).map_err(io::Error::other).map_err(io_error("write", &path))?;
            fs::write(&path, text).map_err(io_error("write", &path))?;
            Ok::<(), Error>(())
        })?;
        let path = dir.join(RECORD);
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let record = serde_json::from_slice(&text).map_err(io::Error::other).map_err(io_error("understand", &path))?;
        Ok(Self { dir, rules: profile::rules(selected), record })
    }

    /// The entries of an image, with their paths.
    pub fn entries(&self) -> impl Iterator<Item = (&str, Node)> {
        self.record.pieces.iter().map(|piece| {
            let node = match &piece.kind {
                Kind::File { mode, .. } => {
                    Node::File { mode: *mode, content: Content::File(self.dir.join("tree").join(&piece.path)) }
                }
                Kind::Link { target } => Node::Symlink { target: target.clone() },
            };
            (piece.path.as_str(), node)
        })
    }

    /// Bytes of all files together, by group.
    #[must_use]
    pub fn sizes(&self) -> BTreeMap<&str, u64> {
        let mut sizes = BTreeMap::new();
        for piece in &self.record.pieces {
            if let Kind::File { size, .. } = piece.kind {
                *sizes.entry(piece.group.as_str()).or_default() += size;
            }
        }
        sizes
    }
}

/// The suite's package for every list of names, by the list's first; noted down.
fn choose(packages: &mut Packages<'_>, suite: &str, selected: &[Selected]) -> Result<BTreeMap<String, Pinned>, Error> {
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
        Error::Cache(io_error("describe", Path::new("the driver's files"))(what))
    })?;
    text.push_str(&files);
    Ok(digest::of_bytes(text.as_bytes()))
}

/// Moves every selected file from `unpacked` to its place below `tree`.
/// `names` has the name that a package goes by in this suite.
fn pick(
    selected: &[Selected],
    names: &BTreeMap<String, String>,
    unpacked: &Path,
    tree: &Path,
) -> Result<Vec<Piece>, Error> {
    let mut pieces = Vec::new();
    let mut taken = BTreeSet::new();
    for file in selected {
        let package = file.package.first().and_then(|first| names.get(first)).cloned().unwrap_or_default();
        let missing = || Error::NoFile { package: package.clone(), file: file.from.clone() };
        let mut from = find(&unpacked.join(&package), &file.from).ok_or_else(missing)?;
        let mut to = file.to.clone();
        let mut piece = |path: &str, kind: Kind| {
            let place = Piece { group: file.group.clone(), package: package.clone(), path: path.to_owned(), kind };
            if !taken.insert(path.to_owned()) {
                return Err(Error::Twice { path: path.to_owned() });
            }
            pieces.push(place);
            Ok(())
        };
        // A library's short name is a link to the file with the full version.
        if from.is_symlink() {
            let target = fs::read_link(&from).map_err(io_error("read link", &from))?;
            let target =
                target.to_str().filter(|target| !target.contains('/') && *target != "..").ok_or_else(missing)?;
            piece(&to, Kind::Link { target: target.to_owned() })?;
            from.set_file_name(target);
            to = sibling(&to, target);
        }
        // Not through further links: a package may not name a file of the machine.
        let data = fs::symlink_metadata(&from).ok().filter(fs::Metadata::is_file).ok_or_else(missing)?;
        piece(&to, Kind::File { mode: file.mode, size: data.len() })?;
        for link in &file.links {
            piece(link, Kind::Link { target: relative(link, &to) })?;
        }
        let place = tree.join(&to);
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent).map_err(io_error("create directory", parent))?;
        }
        fs::rename(&from, &place).map_err(io_error("move", &from))?;
    }
    pieces.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(pieces)
}

/// Until Debian 12 some packages have `/lib` where others have `/usr/lib`.
/// No directory on the way may be a link: it might lead out of the package.
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

/// The text of a link at `link` that leads to `to`, both paths in the image:
/// relative, so that it also holds where the image is not the root.
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

    /// Packages below `dir` with these files; a text `-> x` makes a link.
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

    fn picked(dir: &Path, selected: &[Selected]) -> Result<Vec<Piece>, Error> {
        let names = selected.iter().map(|file| (file.package[0].clone(), file.package[0].clone())).collect();
        pick(selected, &names, &dir.join("packages"), &dir.join("tree"))
    }

    #[test]
    fn files_go_to_their_places_and_links_with_them() {
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
        let pieces = picked(
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
        let shown: Vec<String> = pieces
            .iter()
            .map(|piece| match &piece.kind {
                Kind::File { size, .. } => format!("{} {size}", piece.path),
                Kind::Link { target } => format!("{} -> {target}", piece.path),
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
        let record = Record { schema: 1, packages: Vec::new(), pieces };
        let files = Files { dir: dir.path().to_owned(), rules: Rules::default(), record };
        assert_eq!(files.sizes(), BTreeMap::from([("g", 12)]));
        let mut image = crate::tree::Tree::default();
        for (path, node) in files.entries() {
            if let Node::File { content: Content::File(file), .. } = &node {
                assert!(file.is_file(), "{}", file.display());
            }
            image.add(path, node).unwrap();
        }
    }

    #[test]
    fn a_package_cannot_hand_out_files_of_the_machine() {
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
            let error = picked(dir.path(), &[file("p", from, "to", &[])]).unwrap_err().to_string();
            assert!(error.contains("package p") && error.contains(from), "{error}");
        }
        assert!(!dir.path().join("tree/to").exists());
    }

    #[test]
    fn one_place_one_thing() {
        let dir = tempfile::tempdir().unwrap();
        packages(dir.path(), &[("p/a", "a"), ("p/b", "b")]);
        let error = picked(dir.path(), &[file("p", "a", "x", &[]), file("p", "b", "y", &["x"])]).unwrap_err();
        assert!(error.to_string().contains("/x"), "{error}");
    }

    #[test]
    fn links_are_relative() {
        assert_eq!(relative("usr/lib/a.so.1", "usr/lib/a.so.1.2"), "a.so.1.2");
        assert_eq!(relative("lib64/ld.so", "usr/lib/x/ld.so"), "../usr/lib/x/ld.so");
        assert_eq!(relative("usr/bin/a", "usr/lib/b"), "../lib/b");
        assert_eq!(relative("a", "b"), "b");
    }
}
