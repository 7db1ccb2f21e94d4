//! Adds files of packages to an image.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use crate::cache::digests::Digests;
use crate::cache::{self, io_error};
use crate::image::manifest;
use crate::packages::debian::{self, PackageRequest};
use crate::packages::lock::Pinned;
use crate::packages::{self, Packages};
use crate::tree::{Content, Node};

/// Why a package's files are not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The package is not available.
    #[error(transparent)]
    Packages(#[from] packages::Error),
    /// It could not be unpacked.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A pattern matches no file.
    #[error("package {package} {version} has no file that matches {pattern:?}; similar paths: {near}")]
    NoMatch {
        /// The package.
        package: String,
        /// Its version.
        version: String,
        /// The pattern.
        pattern: String,
        /// Entries of the same directory.
        near: String,
    },
    /// A file's name or link target is not UTF-8.
    #[error("package {package} has a file whose name or target is not UTF-8: {name}")]
    NonUtf8Name {
        /// The package.
        package: String,
        /// The name, lossily converted.
        name: String,
    },
}

/// Layout version of unpacked directories; increment it to invalidate cached ones.
const LAYOUT: u32 = 2;

/// `*` and `?` do not match `/`.
const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// Maximum number of names in the error of a pattern without a match.
const MAX_LISTED: usize = 12;

/// A package that is unpacked in the cache.
#[derive(Debug)]
struct Unpacked {
    /// The cache entry.
    entry: PathBuf,
    digests: Digests,
}

impl Unpacked {
    /// Returns the directory of the package's files.
    fn files(&self) -> PathBuf {
        self.entry.join("files")
    }

    /// Hashes the files of an entry that is being created.
    fn record(entry: &Path) -> Result<(), cache::Error> {
        Digests::of(&entry.join("files"))?.write(&entry.join("digests.json"))
    }

    fn open(entry: PathBuf) -> Result<Self, cache::Error> {
        let digests = Digests::read(&entry.join("digests.json"))?;
        Ok(Self { entry, digests })
    }
}

/// Unpacks a package into the cache, shared by all images.
fn unpack(packages: &mut Packages<'_>, requested: &manifest::Package) -> Result<(Unpacked, Pinned), Error> {
    let request = requested.version.as_deref().map_or(PackageRequest::Newest, PackageRequest::Exact);
    let pinned = packages.find(&requested.suite, &requested.name, request)?;
    packages.note(&pinned);
    let hash = pinned.sha256.get(..32).unwrap_or(&pinned.sha256);
    let dir = packages.cache().join("unpacked").join(format!("{hash}-{LAYOUT}"));
    let progress = packages.progress();
    cache::publish(&dir, &progress, |half| {
        let deb = packages.fetch_one(&format!("package {}", requested.name), &pinned)?;
        let files = half.join("files");
        fs::create_dir(&files).map_err(io_error("create directory", &files))?;
        debian::unpack_all(&deb, &files)?;
        Ok::<(), Error>(Unpacked::record(half)?)
    })?;
    Ok((Unpacked::open(dir)?, pinned))
}

/// Returns the pinned package and the image entries of its requested files, sorted by path.
///
/// # Errors
/// The package is not available, or a pattern matches no file.
pub(super) fn entries(
    packages: &mut Packages<'_>,
    requested: &manifest::Package,
) -> Result<(Pinned, Vec<(String, Node)>), Error> {
    let (unpacked, pinned) = unpack(packages, requested)?;
    let mut names = Vec::new();
    walk(&unpacked.files(), Path::new(""), &mut names)?;
    names.sort();
    let mut entries = Vec::new();
    for text in &requested.files {
        let pattern = Pattern::new(text).unwrap_or_default();
        let found: Vec<&PathBuf> = names.iter().filter(|name| pattern.matches_path_with(name, MATCHING)).collect();
        if found.is_empty() {
            let (package, version) = (requested.name.clone(), pinned.version.clone());
            return Err(Error::NoMatch { package, version, pattern: text.clone(), near: near(&names, text) });
        }
        for name in found {
            entries.push(entry(&unpacked, name, requested)?);
        }
    }
    // Two patterns may match one file.
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries.dedup_by(|a, b| a == b);
    Ok((pinned, entries))
}

/// Collects the paths below `root` of everything except directories.
fn walk(root: &Path, part: &Path, names: &mut Vec<PathBuf>) -> Result<(), Error> {
    let dir = root.join(part);
    for entry in fs::read_dir(&dir).map_err(io_error("list", &dir))? {
        let entry = entry.map_err(io_error("list", &dir))?;
        let name = part.join(entry.file_name());
        if entry.file_type().map_err(io_error("inspect", &dir))?.is_dir() {
            walk(root, &name, names)?;
        } else {
            names.push(name);
        }
    }
    Ok(())
}

fn entry(unpacked: &Unpacked, name: &Path, requested: &manifest::Package) -> Result<(String, Node), Error> {
    let non_utf8 = || Error::NonUtf8Name { package: requested.name.clone(), name: name.display().to_string() };
    let path = unpacked.files().join(name);
    let text = name.to_str().ok_or_else(non_utf8)?;
    let image_path = match &requested.into {
        Some(into) => format!("{into}/{}", name.file_name().and_then(|name| name.to_str()).ok_or_else(non_utf8)?),
        None => text.to_owned(),
    };
    let data = fs::symlink_metadata(&path).map_err(io_error("inspect", &path))?;
    if data.is_symlink() {
        let target = fs::read_link(&path).map_err(io_error("read link", &path))?;
        return Ok((image_path, Node::Symlink { target: target.to_str().ok_or_else(non_utf8)?.to_owned() }));
    }
    // Only the execute bit is preserved.
    let mode = if data.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
    let content = Content::Cached(unpacked.digests.file(&unpacked.entry, &unpacked.files(), text));
    Ok((image_path, Node::File { mode, content }))
}

/// Lists files in the directory of a pattern, or all files if there is no such directory.
fn near(names: &[PathBuf], pattern: &str) -> String {
    let dir = Path::new(pattern).parent().unwrap_or(Path::new(""));
    let within: Vec<&PathBuf> = names.iter().filter(|name| name.parent() == Some(dir)).collect();
    let shown = if within.is_empty() { names.iter().collect() } else { within };
    let mut text: Vec<String> = shown.iter().take(MAX_LISTED).map(|name| name.display().to_string()).collect();
    if shown.len() > MAX_LISTED {
        text.push(format!("{} more", shown.len() - MAX_LISTED));
    }
    if text.is_empty() { "nothing".to_owned() } else { text.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::digests::CachedFile;
    use firstlight_image::digest;

    fn package(files: &[&str], into: Option<&str>) -> manifest::Package {
        manifest::Package {
            name: "p".into(),
            suite: "sid".into(),
            version: None,
            files: files.iter().map(|file| (*file).to_owned()).collect(),
            into: into.map(str::to_owned),
        }
    }

    #[test]
    fn error_without_a_match_lists_similar_paths() {
        let names: Vec<PathBuf> = ["usr/lib/a.so.1", "usr/lib/b.so", "etc/x"].map(PathBuf::from).into();
        assert_eq!(near(&names, "usr/lib/c.so"), "usr/lib/a.so.1, usr/lib/b.so");
        assert_eq!(near(&names, "opt/c"), "usr/lib/a.so.1, usr/lib/b.so, etc/x");
        assert_eq!(near(&[], "x"), "nothing");
        let many: Vec<PathBuf> = (0..20).map(|n| PathBuf::from(format!("d/{n:02}"))).collect();
        assert!(near(&many, "d/x").ends_with("d/11, 8 more"));
    }

    #[test]
    fn path_and_execute_bit_of_a_file_are_preserved() {
        let dir = tempfile::tempdir().unwrap();
        let files = dir.path().join("files");
        let file = files.join("usr/bin/tool");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "x").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4711)).unwrap();
        std::os::unix::fs::symlink("tool", files.join("usr/bin/link")).unwrap();
        Unpacked::record(dir.path()).unwrap();
        let unpacked = Unpacked::open(dir.path().to_owned()).unwrap();
        let (image_path, node) = entry(&unpacked, Path::new("usr/bin/tool"), &package(&[], None)).unwrap();
        let sha256 = digest::of_bytes(b"x");
        let content = Content::Cached(CachedFile { dir: dir.path().to_owned(), file, sha256 });
        assert_eq!((image_path.as_str(), node), ("usr/bin/tool", Node::File { mode: 0o755, content }));
        let (image_path, node) = entry(&unpacked, Path::new("usr/bin/link"), &package(&[], Some("opt/x"))).unwrap();
        assert_eq!((image_path.as_str(), node), ("opt/x/link", Node::Symlink { target: "tool".into() }));
        let mut names = Vec::new();
        walk(&files, Path::new(""), &mut names).unwrap();
        assert_eq!(names.len(), 2);
        let star = Pattern::new("usr/*").unwrap();
        assert!(!names.iter().any(|name| star.matches_path_with(name, MATCHING)), "* does not match /");
    }
}
