//! Boots a lab guest and runs one container in it, for `run`, `bench` and `soak`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use firstlight::run::{self, ContainerCommand, Deadlines, Outputs, Progress, Report, Run, RunError};
use firstlight_lab::{Guest, Lab};
use firstlight_vm::{Interrupted, or_interrupted};

/// Values of the kernel parameter `firstlight.attach`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Attach {
    /// All GPUs at once.
    Parallel,
    /// One after the other.
    Serial,
    /// All at once; those that failed are retried one after the other.
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

/// The guest to boot and the container to run in it.
#[derive(Debug, Clone)]
pub(crate) struct Boot {
    pub(crate) guest: Guest,
    /// CDI names of GPUs for the container.
    pub(crate) devices: Vec<String>,
    /// What the container runs.
    pub(crate) command: ContainerCommand,
    /// An OCI image layout; the lab's busybox image if none.
    pub(crate) image: Option<PathBuf>,
    pub(crate) keep: bool,
}

/// Result of a boot.
pub(crate) enum BootResult {
    Report(Box<Report>),
    Failed(RunError),
    Interrupted(Interrupted),
}

/// Boots a guest and runs its container; `report` receives its steps and the container's output.
pub(crate) fn boot(
    lab: &Lab,
    boot: &Boot,
    outputs: &Outputs,
    report: &mut dyn FnMut(Progress<'_>),
) -> anyhow::Result<BootResult> {
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
            anyhow::Ok(run::run(&plan, report).await)
        };
        Ok(match or_interrupted(work).await {
            Err(signal) => BootResult::Interrupted(signal),
            Ok(result) => match result? {
                Ok(report) => BootResult::Report(Box::new(report)),
                Err(error) => BootResult::Failed(error),
            },
        })
    })
}

/// The default deadlines, with CreateContainer's extended by twice the configured attach times of all GPUs.
fn deadlines(guest: &Guest) -> Deadlines {
    let attach: u64 = guest.devices.iter().filter_map(|gpu| gpu.attach_ms).map(u64::from).sum();
    let default = Deadlines::default();
    Deadlines { create: default.create + Duration::from_millis(attach * 2), ..default }
}
