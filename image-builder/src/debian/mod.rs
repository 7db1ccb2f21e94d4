//! Debian packages without root and without touching the system's own apt.
//!
//! apt itself does the work, driven with a configuration of its own: own
//! package lists, an empty list of installed packages, one suite per tree. It
//! verifies the signature of the suite's `InRelease` and the hashes under it;
//! every `.deb` is hashed once more here against the package list.

mod apt;
mod archive;
mod config;
mod index;
mod keyring;
mod mirror;
mod release;
mod said;

use std::io;
use std::path::PathBuf;

pub use apt::{Apt, Package};
pub use archive::{depends, unpack, unpack_all};
pub(crate) use index::is_plain;
pub use index::{Candidate, Wish};
pub use mirror::mirror;

/// Why packages could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// apt's own set-up names no Debian archive.
    #[error(
        "no Debian archive is named in {}: set FIRSTLIGHT_DEBIAN_MIRROR to the URI of one (it ends in /debian)",
        searched.display()
    )]
    NoMirror {
        /// The directory that was searched.
        searched: PathBuf,
    },
    /// The archive's keys are not installed.
    #[error(
        "{} is missing: install the package debian-archive-keyring, or set FIRSTLIGHT_DEBIAN_KEYRING to the file with \
         the public keys of your archive", file.display()
    )]
    NoKeyring {
        /// Where they should be.
        file: PathBuf,
    },
    /// The variable for the archive's keys names no keyring.
    #[error(
        "FIRSTLIGHT_DEBIAN_KEYRING is {}: {why}; it has to be the absolute path of a file with your archive's public keys, \
         as gpg --export writes them", file.display()
    )]
    BadKeyring {
        /// Its value.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A program of apt or dpkg could not be started.
    #[error("cannot run {program}, which is in one of Debian's packages apt, dpkg and gpgv")]
    Start {
        /// Which program.
        program: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A program of apt or dpkg failed.
    #[error("{program} failed for suite {suite} ({doing}): {said}{advice}")]
    Failed {
        /// Which program.
        program: &'static str,
        /// The suite it worked on.
        suite: String,
        /// What was wanted of it.
        doing: &'static str,
        /// The errors that it printed.
        said: String,
        /// The next thing to try, as a phrase.
        advice: String,
    },
    /// The suite has no such package.
    #[error("suite {suite} has no package {name}{wanted}; it has: {available}")]
    NoPackage {
        /// The suite searched.
        suite: String,
        /// The package wanted.
        name: String,
        /// The version wanted, as a phrase.
        wanted: String,
        /// The versions there are.
        available: String,
    },
    /// A package list entry lacks a field or holds nonsense.
    #[error("suite {suite}: the entry of package {name} has no usable field {field}")]
    BadEntry {
        /// The suite searched.
        suite: String,
        /// The package's name, as far as known.
        name: String,
        /// Which field.
        field: &'static str,
    },
    /// The named package is not what is wanted and depends on nothing that is.
    #[error("package {name} of {suite} is not what is wanted and depends on none that is (Depends: {depends})")]
    NoTarget {
        /// The package.
        name: String,
        /// Its suite.
        suite: String,
        /// What it depends on.
        depends: String,
    },
    /// The package lists have no release file.
    #[error("suite {suite}: no InRelease in {}: remove that directory and run again", dir.display())]
    NoRelease {
        /// The suite.
        suite: String,
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// The release file is not what an archive signs.
    #[error("suite {suite}: its release file is not good: {what}")]
    BadRelease {
        /// The suite.
        suite: String,
        /// What is wrong.
        what: String,
    },
    /// The archive gives older lists than before.
    #[error(
        "suite {suite}: the archive's release file is of {now}, one of {seen} was seen before: the mirror lags behind \
         or somebody keeps updates from you; try another mirror, or remove {} to take the older one", file.display()
    )]
    RolledBack {
        /// The suite.
        suite: String,
        /// The newest date seen.
        seen: String,
        /// The date of the one that came.
        now: String,
        /// Where the date is remembered.
        file: PathBuf,
    },
    /// A file could not be kept.
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    /// A downloaded package is not what the package list promises.
    #[error(
        "{}: SHA-256 is {found}, the package list of {suite} says {expected}; run again; if it stays so, set \
         FIRSTLIGHT_DEBIAN_MIRROR to another mirror", file.display()
    )]
    WrongHash {
        /// The file.
        file: PathBuf,
        /// The suite it came from.
        suite: String,
        /// What the list says.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A package file could not be unpacked.
    #[error("cannot unpack {}: {said}; nothing of it is taken", file.display())]
    Unpack {
        /// The package file.
        file: PathBuf,
        /// What went wrong.
        said: String,
    },
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] crate::cache::Error),
}
