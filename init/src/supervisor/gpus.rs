//! Attach of GPUs, from "found" to "ready".

use std::os::fd::OwnedFd;

use firstlight_boot_record::{Gpu, GpuPhase, Outcome};
use firstlight_pci::{Address, Function, Kind};

use super::{Message, Outbox, STACK, Supervisor};
use crate::attach::{Effect, Event, Group, Limits, Overdue, Policy};
use crate::cdi::{Catalogue, ReadyGpu};
use crate::clock::{micros, ms, now_us, thread_us};
use crate::executor::End;
use crate::hotplug::DriverState;
use crate::interrupts;
use crate::nodes::Minor;
use crate::open::{self, Answer, Refusal};
use crate::unit_id::UnitId;

/// The step of a GPU that waits for its settings.
pub(super) const SETTINGS: &str = "settings";

/// One GPU.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) row: Gpu,
    /// The unit that attaches it; none for one that was plugged in.
    unit: Option<UnitId>,
    pub(super) minor: Result<u32, String>,
    pub(super) driver_state: DriverState,
    /// For one that was plugged in: when the driver is to have taken it, µs.
    pub(super) bind_by: Option<u64>,
    /// For one that was plugged in: its attach is to begin.
    pub(super) begin: bool,
    attempt_us: u64,
    /// Interrupts of this attempt, when they were looked at.
    interrupts: u64,
    refusal: Option<Refusal>,
    pub(super) held: Option<OwnedFd>,
}

impl Entry {
    /// One that nothing has been done with.
    pub(super) fn found(index: u32, pci: Address, device: u16) -> Self {
        let row = Gpu {
            pci,
            index,
            device_id: device,
            minor: None,
            phase: GpuPhase::Found,
            step: "found".to_owned(),
            attempts: 0,
            start_us: None,
            end_us: None,
            attach_us: None,
            driver: None,
            detail: String::new(),
        };
        Self {
            row,
            unit: None,
            minor: Err("the driver's nodes were not made".to_owned()),
            driver_state: DriverState::Driven,
            bind_by: None,
            begin: false,
            attempt_us: 0,
            interrupts: 0,
            refusal: None,
            held: None,
        }
    }
}

/// All GPUs of this guest: those of the boot in PCI order, then those that were plugged in as they came.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    pub(super) entries: Vec<Entry>,
    group: Option<Group>,
    pub(super) catalogue: Catalogue,
    /// Those that go into the CDI file at the end of this turn of the loop.
    pending_ready: Vec<PendingReady>,
}

/// An attached GPU that is not published yet.
#[derive(Debug, Clone, Copy)]
struct PendingReady {
    gpu: usize,
    /// Whether the GPU had timed out; `None` if its unit has ended.
    late: Option<bool>,
}

impl Gpus {
    pub(super) fn addresses(&self) -> Vec<Address> {
        self.entries.iter().map(|entry| entry.row.pci).collect()
    }

    /// One GPU's row, by its place.
    pub(super) fn row(&self, gpu: usize) -> Option<&Gpu> {
        self.entries.get(gpu).map(|entry| &entry.row)
    }

    /// Index and address of each.
    pub(super) fn places(&self) -> Vec<(u32, Address)> {
        self.entries.iter().map(|entry| (entry.row.index, entry.row.pci)).collect()
    }

    pub(super) fn ready(&self) -> impl Iterator<Item = &Gpu> {
        self.entries.iter().map(|entry| &entry.row).filter(|row| row.phase == GpuPhase::Ready)
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        let attach = self.group.as_ref().and_then(Group::next_deadline);
        attach.into_iter().chain(self.entries.iter().filter_map(|entry| entry.bind_by)).min()
    }

    pub(super) fn take_minors(&mut self, minors: Vec<Minor>) {
        for (pci, minor) in minors {
            if let Some(entry) = self.entries.iter_mut().find(|entry| entry.row.pci == pci) {
                entry.row.minor = minor.as_ref().ok().copied();
                entry.minor = minor;
            }
        }
    }

    /// Takes all descriptors of attached GPUs.
    pub(super) fn take_held(&mut self) -> Vec<(Address, OwnedFd)> {
        self.entries.iter_mut().filter_map(|entry| Some((entry.row.pci, entry.held.take()?))).collect()
    }
}

impl Supervisor {
    /// Creates an entry and an attach unit for each GPU function.
    pub(super) fn gpus_found(&mut self) {
        let functions = self.functions.iter().filter(|function| function.kind() == Some(Kind::Gpu));
        let found = |(index, function): (usize, &Function)| {
            Entry::found(u32::try_from(index).unwrap_or(u32::MAX), function.address, function.device)
        };
        let entries: Vec<Entry> = functions.enumerate().map(found).collect();
        let addresses: Vec<Address> = entries.iter().map(|entry| entry.row.pci).collect();
        self.boot.found_gpus(now_us(), &addresses);
        for mut entry in entries {
            let unit = UnitId::GpuAttach(entry.row.pci);
            entry.unit = Some(unit);
            self.recorder.gpu(entry.row.clone());
            self.write_unit(unit);
            self.gpus.entries.push(entry);
        }
    }

    /// The scan has ended, well or not: from now on the list of GPUs says something.
    pub(super) fn scan_ended(&mut self) {
        self.scanned = true;
        self.publish_gpus();
    }

    /// A GPU's unit may start.
    pub(super) fn start_gpu_unit(&mut self, unit: UnitId) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.unit == Some(unit)) else { return };
        if let Some(decision) = self.decision.as_ref().filter(|decision| !decision.attach) {
            let why = format!("mode {}: {}", decision.mode.name, decision.mode.reason);
            self.end_unit(unit, End::NotNeeded(why));
            return;
        }
        if let Err(text) = &self.gpus.entries[gpu].minor {
            let text = text.clone();
            self.read_whole_log();
            let detail = self.sentence(gpu, "nodes", &text);
            self.change(gpu, |row| {
                row.phase = GpuPhase::Failed;
                "nodes".clone_into(&mut row.step);
                row.end_us = Some(now_us());
                row.detail = detail;
            });
            self.settle(gpu, End::Failed);
            return;
        }
        self.make_group();
        self.step_group(Event::Begin(gpu));
    }

    fn make_group(&mut self) {
        let policy = self.attach_policy();
        let (silence_us, whole_us) = (micros(self.params.attach_deadline), micros(self.params.attach_limit));
        let count = self.gpus.entries.len();
        self.gpus.group.get_or_insert_with(|| Group::new(policy, Limits { silence_us, whole_us }, count));
    }

    /// Begins with a GPU that was plugged in. If another one at its place is
    /// still in the driver, that one's end comes first.
    pub(super) fn begin_hotplugged(&mut self, gpu: usize) {
        if !self.gpus.entries.get(gpu).is_some_and(|entry| entry.begin) {
            return;
        }
        self.make_group();
        let free = self.gpus.group.as_mut().is_some_and(|group| group.renew(gpu));
        if free {
            self.gpus.entries[gpu].begin = false;
            self.step_group(Event::Begin(gpu));
        }
    }

    /// Marks the GPU of a skipped attach unit as failed.
    pub(super) fn gpu_unit_ended(&mut self, unit: UnitId) {
        let Some(slot) = self.boot.unit(unit).filter(|slot| slot.outcome == Outcome::Skipped) else { return };
        let step = match self.boot.cause(unit) {
            // With no driver needed, the mode is what decided.
            None | Some(UnitId::NvidiaModules) if slot.not_needed => "mode".to_owned(),
            Some(UnitId::NvidiaModules) => "module".to_owned(),
            cause => cause.map(|cause| cause.to_string()).unwrap_or_default(),
        };
        let detail = slot.detail.clone();
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.unit == Some(unit)) else { return };
        let words = if step == "module" {
            // A driver that does not take a GPU says why before the kernel says that it was not loaded.
            self.read_whole_log();
            self.last_message(gpu)
        } else {
            String::new()
        };
        self.change(gpu, |row| {
            row.phase = GpuPhase::Failed;
            row.step = step;
            row.end_us = Some(now_us());
            row.detail = format!("{}: {detail}{words}", row.pci);
        });
    }

    pub(super) fn gpu_opened(&mut self, gpu: usize) {
        self.change(gpu, |row| open::WAIT.clone_into(&mut row.step));
    }

    /// What an attempt has cost; that of a GPU which was plugged in is in no row.
    pub(super) fn gpu_worked(&mut self, gpu: usize, processor_us: u64) {
        if let Some(unit) = self.gpus.entries.get(gpu).and_then(|entry| entry.unit) {
            self.boot.worked(unit, processor_us);
        }
    }

    pub(super) fn gpu_answered(&mut self, gpu: usize, answer: Answer) {
        let Some(entry) = self.gpus.entries.get_mut(gpu) else { return };
        if entry.driver_state != DriverState::Driven || entry.begin {
            // The GPU was removed during the attach; its row is already updated.
            drop(answer);
            self.step_group(Event::Abandoned(gpu));
            self.begin_hotplugged(gpu);
            return;
        }
        let event = match answer {
            Answer::Attached(held, code) => {
                entry.held = Some(held);
                entry.row.driver = code;
                Event::Attached(gpu)
            }
            Answer::Failed(refusal) => {
                entry.row.driver = refusal.code;
                entry.refusal = Some(refusal);
                Event::Failed(gpu)
            }
        };
        self.step_group(event);
    }

    /// Checks the interrupt counters before GPUs without activity time out.
    pub(super) fn watch_gpus(&mut self, now: u64) {
        if self.gpus.next_deadline().is_none_or(|at| at > now) {
            return;
        }
        self.watch_hotplugged(now);
        let silent: Vec<usize> = self.gpus.group.iter().flat_map(|group| group.silent(now)).collect();
        for gpu in silent {
            let Some(entry) = self.gpus.entries.get_mut(gpu) else { continue };
            let count = interrupts::of(&self.root, entry.row.pci).unwrap_or_default();
            if count > entry.interrupts {
                entry.interrupts = count;
                self.step_group(Event::Progress(gpu));
            }
        }
        self.step_group(Event::Clock);
    }

    fn attach_policy(&self) -> Policy {
        let confidential = self.decision.as_ref().is_some_and(|decision| decision.confidential.is_some());
        self.params.attach.resolve(confidential)
    }

    fn step_group(&mut self, event: Event) {
        let effects = self.gpus.group.as_mut().map(|group| group.step(now_us(), event)).unwrap_or_default();
        self.follow(effects);
    }

    fn follow(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Start(gpu) => self.start_attach(gpu),
                Effect::Retry(gpu) => self.refused(gpu, None),
                Effect::Ready { gpu, late } => self.attached(gpu, late),
                Effect::Failed { gpu, late } => self.refused(gpu, Some(late)),
                Effect::TimedOut { gpu, late, overdue } => self.timed_out(gpu, late, overdue),
            }
        }
    }

    fn start_attach(&mut self, gpu: usize) {
        let now = now_us();
        let attempts = self.gpus.group.as_ref().map_or(0, |group| group.attempts(gpu));
        let Some(entry) = self.gpus.entries.get_mut(gpu) else { return };
        entry.attempt_us = now;
        entry.interrupts = 0;
        let (pci, minor) = (entry.row.pci, entry.minor.clone().unwrap_or_default());
        self.change(gpu, |row| {
            row.phase = GpuPhase::Attaching;
            open::OPEN.clone_into(&mut row.step);
            row.attempts = attempts;
            row.start_us.get_or_insert(now);
        });
        let node = self.root.path(&format!("/dev/nvidia{minor}"));
        let outbox = self.outbox.clone();
        let thread = std::thread::Builder::new().name(format!("attach-{pci}")).stack_size(STACK);
        if let Err(error) = thread.spawn(move || attach(gpu, &node, &outbox)) {
            let reason = format!("cannot start a thread: {error}; is memory short?");
            let answer = Answer::Failed(Refusal { step: open::OPEN, reason, code: None });
            self.outbox.send(Message::Attach(gpu, answer, 0));
        }
    }

    /// Writes the CDI file of all that are ready.
    pub(super) fn write_cdi(&mut self) -> Result<(), String> {
        self.publish_cdi(&[])
    }

    fn publish_cdi(&mut self, further: &[usize]) -> Result<(), String> {
        for entry in further.iter().filter_map(|gpu| self.gpus.entries.get(*gpu)) {
            self.gpus.catalogue.forget(entry.row.pci);
        }
        let mut ready: Vec<ReadyGpu> = Vec::new();
        for (at, entry) in self.gpus.entries.iter().enumerate() {
            if (further.contains(&at) || entry.row.phase == GpuPhase::Ready)
                && let Ok(minor) = entry.minor
            {
                ready.push(ReadyGpu { index: entry.row.index, pci: entry.row.pci, minor });
            }
        }
        self.gpus.catalogue.publish(&self.root, &ready).map(drop).map_err(|error| error.to_string())
    }

    /// Handles a successful attach. Requested settings are applied before it is published.
    fn attached(&mut self, gpu: usize, late: bool) {
        let now = now_us();
        self.change(gpu, |row| row.attach_us = row.start_us.map(|start| now.saturating_sub(start)));
        let first = self.needs_settings(gpu);
        if first {
            self.change(gpu, |row| {
                row.phase = GpuPhase::Attaching;
                SETTINGS.clone_into(&mut row.step);
                row.end_us = None;
                row.detail.clear();
            });
            self.wait_for_settings(gpu);
            self.attach_ended(gpu, late, "attached");
        } else {
            self.gpus.pending_ready.push(PendingReady { gpu, late: Some(late) });
        }
    }

    /// Reports a successful attach.
    fn attach_ended(&mut self, gpu: usize, late: bool, state: &str) {
        let now = now_us();
        if late {
            let pci = self.gpus.entries[gpu].row.pci.to_string();
            self.recorder.event(
                now,
                "gpu-attached-after-deadline",
                &pci,
                "it attached after its deadline and is ready now",
            );
        } else if matches!(self.gpus.entries[gpu].row.phase, GpuPhase::Failed | GpuPhase::Removed) {
            self.settle(gpu, End::Failed);
        } else {
            let took = ms(self.gpus.entries[gpu].row.attach_us.unwrap_or_default());
            let attempts = self.gpus.entries[gpu].row.attempts;
            let tries = if attempts > 1 { format!(", attempt {attempts}") } else { String::new() };
            self.settle_with(gpu, End::Ok(format!("{state} after {took} ms{tries}")));
        }
    }

    /// Excludes a GPU without its requested MIG layout: containers must not get
    /// the whole GPU in place of an instance.
    pub(super) fn fail_undivided(&mut self, gpu: usize, why: &str) {
        let Some(entry) = self.gpus.entries.get(gpu) else { return };
        let detail = format!("{}: not divided as firstlight.mig asks, and so not served: {why}", entry.row.pci);
        self.change(gpu, |row| {
            row.phase = GpuPhase::Failed;
            "mig".clone_into(&mut row.step);
            row.end_us = Some(now_us());
            row.detail = detail;
        });
    }

    /// A GPU whose settings are over is ready at the end of this turn.
    pub(super) fn serve(&mut self, gpu: usize) {
        self.gpus.pending_ready.push(PendingReady { gpu, late: None });
    }

    /// Publishes attached GPUs: first in the CDI file, then to subscribers. All GPUs
    /// of one iteration share one write.
    pub(super) fn publish_ready_gpus(&mut self) {
        let mut pending_ready = std::mem::take(&mut self.gpus.pending_ready);
        if pending_ready.is_empty() {
            return;
        }
        let now = now_us();
        // One that was taken out in this very turn is not held any more.
        let held = |gpu: &usize| self.gpus.entries.get(*gpu).is_some_and(|entry| entry.held.is_some());
        let further: Vec<usize> = pending_ready.iter().map(|one| one.gpu).filter(held).collect();
        let written = self.publish_cdi(&further);
        for gpu in further {
            let detail = written.as_ref().err().map(|text| self.sentence(gpu, "cdi", text));
            let good = written.is_ok();
            self.change(gpu, |row| {
                row.end_us = Some(now);
                row.phase = if good { GpuPhase::Ready } else { GpuPhase::Failed };
                row.step = if good { "ready" } else { "cdi" }.to_owned();
                row.detail = detail.unwrap_or_default();
            });
        }
        for one in pending_ready.drain(..) {
            if let Some(late) = one.late {
                self.attach_ended(one.gpu, late, "ready");
            }
        }
    }

    /// An attempt failed; `verdict` is `None` while there will be another one.
    fn refused(&mut self, gpu: usize, verdict: Option<bool>) {
        self.read_whole_log();
        let refusal = self.gpus.entries.get_mut(gpu).and_then(|entry| entry.refusal.take());
        let (step, reason) = refusal.map_or((open::OPEN, String::new()), |refusal| (refusal.step, refusal.reason));
        let detail = self.sentence(gpu, step, &reason);
        self.change(gpu, |row| {
            step.clone_into(&mut row.step);
            if verdict.is_some() {
                row.phase = GpuPhase::Failed;
                row.end_us = Some(now_us());
            } else {
                "retry".clone_into(&mut row.step);
            }
            row.detail = detail;
        });
        if verdict == Some(false) {
            self.settle(gpu, End::Failed);
        }
    }

    fn timed_out(&mut self, gpu: usize, late: bool, overdue: Overdue) {
        self.read_whole_log();
        let Some(entry) = self.gpus.entries.get(gpu) else { return };
        let step = entry.row.step.clone();
        let seen = match entry.interrupts {
            0 => "the GPU has not interrupted once".to_owned(),
            count => format!("the GPU has interrupted {count} times"),
        };
        let reason = match overdue {
            Overdue::Silent => {
                let limit = self.params.attach_deadline;
                format!(
                    "no answer before the deadline, and nothing has moved for {limit:?} ({seen}); the attach continues"
                )
            }
            Overdue::TooLong => {
                let limit = self.params.attach_limit;
                format!("no answer before the limit of {limit:?} ({seen}); the attach continues")
            }
        };
        let detail = self.sentence(gpu, &step, &reason);
        self.change(gpu, |row| {
            row.phase = GpuPhase::TimedOut;
            row.end_us = Some(now_us());
            row.detail = detail;
        });
        if !late {
            self.settle(gpu, End::TimedOut);
        }
    }

    /// Changes a GPU's row in the record and notifies subscribers.
    pub(super) fn change(&mut self, gpu: usize, change: impl FnOnce(&mut Gpu)) {
        let Some(entry) = self.gpus.entries.get_mut(gpu) else { return };
        let before = entry.row.phase;
        change(&mut entry.row);
        let row = entry.row.clone();
        // A step within a phase is for listeners; the console has enough to do.
        if before == row.phase {
            self.recorder.gpu_step(row);
        } else {
            self.recorder.gpu(row);
        }
        self.publish_gpus();
    }

    fn settle(&mut self, gpu: usize, end: fn(String) -> End) {
        let detail = self.gpus.entries.get(gpu).map(|entry| entry.row.detail.clone()).unwrap_or_default();
        self.settle_with(gpu, end(detail));
    }

    fn settle_with(&mut self, gpu: usize, end: End) {
        if let Some(unit) = self.gpus.entries.get(gpu).and_then(|entry| entry.unit) {
            self.end_unit(unit, end);
        }
    }

    /// Returns the driver's last kernel-log message about a GPU as a suffix.
    fn last_message(&self, gpu: usize) -> String {
        let message = self.gpus.entries.get(gpu).and_then(|entry| self.logs.kernel.last_message(entry.row.pci));
        match message {
            Some(message) => format!("; driver's last message: {message:?}"),
            None => "; the driver logged nothing about it".to_owned(),
        }
    }

    /// Composes the error message of a GPU.
    pub(super) fn sentence(&self, gpu: usize, step: &str, reason: &str) -> String {
        let Some(entry) = self.gpus.entries.get(gpu) else { return reason.to_owned() };
        let policy = self.attach_policy();
        let after = match entry.row.start_us {
            Some(_) => format!(" after {} ms", ms(now_us().saturating_sub(entry.attempt_us))),
            None => String::new(),
        };
        let attempt = match entry.row.attempts {
            0 => String::new(),
            number => format!(" (attempt {number} of {})", policy.attempts()),
        };
        let words = self.last_message(gpu);
        let advice = match policy {
            _ if ![open::OPEN, open::WAIT].contains(&step) => "",
            Policy::Serial if self.decision.as_ref().is_some_and(|decision| decision.confidential.is_some()) => {
                "; under confidential computing the host has to reset a GPU whose attach did not end well"
            }
            Policy::Serial => "; look at the host's vfio log",
            _ => "; try firstlight.attach=serial or look at the host's vfio log",
        };
        format!("{}: attach failed in {step}{after}{attempt}: {reason}{words}{advice}", entry.row.pci)
    }
}

/// The body of an attach's thread.
fn attach(gpu: usize, node: &std::path::Path, outbox: &Outbox) {
    let answer = open::attach(node, || outbox.send(Message::Opened(gpu)));
    outbox.send(Message::Attach(gpu, answer, thread_us()));
}
