//! GPUs on their way from "found" to "ready".

use std::os::fd::OwnedFd;
use std::time::Duration;

use firstlight_boot_record::{Gpu, GpuPhase, Outcome};
use firstlight_pci::{Address, Kind};

use super::{Message, Outbox, STACK, Supervisor};
use crate::attach::{Effect, Event, Group};
use crate::cdi::{self, ReadyGpu};
use crate::clock::{ms, now_us};
use crate::executor::{self, End};
use crate::nodes::Minor;
use crate::open::{self, Answer, Refusal};
use crate::units::{Action, PLAN};

/// A duration as the clock counts.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// One GPU.
#[derive(Debug)]
struct Entry {
    row: Gpu,
    unit: Option<usize>,
    minor: Result<u32, String>,
    attempt_us: u64,
    refusal: Option<Refusal>,
    held: Option<OwnedFd>,
}

/// All GPUs of this guest, in PCI order.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    entries: Vec<Entry>,
    group: Option<Group>,
}

impl Gpus {
    pub(super) fn addresses(&self) -> Vec<Address> {
        self.entries.iter().map(|entry| entry.row.pci).collect()
    }

    pub(super) fn ready(&self) -> impl Iterator<Item = &Gpu> {
        self.entries.iter().map(|entry| &entry.row).filter(|row| row.phase == GpuPhase::Ready)
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.group.as_ref().and_then(Group::next_deadline)
    }

    pub(super) fn take_minors(&mut self, minors: Vec<Minor>) {
        for (pci, minor) in minors {
            if let Some(entry) = self.entries.iter_mut().find(|entry| entry.row.pci == pci) {
                entry.row.minor = minor.as_ref().ok().copied();
                entry.minor = minor;
            }
        }
    }

    /// Gives up all descriptors: the GPUs are no longer held.
    pub(super) fn take_held(&mut self) -> Vec<OwnedFd> {
        self.entries.iter_mut().filter_map(|entry| entry.held.take()).collect()
    }
}

impl Supervisor {
    /// Makes a GPU of every function that is one, and instances of the unit that attaches it.
    pub(super) fn gpus_found(&mut self, scan: usize) {
        let functions = self.functions.iter().filter(|function| function.kind() == Some(Kind::Gpu));
        let mut rows = Vec::new();
        for (index, function) in functions.enumerate() {
            rows.push(Gpu {
                pci: function.address,
                index: u32::try_from(index).unwrap_or(u32::MAX),
                device_id: function.device,
                minor: None,
                phase: GpuPhase::Found,
                step: "found".to_owned(),
                attempts: 0,
                start_us: None,
                end_us: None,
                attach_us: None,
                driver: None,
                detail: String::new(),
            });
        }
        let objects = rows.iter().map(|row| row.pci.to_string()).collect();
        let template = PLAN.iter().position(|unit| unit.action == Action::GpuAttach);
        if let Some(template) = template {
            self.feed(executor::Event::Expanded(template, objects));
        }
        let units: Vec<(usize, String)> =
            self.executor.slots().iter().enumerate().map(|(unit, slot)| (unit, slot.node.name.clone())).collect();
        for row in rows {
            let name = format!("gpu-attach[{}]", row.pci);
            let unit = units.iter().find(|(_, known)| *known == name).map(|(unit, _)| *unit);
            self.recorder.gpu(row.clone());
            if let Some(unit) = unit {
                self.write_unit(unit);
            }
            let minor = Err("the driver's nodes were not made".to_owned());
            self.gpus.entries.push(Entry { row, unit, minor, attempt_us: 0, refusal: None, held: None });
        }
        debug_assert!(self.action(scan) == Some(Action::PciScan));
    }

    /// The scan has ended, well or not: from now on the list of GPUs says something.
    pub(super) fn scan_ended(&mut self) {
        self.scanned = true;
        self.publish_gpus();
    }

    /// A GPU's unit may start.
    pub(super) fn start_gpu_unit(&mut self, unit: usize) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.unit == Some(unit)) else { return };
        let (policy, limit) = (self.params.attach.resolve(false), micros(self.params.attach_deadline));
        let count = self.gpus.entries.len();
        let group = self.gpus.group.get_or_insert_with(|| Group::new(policy, limit, count));
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
        let effects = group.step(now_us(), Event::Begin(gpu));
        self.follow(effects);
    }

    /// A unit that was skipped leaves a GPU that nobody will attach.
    pub(super) fn gpu_unit_ended(&mut self, unit: usize) {
        let Some(slot) = self.executor.slots().get(unit).filter(|slot| slot.outcome == Outcome::Skipped) else {
            return;
        };
        let cause = slot.cause.map(|cause| self.name(cause)).unwrap_or_default();
        let step = match cause.as_str() {
            // With no driver needed, the mode is what decided.
            "modules-nvidia" if slot.not_needed => "mode",
            "modules-nvidia" => "module",
            other => other,
        };
        let (step, detail) = (step.to_owned(), slot.detail.clone());
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.unit == Some(unit)) else { return };
        self.change(gpu, |row| {
            row.phase = GpuPhase::Failed;
            row.step = step;
            row.end_us = Some(now_us());
            row.detail = format!("{}: {detail}", row.pci);
        });
    }

    pub(super) fn gpu_opened(&mut self, gpu: usize) {
        self.change(gpu, |row| open::WAIT.clone_into(&mut row.step));
    }

    pub(super) fn gpu_answered(&mut self, gpu: usize, answer: Answer) {
        let Some(entry) = self.gpus.entries.get_mut(gpu) else { return };
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

    pub(super) fn watch_gpus(&mut self, now: u64) {
        if self.gpus.next_deadline().is_some_and(|at| at <= now) {
            self.step_group(Event::Clock);
        }
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
                Effect::TimedOut { gpu, late } => self.timed_out(gpu, late),
            }
        }
    }

    fn start_attach(&mut self, gpu: usize) {
        let now = now_us();
        let attempts = self.gpus.group.as_ref().map_or(0, |group| group.attempts(gpu));
        let Some(entry) = self.gpus.entries.get_mut(gpu) else { return };
        entry.attempt_us = now;
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
            self.outbox.send(Message::Attach(gpu, Answer::Failed(Refusal { step: open::OPEN, reason, code: None })));
        }
    }

    /// The CDI file has the GPU before anybody is told that it is ready.
    fn attached(&mut self, gpu: usize, late: bool) {
        let now = now_us();
        let mut ready: Vec<ReadyGpu> = Vec::new();
        for (at, entry) in self.gpus.entries.iter().enumerate() {
            if (at == gpu || entry.row.phase == GpuPhase::Ready)
                && let Ok(minor) = entry.minor
            {
                ready.push(ReadyGpu { index: entry.row.index, pci: entry.row.pci, minor });
            }
        }
        let written = cdi::publish(&self.root, &ready);
        let detail = written.as_ref().err().map(|error| self.sentence(gpu, "cdi", &error.to_string()));
        let good = written.is_ok();
        self.change(gpu, |row| {
            row.end_us = Some(now);
            row.attach_us = row.start_us.map(|start| now.saturating_sub(start));
            row.phase = if good { GpuPhase::Ready } else { GpuPhase::Failed };
            row.step = if good { "ready" } else { "cdi" }.to_owned();
            row.detail = detail.unwrap_or_default();
        });
        if late {
            let pci = self.gpus.entries[gpu].row.pci.to_string();
            self.recorder.event(now, "gpu-late", &pci, "it attached after it had been given up, and is served now");
        } else if good {
            let took = ms(self.gpus.entries[gpu].row.attach_us.unwrap_or_default());
            let attempts = self.gpus.entries[gpu].row.attempts;
            let tries = if attempts > 1 { format!(", attempt {attempts}") } else { String::new() };
            self.settle_with(gpu, End::Ok(format!("ready after {took} ms{tries}")));
        } else {
            self.settle(gpu, End::Failed);
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

    fn timed_out(&mut self, gpu: usize, late: bool) {
        self.read_whole_log();
        let Some(entry) = self.gpus.entries.get(gpu) else { return };
        let step = entry.row.step.clone();
        let limit = self.params.attach_deadline;
        let reason = format!("no answer before the deadline of {limit:?}; the attach goes on, watched");
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

    /// Changes a GPU's row, in the record and for all who listen.
    fn change(&mut self, gpu: usize, change: impl FnOnce(&mut Gpu)) {
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
            self.feed(executor::Event::Ended(unit, end));
        }
    }

    /// What a user reads about a GPU that is not there.
    fn sentence(&self, gpu: usize, step: &str, reason: &str) -> String {
        let Some(entry) = self.gpus.entries.get(gpu) else { return reason.to_owned() };
        let policy = self.params.attach.resolve(false);
        let after = match entry.row.start_us {
            Some(_) => format!(" after {} ms", ms(now_us().saturating_sub(entry.attempt_us))),
            None => String::new(),
        };
        let attempt = match entry.row.attempts {
            0 => String::new(),
            number => format!(" (attempt {number} of {})", policy.attempts()),
        };
        let words = match self.log.last_words(entry.row.pci) {
            Some(words) => format!("; driver's last words: {words:?}"),
            None => "; the driver said nothing about it".to_owned(),
        };
        let advice = if policy == crate::attach::Policy::Serial { "" } else { "try firstlight.attach=serial or " };
        format!(
            "{}: attach failed in {step}{after}{attempt}: {reason}{words}; {advice}look at the host's vfio log",
            entry.row.pci
        )
    }
}

/// The body of an attach's thread.
fn attach(gpu: usize, node: &std::path::Path, outbox: &Outbox) {
    let answer = open::attach(node, || outbox.send(Message::Opened(gpu)));
    outbox.send(Message::Attach(gpu, answer));
}
