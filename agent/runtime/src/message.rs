//! Messages between the agent and the runtime: JSON, one message per packet.

use std::path::PathBuf;

use firstlight_device_filter::Rule;
use serde::{Deserialize, Serialize};

/// A call with the id that its reply will carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Chosen by the caller.
    pub id: u64,
    /// The operation.
    pub call: Call,
}

/// An operation of the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    /// Creates the sandbox's IPC and UTS namespaces and bind-mounts them at `dir/ipc` and `dir/uts`.
    Namespaces {
        /// The directory of the bind mounts.
        dir: PathBuf,
        /// The host name of the UTS namespace; empty leaves it unchanged.
        hostname: String,
    },
    /// Creates a container from `bundle/config.json`. The packet carries its standard input, output and error,
    /// unless it has a terminal: then the reply carries the terminal's master.
    Create {
        /// The container's id.
        container: String,
        /// The bundle directory.
        bundle: PathBuf,
        /// The container's cgroup, as an absolute path.
        cgroup: PathBuf,
        /// The container's root directory from its configuration.
        root: PathBuf,
        /// The device rules from its configuration.
        devices: Vec<Rule>,
        /// Whether the configuration requests a terminal.
        terminal: bool,
        /// Whether `pivot_root` cannot replace the current root (an initramfs).
        no_pivot: bool,
        /// Whether the container has hooks at any point.
        hooks: bool,
    },
    /// Starts the container's program. Replied to after `exec` succeeded or failed, and after the `poststart` hooks.
    Start {
        /// The container's id.
        container: String,
    },
    /// Runs an exec process; descriptors as for [`Call::Create`]. Replied to when it runs.
    Exec {
        /// The container's id.
        container: String,
        /// The exec id.
        exec: String,
        /// The file with the OCI process.
        process: PathBuf,
        /// Whether the process requests a terminal.
        terminal: bool,
    },
    /// Sends a signal to one process.
    Signal {
        /// The container's id.
        container: String,
        /// The exec id; empty for the container's init process.
        exec: String,
        /// The signal's number.
        signal: i32,
    },
    /// Kills all processes in the container's cgroup.
    Kill {
        /// The container's id.
        container: String,
    },
    /// Removes the container's state and cgroup and runs the `poststop` hooks. The container is removed even if a
    /// hook fails.
    Delete {
        /// The container's id.
        container: String,
    },
}

/// A message from the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromRuntime {
    /// The reply to the request with this id.
    Reply {
        /// The request's id.
        id: u64,
        /// The call's result.
        result: Result<Done, Failure>,
    },
    /// A process exited.
    Exited {
        /// The container's id.
        container: String,
        /// The exec id; empty for the container's init process.
        exec: String,
        /// The exit status, or 128 + signal number.
        code: i32,
    },
}

/// The result of a successful call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// The process that was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
}

/// The error of a failed call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure.
    pub kind: FailureKind,
    /// One line with the cause.
    pub message: String,
}

/// The kinds of failure that callers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// The container or process does not exist or has exited.
    NotFound,
    /// The id is in use.
    Exists,
    /// The request is invalid.
    Invalid,
    /// Any other failure.
    Internal,
}

impl Call {
    /// Returns the id of the container concerned; empty for calls of the sandbox.
    pub(crate) fn container(&self) -> &str {
        match self {
            Self::Namespaces { .. } => "",
            Self::Create { container, .. }
            | Self::Start { container }
            | Self::Exec { container, .. }
            | Self::Signal { container, .. }
            | Self::Kill { container }
            | Self::Delete { container } => container,
        }
    }
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Internal, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_round_trip() {
        let request = Request {
            id: 7,
            call: Call::Exec { container: "c".into(), exec: "e".into(), process: "/p".into(), terminal: true },
        };
        let text = serde_json::to_string(&request).unwrap();
        assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request);
        let reply = FromRuntime::Reply { id: 7, result: Err(Failure::internal("x")) };
        let text = serde_json::to_string(&reply).unwrap();
        assert_eq!(serde_json::from_str::<FromRuntime>(&text).unwrap(), reply);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_parse_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = serde_json::from_slice::<Request>(&bytes);
            let _ = serde_json::from_slice::<FromRuntime>(&bytes);
        }
    }
}
