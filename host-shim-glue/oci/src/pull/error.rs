//! Errors of a pull.

use std::io;
use std::path::{Path, PathBuf};

/// The syntax of sources, for messages.
pub(crate) const SOURCES: &str =
    "a source is oci:PATH[:REF], docker-archive:PATH[:REF] or docker://HOST[:PORT]/NAME[:TAG|@sha256:..]";

/// Why an image could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The source does not parse.
    #[error("source {text:?}: {reason}; {SOURCES}")]
    Source {
        /// The given text.
        text: String,
        /// Why it does not parse.
        reason: String,
    },
    /// A file, blob or response is missing, malformed, damaged or exceeds a limit.
    #[error("{object}: failed to {step}: {reason}; {advice}")]
    Invalid {
        /// The file, blob or URL.
        object: String,
        /// The step that failed: a verb with its object.
        step: &'static str,
        /// The cause.
        reason: String,
        /// The next thing to try.
        advice: &'static str,
    },
    /// There is no image for the requested platform.
    #[error("{object}: no image for {requested}; available: {found}; select one with --platform")]
    Platform {
        /// The index or configuration.
        object: String,
        /// The requested platform.
        requested: String,
        /// The available platforms.
        found: String,
    },
    /// The registry requires credentials, or refuses the given ones.
    #[error("{object}: the registry denied access: {reason}")]
    Denied {
        /// The repository.
        object: String,
        /// The registry's message, and the next thing to try.
        reason: String,
    },
    /// A transfer failed in every attempt.
    #[error(
        "{object}: gave up after {attempts} attempts: {reason}; complete blobs are kept, and the same command resumes the pull"
    )]
    Transfer {
        /// The blob or repository.
        object: String,
        /// The number of attempts.
        attempts: u32,
        /// The error of the last attempt.
        reason: String,
    },
    /// A file operation failed.
    #[error("failed to {operation} {}", path.display())]
    File {
        /// The operation.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Returns the error of a missing, malformed, damaged or too large object.
pub(crate) fn invalid(
    object: impl Into<String>,
    step: &'static str,
    reason: impl Into<String>,
    advice: &'static str,
) -> PullError {
    PullError::Invalid { object: object.into(), step, reason: reason.into(), advice }
}

/// Returns a closure for `map_err` that adds the operation and the path.
pub(crate) fn file_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PullError {
    let path = path.to_owned();
    move |source| PullError::File { operation, path, source }
}

/// Truncates untrusted text for a message.
pub(crate) fn clipped(text: &str) -> String {
    text.chars().take(200).collect()
}

/// Returns the reason of a document that exceeds the size limit.
pub(crate) fn too_large(size: u64) -> String {
    format!("it has {size} bytes or more; the limit is {}", super::limits::DOCUMENT)
}

/// Advice where content does not match its digest.
pub(crate) const COPY_AGAIN: &str = "the data is damaged or was tampered with: copy or download it again";
/// Advice where a document has an unsupported structure.
pub(crate) const RECREATE: &str = "create it again with a current version of docker, podman, skopeo or buildah";
