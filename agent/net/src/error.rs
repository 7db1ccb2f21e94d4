//! Errors of network configuration.

use std::io;
use std::time::Duration;

use rustix::io::Errno;

/// The result of a request.
pub type Result<T> = std::result::Result<T, Error>;

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The interface does not exist, or not yet. Shims search for this text and then retry.
    #[error("Link not found: {0}")]
    LinkNotFound(String),
    /// The kernel refused the request.
    #[error("{what}: {source}{ext_ack}")]
    Refused {
        /// The request.
        what: String,
        /// The kernel's error number.
        source: Errno,
        /// The kernel's extended-ack message in parentheses, if any.
        ext_ack: String,
    },
    /// One of several steps failed; those before it were applied.
    #[error("interface {interface}: step \"{step}\": {source}")]
    Step {
        /// The interface's name, and how it was identified.
        interface: String,
        /// The failed step.
        step: String,
        /// The cause.
        source: Box<Error>,
    },
    /// The request contradicts itself or the existing configuration.
    #[error("{0}")]
    Invalid(String),
    /// The socket failed.
    #[error("{what}: netlink socket: {source}")]
    Socket {
        /// The request.
        what: String,
        /// The socket's error.
        source: io::Error,
    },
    /// The kernel did not respond in time.
    #[error("{what}: timed out: no response of the kernel in {limit:?}")]
    Timeout {
        /// The request.
        what: String,
        /// The timeout.
        limit: Duration,
    },
    /// The kernel's response is malformed.
    #[error("{what}: malformed response of the kernel: {detail}")]
    Malformed {
        /// The request.
        what: String,
        /// The cause.
        detail: String,
    },
}

impl Error {
    /// Returns the kernel's error number, if the kernel refused the request.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { source, .. } => Some(*source),
            Self::Step { source, .. } => source.errno(),
            _ => None,
        }
    }
}
