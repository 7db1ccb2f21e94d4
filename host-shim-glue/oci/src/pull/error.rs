//! What can go wrong with a pull.

use std::io;
use std::path::{Path, PathBuf};

/// What sources look like, for messages.
pub(crate) const SOURCES: &str =
    "a source is oci:PATH[:REF], docker-archive:PATH[:REF] or docker://HOST[:PORT]/NAME[:TAG|@sha256:..]";

/// Why an image could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line names no source.
    #[error("source {text:?}: {why}; {SOURCES}")]
    Source {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// Something of the image is not what it should be.
    #[error("{object}: cannot {step}: {why}; {next}")]
    Input {
        /// The file, blob or address.
        object: String,
        /// What was being done.
        step: &'static str,
        /// What is wrong.
        why: String,
        /// The next thing to try.
        next: &'static str,
    },
    /// The image is for other machines.
    #[error("{object}: no image for {wanted}; there is {found}: choose one with --platform")]
    Platform {
        /// What was looked through.
        object: String,
        /// The platform that was asked for.
        wanted: String,
        /// Those that are there.
        found: String,
    },
    /// A registry wants other credentials, or some.
    #[error("{object}: the registry does not let us in: {why}")]
    Denied {
        /// The address.
        object: String,
        /// What it said and what to do.
        why: String,
    },
    /// A transfer failed again and again.
    #[error(
        "{object}: gave up after {attempts} attempts: {why}; whole blobs are kept, the same command goes on from there"
    )]
    Transfer {
        /// The address.
        object: String,
        /// How often it was tried.
        attempts: u32,
        /// What happened last.
        why: String,
    },
    /// A file operation failed.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Returns a closure for `map_err` that adds the operation and the path.
pub(crate) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { what, path, source }
}

/// Something of the image is not what it should be.
pub(crate) fn input(
    object: impl Into<String>,
    step: &'static str,
    why: impl Into<String>,
    next: &'static str,
) -> Error {
    Error::Input { object: object.into(), step, why: why.into(), next }
}

/// What came is not what was promised: only another copy helps.
pub(crate) const COPY_AGAIN: &str = "the copy is damaged or was tampered with: get it again";
/// A shape of images that nobody writes by accident.
pub(crate) const OTHER_TOOL: &str = "write it again with a current docker, podman, skopeo or buildah";
