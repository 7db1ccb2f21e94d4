//! Applies GPU settings between attach and ready.

use std::os::fd::BorrowedFd;

use firstlight_boot_record::GpuPhase;
use firstlight_gpu_settings_protocol::{Outcome, SettingsRequest};
use firstlight_pci::Address;
use rustix::process::{Pid, WaitStatus};

use super::Supervisor;
use super::gpus::SETTINGS;
use crate::agent::describe_exit;
use crate::clock::{micros, now_us};
use crate::daemons::cgroup::PARENT;
use crate::executor::End;
use crate::nodes::{self, Mknod};
use crate::settings::{OutputLine, Run, missing};
use crate::unit_id::UnitId;

/// Settings runs and the GPUs that wait for them.
#[derive(Debug, Default)]
pub(super) struct Settings {
    rows: Vec<Row>,
    /// GPUs, by their places, that are attached and wait for the unit to begin.
    waiting: Vec<usize>,
    /// Whether the unit has begun: a GPU that attaches later has a run of its own.
    begun: bool,
    /// How many runs there were.
    runs: usize,
}

/// A run and its GPUs.
#[derive(Debug)]
struct Row {
    run: Run,
    gpus: Vec<usize>,
    /// Its unit, for the first one.
    unit: Option<UnitId>,
    deadline_us: u64,
    /// Errors besides those of the run.
    strange: Vec<String>,
}

impl Settings {
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.rows.iter().map(|row| row.deadline_us).min()
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rows.iter().filter_map(|row| row.run.descriptor())
    }
}

impl Supervisor {
    fn is_confidential(&self) -> bool {
        self.decision.as_ref().is_some_and(|decision| decision.confidential.is_some())
    }

    /// What has to be set of these GPUs, if anything.
    fn settings_of(&self, gpus: &[(u32, Address)]) -> Option<SettingsRequest> {
        self.params.settings.request_for(gpus, self.is_confidential())
    }

    /// Returns whether an attached GPU has to wait for its settings;
    /// [`Supervisor::serve`] then makes it ready.
    pub(super) fn needs_settings(&self, gpu: usize) -> bool {
        let gpu = self.gpus.row(gpu).map(|row| (row.index, row.pci));
        gpu.is_some_and(|gpu| self.settings_of(&[gpu]).is_some())
    }

    /// A GPU is attached and waits.
    pub(super) fn wait_for_settings(&mut self, gpu: usize) {
        if !self.settings.begun {
            self.settings.waiting.push(gpu);
            return;
        }
        if let Err(text) = self.set(vec![gpu], None, Vec::new()) {
            self.recorder.event(now_us(), "gpu-settings-failed", "", &text);
            self.serve_after(&[gpu], |_| Some(text.clone()));
        }
    }

    /// Returns whether a GPU still waits; it may have been removed meanwhile.
    fn waits_for_settings(&self, gpu: usize) -> bool {
        self.gpus.row(gpu).is_some_and(|row| row.phase == GpuPhase::Attaching && row.step == SETTINGS)
    }

    /// Every GPU has attached or has been given up.
    pub(super) fn start_settings_unit(&mut self, unit: UnitId) {
        self.settings.begun = true;
        let mut gpus = std::mem::take(&mut self.settings.waiting);
        gpus.retain(|gpu| self.waits_for_settings(*gpu));
        let all = self.gpus.places();
        // Where GPUs may come later, so may those.
        let strange =
            if self.params.gpu_hotplug { Vec::new() } else { self.params.settings.settings_for_unknown_gpus(&all) };
        let strange: Vec<String> = strange
            .into_iter()
            .map(|name| {
                let there = match all.last() {
                    Some((last, _)) => format!("its GPUs are 0 to {last}, in PCI order"),
                    None => "it has none".to_owned(),
                };
                format!("{name} names a GPU that this guest does not have: {there}")
            })
            .collect();
        let end = if !gpus.is_empty() {
            match self.set(gpus.clone(), Some(unit), strange) {
                Ok(()) => return,
                Err(text) => {
                    self.serve_after(&gpus, |_| Some(text.clone()));
                    End::Failed(text)
                }
            }
        } else if strange.is_empty() {
            End::NotNeeded("nothing is asked of a GPU that is attached".to_owned())
        } else {
            End::Failed(strange.join("; "))
        };
        self.end_unit(unit, end);
    }

    /// The unit has ended, possibly skipped: GPUs attached later have their own run.
    pub(super) fn settings_unit_ended(&mut self) {
        self.settings.begun = true;
        for gpu in std::mem::take(&mut self.settings.waiting) {
            self.wait_for_settings(gpu);
        }
    }

    /// Starts the program for these GPUs.
    fn set(&mut self, gpus: Vec<usize>, unit: Option<UnitId>, strange: Vec<String>) -> Result<(), String> {
        let places: Vec<_> =
            gpus.iter().filter_map(|gpu| self.gpus.row(*gpu)).map(|row| (row.index, row.pci)).collect();
        let work = self.settings_of(&places).unwrap_or_default();
        if let Some(text) = missing(&self.root) {
            return Err(format!(
                "GPU settings were requested but not applied: {text}, with NVML (libnvidia-ml) and the C library that it needs"
            ));
        }
        self.settings.runs += 1;
        let name = format!("gpu-settings-{}", self.settings.runs);
        let run = Run::start(&self.root, &self.root.path(PARENT), &name, &work)?;
        let deadline_us = now_us().saturating_add(micros(self.params.settings_deadline));
        self.settings.rows.push(Row { run, gpus, unit, deadline_us, strange });
        Ok(())
    }

    /// Takes what runs have said, and ends those that are past their deadline.
    pub(super) fn poll_settings(&mut self) {
        for at in 0..self.settings.rows.len() {
            self.handle_settings_output(at, false);
        }
        let now = now_us();
        while let Some(at) = self.settings.rows.iter().position(|row| row.deadline_us <= now) {
            // First, so that what it says comes to an end.
            self.settings.rows[at].run.kill();
            self.handle_settings_output(at, true);
            let row = self.settings.rows.remove(at);
            let limit = self.params.settings_deadline;
            let why = format!("killed, as it did not end within {limit:?}, firstlight.gpu-settings-deadline");
            self.settings_ended(&row, Some(&why), End::TimedOut);
        }
        self.drain();
    }

    /// A child has ended; `false` if it was none of these.
    pub(super) fn settings_process_ended(&mut self, pid: Pid, status: WaitStatus) -> bool {
        let Some(at) = self.settings.rows.iter().position(|row| row.run.is(pid)) else { return false };
        // Kill remaining processes in its cgroup.
        self.settings.rows[at].run.kill();
        self.handle_settings_output(at, true);
        let row = self.settings.rows.remove(at);
        let reported = status.exit_status() == Some(1) && !row.run.tally.complaints().is_empty();
        let words = describe_exit(status.exit_status(), status.terminating_signal());
        let why = if status.exit_status() == Some(0) || reported { None } else { Some(words) };
        self.settings_ended(&row, why.as_deref(), End::Failed);
        true
    }

    fn handle_settings_output(&mut self, at: usize, all: bool) {
        let now = now_us();
        let Some(row) = self.settings.rows.get_mut(at) else { return };
        for said in row.run.listen(all) {
            match said {
                OutputLine::Text(words) => self.log_daemon_line(&crate::log::Source::Daemon("gpu-settings"), words),
                // How far it is matters only if it does not end.
                OutputLine::Step(line) if line.result == Outcome::Started => {}
                OutputLine::Step(line) => {
                    let what = match line.result {
                        Outcome::Failed => "gpu-setting-failed",
                        Outcome::Done => "gpu-setting",
                        _ => "gpu-setting-unchanged",
                    };
                    let detail = format!("{}: {} ({} us)", line.step, line.detail, line.elapsed_us);
                    self.recorder.event(now, what, &line.object, &detail);
                }
            }
        }
    }

    /// A run is over: its unit ends, and its GPUs are served.
    fn settings_ended(&mut self, row: &Row, why: Option<&str>, failed: fn(String) -> End) {
        let tally = &row.run.tally;
        let mut complaints = row.strange.clone();
        complaints.extend(tally.complaints());
        let words = match row.run.last_line() {
            "" => String::new(),
            line => format!("; its last line: {line:?}"),
        };
        complaints.extend(why.map(|why| format!("firstlight-gpu-settings: {why}{words}")));
        let text = complaints.join("; ");
        // Only steps that were reported as done count as done.
        let undivided = |pci: Address| {
            let pci = pci.to_string();
            let cause = || tally.failure_of(&pci).unwrap_or(&text).to_owned();
            (!tally.is_divided(&pci)).then(cause)
        };
        self.serve_after(&row.gpus, undivided);
        if let Some(unit) = row.unit {
            let end = if complaints.is_empty() { End::Ok(tally.words()) } else { failed(text.clone()) };
            self.end_unit(unit, end);
        } else if !complaints.is_empty() {
            self.recorder.event(now_us(), "gpu-settings-failed", "", &text);
        }
    }

    /// Publishes GPUs whose run is over, except those without the requested MIG
    /// layout, as requested instances do not exist.
    fn serve_after(&mut self, gpus: &[usize], undivided: impl Fn(Address) -> Option<String>) {
        // Instances have come or gone, and with them the driver's capabilities.
        if let Err(error) = nodes::make_capabilities(&self.root, &mut Mknod) {
            self.recorder.event(now_us(), "device-nodes-skipped", "", &error.to_string());
        }
        for gpu in gpus {
            let place = self.gpus.row(*gpu).map(|row| (row.index, row.pci));
            let Some((index, pci)) = place.filter(|_| self.waits_for_settings(*gpu)) else { continue };
            let asked = self.params.settings.mig.of(index, pci).is_some();
            match undivided(pci).filter(|_| asked) {
                Some(why) => self.fail_undivided(*gpu, &why),
                None => self.serve(*gpu),
            }
        }
    }
}
