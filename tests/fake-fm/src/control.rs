//! The control socket for tests: JSON lines, one response per request.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Error, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use firstlight_partitions::PartitionId;
use serde::{Deserialize, Serialize};

use crate::call::Op;
use crate::machine::Phase;
use crate::scenario::Scenario;
use crate::tenant_monitor::LogLine;

/// Timeout of a response.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A request of a test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Sets the latency of calls.
    Latency(Latency),
    /// Injects a fault into the next calls.
    Fault(Fault),
    /// Makes the next call hang, of that kind or any, until `Release`.
    Hang(Option<Op>),
    /// Releases a hanging call.
    Release,
    /// Starts or stops a virtual machine on a partition.
    Tenant {
        /// The partition.
        partition: PartitionId,
        /// Whether it runs.
        running: bool,
    },
    /// The host resets a GPU.
    Reset {
        /// Its module id.
        gpu: u32,
    },
    /// Writes an SXid to the manager's log.
    Sxid {
        /// The switch.
        switch: u32,
        /// The error.
        code: u32,
    },
    /// Writes an Xid to the manager's log.
    Xid {
        /// The GPU, by module id.
        gpu: u32,
        /// The error.
        code: u32,
    },
    /// Returns a snapshot.
    Snapshot,
}

/// Latencies of calls that are not refused; `None` keeps the current one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Latency {
    /// Lists.
    pub list_ms: Option<u64>,
    /// To activate.
    pub activate_ms: Option<u64>,
    /// To deactivate.
    pub deactivate_ms: Option<u64>,
}

impl Latency {
    /// Returns the latencies of a scenario.
    #[must_use]
    pub fn of(scenario: &Scenario) -> Self {
        let (list_ms, activate_ms) = (Some(scenario.list_ms), Some(scenario.activate_ms));
        Self { list_ms, activate_ms, deactivate_ms: Some(scenario.deactivate_ms) }
    }

    /// Overrides latencies with the given ones.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            list_ms: other.list_ms.or(self.list_ms),
            activate_ms: other.activate_ms.or(self.activate_ms),
            deactivate_ms: other.deactivate_ms.or(self.deactivate_ms),
        }
    }

    /// Returns the latency of a kind of call.
    #[must_use]
    pub fn of_call(self, op: Op) -> Duration {
        let ms = match op {
            Op::List | Op::Unsupported | Op::FailedDevices => self.list_ms,
            Op::Activate | Op::ActivateWithVfs => self.activate_ms,
            Op::Deactivate => self.deactivate_ms,
            Op::SetActivated => None,
        };
        Duration::from_millis(ms.unwrap_or_default())
    }
}

/// An injected fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// The kind of call; `None` for any.
    #[serde(default)]
    pub op: Option<Op>,
    /// The returned code, whatever was done.
    pub rc: i32,
    /// The delay.
    #[serde(default)]
    pub after_ms: u64,
    /// Whether the call takes effect nevertheless, if it can.
    #[serde(default)]
    pub take_effect: bool,
    /// The number of calls.
    #[serde(default = "once")]
    pub times: u32,
}

fn once() -> u32 {
    1
}

/// The state of the manager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The phase.
    pub phase: Phase,
    /// Partitions that are active.
    pub active: BTreeSet<PartitionId>,
    /// Partitions with a running virtual machine.
    pub tenants: BTreeSet<PartitionId>,
    /// Whether a call hangs now.
    pub hanging: bool,
    /// All log lines.
    pub log: Vec<LogLine>,
    /// Violations.
    pub violations: Vec<String>,
}

/// A response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The command was executed.
    Done,
    /// To [`Command::Snapshot`].
    Snapshot(Snapshot),
    /// The command is invalid.
    Error(String),
}

/// A client of the control socket.
#[derive(Debug)]
pub struct Control {
    stream: BufReader<UnixStream>,
}

impl Control {
    /// Connects to the socket of [`crate::scenario::Scenario::control`].
    ///
    /// # Errors
    /// The process does not run.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    fn request(&mut self, command: &Command) -> Result<Answer, Error> {
        let mut line = serde_json::to_string(command)?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        line.clear();
        self.stream.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }

    /// Sends a command.
    ///
    /// # Errors
    /// The process has ended or rejects the command.
    pub fn send(&mut self, command: &Command) -> Result<(), Error> {
        match self.request(command)? {
            Answer::Done => Ok(()),
            other => Err(Error::other(format!("{command:?}: {other:?}"))),
        }
    }

    /// Returns a snapshot.
    ///
    /// # Errors
    /// The process has ended.
    pub fn snapshot(&mut self) -> Result<Snapshot, Error> {
        match self.request(&Command::Snapshot)? {
            Answer::Snapshot(snapshot) => Ok(snapshot),
            other => Err(Error::other(format!("snapshot: {other:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_commands_have_short_json() {
        for (line, command) in [
            (r#""release""#, Command::Release),
            (r#"{"hang": "activate"}"#, Command::Hang(Some(Op::Activate))),
            (r#"{"hang": null}"#, Command::Hang(None)),
            (
                r#"{"fault": {"rc": -5}}"#,
                Command::Fault(Fault { op: None, rc: -5, after_ms: 0, take_effect: false, times: 1 }),
            ),
            (r#"{"tenant": {"partition": 3, "running": true}}"#, Command::Tenant { partition: 3, running: true }),
        ] {
            assert_eq!(serde_json::from_str::<Command>(line).unwrap(), command);
        }
        assert!(serde_json::from_str::<Command>(r#"{"fault": {"rc": 0, "effect": true}}"#).is_err());
    }
}
