//! One guest, one container, and what happened when.

mod drive;
mod output;
mod report;
mod share;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use firstlight_boot_record::BootRecord;
use firstlight_oci::OciError;
use firstlight_vm::{Machine, VmError};

pub use drive::run;
pub use output::{Outputs, print};
pub use report::{Container, GpuReport, Report, Timeline};

use crate::agent::AgentError;

/// What to run.
#[derive(Debug, Clone)]
pub struct Run {
    /// The guest; its shared directory is added by the run.
    pub machine: Machine,
    /// The image's OCI layout.
    pub image: PathBuf,
    /// CDI device names of kind `nvidia.com/gpu`: indices, PCI addresses, `all`.
    pub devices: Vec<String>,
    /// The command; empty for the default one, which shows and probes GPUs.
    pub command: Vec<String>,
    /// Where the console's text goes.
    pub console_log: PathBuf,
    /// Bounds.
    pub deadlines: Deadlines,
    /// Leave the guest running after the container, until interrupted.
    pub keep: bool,
}

/// How long each part of a run may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// From QEMU's start to the agent's first answer.
    pub boot: Duration,
    /// One call to the agent that does not wait by its nature.
    pub call: Duration,
    /// Creating the container, its wait for GPUs included.
    pub create: Duration,
    /// The container's life.
    pub container: Duration,
    /// From the request to power off to QEMU's end.
    pub power_off: Duration,
}

impl Default for Deadlines {
    /// For a loaded machine without virtualisation.
    fn default() -> Self {
        Self {
            boot: Duration::from_secs(60),
            call: Duration::from_secs(30),
            create: Duration::from_secs(150),
            container: Duration::from_secs(120),
            power_off: Duration::from_secs(30),
        }
    }
}

/// Why a run gave no report. What the guest itself reported before is kept.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A file or directory of the run could not be made.
    #[error("run: {path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The image cannot be used.
    #[error(transparent)]
    Image(#[from] OciError),
    /// The virtual machine could not be started or reached.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The agent refused something that every guest must do.
    #[error("agent: {0}; the console's last words:\n{1}")]
    Agent(AgentError, String),
    /// The guest ended before it should.
    #[error("guest ended {} ms after its start, in step {step:?}: {why}", lived.as_millis())]
    Ended {
        /// What the run was doing.
        step: &'static str,
        /// QEMU's life.
        lived: Duration,
        /// The boot record's failure, or the console's last words.
        why: String,
        /// The record as the console told it.
        record: Option<Box<BootRecord>>,
    },
    /// The guest is alive and does not go on.
    #[error("guest hangs in step {step:?}: nothing for {} ms; the console's last words:\n{last_words}", elapsed.as_millis())]
    Hangs {
        /// What the run was doing.
        step: &'static str,
        /// How long it waited.
        elapsed: Duration,
        /// The end of the console.
        last_words: String,
        /// The record as the console told it.
        record: Option<Box<BootRecord>>,
    },
}

impl RunError {
    /// The boot record as far as it got, for those errors that have one.
    #[must_use]
    pub fn record(&self) -> Option<&BootRecord> {
        match self {
            Self::Ended { record, .. } | Self::Hangs { record, .. } => record.as_deref(),
            _ => None,
        }
    }
}
