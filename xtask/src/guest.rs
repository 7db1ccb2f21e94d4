//! One boot of a lab guest with one container, for `run` and for the benches.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use firstlight::run::{self, Deadlines, Outputs, Report, Run, RunError};
use firstlight_lab::{Guest, Lab};
use firstlight_vm::{Interrupted, or_interrupted};

/// `firstlight.attach`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Attach {
    /// All GPUs at once.
    Parallel,
    /// One after the other.
    Serial,
    /// All at once, then one after the other those that failed.
    Auto,
}

impl Attach {
    pub(crate) fn parameter(self) -> &'static str {
        match self {
            Self::Parallel => "firstlight.attach=parallel",
            Self::Serial => "firstlight.attach=serial",
            Self::Auto => "firstlight.attach=auto",
        }
    }
}

/// What to boot and what to run in it.
#[derive(Debug, Clone)]
pub(crate) struct Boot {
    pub(crate) guest: Guest,
    /// CDI names of GPUs for the container.
    pub(crate) devices: Vec<String>,
    /// Empty for the default probe.
    pub(crate) command: Vec<String>,
    /// An OCI layout; the lab's busybox if none.
    pub(crate) image: Option<PathBuf>,
    pub(crate) keep: bool,
}

/// How a boot went.
pub(crate) enum Ended {
    Report(Box<Report>),
    Failed(RunError),
    Interrupted(Interrupted),
}

/// Boots and runs; `say` gets a line per step.
pub(crate) fn boot(lab: &Lab, boot: &Boot, outputs: &Outputs, say: &mut dyn FnMut(&str)) -> anyhow::Result<Ended> {
    let _lock = outputs.prepare()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    runtime.block_on(async {
        let work = async {
            let prepared = lab.guest(&boot.guest).context("start the synthetic GPUs")?;
            let plan = Run {
                machine: prepared.machine.clone(),
                image: boot.image.clone().unwrap_or_else(|| lab.busybox_image.clone()),
                devices: boot.devices.clone(),
                command: boot.command.clone(),
                console_log: outputs.console_log(),
                deadlines: deadlines(&boot.guest),
                keep: boot.keep,
            };
            anyhow::Ok(run::run(&plan, say).await)
        };
        Ok(match or_interrupted(work).await {
            Err(signal) => Ended::Interrupted(signal),
            Ok(result) => match result? {
                Ok(report) => Ended::Report(Box::new(report)),
                Err(error) => Ended::Failed(error),
            },
        })
    })
}

/// The usual bounds, longer by what the GPUs are told to take one after the other.
fn deadlines(guest: &Guest) -> Deadlines {
    let attach: u64 = guest.devices.iter().filter_map(|gpu| gpu.attach_ms).map(u64::from).sum();
    let usual = Deadlines::default();
    Deadlines { create: usual.create + Duration::from_millis(attach * 2), ..usual }
}
