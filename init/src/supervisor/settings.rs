//! Runs of the GPU settings program, after the attach of a GPU and before it is ready.

use std::os::fd::BorrowedFd;

use firstlight_gpu_settings_protocol::Outcome;
use firstlight_pci::Address;
use rustix::process::{Pid, WaitStatus};

use super::effect::Effect;
use super::guest::Guest;
use crate::agent::describe_exit;
use crate::clock::micros;
use crate::daemons::cgroup::PARENT;
use crate::executor::End;
use crate::log::Source;
use crate::settings::{OutputLine, Run, Tally, missing};
use crate::unit_id::UnitId;

/// The index and the PCI address of a GPU.
pub(super) type Place = (u32, Address);

/// Settings runs, and the GPUs that wait for them.
#[derive(Debug, Default)]
pub(super) struct SettingsRuns {
    rows: Vec<Row>,
    /// GPUs that are attached and wait for the unit to start.
    waiting: Vec<Address>,
    /// Whether the unit has started: a GPU that attaches later gets its own run.
    begun: bool,
    /// Number of runs that were started, which makes their cgroup names unique.
    runs: usize,
}

/// A settings run and its GPUs.
#[derive(Debug)]
struct Row {
    run: Run,
    gpus: Vec<Address>,
    /// Whether this is the run of the unit.
    of_unit: bool,
    deadline_us: u64,
    /// Errors that were known before the run, such as settings for unknown GPUs.
    errors: Vec<String>,
}

impl SettingsRuns {
    /// Returns when [`SettingsRuns::poll`] is due if no descriptor is ready, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.rows.iter().map(|row| row.deadline_us).min()
    }

    /// Returns the descriptors to poll.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rows.iter().filter_map(|row| row.run.descriptor())
    }

    /// Applies the settings of an attached GPU: in the unit's run, or in a run of its own if the
    /// unit has started.
    pub(super) fn apply(&mut self, now: u64, gpu: Place, guest: &Guest) -> Vec<Effect> {
        if !self.begun {
            self.waiting.push(gpu.1);
            return Vec::new();
        }
        match self.start_run(now, &[gpu], false, Vec::new(), guest) {
            Ok(()) => Vec::new(),
            Err(text) => {
                let mut effects = vec![Effect::event("gpu-settings-failed", "", text.clone())];
                effects.extend(applied(&[gpu.1], |_| Some(text.clone())));
                effects
            }
        }
    }

    /// Starts the unit: the attach of each GPU has ended. `gpus` are all GPUs; `attached` are those
    /// that still wait for settings.
    pub(super) fn start_unit(&mut self, now: u64, gpus: &[Place], attached: &[Place], guest: &Guest) -> Vec<Effect> {
        self.begun = true;
        let waiting = std::mem::take(&mut self.waiting);
        let place = |pci: &Address| attached.iter().find(|(_, other)| other == pci).copied();
        let waiting: Vec<Place> = waiting.iter().filter_map(place).collect();
        let errors = unknown_gpus(gpus, guest);
        if waiting.is_empty() {
            let end = if errors.is_empty() {
                End::NotNeeded("nothing is asked of a GPU that is attached".to_owned())
            } else {
                End::Failed(errors.join("; "))
            };
            return vec![Effect::EndUnit(UnitId::GpuSettings, end)];
        }
        match self.start_run(now, &waiting, true, errors, guest) {
            Ok(()) => Vec::new(),
            Err(text) => {
                let waiting: Vec<Address> = waiting.into_iter().map(|(_, pci)| pci).collect();
                let mut effects = applied(&waiting, |_| Some(text.clone()));
                effects.push(Effect::EndUnit(UnitId::GpuSettings, End::Failed(text)));
                effects
            }
        }
    }

    /// Handles the end of the unit, which may have been skipped: each waiting GPU gets a run of its
    /// own.
    pub(super) fn unit_ended(&mut self) -> Vec<Effect> {
        self.begun = true;
        std::mem::take(&mut self.waiting).into_iter().map(Effect::ApplySettings).collect()
    }

    fn start_run(
        &mut self,
        now: u64,
        gpus: &[Place],
        of_unit: bool,
        errors: Vec<String>,
        guest: &Guest,
    ) -> Result<(), String> {
        let request = guest.settings_for(gpus).unwrap_or_default();
        if let Some(text) = missing(guest.root()) {
            return Err(format!(
                "GPU settings were requested but not applied: {text}, with NVML (libnvidia-ml) and the C library that it needs"
            ));
        }
        self.runs += 1;
        let name = format!("gpu-settings-{}", self.runs);
        let run = Run::start(guest.root(), &guest.root().path(PARENT), &name, &request)?;
        let deadline_us = now.saturating_add(micros(guest.params().settings_deadline));
        let gpus = gpus.iter().map(|(_, pci)| *pci).collect();
        self.rows.push(Row { run, gpus, of_unit, deadline_us, errors });
        Ok(())
    }

    /// Processes the output of all runs, and kills the runs whose deadline has expired.
    pub(super) fn poll(&mut self, now: u64, guest: &Guest) -> Vec<Effect> {
        let mut effects: Vec<Effect> = self.rows.iter_mut().flat_map(|row| row.output(false)).collect();
        while let Some(at) = self.rows.iter().position(|row| row.deadline_us <= now) {
            let limit = guest.params().settings_deadline;
            let why = format!("killed, as it did not end within {limit:?}, firstlight.gpu-settings-deadline");
            let mut row = self.rows.remove(at);
            effects.extend(row.kill());
            effects.extend(row.ended(Some(&why), End::TimedOut));
        }
        effects
    }

    /// Handles the exit of a child; returns `None` if no run started the process.
    pub(super) fn process_ended(&mut self, pid: Pid, status: WaitStatus) -> Option<Vec<Effect>> {
        let at = self.rows.iter().position(|row| row.run.is(pid))?;
        let mut row = self.rows.remove(at);
        let mut effects = row.kill();
        let reported = status.exit_status() == Some(1) && !row.run.tally.complaints().is_empty();
        let words = describe_exit(status.exit_status(), status.terminating_signal());
        let why = if status.exit_status() == Some(0) || reported { None } else { Some(words) };
        effects.extend(row.ended(why.as_deref(), End::Failed));
        Some(effects)
    }
}

impl Row {
    /// Kills all processes of the run and reads the rest of its output.
    fn kill(&mut self) -> Vec<Effect> {
        // Killed before the read: the read continues until end of file or EAGAIN, which a process
        // that keeps writing could delay forever.
        self.run.kill();
        self.output(true)
    }

    fn output(&mut self, all: bool) -> Vec<Effect> {
        self.run.listen(all).into_iter().filter_map(line_effect).collect()
    }

    /// Ends the run: its GPUs are published or excluded, and its unit ends.
    fn ended(self, why: Option<&str>, failed: fn(String) -> End) -> Vec<Effect> {
        let errors = errors_of(self.errors, &self.run.tally, why, self.run.last_line());
        run_ended(&self.gpus, &self.run.tally, &errors, self.of_unit, failed)
    }
}

/// Returns an error for each setting that names a GPU which the guest does not have.
fn unknown_gpus(gpus: &[Place], guest: &Guest) -> Vec<String> {
    // With GPU hotplug, these GPUs may be added later.
    if guest.params().gpu_hotplug {
        return Vec::new();
    }
    let there = match gpus.last() {
        Some((last, _)) => format!("its GPUs are 0 to {last}, in PCI order"),
        None => "it has none".to_owned(),
    };
    let unknown = guest.params().settings.settings_for_unknown_gpus(gpus).into_iter();
    unknown.map(|name| format!("{name} names a GPU that this guest does not have: {there}")).collect()
}

/// Returns the effect of a line of the program's output.
fn line_effect(line: OutputLine) -> Option<Effect> {
    match line {
        OutputLine::Text(text) => Some(Effect::ProgramLine(Source::Daemon("gpu-settings"), text)),
        // The start of a step is only reported if the step does not end.
        OutputLine::Step(line) if line.result == Outcome::Started => None,
        OutputLine::Step(line) => {
            let kind = match line.result {
                Outcome::Failed => "gpu-setting-failed",
                Outcome::Done => "gpu-setting",
                _ => "gpu-setting-unchanged",
            };
            let detail = format!("{}: {} ({} us)", line.step, line.detail, line.elapsed_us);
            Some(Effect::event(kind, line.object, detail))
        }
    }
}

/// Returns all errors of a run: those known before the run, those of its steps, and the reason of
/// its failure.
fn errors_of(mut errors: Vec<String>, tally: &Tally, why: Option<&str>, last_line: &str) -> Vec<String> {
    errors.extend(tally.complaints());
    let words = match last_line {
        "" => String::new(),
        line => format!("; its last line: {line:?}"),
    };
    errors.extend(why.map(|why| format!("firstlight-gpu-settings: {why}{words}")));
    errors
}

/// Returns the effects of the end of a run.
fn run_ended(
    gpus: &[Address],
    tally: &Tally,
    errors: &[String],
    of_unit: bool,
    failed: fn(String) -> End,
) -> Vec<Effect> {
    let text = errors.join("; ");
    let mut effects = applied(gpus, |pci| {
        let pci = pci.to_string();
        // Only a reported result counts as success; a step without a result may not have run.
        (!tally.is_divided(&pci)).then(|| tally.failure_of(&pci).unwrap_or(&text).to_owned())
    });
    if of_unit {
        let end = if errors.is_empty() { End::Ok(tally.words()) } else { failed(text) };
        effects.push(Effect::EndUnit(UnitId::GpuSettings, end));
    } else if !errors.is_empty() {
        effects.push(Effect::event("gpu-settings-failed", "", text));
    }
    effects
}

/// Returns the effects for GPUs whose run has ended; `undivided` returns the reason why a GPU has
/// no MIG instances.
fn applied(gpus: &[Address], undivided: impl Fn(Address) -> Option<String>) -> Vec<Effect> {
    // The run may have created or destroyed MIG instances, and with them the driver's capabilities.
    let published = gpus.iter().map(|pci| Effect::SettingsApplied(*pci, undivided(*pci)));
    std::iter::once(Effect::MakeCapabilities).chain(published).collect()
}

#[cfg(test)]
mod tests {
    use firstlight_gpu_settings_protocol::StepReport;

    use super::super::guest::testing::guest;
    use super::*;

    fn pci(bus: u8) -> Address {
        format!("0000:{bus:02x}:00.0").parse().unwrap()
    }

    fn step(object: &str, result: Outcome) -> StepReport {
        StepReport { object: object.into(), step: "mig".into(), result, elapsed_us: 7, detail: "x".into() }
    }

    #[test]
    fn gpus_that_attach_before_the_unit_wait_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let guest = guest(dir.path(), "firstlight.mig=all:on", &[1, 2]);
        let mut runs = SettingsRuns::default();
        let places = [(0, pci(1)), (1, pci(2))];
        assert_eq!(runs.apply(1, places[0], &guest), []);
        assert_eq!(runs.apply(1, places[1], &guest), []);
        // The second GPU was removed before the start of the unit. The image lacks the settings
        // program.
        let effects = runs.start_unit(2, &places, &places[..1], &guest);
        assert_eq!(effects[0], Effect::MakeCapabilities);
        assert!(matches!(&effects[1], Effect::SettingsApplied(gpu, Some(_)) if *gpu == pci(1)));
        assert!(
            matches!(&effects[2], Effect::EndUnit(UnitId::GpuSettings, End::Failed(text)) if text.contains("NVML")),
            "{effects:?}"
        );
        let effects = runs.apply(3, places[1], &guest);
        assert!(matches!(&effects[0], Effect::Event { kind: "gpu-settings-failed", .. }));
        assert_eq!(effects.len(), 3);
    }

    #[test]
    fn unit_without_settings_is_not_needed_and_unknown_gpus_fail_it() {
        let dir = tempfile::tempdir().unwrap();
        let end = |line: &str| {
            let effects = SettingsRuns::default().start_unit(1, &[(0, pci(1))], &[], &guest(dir.path(), line, &[1]));
            let [Effect::EndUnit(UnitId::GpuSettings, end)] = &effects[..] else { panic!("{effects:?}") };
            end.clone()
        };
        assert!(matches!(end(""), End::NotNeeded(_)));
        let End::Failed(text) = end("firstlight.mig=4:on") else { panic!() };
        assert!(text.contains("does not have: its GPUs are 0 to 0, in PCI order"), "{text}");
        assert!(matches!(end("firstlight.mig=4:on firstlight.gpu-hotplug=on"), End::NotNeeded(_)));
    }

    #[test]
    fn skipped_unit_gives_waiting_gpus_their_own_run() {
        let dir = tempfile::tempdir().unwrap();
        let mut runs = SettingsRuns::default();
        runs.apply(1, (0, pci(1)), &guest(dir.path(), "", &[1]));
        assert_eq!(runs.unit_ended(), [Effect::ApplySettings(pci(1))]);
        assert_eq!(runs.unit_ended(), []);
    }

    #[test]
    fn only_reported_steps_confirm_mig_instances() {
        let mut tally = Tally::default();
        tally.take(&step("0000:01:00.0", Outcome::Done));
        tally.take(&step("0000:02:00.0", Outcome::Failed));
        let errors = errors_of(Vec::new(), &tally, Some("signal 9"), "oops");
        assert_eq!(errors[1], "firstlight-gpu-settings: signal 9; its last line: \"oops\"");
        let effects = run_ended(&[pci(1), pci(2), pci(3)], &tally, &errors, true, End::TimedOut);
        assert_eq!(effects[1], Effect::SettingsApplied(pci(1), None));
        assert_eq!(effects[2], Effect::SettingsApplied(pci(2), Some("x".into())));
        assert_eq!(effects[3], Effect::SettingsApplied(pci(3), Some(errors.join("; "))));
        assert_eq!(effects[4], Effect::EndUnit(UnitId::GpuSettings, End::TimedOut(errors.join("; "))));
        let effects = run_ended(&[], &tally, &[], false, End::Failed);
        assert_eq!(effects, [Effect::MakeCapabilities]);
    }

    #[test]
    fn steps_are_events_when_they_end() {
        assert_eq!(line_effect(OutputLine::Step(step("a", Outcome::Started))), None);
        let effect = line_effect(OutputLine::Step(step("a", Outcome::Done)));
        assert_eq!(effect, Some(Effect::event("gpu-setting", "a", "mig: x (7 us)")));
    }
}
