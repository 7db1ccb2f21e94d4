//! How to run a program that may live in a private tree with its own loader.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// A program and the arguments that always come first.
///
/// QEMU from a newer Debian than the host's runs through that tree's own
/// `ld.so`, so "the program" is a loader, a library path and a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// What is executed.
    pub program: PathBuf,
    /// Arguments before the caller's own.
    pub args: Vec<OsString>,
    /// Environment variables added to the caller's.
    pub env: Vec<(OsString, OsString)>,
}

impl Tool {
    /// A program that needs nothing but its path.
    #[must_use]
    pub fn plain(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), args: Vec::new(), env: Vec::new() }
    }

    /// A command ready for the caller's arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }
}
