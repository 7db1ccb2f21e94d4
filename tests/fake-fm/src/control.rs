//! The socket for tests: a line of JSON is asked, a line of JSON answered.

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

/// Nothing that is asked here takes long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What a test asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// How long calls take from now on.
    Latency(Latency),
    /// The next calls go wrong.
    Fault(Fault),
    /// The next call, of that kind or any, hangs until released.
    Hang(Option<Op>),
    /// Let it go on.
    Release,
    /// A virtual machine runs on a partition, or no longer.
    Tenant {
        /// Its partition.
        partition: PartitionId,
        /// Whether it runs.
        running: bool,
    },
    /// The host resets a GPU.
    Reset {
        /// Its module id.
        gpu: u32,
    },
    /// A switch's error is written to the manager's log.
    Sxid {
        /// The switch.
        switch: u32,
        /// The error.
        code: u32,
    },
    /// A GPU's error is written to the manager's log.
    Xid {
        /// The GPU, by module id.
        gpu: u32,
        /// The error.
        code: u32,
    },
    /// How it stands.
    Snapshot,
}

/// How long calls take that are not refused; what is not given stays.
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
    /// As it is from the start.
    #[must_use]
    pub fn of(scenario: &Scenario) -> Self {
        let (list_ms, activate_ms) = (Some(scenario.list_ms), Some(scenario.activate_ms));
        Self { list_ms, activate_ms, deactivate_ms: Some(scenario.deactivate_ms) }
    }

    /// With what the other gives.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            list_ms: other.list_ms.or(self.list_ms),
            activate_ms: other.activate_ms.or(self.activate_ms),
            deactivate_ms: other.deactivate_ms.or(self.deactivate_ms),
        }
    }

    /// How long a call of this kind takes.
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

/// Calls that go wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Which call; none: any.
    #[serde(default)]
    pub op: Option<Op>,
    /// What is answered, whatever was done.
    pub rc: i32,
    /// How long it takes.
    #[serde(default)]
    pub after_ms: u64,
    /// Whether it is done all the same, if it can be.
    #[serde(default)]
    pub take_effect: bool,
    /// How many calls.
    #[serde(default = "once")]
    pub times: u32,
}

fn once() -> u32 {
    1
}

/// How it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Where in its life.
    pub phase: Phase,
    /// Partitions that are active.
    pub active: BTreeSet<PartitionId>,
    /// Partitions with a running virtual machine.
    pub tenants: BTreeSet<PartitionId>,
    /// Whether a call hangs now.
    pub hanging: bool,
    /// All that happened.
    pub log: Vec<LogLine>,
    /// What must not have been.
    pub violations: Vec<String>,
}

/// What a test gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It is so.
    Done,
    /// To [`Command::Snapshot`].
    Snapshot(Snapshot),
    /// It was not understood.
    Error(String),
}

/// A test's side of the socket.
#[derive(Debug)]
pub struct Control {
    stream: BufReader<UnixStream>,
}

impl Control {
    /// To the process whose [`crate::scenario::Scenario::control`] that is.
    ///
    /// # Errors
    /// Nobody is there.
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

    /// Asks for something to be so.
    ///
    /// # Errors
    /// The process is gone or does not understand.
    pub fn tell(&mut self, command: &Command) -> Result<(), Error> {
        match self.request(command)? {
            Answer::Done => Ok(()),
            other => Err(Error::other(format!("{command:?}: {other:?}"))),
        }
    }

    /// How it stands.
    ///
    /// # Errors
    /// The process is gone.
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
