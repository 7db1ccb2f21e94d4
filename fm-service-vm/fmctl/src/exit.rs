//! How it ends, for people and for scripts.

use std::io;
use std::process::ExitCode;

use firstlight_fabric_api::connect;
use tonic::{Code, Status};

/// `health` has found trouble.
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
            Self::Connect(_) | Self::Missing { .. } => 2,
            Self::Output(_) => 1,
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
