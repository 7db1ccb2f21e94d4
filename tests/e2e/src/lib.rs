//! End-to-end scenarios in the lab.
//!
//! A [`Scenario`] is a guest, a container for it and deadlines; [`Scenario::go`]
//! runs it as `firstlight run` would. The scenarios themselves are in `tests/`.
#![forbid(unsafe_code)]
#![expect(clippy::expect_used, reason = "a scenario whose setup fails has failed")]

mod shared;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use firstlight::run::{ContainerCommand, Deadlines, Report, Run, RunError, run};
use firstlight_boot_record::{BootRecord, Gpu};
use firstlight_lab::{Guest, Lab};
use firstlight_vm::{Device, Vm};

pub use shared::{Shared, SharedGuest};

/// Returns the lab, prepared once for all scenarios of a program.
///
/// # Panics
/// The lab cannot be prepared.
pub fn lab() -> &'static Lab {
    static LAB: OnceLock<Lab> = OnceLock::new();
    LAB.get_or_init(|| Lab::prepare(true).expect("the lab is ready"))
}

/// A guest, its container, and deadlines.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The guest.
    pub guest: Guest,
    /// CDI names of the GPUs that the container requests.
    pub devices: Vec<String>,
    /// What the container runs.
    pub command: ContainerCommand,
    /// The container's OCI image layout; busybox if `None`.
    pub image: Option<PathBuf>,
    /// Deadlines of the run's steps.
    pub deadlines: Deadlines,
}

impl Scenario {
    /// Returns a scenario of a guest with `gpus` H100s that attach in 300 ms each.
    #[must_use]
    pub fn gpus(gpus: usize) -> Self {
        Self::guest(Guest::with_gpus(gpus, Duration::from_millis(300)))
    }

    /// Returns a scenario of `guest`, with the probe as its container, which requests no GPU.
    #[must_use]
    pub fn guest(guest: Guest) -> Self {
        Self {
            guest,
            devices: Vec::new(),
            command: ContainerCommand::Probe,
            image: None,
            deadlines: Deadlines::default(),
        }
    }

    /// Requests GPUs for the container.
    #[must_use]
    pub fn request(mut self, devices: &[&str]) -> Self {
        self.devices = devices.iter().map(ToString::to_string).collect();
        self
    }

    /// Runs a command instead of the probe.
    #[must_use]
    pub fn command(mut self, command: &[&str]) -> Self {
        self.command = ContainerCommand::Arguments(command.iter().map(ToString::to_string).collect());
        self
    }

    /// Adds a kernel parameter.
    #[must_use]
    pub fn parameter(mut self, parameter: &str) -> Self {
        self.guest.parameters.push(parameter.to_owned());
        self
    }

    /// Boots the guest, runs the container, and powers off.
    ///
    /// # Errors
    /// The run's errors.
    ///
    /// # Panics
    /// The synthetic GPUs do not start.
    pub fn go(&self) -> Result<Report, RunError> {
        self.go_with_console().0
    }

    /// Runs [`Scenario::go`]; returns its result and the console's output.
    ///
    /// # Panics
    /// The synthetic GPUs do not start.
    pub fn go_with_console(&self) -> (Result<Report, RunError>, String) {
        let lab = lab();
        let prepared = lab.guest(&self.guest).expect("synthetic GPUs start");
        let dir = tempfile::tempdir().expect("a directory for the console");
        let console_log = dir.path().join("console.log");
        let plan = Run {
            machine: prepared.machine.clone(),
            image: self.image.clone().unwrap_or_else(|| lab.busybox_image.clone()),
            devices: self.devices.clone(),
            command: self.command.clone(),
            console_log: console_log.clone(),
            deadlines: self.deadlines,
            keep: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("tokio starts");
        let result = runtime.block_on(run(&plan, &mut |progress| println!("  {progress}")));
        let console = std::fs::read(&console_log).unwrap_or_default();
        (result, String::from_utf8_lossy(&console).into_owned())
    }

    /// Boots the guest without a container and runs `watch` beside it; returns the
    /// console's output.
    ///
    /// # Panics
    /// The machine does not start.
    pub fn watched(&self, watch: impl AsyncFnOnce(&mut Vm)) -> String {
        self.watched_with(async |vm, _| watch(vm).await)
    }

    /// Like [`Scenario::watched`]; `watch` also gets the devices to hot-plug, each with its port.
    ///
    /// # Panics
    /// The machine does not start.
    pub fn watched_with(&self, watch: impl AsyncFnOnce(&mut Vm, &[(usize, Device)])) -> String {
        let prepared = lab().guest(&self.guest).expect("synthetic GPUs start");
        let dir = tempfile::tempdir().expect("a directory for the machine");
        let console_log = dir.path().join("console.log");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("tokio starts");
        runtime.block_on(async {
            let vm = Vm::start(&prepared.machine, dir.path(), &console_log).await;
            let mut vm = vm.expect("the machine starts");
            watch(&mut vm, &prepared.spare).await;
            vm.stop().await;
        });
        let console = std::fs::read(&console_log).unwrap_or_default();
        String::from_utf8_lossy(&console).into_owned()
    }
}

/// Returns the GPU with that index.
///
/// # Panics
/// The record has no such GPU.
#[must_use]
pub fn gpu(record: &BootRecord, index: u32) -> &Gpu {
    record.gpus.iter().find(|gpu| gpu.index == index).expect("the record has the GPU")
}
