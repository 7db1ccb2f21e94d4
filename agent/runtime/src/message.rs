//! What the agent and the runtime say to each other, as JSON, one message per packet.

use std::path::PathBuf;

use firstlight_device_filter::Rule;
use serde::{Deserialize, Serialize};

/// A call with the number that its reply will carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Chosen by the caller.
    pub id: u64,
    /// What to do.
    pub call: Call,
}

/// What the runtime can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    /// Make the sandbox's IPC and UTS namespaces and keep them as `directory/ipc` and `directory/uts`.
    Namespaces {
        /// Where.
        dir: PathBuf,
        /// The host name of the UTS namespace; empty leaves it as it is.
        hostname: String,
    },
    /// Make a container whose configuration is `bundle/config.json`. With the
    /// packet come its standard input, output and error, unless it has a
    /// terminal: then the reply brings the terminal's master.
    Create {
        /// The container.
        container: String,
        /// The directory.
        bundle: PathBuf,
        /// Its resource group, as an absolute path.
        cgroup: PathBuf,
        /// The directory that its configuration names as its root.
        root: PathBuf,
        /// Which devices it may open, as its configuration says.
        devices: Vec<Rule>,
        /// Whether the configuration asks for a terminal.
        terminal: bool,
        /// Whether the root is one that `pivot_root` cannot leave (an initramfs).
        no_pivot: bool,
        /// Whether any hook, of any moment, is to be run.
        hooks: bool,
    },
    /// Let the container's program run. Answered when it does, or with the
    /// reason why it cannot; the hooks of that moment have then run as well.
    Start {
        /// The container.
        container: String,
    },
    /// Run a further process; descriptors as for [`Call::Create`]. Answered when it runs.
    Exec {
        /// The container.
        container: String,
        /// The process.
        exec: String,
        /// A file with an OCI process.
        process: PathBuf,
        /// Whether that asks for a terminal.
        terminal: bool,
    },
    /// Send a signal to one process.
    Signal {
        /// The container.
        container: String,
        /// The process; empty for the container's first.
        exec: String,
        /// The signal's number.
        signal: i32,
    },
    /// Kill everything in the container's cgroup.
    Kill {
        /// The container.
        container: String,
    },
    /// Forget the container, remove its cgroup and run the hooks of its end. If
    /// only a hook fails, the container is gone all the same.
    Delete {
        /// The container.
        container: String,
    },
}

/// What the runtime sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromRuntime {
    /// The answer to the request of that number.
    Reply {
        /// The request's number.
        id: u64,
        /// How it went.
        result: Result<Done, Failure>,
    },
    /// A process ended.
    Exited {
        /// Its container.
        container: String,
        /// Its name; empty for the container's first process.
        exec: String,
        /// Exit status, or 128 and the signal's number.
        code: i32,
    },
}

/// A call that went well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// The process that was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
}

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of failure.
    pub kind: FailureKind,
    /// One line with the cause.
    pub message: String,
}

/// Kinds of failure that callers tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// No such container or process, or it has ended.
    NotFound,
    /// The name is taken.
    Exists,
    /// The request makes no sense.
    Invalid,
    /// Everything else.
    Internal,
}

impl Call {
    /// The container that it is about; empty if it is about the sandbox.
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
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = serde_json::from_slice::<Request>(&bytes);
            let _ = serde_json::from_slice::<FromRuntime>(&bytes);
        }
    }
}
