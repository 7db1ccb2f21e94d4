//! The document.

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

/// The value of [`BootRecord::schema`] that this crate writes and reads.
pub const SCHEMA: &str = "firstlight.boot-record/1";

/// Everything known about one boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootRecord {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the PID 1 that wrote it.
    pub init_version: String,
    /// The kernel that ran and when it reached what.
    pub kernel: Kernel,
    /// When PID 1's `main` began, µs.
    pub pid1_start_us: u64,
    /// Where the boot stands.
    pub state: State,
    /// What kind of guest this is, once the PCI scan has decided it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mode: Option<Mode>,
    /// Every unit of the plan, in plan order.
    pub units: Vec<Unit>,
    /// Every GPU, in PCI order.
    pub gpus: Vec<Gpu>,
    /// What happened outside the plan, in time order: restarts, containers, power-off.
    pub events: Vec<Event>,
    /// Set when a required unit failed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<Failure>,
}

/// The kernel's part of the record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// As `/proc/cmdline` holds it.
    pub command_line: String,
    /// Times read from the kernel's own log.
    pub milestones: Vec<Milestone>,
}

/// A moment that the kernel logged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Milestone {
    /// What was reached, e.g. `init-exec`.
    pub name: String,
    /// When, µs.
    pub at_us: u64,
}

/// Where a boot stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Units are still to run.
    #[default]
    Booting,
    /// Every unit ended well.
    Ready,
    /// The boot ended, and something that is not required failed.
    Degraded,
    /// A required unit failed.
    Failed,
    /// On the way down.
    PoweringOff,
}

/// What kind of guest this is and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mode {
    /// `cpu`, `gpu`, ...
    pub name: String,
    /// The rule that chose it and what it saw.
    pub reason: String,
}

/// What failure of a unit means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The guest cannot be used: the failure policy decides what happens.
    Required,
    /// Something is missing; the rest serves.
    Degraded,
    /// Nice to have.
    Optional,
}

/// How a unit ended, or that it has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Waits for what it needs.
    Pending,
    /// Started.
    Running,
    /// Done as meant.
    Ok,
    /// Ended with an error: see `detail`.
    Failed,
    /// Did not end before its deadline.
    TimedOut,
    /// Never ran: `detail` says what it needed that is not there.
    Skipped,
}

impl Outcome {
    /// The word used in JSON and on the console.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::TimedOut => "timed-out",
            Self::Skipped => "skipped",
        }
    }

    /// Whether nothing more will happen.
    #[must_use]
    pub fn ended(self) -> bool {
        !matches!(self, Self::Pending | Self::Running)
    }
}

/// One unit of the boot plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Unique in the plan; instances carry their object in brackets.
    pub name: String,
    /// Names of the units it waited for.
    pub need: Vec<String>,
    /// What its failure means.
    pub severity: Severity,
    /// From its start, µs.
    pub deadline_us: u64,
    /// When it began, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start_us: Option<u64>,
    /// When others could begin to use it, µs. A daemon is ready long before it ends.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ready_us: Option<u64>,
    /// When it ended, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end_us: Option<u64>,
    /// Processor time of the thread that did it, kernel's included, µs. What it
    /// waited for is not in it, nor what other threads and processes did for it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub processor_us: Option<u64>,
    /// How it ended.
    pub outcome: Outcome,
    /// One line: what was done, or what went wrong and what to try next.
    #[serde(default)]
    pub detail: String,
    /// The PCI function it is about.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pci: Option<Address>,
}

/// How far a GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuPhase {
    /// Seen on the bus; its driver is not loaded or its turn has not come.
    Found,
    /// Its first open runs in the driver.
    Attaching,
    /// Attached, held, and in the CDI file.
    Ready,
    /// Its attach ended with an error.
    Failed,
    /// Its attach did not end before the deadline.
    TimedOut,
    /// It was taken out of the guest, or its driver was taken off it.
    Removed,
}

impl GpuPhase {
    /// The word used in JSON and on the console.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Attaching => "attaching",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::TimedOut => "timed-out",
            Self::Removed => "removed",
        }
    }
}

/// What the driver answered to `NV_ESC_WAIT_OPEN_COMPLETE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverCode {
    /// 0 or a negative errno.
    pub rc: i32,
    /// The resource manager's own code; 0 is OK.
    pub adapter_status: u32,
}

/// One GPU of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its name everywhere.
    pub pci: Address,
    /// The index of `nvidia.com/gpu=N`: position in PCI order among those that are in the guest now.
    pub index: u32,
    /// PCI device id.
    pub device_id: u16,
    /// Minor of `/dev/nvidiaN`, once the driver has told it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub minor: Option<u32>,
    /// How far it is.
    pub phase: GpuPhase,
    /// The step it is in or failed in, e.g. `open`, `wait-open-complete`, `cdi`.
    pub step: String,
    /// Attempts begun; 2 after a serial retry.
    pub attempts: u32,
    /// When the first attempt began, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start_us: Option<u64>,
    /// When it became ready or failed, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end_us: Option<u64>,
    /// From the first open to the answer, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub attach_us: Option<u64>,
    /// What the driver answered, when it answered.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub driver: Option<DriverCode>,
    /// One line: what went wrong, with the driver's last words, and what to try next.
    #[serde(default)]
    pub detail: String,
}

/// Something that happened outside the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, µs.
    pub at_us: u64,
    /// What, one word: `agent-listening`, `container-started`, `agent-restarted`, `power-off`, ...
    pub kind: String,
    /// Whom it is about: a container id, a process, a PCI address; may be empty.
    #[serde(default)]
    pub object: String,
    /// One line more.
    #[serde(default)]
    pub detail: String,
}

/// Why a boot failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The required unit that failed.
    pub unit: String,
    /// When, µs.
    pub at_us: u64,
    /// Its error.
    pub detail: String,
    /// What was done about it: the failure policy's word.
    pub action: String,
}

/// Why a document is not a boot record.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or not this shape.
    #[error("not a boot record: {0}")]
    Json(#[from] serde_json::Error),
    /// A later or foreign schema.
    #[error("this boot record has schema {0:?}, this program reads {SCHEMA:?}: use the version that wrote it")]
    Schema(String),
}

impl BootRecord {
    /// A record with nothing in it yet.
    #[must_use]
    pub fn new(init_version: &str, pid1_start_us: u64) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            init_version: init_version.to_owned(),
            kernel: Kernel::default(),
            pid1_start_us,
            state: State::default(),
            mode: None,
            units: Vec::new(),
            gpus: Vec::new(),
            events: Vec::new(),
            failure: None,
        }
    }

    /// Reads a document.
    ///
    /// # Errors
    /// It is not JSON, lacks something, or has another schema.
    pub fn from_json(text: &str) -> Result<Self, ReadError> {
        let value: serde_json::Value = serde_json::from_str(text)?;
        match value.get("schema").and_then(serde_json::Value::as_str) {
            Some(SCHEMA) => Ok(serde_json::from_value(value)?),
            Some(other) => Err(ReadError::Schema(other.chars().take(60).collect())),
            None => Err(ReadError::Schema(String::new())),
        }
    }

    /// The unit of that name.
    #[must_use]
    pub fn unit(&self, name: &str) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.name == name)
    }

    /// The first event of that kind.
    #[must_use]
    pub fn event(&self, kind: &str) -> Option<&Event> {
        self.events.iter().find(|event| event.kind == kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_record_round_trips() {
        let record = BootRecord::new("0.1.0", 2_000_000);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(BootRecord::from_json(&text).unwrap(), record);
    }

    #[test]
    fn another_schema_is_named() {
        let text = serde_json::to_string(&BootRecord::new("x", 0)).unwrap().replace("record/1", "record/2");
        let error = BootRecord::from_json(&text).unwrap_err().to_string();
        assert!(error.contains("firstlight.boot-record/2"), "{error}");
        assert!(BootRecord::from_json("{}").is_err());
        assert!(BootRecord::from_json("nonsense").is_err());
    }

    #[test]
    fn words_are_the_json_words() {
        for outcome in
            [Outcome::Pending, Outcome::Running, Outcome::Ok, Outcome::Failed, Outcome::TimedOut, Outcome::Skipped]
        {
            assert_eq!(serde_json::to_value(outcome).unwrap(), outcome.word());
        }
        for phase in [
            GpuPhase::Found,
            GpuPhase::Attaching,
            GpuPhase::Ready,
            GpuPhase::Failed,
            GpuPhase::TimedOut,
            GpuPhase::Removed,
        ] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.word());
        }
    }
}
