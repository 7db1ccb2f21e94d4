//! Errors as callers see them: a code and one line.

use firstlight_runtime::{Failure, FailureKind};
use ttrpc::Code;

/// A call that failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind of failure; shims act on it.
    pub code: Code,
    /// One line with the cause and, where there is one, the next thing to try.
    pub message: String,
}

/// What a call results in.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of that code. Line ends become spaces: shims and logs show one line.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into().replace(['\n', '\r'], " ") }
    }

    /// Something in the guest went wrong.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::INTERNAL, message)
    }

    /// The request makes no sense.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::INVALID_ARGUMENT, message)
    }

    /// There is no such container. The first word is what callers of Kata's agent know.
    #[must_use]
    pub fn no_container(container: &str) -> Self {
        Self::invalid(format!("InvalidContainerId: no container {container:?}"))
    }

    /// The process has ended and its code has been fetched, or it never was.
    #[must_use]
    pub fn no_process(container: &str, exec: &str) -> Self {
        let word = if exec.is_empty() { "InitProcessNotFound" } else { "InvalidExecId" };
        Self::new(Code::NOT_FOUND, format!("{word}: no process {exec:?} in container {container:?}; it may have ended"))
    }

    /// The name is taken.
    #[must_use]
    pub fn exists(message: impl Into<String>) -> Self {
        Self::new(Code::ALREADY_EXISTS, message)
    }

    /// Adds what was being done.
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
    fn one_line_with_the_code() {
        let error = Error::internal("a\nb").during("create");
        assert_eq!((error.code, error.to_string().as_str()), (Code::INTERNAL, "create: a b"));
        let ttrpc::Error::RpcStatus(status) = Error::no_process("c", "").into() else { panic!("no status") };
        assert!(status.message().starts_with("InitProcessNotFound"));
    }
}
