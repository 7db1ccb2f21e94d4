//! The boot record document.

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

/// The value of [`BootRecord::schema`] that this crate writes and reads.
pub const SCHEMA: &str = "firstlight.boot-record/1";

/// The record of one boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootRecord {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the PID 1 that wrote it.
    pub init_version: String,
    /// The kernel and its milestones.
    pub kernel: Kernel,
    /// Start of PID 1's `main`, µs.
    pub pid1_start_us: u64,
    /// Overall state of the boot.
    pub state: State,
    /// The guest's mode, once the PCI scan has selected it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mode: Option<Mode>,
    /// Every unit of the plan, in plan order.
    pub units: Vec<Unit>,
    /// Every GPU, in PCI order.
    pub gpus: Vec<Gpu>,
    /// Events outside the plan in time order: restarts, containers, power-off.
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
    /// As in `/proc/cmdline`.
    pub command_line: String,
    /// Times read from the kernel's own log.
    pub milestones: Vec<Milestone>,
}

/// A point in time that the kernel logged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Milestone {
    /// Name, e.g. `init-exec`.
    pub name: String,
    /// Time, µs.
    pub at_us: u64,
}

/// The overall state of a boot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Units are pending or running.
    #[default]
    Booting,
    /// Every unit succeeded.
    Ready,
    /// The boot ended, and a unit that is not required failed.
    Degraded,
    /// A required unit failed.
    Failed,
    /// Shutting down.
    PoweringOff,
}

/// The guest's mode and why it was selected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mode {
    /// `cpu`, `gpu`, ...
    pub name: String,
    /// The rule that selected it and the facts it matched.
    pub reason: String,
}

/// The consequence of a unit's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The guest is unusable: the failure policy applies.
    Required,
    /// The guest runs without this function.
    Degraded,
    /// The failure has no consequence.
    Optional,
}

/// The result of a unit, or its state until it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Waiting for the units it needs.
    Pending,
    /// Started and not ended.
    Running,
    /// Succeeded.
    Ok,
    /// Failed with the error in `detail`.
    Failed,
    /// Exceeded its deadline.
    TimedOut,
    /// Not started: `detail` names the unmet dependency.
    Skipped,
}

impl Outcome {
    /// Returns the name used in JSON and on the console.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::TimedOut => "timed-out",
            Self::Skipped => "skipped",
        }
    }

    /// Returns whether the unit has ended.
    #[must_use]
    pub fn ended(self) -> bool {
        !matches!(self, Self::Pending | Self::Running)
    }
}

/// One unit of the boot plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Unique in the plan; instances have their object in brackets, e.g. `gpu-attach[0000:01:00.0]`.
    pub name: String,
    /// Names of the units it depends on.
    pub need: Vec<String>,
    /// Consequence of its failure.
    pub severity: Severity,
    /// Deadline, µs after its start.
    pub deadline_us: u64,
    /// Start, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start_us: Option<u64>,
    /// When it became ready for its dependants, µs. A daemon is ready long before it ends.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ready_us: Option<u64>,
    /// End, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end_us: Option<u64>,
    /// CPU time of the unit's thread, user and system, µs. Excludes waiting, and
    /// work that other threads and processes did for it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub processor_us: Option<u64>,
    /// Result.
    pub outcome: Outcome,
    /// One line: what was done, or the error and the next step.
    #[serde(default)]
    pub detail: String,
    /// The PCI function of an instance.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pci: Option<Address>,
}

/// The phase of a GPU's attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuPhase {
    /// Found on the bus; its driver is not loaded, or its attach is queued.
    Found,
    /// The driver is processing its first open.
    Attaching,
    /// Attached, its device node held open, and listed in the CDI file.
    Ready,
    /// Its attach failed.
    Failed,
    /// Its attach exceeded its deadline.
    TimedOut,
    /// It was unplugged, or its driver was unbound.
    Removed,
}

impl GpuPhase {
    /// Returns the name used in JSON and on the console.
    #[must_use]
    pub fn as_str(self) -> &'static str {
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

/// The driver's result of `NV_ESC_WAIT_OPEN_COMPLETE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverCode {
    /// 0 or a negative errno.
    pub rc: i32,
    /// The resource manager (RM) status; 0 is OK.
    pub adapter_status: u32,
}

/// One GPU of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// PCI address, its name in all interfaces.
    pub pci: Address,
    /// The index N of `nvidia.com/gpu=N`: position in PCI order among the GPUs now in the guest.
    pub index: u32,
    /// PCI device id.
    pub device_id: u16,
    /// Minor number of `/dev/nvidiaN`, once the driver has reported it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub minor: Option<u32>,
    /// Phase of its attach.
    pub phase: GpuPhase,
    /// The current or failed step, e.g. `open`, `wait-open-complete`, `cdi`.
    pub step: String,
    /// Attempts started; 2 after a serial retry.
    pub attempts: u32,
    /// Start of the first attempt, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start_us: Option<u64>,
    /// When it became ready or failed, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end_us: Option<u64>,
    /// Duration from the first open to the driver's result, µs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub attach_us: Option<u64>,
    /// The driver's result, if it returned one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub driver: Option<DriverCode>,
    /// One line: the error with the driver's last log line, and the next step.
    #[serde(default)]
    pub detail: String,
}

/// An event outside the boot plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time, µs.
    pub at_us: u64,
    /// Kind, one word: `agent-listening`, `container-started`, `agent-restarted`, `power-off`, ...
    pub kind: String,
    /// The object: a container id, a process, a PCI address; may be empty.
    #[serde(default)]
    pub object: String,
    /// One line of detail.
    #[serde(default)]
    pub detail: String,
}

/// Why a boot failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The required unit that failed.
    pub unit: String,
    /// Time, µs.
    pub at_us: u64,
    /// Its error.
    pub detail: String,
    /// The action taken, as the failure policy names it.
    pub action: String,
}

/// Why a document is not a boot record.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or not of this schema.
    #[error("not a boot record: {0}")]
    Json(#[from] serde_json::Error),
    /// Another schema.
    #[error("unsupported boot record schema {0:?}, this program reads {SCHEMA:?}; use the version that wrote it")]
    Schema(String),
}

impl BootRecord {
    /// Returns an empty record.
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

    /// Parses a boot record.
    ///
    /// # Errors
    /// It is not JSON, lacks a field, or has another schema.
    pub fn from_json(text: &str) -> Result<Self, ReadError> {
        let value: serde_json::Value = serde_json::from_str(text)?;
        match value.get("schema").and_then(serde_json::Value::as_str) {
            Some(SCHEMA) => Ok(serde_json::from_value(value)?),
            Some(other) => Err(ReadError::Schema(other.chars().take(60).collect())),
            None => Err(ReadError::Schema(String::new())),
        }
    }

    /// Returns the unit of that name.
    #[must_use]
    pub fn unit(&self, name: &str) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.name == name)
    }

    /// Returns the first event of that kind.
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
    fn unsupported_schema_is_named_in_the_error() {
        let text = serde_json::to_string(&BootRecord::new("x", 0)).unwrap().replace("record/1", "record/2");
        let error = BootRecord::from_json(&text).unwrap_err().to_string();
        assert!(error.contains("firstlight.boot-record/2"), "{error}");
        assert!(BootRecord::from_json("{}").is_err());
        assert!(BootRecord::from_json("nonsense").is_err());
    }

    #[test]
    fn as_str_equals_the_json_name() {
        for outcome in
            [Outcome::Pending, Outcome::Running, Outcome::Ok, Outcome::Failed, Outcome::TimedOut, Outcome::Skipped]
        {
            assert_eq!(serde_json::to_value(outcome).unwrap(), outcome.as_str());
        }
        for phase in [
            GpuPhase::Found,
            GpuPhase::Attaching,
            GpuPhase::Ready,
            GpuPhase::Failed,
            GpuPhase::TimedOut,
            GpuPhase::Removed,
        ] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.as_str());
        }
    }
}
