//! How it ends, for people and for scripts.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use firstlight_fabric_api::connect;
use tonic::{Code, Status};

/// `health` or `doctor` has found trouble.
pub(crate) const TROUBLE: u8 = 9;

/// Why nothing came of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The daemon has refused, or has not answered.
    #[error("{}", .0.message())]
    Refused(#[from] Box<Status>),
    /// The daemon hung up, or died.
    #[error(
        "the daemon hung up: {why}; is your certificate one that it takes? What was begun may come to be: ask again with the \
         same --request-id"
    )]
    Broken {
        /// The first cause.
        why: String,
    },
    /// There is no daemon, or it does not take us.
    #[error(transparent)]
    Connect(#[from] connect::Error),
    /// TCP is for who has a certificate.
    #[error("https:// needs --certificate, --key and --ca; {option} is missing")]
    Missing {
        /// Which.
        option: &'static str,
    },
    /// A file is not what it should be.
    #[error("{}: {why}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// What was asked for cannot be.
    #[error("{0}")]
    Input(String),
    /// The fabric is not in a state for it.
    #[error("{0}")]
    State(String),
    /// A probe came to no end.
    #[error("{0}")]
    Probe(String),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Nothing can be printed, or read of this machine.
    #[error(transparent)]
    Output(#[from] io::Error),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        // What the daemon says has no source; what becomes of a connection has.
        let causes = std::iter::successors(std::error::Error::source(&status), |error| error.source());
        match causes.last() {
            Some(cause) if status.code() != Code::DeadlineExceeded => Self::Broken { why: cause.to_string() },
            _ => Self::Refused(Box::new(status)),
        }
    }
}

impl Failure {
    /// As the help has them.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Refused(status) => match status.code() {
                Code::InvalidArgument => 2,
                Code::ResourceExhausted => 3,
                Code::NotFound => 4,
                Code::FailedPrecondition | Code::AlreadyExists | Code::PermissionDenied => 5,
                Code::Aborted => 6,
                Code::Unavailable => 7,
                // The second is what a client says of itself that did not wait any longer.
                Code::DeadlineExceeded | Code::Cancelled => 8,
                _ => 1,
            },
            Self::Connect(connect::Error::Unreachable { .. }) | Self::Broken { .. } => 7,
            Self::Connect(_) | Self::Missing { .. } | Self::File { .. } | Self::Content { .. } | Self::Input(_) => 2,
            Self::State(_) => 5,
            Self::Output(_) | Self::Probe(_) => 1,
        }
    }

    /// Says so, and ends with its code.
    pub(crate) fn told(&self, json: bool) -> ExitCode {
        // A reader that has seen enough is none that has to be told.
        if !matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe) {
            match json {
                true => eprintln!("{}", serde_json::json!({ "error": self.to_string(), "exit": self.code() })),
                false => eprintln!("fmctl: {self}"),
            }
        }
        ExitCode::from(self.code())
    }
}
