//! What can go wrong, in one line each.

use std::io;
use std::time::Duration;

use rustix::io::Errno;

/// What a request results in.
pub type Result<T> = std::result::Result<T, Error>;

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such interface, or not yet. Shims look for these three words and then try again.
    #[error("Link not found: {0}")]
    NoLink(String),
    /// The kernel said no.
    #[error("{what}: {source}{words}")]
    Refused {
        /// What was asked of it.
        what: String,
        /// Its error number.
        source: Errno,
        /// Its own words in parentheses, if it had any.
        words: String,
    },
    /// One step of several; those before it were done.
    #[error("interface {interface}: step \"{step}\": {source}")]
    Step {
        /// Its name, and how it was found.
        interface: String,
        /// What was being done.
        step: String,
        /// What went wrong.
        source: Box<Error>,
    },
    /// The request contradicts itself or what is there.
    #[error("{0}")]
    Impossible(String),
    /// The socket failed.
    #[error("{what}: netlink socket: {source}")]
    Socket {
        /// What was asked of the kernel.
        what: String,
        /// Its error.
        source: io::Error,
    },
    /// No answer.
    #[error("{what}: the kernel has not answered in {limit:?}")]
    Late {
        /// What was asked of the kernel.
        what: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// An answer that cannot be understood.
    #[error("{what}: the kernel's answer cannot be read: {detail}")]
    Unreadable {
        /// What was asked of the kernel.
        what: String,
        /// What is wrong with it.
        detail: String,
    },
}

impl Error {
    /// The kernel's error number, if it was the kernel that refused.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { source, .. } => Some(*source),
            Self::Step { source, .. } => source.errno(),
            _ => None,
        }
    }
}
