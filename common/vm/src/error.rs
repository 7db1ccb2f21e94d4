//! Errors of a virtual machine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why an operation on a virtual machine failed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A file or directory of the machine could not be created.
    #[error("virtual machine: failed to create {path}: {source}")]
    File {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("virtual machine: failed to start {name} ({program}): {source}")]
    Spawn {
        /// Its role.
        name: String,
        /// Its path.
        program: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A daemon exited or did not listen in time.
    #[error("virtual machine: {name} {problem} after {} ms; end of its log: {log_tail}", elapsed.as_millis())]
    Helper {
        /// Its role.
        name: String,
        /// `exited` or `did not listen`.
        problem: &'static str,
        /// Time since its start.
        elapsed: Duration,
        /// The end of its log.
        log_tail: String,
    },
    /// The guest did not accept a connection.
    #[error("virtual machine: vsock port {port}: no connection after {} ms ({last}); end of the console:\n{console_tail}", elapsed.as_millis())]
    Connect {
        /// The guest's port.
        port: u32,
        /// Time since the first attempt.
        elapsed: Duration,
        /// The last attempt's error.
        last: String,
        /// The end of the console.
        console_tail: String,
    },
    /// A monitor (QMP) command failed.
    #[error("virtual machine: monitor: {command}: {reason}")]
    Monitor {
        /// The command.
        command: String,
        /// QEMU's error.
        reason: String,
    },
    /// Waiting for QEMU failed.
    #[error("virtual machine: failed to wait for QEMU: {0}")]
    Wait(#[source] io::Error),
}
