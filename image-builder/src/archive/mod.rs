//! Files of an archive that whoever builds the image supplies.
//!
//! What is in it is taken for hostile, as packages are, although its hash is
//! known: the hash says which archive it is, not that it is a good one.

mod unpack;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use crate::cache::{self, io_error};
use crate::digest;
use crate::manifest::Archive;
use crate::progress::Progress;
use crate::record::ArchiveRecord;
use crate::tree::{Content, Node};
use unpack::{Entry, FILES, Listing};

/// Why an archive's files could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not there.
    #[error("archive {name}: cannot read {}: {source}; it is supplied by you: {reason}", path.display())]
    Missing {
        /// The archive.
        name: String,
        /// Where it should be.
        path: PathBuf,
        /// What it is for, and where it is had.
        reason: String,
        /// The system's answer.
        source: io::Error,
    },
    /// It is another one.
    #[error(transparent)]
    Other(#[from] Box<Other>),
    /// It cannot be unpacked.
    #[error("archive {name}: cannot unpack {}: {what}; nothing of it is taken", path.display())]
    Unpack {
        /// The archive.
        name: String,
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// It has nothing of that name.
    #[error("archive {name} has nothing that matches {pattern:?}; it has {near}")]
    NoMatch {
        /// The archive.
        name: String,
        /// What was asked for.
        pattern: String,
        /// Some of what it has.
        near: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// An archive that is not the one that is meant.
#[derive(Debug, thiserror::Error)]
#[error(
    "archive {name}: {} has SHA-256 {found}, the manifest says {expected}; supply the one that is meant, \
     version {version}, or give its hash once you trust it: {reason}",
    path.display()
)]
pub struct Other {
    /// The archive.
    pub name: String,
    /// The version that is meant.
    pub version: String,
    /// Where it is.
    pub path: PathBuf,
    /// What it should have.
    pub expected: String,
    /// What it has.
    pub found: String,
    /// What it is for, and where it is had.
    pub reason: String,
}

/// Changes when unpacked directories do, so that old ones are made anew.
const LAYOUT: u32 = 1;

/// `*` and `?` stay within a directory.
const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// Names shown when nothing matches.
const MOST_NEAR: usize = 12;

/// The entries that an archive gives to an image, by path, and which archive that is.
///
/// # Errors
/// It is not there, is another one or a bad one, or a pattern matches nothing of it.
pub fn entries(
    cache: &Path,
    wanted: &Archive,
    progress: Progress,
) -> Result<(ArchiveRecord, Vec<(String, Node)>), Error> {
    let path = PathBuf::from(&wanted.path);
    let missing = |source| Error::Missing {
        name: wanted.name.clone(),
        path: path.clone(),
        reason: wanted.reason.clone(),
        source,
    };
    let (found, size) = digest::of_file(&path).map_err(missing)?;
    let other = |found: String| {
        Error::from(Box::new(Other {
            name: wanted.name.clone(),
            version: wanted.version.clone(),
            path: path.clone(),
            expected: wanted.sha256.clone(),
            found,
            reason: wanted.reason.clone(),
        }))
    };
    if found != wanted.sha256 {
        return Err(other(found));
    }
    let hash = found.get(..32).unwrap_or(&found);
    let dir = cache.join("unpacked").join(format!("archive-{hash}-{LAYOUT}"));
    cache::publish(&dir, &progress, |half| {
        progress.say(format_args!("archive {} {}: unpacking", wanted.name, wanted.version));
        let file = File::open(&path).map_err(missing)?;
        // It is hashed once more as it is read: somebody may be writing it.
        let found = unpack::unpack(file, half).map_err(|what| Error::Unpack {
            name: wanted.name.clone(),
            path: path.clone(),
            what,
        })?;
        if found == wanted.sha256 { Ok(()) } else { Err(other(found)) }
    })?;
    let listing = Listing::read(&dir)?;
    let mut entries = Vec::new();
    for part in &wanted.files {
        let pattern = Pattern::new(&part.from).unwrap_or_default();
        let mut matched = listing.entries.iter().filter(|(name, _)| pattern.matches_with(name, MATCHING)).peekable();
        if matched.peek().is_none() {
            let (name, pattern) = (wanted.name.clone(), part.from.clone());
            return Err(Error::NoMatch { name, pattern, near: near(&listing) });
        }
        for (name, entry) in matched {
            let place = format!("{}/{}", part.into, name.rsplit('/').next().unwrap_or(name));
            let node = match entry {
                Entry::File { program } => Node::File {
                    mode: if *program { 0o755 } else { 0o644 },
                    content: Content::File(dir.join(FILES).join(name)),
                },
                Entry::Link { target } => Node::Symlink { target: target.clone() },
            };
            entries.push((place, node));
        }
    }
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    // Two patterns may match one file.
    entries.dedup_by(|a, b| a == b);
    let record = ArchiveRecord {
        name: wanted.name.clone(),
        version: wanted.version.clone(),
        size,
        sha256: found,
        licence: wanted.licence.clone(),
        reason: wanted.reason.clone(),
    };
    Ok((record, entries))
}

fn near(listing: &Listing) -> String {
    let mut names: Vec<&str> = listing.entries.keys().take(MOST_NEAR).map(String::as_str).collect();
    let more = format!("{} more", listing.entries.len().saturating_sub(MOST_NEAR));
    if listing.entries.len() > MOST_NEAR {
        names.push(&more);
    }
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

/// Where the listing of an unpacked archive is.
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
