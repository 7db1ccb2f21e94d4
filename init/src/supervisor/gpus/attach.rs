//! The attach of GPUs: start, result and deadlines.

use firstlight_boot_record::GpuPhase;
use firstlight_pci::Address;

use super::super::effect::Effect;
use super::publish::PendingReady;
use super::{GpuContext, Gpus, SETTINGS, last_message};
use crate::attach::{self, Event, Group, Limits, Overdue};
use crate::clock::{micros, ms};
use crate::executor::End;
use crate::hotplug::DriverState;
use crate::interrupts;
use crate::open::{Answer, OPEN, WAIT};

impl Gpus {
    /// Starts the attach unit of a GPU found at boot.
    pub(in crate::supervisor) fn start_unit(&mut self, pci: Address, context: &GpuContext<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(gpu) = self.find(pci) else { return effects };
        if context.guest.decision().is_some_and(|decision| !decision.attach) {
            self.end_unit_with(gpu, End::NotNeeded(context.guest.mode_reason()), &mut effects);
            return effects;
        }
        if let Err(text) = &self.entries[gpu].minor {
            let detail = self.sentence(gpu, "nodes", text, context);
            self.fail(gpu, context.now, "nodes", detail, &mut effects);
            self.end_unit(gpu, End::Failed, &mut effects);
            return effects;
        }
        self.group(context);
        self.step(Event::Begin(gpu), context, &mut effects);
        effects
    }

    fn group(&mut self, context: &GpuContext<'_>) -> &mut Group {
        let params = context.guest.params();
        let limits = Limits { silence_us: micros(params.attach_deadline), whole_us: micros(params.attach_limit) };
        let (policy, count) = (context.guest.attach_policy(), self.entries.len());
        self.group.get_or_insert_with(|| Group::new(policy, limits, count))
    }

    /// Marks the GPU of a skipped attach unit as failed in `step`.
    pub(in crate::supervisor) fn unit_skipped(
        &mut self,
        pci: Address,
        step: &str,
        why: &str,
        context: &GpuContext<'_>,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(gpu) = self.find(pci) else { return effects };
        // A driver that rejects a GPU logs the reason before its module fails to load.
        let words = if step == "module" { last_message(pci, context.log) } else { String::new() };
        self.fail(gpu, context.now, step, format!("{pci}: {why}{words}"), &mut effects);
        effects
    }

    /// Begins the attach of a hotplugged GPU. If an attempt for a removed GPU at the same address
    /// is still in the driver, the attach begins after the end of that attempt.
    pub(super) fn begin_hotplugged(&mut self, gpu: usize, context: &GpuContext<'_>, effects: &mut Vec<Effect>) {
        if self.entries.get(gpu).is_some_and(|entry| entry.begin) && self.group(context).renew(gpu) {
            self.entries[gpu].begin = false;
            self.step(Event::Begin(gpu), context, effects);
        }
    }

    /// Handles the open of a GPU's device node: the driver is initialising the GPU.
    pub(in crate::supervisor) fn opened(&mut self, pci: Address) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Some(gpu) = self.find(pci) {
            self.change(gpu, &mut effects, |row| WAIT.clone_into(&mut row.step));
        }
        effects
    }

    /// Handles the result of an attach attempt.
    pub(in crate::supervisor) fn answered(
        &mut self,
        pci: Address,
        answer: Answer,
        context: &GpuContext<'_>,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(gpu) = self.find(pci) else { return effects };
        let entry = &mut self.entries[gpu];
        if entry.driver_state != DriverState::Driven || entry.begin {
            // The GPU was removed during the attempt; its row is already up to date.
            drop(answer);
            self.step(Event::Abandoned(gpu), context, &mut effects);
            self.begin_hotplugged(gpu, context, &mut effects);
            return effects;
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
        self.step(event, context, &mut effects);
        effects
    }

    /// Times out GPUs. A GPU whose interrupt counter has increased since the last check is active
    /// and does not count as silent.
    pub(in crate::supervisor) fn clock(&mut self, context: &GpuContext<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.fail_unbound(context, &mut effects);
        let silent: Vec<usize> = self.group.iter().flat_map(|group| group.silent(context.now)).collect();
        for gpu in silent {
            let Some(entry) = self.entries.get_mut(gpu) else { continue };
            let count = interrupts::of(context.guest.root(), entry.row.pci).unwrap_or_default();
            if count > entry.interrupts {
                entry.interrupts = count;
                self.step(Event::Progress(gpu), context, &mut effects);
            }
        }
        self.step(Event::Clock, context, &mut effects);
        effects
    }

    fn step(&mut self, event: Event, context: &GpuContext<'_>, effects: &mut Vec<Effect>) {
        let Some(group) = &mut self.group else { return };
        for effect in group.step(context.now, event) {
            match effect {
                attach::Effect::Start(gpu) => self.start_attempt(gpu, context, effects),
                attach::Effect::Retry(gpu) => self.attempt_failed(gpu, None, context, effects),
                attach::Effect::Ready { gpu, late } => self.attached(gpu, late, context, effects),
                attach::Effect::Failed { gpu, late } => self.attempt_failed(gpu, Some(late), context, effects),
                attach::Effect::TimedOut { gpu, late, overdue } => {
                    self.timed_out(gpu, late, overdue, context, effects);
                }
            }
        }
    }

    fn start_attempt(&mut self, gpu: usize, context: &GpuContext<'_>, effects: &mut Vec<Effect>) {
        let attempts = self.group.as_ref().map_or(0, |group| group.attempts(gpu));
        let Some(entry) = self.entries.get_mut(gpu) else { return };
        (entry.attempt_us, entry.interrupts) = (context.now, 0);
        let (pci, minor) = (entry.row.pci, entry.minor.clone().unwrap_or_default());
        self.change(gpu, effects, |row| {
            row.phase = GpuPhase::Attaching;
            OPEN.clone_into(&mut row.step);
            row.attempts = attempts;
            row.start_us.get_or_insert(context.now);
        });
        effects.push(Effect::Attach(pci, minor));
    }

    /// Handles a successful attach. If settings are requested, they are applied before the GPU is
    /// published.
    fn attached(&mut self, gpu: usize, late: bool, context: &GpuContext<'_>, effects: &mut Vec<Effect>) {
        let now = context.now;
        self.change(gpu, effects, |row| row.attach_us = row.start_us.map(|start| now.saturating_sub(start)));
        let Some(place) = self.entries.get(gpu).map(super::Entry::place) else { return };
        if context.guest.settings_for(&[place]).is_none() {
            self.pending_ready.push(PendingReady { gpu, late: Some(late) });
            return;
        }
        self.change(gpu, effects, |row| {
            row.phase = GpuPhase::Attaching;
            SETTINGS.clone_into(&mut row.step);
            row.end_us = None;
            row.detail.clear();
        });
        effects.push(Effect::ApplySettings(place.1));
        self.attach_ended(gpu, late, "attached", effects);
    }

    /// Ends the attach unit after a successful attach, or records an event if the GPU had timed out
    /// before. If the GPU has failed or was removed before its publication, the unit fails.
    pub(super) fn attach_ended(&self, gpu: usize, late: bool, state: &str, effects: &mut Vec<Effect>) {
        let Some(entry) = self.entries.get(gpu) else { return };
        if late {
            let text = "it attached after its deadline and is ready now";
            effects.push(Effect::event("gpu-attached-after-deadline", entry.row.pci.to_string(), text));
        } else if matches!(entry.row.phase, GpuPhase::Failed | GpuPhase::Removed) {
            self.end_unit(gpu, End::Failed, effects);
        } else {
            let took = ms(entry.row.attach_us.unwrap_or_default());
            let attempts = entry.row.attempts;
            let tries = if attempts > 1 { format!(", attempt {attempts}") } else { String::new() };
            self.end_unit_with(gpu, End::Ok(format!("{state} after {took} ms{tries}")), effects);
        }
    }

    /// Handles a failed attempt. `verdict` is `None` if another attempt follows; otherwise it is
    /// `Some` with the flag whether the GPU had timed out before.
    fn attempt_failed(
        &mut self,
        gpu: usize,
        verdict: Option<bool>,
        context: &GpuContext<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let refusal = self.entries.get_mut(gpu).and_then(|entry| entry.refusal.take());
        let (step, reason) = refusal.map_or((OPEN, String::new()), |refusal| (refusal.step, refusal.reason));
        let detail = self.sentence(gpu, step, &reason, context);
        if verdict.is_some() {
            self.fail(gpu, context.now, step, detail, effects);
        } else {
            self.change(gpu, effects, |row| {
                "retry".clone_into(&mut row.step);
                row.detail = detail;
            });
        }
        if verdict == Some(false) {
            self.end_unit(gpu, End::Failed, effects);
        }
    }

    fn timed_out(
        &mut self,
        gpu: usize,
        late: bool,
        overdue: Overdue,
        context: &GpuContext<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.entries.get(gpu) else { return };
        let seen = match entry.interrupts {
            0 => "the GPU has not interrupted once".to_owned(),
            count => format!("the GPU has interrupted {count} times"),
        };
        let params = context.guest.params();
        let reason = match overdue {
            Overdue::Silent => {
                let limit = params.attach_deadline;
                format!(
                    "no answer before the deadline, and nothing has moved for {limit:?} ({seen}); the attach continues"
                )
            }
            Overdue::TooLong => {
                let limit = params.attach_limit;
                format!("no answer before the limit of {limit:?} ({seen}); the attach continues")
            }
        };
        let detail = self.sentence(gpu, &entry.row.step, &reason, context);
        self.change(gpu, effects, |row| {
            row.phase = GpuPhase::TimedOut;
            row.end_us = Some(context.now);
            row.detail = detail;
        });
        if !late {
            self.end_unit(gpu, End::TimedOut, effects);
        }
    }
}
