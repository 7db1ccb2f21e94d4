//! The boot plan as a state machine: decides which units start and which are skipped.
//!
//! Pure: [`Executor::step`] takes the time and an event and returns effects. Threads and clocks
//! belong to the supervisor.

use std::fmt::Display;

use firstlight_boot_record::{Outcome, Severity};

use crate::plan::{Graph, Node};

/// The end of a unit's action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It succeeded; a line of detail.
    Ok(String),
    /// It was not needed; the reason.
    NotNeeded(String),
    /// It failed; the cause and what to try.
    Failed(String),
    /// The action supervises its own time, which is over.
    TimedOut(String),
}

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<I> {
    /// The boot starts.
    Begin,
    /// A unit's action ended.
    Ended(usize, End),
    /// The ids of a template's instances are known. Precedes the end of the unit that reports them.
    Expanded(usize, Vec<I>),
    /// Time has passed.
    Clock,
}

/// An effect that the caller carries out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Run this unit's action.
    Start(usize),
    /// Record that this unit has ended.
    Ended(usize),
    /// Apply the failure policy: this required unit did not succeed.
    RequiredFailed(usize),
    /// This unit's action ended after the unit had timed out.
    Late(usize),
    /// Every unit has ended.
    Finished,
}

/// The state of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot<I> {
    /// The unit's node in the plan; an instance has its own id.
    pub node: Node<I>,
    /// The template of an instance.
    pub template: Option<usize>,
    /// The outcome so far.
    pub outcome: Outcome,
    /// When it started, µs.
    pub start_us: Option<u64>,
    /// When it ended, µs.
    pub end_us: Option<u64>,
    /// A line about its end.
    pub detail: String,
    /// For a skipped unit: whether it is not needed, as opposed to prevented by a failure.
    pub not_needed: bool,
    /// For a skipped unit: the unit that prevented it.
    pub cause: Option<usize>,
}

impl<I> Slot<I> {
    fn new(node: Node<I>, template: Option<usize>) -> Self {
        let outcome = Outcome::Pending;
        Self {
            node,
            template,
            outcome,
            start_us: None,
            end_us: None,
            detail: String::new(),
            not_needed: false,
            cause: None,
        }
    }

    /// Returns whether this is a template of instances, which itself does not run.
    #[must_use]
    pub fn is_template(&self) -> bool {
        self.node.per.is_some() && self.template.is_none()
    }
}

/// The boot plan in execution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executor<I> {
    slots: Vec<Slot<I>>,
    failed: Option<usize>,
    finished: bool,
}

impl<I: Clone + PartialEq + Display> Executor<I> {
    /// Creates an executor of a plan that has not started.
    #[must_use]
    pub fn new(graph: &Graph<I>) -> Self {
        let slots = graph.nodes().iter().map(|node| Slot::new(node.clone(), None)).collect();
        Self { slots, failed: None, finished: false }
    }

    /// Returns all units: those of the plan at their index, then instances.
    #[must_use]
    pub fn slots(&self) -> &[Slot<I>] {
        &self.slots
    }

    /// Returns the required unit that failed, if one did.
    #[must_use]
    pub fn failed(&self) -> Option<usize> {
        self.failed
    }

    /// Returns whether every unit has ended.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.finished
    }

    /// Returns whether a unit failed or timed out.
    #[must_use]
    pub fn degraded(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.outcome, Outcome::Failed | Outcome::TimedOut))
    }

    /// Returns when [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.slots.iter().filter_map(deadline_of).min()
    }

    /// Replaces a unit's deadline, also while it runs.
    pub fn set_deadline(&mut self, unit: &I, limit_us: u64) {
        let named = self.slots.iter_mut().filter(|slot| slot.node.id == *unit && slot.node.deadline_us.is_some());
        named.for_each(|slot| slot.node.deadline_us = Some(limit_us));
    }

    /// Processes an event at time `now` (µs); returns the effects in order.
    pub fn step(&mut self, now: u64, event: Event<I>) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Begin => {}
            Event::Expanded(template, ids) => self.expand(template, ids),
            Event::Ended(unit, end) => {
                if self.slots.get(unit).is_none_or(|slot| slot.outcome != Outcome::Running) {
                    return vec![Effect::Late(unit)];
                }
                let (outcome, detail, not_needed) = match end {
                    End::Ok(detail) => (Outcome::Ok, detail, false),
                    End::NotNeeded(why) => (Outcome::Skipped, why, true),
                    End::Failed(why) => (Outcome::Failed, why, false),
                    End::TimedOut(why) => (Outcome::TimedOut, why, false),
                };
                self.slots[unit].not_needed = not_needed;
                self.end(unit, now, outcome, detail, &mut effects);
            }
            Event::Clock => {
                for unit in 0..self.slots.len() {
                    if deadline_of(&self.slots[unit]).is_some_and(|at| at <= now) {
                        let limit = self.slots[unit].node.deadline_us.unwrap_or_default() / 1000;
                        let detail = format!(
                            "not done after its deadline of {limit} ms; it is left running; {}",
                            self.slots[unit].node.hint
                        );
                        self.end(unit, now, Outcome::TimedOut, detail, &mut effects);
                    }
                }
            }
        }
        self.advance(now, &mut effects);
        effects
    }

    fn expand(&mut self, template: usize, ids: Vec<I>) {
        let Some(slot) = self.slots.get(template).filter(|slot| slot.is_template()) else { return };
        let pattern = slot.node.clone();
        for id in ids {
            self.slots.push(Slot::new(Node { id, ..pattern.clone() }, Some(template)));
        }
    }

    fn end(&mut self, unit: usize, now: u64, outcome: Outcome, detail: String, effects: &mut Vec<Effect>) {
        let slot = &mut self.slots[unit];
        slot.outcome = outcome;
        slot.end_us = Some(now);
        slot.detail = detail;
        let bad = outcome != Outcome::Ok && !slot.not_needed;
        let required = slot.node.severity == Severity::Required;
        effects.push(Effect::Ended(unit));
        if bad && required && self.failed.is_none() {
            self.failed = Some(unit);
            effects.push(Effect::RequiredFailed(unit));
        }
    }

    /// Returns whether a unit has ended. A template has ended when its instances are known and all
    /// have ended.
    fn ended(&self, unit: usize) -> bool {
        let slot = &self.slots[unit];
        if !slot.is_template() {
            return slot.outcome.ended();
        }
        let known = slot.node.per.is_none_or(|per| self.slots[per].outcome.ended());
        known && self.slots.iter().filter(|other| other.template == Some(unit)).all(|other| other.outcome.ended())
    }

    /// Starts and skips units until no further unit can change.
    fn advance(&mut self, now: u64, effects: &mut Vec<Effect>) {
        loop {
            let mut moved = false;
            for unit in 0..self.slots.len() {
                let slot = &self.slots[unit];
                if slot.outcome != Outcome::Pending || slot.is_template() {
                    continue;
                }
                if let Some(cause) = self.skip_cause(unit) {
                    let (detail, not_needed) = self.skip_reason(cause);
                    self.slots[unit].cause = Some(cause);
                    self.slots[unit].not_needed = not_needed;
                    self.end(unit, now, Outcome::Skipped, detail, effects);
                    moved = true;
                } else if slot.node.needs.iter().chain(&slot.node.after).all(|other| self.ended(*other)) {
                    self.slots[unit].outcome = Outcome::Running;
                    self.slots[unit].start_us = Some(now);
                    effects.push(Effect::Start(unit));
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        if !self.finished && (0..self.slots.len()).all(|unit| self.ended(unit)) {
            self.finished = true;
            effects.push(Effect::Finished);
        }
    }

    /// Returns the unit because of which this one is skipped.
    fn skip_cause(&self, unit: usize) -> Option<usize> {
        if let Some(failed) = self.failed {
            return Some(failed);
        }
        let needs = &self.slots[unit].node.needs;
        // All of them must have ended: the reported unit must not depend on the order in which they
        // end.
        if !needs.iter().all(|need| self.ended(*need)) {
            return None;
        }
        let bad = || needs.iter().copied().filter(|need| self.slots[*need].outcome != Outcome::Ok);
        // A failed unit is a better explanation than one that was not needed.
        let need = bad().find(|need| !self.slots[*need].not_needed).or_else(|| bad().next())?;
        Some(self.slots[need].cause.unwrap_or(need))
    }

    fn skip_reason(&self, cause: usize) -> (String, bool) {
        let slot = &self.slots[cause];
        let (name, detail) = (&slot.node.id, &slot.detail);
        if self.failed == Some(cause) {
            // The failure itself is reported once, in full, by its own unit.
            return (format!("did not run because the boot failed in {name}"), false);
        }
        if slot.not_needed {
            return (format!("not needed, as {name} was not: {detail}"), true);
        }
        (format!("did not run because {name} {}: {detail}", past(slot.outcome)), false)
    }
}

fn deadline_of<I>(slot: &Slot<I>) -> Option<u64> {
    if slot.outcome != Outcome::Running {
        return None;
    }
    Some(slot.start_us?.saturating_add(slot.node.deadline_us?))
}

fn past(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::TimedOut => "timed out",
        Outcome::Skipped => "was skipped",
        _ => "failed",
    }
}

#[cfg(test)]
mod tests;
