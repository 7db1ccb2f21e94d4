//! Runs one container in one guest and reports a timeline.

mod drive;
mod output;
mod progress;
mod report;
mod share;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use firstlight_boot_record::BootRecord;
use firstlight_oci::OciError;
use firstlight_vm::{Machine, VmError};

pub use drive::run;
pub use output::{Outputs, OutputsLock, parse_record, print};
pub use progress::Progress;
pub use report::{Container, GpuReport, Report, Timeline, problems};

use crate::agent::AgentError;

/// A run: guest, image and container.
#[derive(Debug, Clone)]
pub struct Run {
    /// The guest; the run adds its shared directory.
    pub machine: Machine,
    /// The image's OCI layout.
    pub image: PathBuf,
    /// CDI device names of kind `nvidia.com/gpu`: indices, PCI addresses, `all`.
    pub devices: Vec<String>,
    /// The container's command.
    pub command: ContainerCommand,
    /// Path of the console's log.
    pub console_log: PathBuf,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// Keep the guest running after the container has exited, until interrupted.
    pub keep: bool,
}

/// What a container runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ContainerCommand {
    /// Our script that lists the container's GPUs and tries to open all others.
    #[default]
    Probe,
    /// The image's entry point and command.
    Image,
    /// These arguments.
    Arguments(Vec<String>),
}

/// Deadlines of the steps of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// From QEMU's start to the agent's first reply.
    pub boot: Duration,
    /// One call to the agent that does not wait for an event.
    pub call: Duration,
    /// Creating the container, its wait for GPUs included.
    pub create: Duration,
    /// Start to exit of the container; `None` without limit.
    pub container: Option<Duration>,
    /// From the power-off request to QEMU's exit.
    pub power_off: Duration,
}

impl Default for Deadlines {
    /// Returns deadlines for a loaded machine without hardware virtualisation.
    fn default() -> Self {
        Self {
            boot: Duration::from_secs(60),
            call: Duration::from_secs(30),
            create: Duration::from_secs(150),
            container: Some(Duration::from_secs(120)),
            power_off: Duration::from_secs(30),
        }
    }
}

/// Why a run failed, with the guest's partial boot record if there is one.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A file or directory of the run could not be created.
    #[error("run: failed to create {path}: {source}")]
    File {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The image is unusable.
    #[error(transparent)]
    Image(#[from] OciError),
    /// The image names no command.
    #[error("run: image {} has neither an entry point nor a command: name a command after --", image.display())]
    NoCommand {
        /// The image's layout.
        image: PathBuf,
    },
    /// The virtual machine could not be started or reached.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The output directory is in use.
    #[error("run: {} is in use by another run: wait for it, or choose another directory with --out", dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
    },
    /// The agent refused a call that every guest must support, or its connection broke while the guest went on.
    #[error("agent failed in step {step:?}: {source}; end of the console:\n{console_tail}")]
    Agent {
        /// The step of the run.
        step: &'static str,
        /// The agent's error.
        source: Box<AgentError>,
        /// The end of the console.
        console_tail: String,
        /// The boot record from the console.
        record: Option<Box<BootRecord>>,
    },
    /// The guest exited early.
    #[error("guest exited {} ms after its start, in step {step:?}: {why}", uptime.as_millis())]
    Ended {
        /// The step of the run.
        step: &'static str,
        /// Time from QEMU's start to its exit.
        uptime: Duration,
        /// The boot record's failure, or the end of the console.
        why: String,
        /// The boot record from the console.
        record: Option<Box<BootRecord>>,
    },
    /// The guest runs and makes no progress.
    #[error(
        "guest hangs in step {step:?}: no result within {} ms (deadline {deadline:?}); end of the console:\n{console_tail}",
        limit.as_millis()
    )]
    Hangs {
        /// The step of the run.
        step: &'static str,
        /// The name of the deadline, as in `--deadline NAME=SECONDS`.
        deadline: &'static str,
        /// Time waited.
        limit: Duration,
        /// The end of the console.
        console_tail: String,
        /// The boot record from the console.
        record: Option<Box<BootRecord>>,
    },
}

impl RunError {
    /// Returns the partial boot record, if the error has one.
    #[must_use]
    pub fn record(&self) -> Option<&BootRecord> {
        match self {
            Self::Ended { record, .. } | Self::Hangs { record, .. } | Self::Agent { record, .. } => record.as_deref(),
            _ => None,
        }
    }
}
