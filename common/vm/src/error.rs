//! What can go wrong with a virtual machine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a virtual machine did not start, or is not what it was.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A file or directory for the machine could not be made.
    #[error("virtual machine: {path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("virtual machine: cannot start {name} ({program}): {source}")]
    Spawn {
        /// Its part.
        name: String,
        /// Its path.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A daemon ended or did not begin to listen.
    #[error("virtual machine: {name} {what} after {} ms; its last words: {last_words}", elapsed.as_millis())]
    Helper {
        /// Its part.
        name: String,
        /// `ended` or `did not listen`.
        what: &'static str,
        /// Since its start.
        elapsed: Duration,
        /// The end of its log.
        last_words: String,
    },
    /// The guest did not accept a connection.
    #[error("virtual machine: vsock port {port}: no connection after {} ms ({last}); the console's last words:\n{last_words}", elapsed.as_millis())]
    Connect {
        /// The guest's port.
        port: u32,
        /// Since the first try.
        elapsed: Duration,
        /// The last try's error.
        last: String,
        /// The end of the console.
        last_words: String,
    },
    /// QEMU's monitor did not do what it was asked.
    #[error("virtual machine: monitor: {command}: {what}")]
    Monitor {
        /// The command.
        command: String,
        /// What QEMU says about it.
        what: String,
    },
    /// QEMU could not be waited for.
    #[error("virtual machine: cannot wait for QEMU: {0}")]
    Wait(#[source] io::Error),
}
