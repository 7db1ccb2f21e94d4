//! The plan as a state machine: which unit may start, which never will.
//!
//! Pure: time and what happened come in through [`Executor::step`], what has to
//! be done comes out of it. Threads and clocks are the supervisor's.

use std::fmt::Display;

use firstlight_boot_record::{Outcome, Severity};

use crate::plan::{Graph, Node};

/// How a unit's action ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Done; one line about it.
    Ok(String),
    /// There was nothing to do here; why.
    NotNeeded(String),
    /// Not done; what went wrong and what to try.
    Failed(String),
    /// The action watches its own time, and it is up.
    TimedOut(String),
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<I> {
    /// The boot begins.
    Begin,
    /// A unit's action ended.
    Ended(usize, End),
    /// The ids of a template's instances are known. Comes before the end of the unit it is expanded by.
    Expanded(usize, Vec<I>),
    /// Time went by.
    Clock,
}

/// What has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Run this unit's action.
    Start(usize),
    /// This unit has ended: write it down.
    Ended(usize),
    /// This required unit did not end well: follow the failure policy.
    RequiredFailed(usize),
    /// This unit's action ended after it had been given up.
    Late(usize),
    /// Every unit has ended.
    Finished,
}

/// One unit as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot<I> {
    /// The plan's part of it; an instance has its own id.
    pub node: Node<I>,
    /// The template it is an instance of.
    pub template: Option<usize>,
    /// Where it stands.
    pub outcome: Outcome,
    /// When it started, µs.
    pub start_us: Option<u64>,
    /// When it ended, µs.
    pub end_us: Option<u64>,
    /// One line about its end.
    pub detail: String,
    /// For a skipped unit: that nothing failed, it is just not needed.
    pub not_needed: bool,
    /// For a skipped unit: the unit that is to blame.
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

    /// Whether this is a pattern for instances, which itself never runs.
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
    /// A plan of which nothing has run.
    #[must_use]
    pub fn new(graph: &Graph<I>) -> Self {
        let slots = graph.nodes().iter().map(|node| Slot::new(node.clone(), None)).collect();
        Self { slots, failed: None, finished: false }
    }

    /// Every unit: those of the table at their index, instances behind them.
    #[must_use]
    pub fn slots(&self) -> &[Slot<I>] {
        &self.slots
    }

    /// The required unit that failed, if one did.
    #[must_use]
    pub fn failed(&self) -> Option<usize> {
        self.failed
    }

    /// Whether every unit has ended.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.finished
    }

    /// Whether a unit failed or ran out of time.
    #[must_use]
    pub fn degraded(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.outcome, Outcome::Failed | Outcome::TimedOut))
    }

    /// When [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.slots.iter().filter_map(deadline_of).min()
    }

    /// Gives a unit another deadline, also while it runs.
    pub fn set_deadline(&mut self, unit: &I, limit_us: u64) {
        let named = self.slots.iter_mut().filter(|slot| slot.node.id == *unit && slot.node.deadline_us.is_some());
        named.for_each(|slot| slot.node.deadline_us = Some(limit_us));
    }

    /// Takes what happened at `now` and says what has to be done.
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

    /// A template has ended when its objects are known and all its instances have ended.
    fn ended(&self, unit: usize) -> bool {
        let slot = &self.slots[unit];
        if !slot.is_template() {
            return slot.outcome.ended();
        }
        let known = slot.node.per.is_none_or(|per| self.slots[per].outcome.ended());
        known && self.slots.iter().filter(|other| other.template == Some(unit)).all(|other| other.outcome.ended())
    }

    /// Starts and skips units until nothing more can be.
    fn advance(&mut self, now: u64, effects: &mut Vec<Effect>) {
        loop {
            let mut moved = false;
            for unit in 0..self.slots.len() {
                let slot = &self.slots[unit];
                if slot.outcome != Outcome::Pending || slot.is_template() {
                    continue;
                }
                if let Some(cause) = self.hindrance(unit) {
                    let (detail, not_needed) = self.excuse(cause);
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

    /// The unit because of which this one will never start.
    fn hindrance(&self, unit: usize) -> Option<usize> {
        if let Some(failed) = self.failed {
            return Some(failed);
        }
        let needs = &self.slots[unit].node.needs;
        // All of them have to have ended: which one is blamed must not depend on who is faster.
        if !needs.iter().all(|need| self.ended(*need)) {
            return None;
        }
        let bad = || needs.iter().copied().filter(|need| self.slots[*need].outcome != Outcome::Ok);
        // One that failed says more than one that was not needed.
        let need = bad().find(|need| !self.slots[*need].not_needed).or_else(|| bad().next())?;
        Some(self.slots[need].cause.unwrap_or(need))
    }

    fn excuse(&self, cause: usize) -> (String, bool) {
        let slot = &self.slots[cause];
        let (name, detail) = (&slot.node.id, &slot.detail);
        if self.failed == Some(cause) {
            // The failure itself is reported once, in full, elsewhere.
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
