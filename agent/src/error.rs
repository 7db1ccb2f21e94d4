//! Errors returned to ttrpc callers: a status code and a one-line message.

use firstlight_runtime::{Failure, FailureKind};
use ttrpc::Code;

/// The error of a failed call.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Status code; shims act on it.
    pub code: Code,
    /// One line with the cause and, if there is one, the next step.
    pub message: String,
}

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns an error with this code. Newlines become spaces: shims and logs show one line.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into().replace(['\n', '\r'], " ") }
    }

    /// Returns an `INTERNAL` error.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::INTERNAL, message)
    }

    /// Returns an `INVALID_ARGUMENT` error.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::INVALID_ARGUMENT, message)
    }

    /// Returns the error for an unknown container. Callers of Kata's agent match on the first word.
    #[must_use]
    pub fn no_container(container: &str) -> Self {
        Self::invalid(format!("InvalidContainerId: no container {container:?}"))
    }

    /// Returns the error for a process that never existed, or has exited and had its exit code
    /// fetched.
    #[must_use]
    pub fn no_process(container: &str, exec: &str) -> Self {
        let word = if exec.is_empty() { "InitProcessNotFound" } else { "InvalidExecId" };
        Self::new(
            Code::NOT_FOUND,
            format!("{word}: no process {exec:?} in container {container:?}; it may have exited"),
        )
    }

    /// Returns an `ALREADY_EXISTS` error.
    #[must_use]
    pub fn exists(message: impl Into<String>) -> Self {
        Self::new(Code::ALREADY_EXISTS, message)
    }

    /// Prefixes the message with the operation that failed.
    #[must_use]
    pub fn during(self, what: &str) -> Self {
        Self { code: self.code, message: format!("{what}: {}", self.message) }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let code = match failure.kind {
            FailureKind::NotFound => Code::NOT_FOUND,
            FailureKind::Exists => Code::ALREADY_EXISTS,
            FailureKind::Invalid => Code::INVALID_ARGUMENT,
            FailureKind::Internal => Code::INTERNAL,
        };
        Self::new(code, failure.message)
    }
}

impl From<Error> for ttrpc::Error {
    fn from(error: Error) -> Self {
        Self::RpcStatus(ttrpc::get_status(error.code, error.message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_one_line_with_its_code() {
        let error = Error::internal("a\nb").during("create");
        assert_eq!((error.code, error.to_string().as_str()), (Code::INTERNAL, "create: a b"));
        let ttrpc::Error::RpcStatus(status) = Error::no_process("c", "").into() else { panic!("no status") };
        assert!(status.message().starts_with("InitProcessNotFound"));
    }
}
