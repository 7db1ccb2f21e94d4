//! Downloads Debian packages without root and without changing the host's apt state.
//!
//! Runs apt with a private configuration: own package lists, an empty list of
//! installed packages, one suite per directory tree. apt verifies the signature of
//! the suite's `InRelease` and the hashes in it; the hash of every `.deb` is
//! verified again here against the package list.

mod apt;
mod archive;
mod config;
mod index;
mod keyring;
mod messages;
mod mirror;
mod release;

use std::io;
use std::path::PathBuf;

pub use apt::{Apt, Package};
pub use archive::{depends, unpack, unpack_all};
pub(crate) use index::is_plain;
pub use index::{Candidate, PackageRequest};
pub use mirror::mirror;

/// Why packages are not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The apt configuration has no Debian archive.
    #[error(
        "no Debian archive is configured in {}: set FIRSTLIGHT_DEBIAN_MIRROR to the URI of one (it ends in /debian)",
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
        /// The path of the missing file.
        file: PathBuf,
    },
    /// `FIRSTLIGHT_DEBIAN_KEYRING` is not a valid keyring.
    #[error(
        "invalid FIRSTLIGHT_DEBIAN_KEYRING {}: {reason}; set it to the absolute path of a file with your archive's public keys, \
         created with gpg --export", file.display()
    )]
    BadKeyring {
        /// Its value.
        file: PathBuf,
        /// Why it is invalid.
        reason: String,
    },
    /// A program of apt or dpkg could not be started.
    #[error("failed to run {program}: install the packages apt, dpkg and gpgv")]
    Start {
        /// The program.
        program: &'static str,
        /// The I/O error.
        source: io::Error,
    },
    /// A program of apt or dpkg failed.
    #[error("{program} failed for suite {suite} ({task}): {message}{advice}")]
    Failed {
        /// The program.
        program: &'static str,
        /// The suite.
        suite: String,
        /// The task.
        task: &'static str,
        /// The errors that it printed.
        message: String,
        /// The next step, beginning with a semicolon; may be empty.
        advice: String,
    },
    /// The suite has no such package.
    #[error("suite {suite} has no package {name}{constraint}; available versions: {available}")]
    NoPackage {
        /// The suite.
        suite: String,
        /// The requested package.
        name: String,
        /// The version constraint as text, with a leading space.
        constraint: String,
        /// The available versions.
        available: String,
    },
    /// A package list entry has a missing or invalid field.
    #[error("suite {suite}: missing or invalid field {field} in the entry of package {name}")]
    BadEntry {
        /// The suite.
        suite: String,
        /// The package's name, if known.
        name: String,
        /// The field.
        field: &'static str,
    },
    /// Neither the package nor one of its dependencies is of the required kind.
    #[error(
        "neither package {name} of {suite} nor one of its dependencies is of the required kind (Depends: {depends})"
    )]
    NoTarget {
        /// The package.
        name: String,
        /// Its suite.
        suite: String,
        /// Its `Depends` field.
        depends: String,
    },
    /// The package lists have no release file.
    #[error("suite {suite}: no InRelease in {}: remove that directory and retry", dir.display())]
    NoRelease {
        /// The suite.
        suite: String,
        /// The directory that was searched.
        dir: PathBuf,
    },
    /// The release file is invalid.
    #[error("suite {suite}: invalid release file: {what}")]
    BadRelease {
        /// The suite.
        suite: String,
        /// Why it is invalid.
        what: String,
    },
    /// The archive has an older release file than seen before.
    #[error(
        "suite {suite}: the archive's release file is dated {now}, but one dated {seen} was seen before: the mirror is outdated \
         or updates are being withheld (downgrade attack); use another mirror, or remove {} to accept the older one", file.display()
    )]
    RolledBack {
        /// The suite.
        suite: String,
        /// The newest date seen.
        seen: String,
        /// The date of the current one.
        now: String,
        /// The file with the newest date.
        file: PathBuf,
    },
    /// A file could not be stored.
    #[error(transparent)]
    Store(#[from] crate::packages::store::Error),
    /// A downloaded package differs from the package list.
    #[error(
        "{}: SHA-256 is {found}, but the package list of {suite} has {expected}; retry; if it persists, set \
         FIRSTLIGHT_DEBIAN_MIRROR to another mirror", file.display()
    )]
    WrongHash {
        /// The file.
        file: PathBuf,
        /// The suite it came from.
        suite: String,
        /// The SHA-256 in the package list.
        expected: String,
        /// The SHA-256 of the file.
        found: String,
    },
    /// A package file could not be unpacked.
    #[error("failed to unpack {}: {message}; none of its files is used", file.display())]
    Unpack {
        /// The package file.
        file: PathBuf,
        /// The cause.
        message: String,
    },
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] crate::cache::Error),
}
