//! Adds files of archives that the user supplies.
//!
//! The contents are untrusted input, like packages, although the hash is
//! pinned: the hash identifies the archive, it does not make it trustworthy.

mod tar_names;
mod unpack;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::{ArchiveRecord, digest};
use firstlight_progress::Progress;
use glob::{MatchOptions, Pattern};

use crate::cache::digests::CachedFile;
use crate::cache::{self, io_error};
use crate::image::manifest::Archive;
use crate::tree::{Content, Node};
use unpack::{Entry, FILES, Listing};

/// Why an archive's files are not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not exist.
    #[error("archive {name}: cannot read {}: {source}; it is supplied by you: {reason}", path.display())]
    Missing {
        /// The archive.
        name: String,
        /// Its expected path.
        path: PathBuf,
        /// What it is for, and where it is had.
        reason: String,
        /// The system's answer.
        source: io::Error,
    },
    /// It has another hash.
    #[error(transparent)]
    WrongArchive(#[from] Box<WrongArchive>),
    /// It cannot be unpacked.
    #[error("archive {name}: failed to unpack {}: {what}; none of its files is used", path.display())]
    Unpack {
        /// The archive.
        name: String,
        /// Its path.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// A pattern matches no entry.
    #[error("archive {name} has no entry that matches {pattern:?}; it has {near}")]
    NoMatch {
        /// The archive.
        name: String,
        /// The pattern.
        pattern: String,
        /// Some of its entries.
        near: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// An archive with another hash than the manifest says.
#[derive(Debug, thiserror::Error)]
#[error(
    "archive {name}: {} has SHA-256 {found}, the manifest says {expected}; supply \
     version {version}, or update the hash if you trust this archive: {reason}",
    path.display()
)]
pub struct WrongArchive {
    /// The archive.
    pub name: String,
    /// The version in the manifest.
    pub version: String,
    /// Its path.
    pub path: PathBuf,
    /// The expected SHA-256.
    pub expected: String,
    /// The actual SHA-256.
    pub found: String,
    /// What it is for, and where it is had.
    pub reason: String,
}

/// Layout version of unpacked directories; increment it to invalidate cached ones.
const LAYOUT: u32 = 2;

/// `*` and `?` do not match `/`.
const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// Maximum number of names in the error of a pattern without a match.
const MAX_LISTED: usize = 12;

/// Unpacks an archive and returns its record and the image entries sorted by path.
///
/// # Errors
/// It does not exist, has a wrong hash or is malformed, or a pattern matches nothing.
pub fn entries(
    cache: &Path,
    archive: &Archive,
    progress: Progress,
) -> Result<(ArchiveRecord, Vec<(String, Node)>), Error> {
    let path = PathBuf::from(&archive.path);
    let missing = |source| Error::Missing {
        name: archive.name.clone(),
        path: path.clone(),
        reason: archive.reason.clone(),
        source,
    };
    let (found, size) = digest::of_file(&path).map_err(missing)?;
    let other = |found: String| {
        Error::from(Box::new(WrongArchive {
            name: archive.name.clone(),
            version: archive.version.clone(),
            path: path.clone(),
            expected: archive.sha256.clone(),
            found,
            reason: archive.reason.clone(),
        }))
    };
    if found != archive.sha256 {
        return Err(other(found));
    }
    let hash = found.get(..32).unwrap_or(&found);
    let dir = cache.join("unpacked").join(format!("archive-{hash}-{LAYOUT}"));
    cache::publish(&dir, &progress, |half| {
        progress.say(format_args!("archive {} {}: unpacking", archive.name, archive.version));
        let file = File::open(&path).map_err(missing)?;
        // Hashed again while reading: the file may change meanwhile.
        let found = unpack::unpack(file, half).map_err(|what| Error::Unpack {
            name: archive.name.clone(),
            path: path.clone(),
            what,
        })?;
        if found == archive.sha256 { Ok(()) } else { Err(other(found)) }
    })?;
    let listing = Listing::read(&dir)?;
    let mut entries = Vec::new();
    for part in &archive.files {
        let pattern = Pattern::new(&part.from).unwrap_or_default();
        let mut matched = listing.entries.iter().filter(|(name, _)| pattern.matches_with(name, MATCHING)).peekable();
        if matched.peek().is_none() {
            let (name, pattern) = (archive.name.clone(), part.from.clone());
            return Err(Error::NoMatch { name, pattern, near: near(&listing) });
        }
        for (name, entry) in matched {
            let image_path = format!("{}/{}", part.into, name.rsplit('/').next().unwrap_or(name));
            let node = match entry {
                Entry::File { program, sha256 } => Node::File {
                    mode: if *program { 0o755 } else { 0o644 },
                    content: Content::Cached(CachedFile {
                        dir: dir.clone(),
                        file: dir.join(FILES).join(name),
                        sha256: sha256.clone(),
                    }),
                },
                Entry::Link { target } => Node::Symlink { target: target.clone() },
            };
            entries.push((image_path, node));
        }
    }
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    // Two patterns may match one file.
    entries.dedup_by(|a, b| a == b);
    let record = ArchiveRecord {
        name: archive.name.clone(),
        version: archive.version.clone(),
        size,
        sha256: found,
        licence: archive.licence.clone(),
        reason: archive.reason.clone(),
    };
    Ok((record, entries))
}

fn near(listing: &Listing) -> String {
    let mut names: Vec<&str> = listing.entries.keys().take(MAX_LISTED).map(String::as_str).collect();
    let more = format!("{} more", listing.entries.len().saturating_sub(MAX_LISTED));
    if listing.entries.len() > MAX_LISTED {
        names.push(&more);
    }
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

/// Returns the path of the listing of an unpacked archive.
fn listing_of(dir: &Path) -> PathBuf {
    dir.join("listing.json")
}

impl Listing {
    fn read(dir: &Path) -> Result<Self, cache::Error> {
        let path = listing_of(dir);
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        serde_json::from_slice(&text).map_err(io::Error::from).map_err(io_error("understand", &path))
    }
}

#[cfg(test)]
mod tests;
