//! Programs, including those in a private tree with their own dynamic loader.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// A program and its leading arguments.
///
/// QEMU from a newer Debian than the host's runs through that tree's `ld.so`, so
/// the command is a loader, a library path and a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// The executable.
    pub program: PathBuf,
    /// Arguments before the caller's own.
    pub args: Vec<OsString>,
    /// Environment variables added to the caller's.
    pub env: Vec<(OsString, OsString)>,
}

impl Tool {
    /// Creates a tool of a path without leading arguments.
    #[must_use]
    pub fn plain(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), args: Vec::new(), env: Vec::new() }
    }

    /// Returns a command to which the caller appends arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }
}
