//! Errors and exit codes.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use firstlight_fabric_api::connect;
use tonic::{Code, Status};

/// `health` or `doctor` has found problems.
pub(crate) const PROBLEMS: u8 = 9;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The daemon has refused the request, or has timed out.
    #[error("{}", .0.message())]
    Refused(#[from] Box<Status>),
    /// The connection to the daemon was closed.
    #[error(
        "the daemon closed the connection: {reason}; does it accept your certificate? A change that was started may still complete: retry with the \
         same --request-id"
    )]
    Broken {
        /// The root cause.
        reason: String,
    },
    /// The daemon cannot be reached, or rejects the connection.
    #[error(transparent)]
    Connect(#[from] connect::Error),
    /// TCP requires a client certificate.
    #[error("https:// needs --certificate, --key and --ca; {option} is missing")]
    Missing {
        /// The missing option.
        option: &'static str,
    },
    /// A file is invalid.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Invalid arguments.
    #[error("{0}")]
    Input(String),
    /// The state of the fabric forbids it.
    #[error("{0}")]
    State(String),
    /// A probe failed.
    #[error("{0}")]
    Probe(String),
    /// A file cannot be read.
    #[error("failed to read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Standard output or `/proc` failed.
    #[error(transparent)]
    Output(#[from] io::Error),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        // The daemon's own errors have no source; errors of the connection have one.
        let causes = std::iter::successors(std::error::Error::source(&status), |error| error.source());
        match causes.last() {
            Some(cause) if status.code() != Code::DeadlineExceeded => Self::Broken { reason: cause.to_string() },
            _ => Self::Refused(Box::new(status)),
        }
    }
}

impl Failure {
    /// Returns the exit code, as documented in the help.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Refused(status) => match status.code() {
                Code::InvalidArgument => 2,
                Code::ResourceExhausted => 3,
                Code::NotFound => 4,
                Code::FailedPrecondition | Code::AlreadyExists | Code::PermissionDenied => 5,
                Code::Aborted => 6,
                Code::Unavailable => 7,
                // A client reports its own timeout as Cancelled.
                Code::DeadlineExceeded | Code::Cancelled => 8,
                _ => 1,
            },
            Self::Connect(connect::Error::Unreachable { .. }) | Self::Broken { .. } => 7,
            Self::Connect(_) | Self::Missing { .. } | Self::File { .. } | Self::Content { .. } | Self::Input(_) => 2,
            Self::State(_) => 5,
            Self::Output(_) | Self::Probe(_) => 1,
        }
    }

    /// Prints the error and returns its exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        // After EPIPE there is no reader for an error.
        if !matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe) {
            match json {
                true => eprintln!("{}", serde_json::json!({ "error": self.to_string(), "exit_code": self.code() })),
                false => eprintln!("fmctl: {self}"),
            }
        }
        ExitCode::from(self.code())
    }
}
