//! The execution of the boot plan, with units named by their ids.
//!
//! Pure: no I/O. [`Boot::next_due`] returns the next work item; [`Boot::end`], [`Boot::found_gpus`]
//! and [`Boot::clock`] take events.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use firstlight_boot_record::Unit;
use firstlight_pci::Address;

use crate::actions::{Inputs, Report};
use crate::clock::{Moment, micros};
use crate::daemons::table::{DaemonContext, daemon_spec};
use crate::executor::{Effect, End, Event, Executor, Slot};
use crate::params::Params;
use crate::plan::{PlanError, check};
use crate::record::unit_of;
use crate::unit_id::UnitId;
use crate::units::PLAN;

/// The function that a unit's thread runs.
type Run = fn(&Inputs) -> Report;

/// The next work item of the plan.
#[derive(Debug, Clone, Copy)]
pub(super) enum Due {
    /// Start this unit.
    Start(UnitId),
    /// Start this unit's thread, which runs the function.
    StartThread(UnitId, Run),
    /// This unit has ended.
    Ended(UnitId),
    /// This required unit failed or timed out.
    RequiredFailed(UnitId),
    /// This unit's action ended after the unit had timed out.
    Late(UnitId),
    /// All units have ended.
    Finished,
}

/// The data of other components that a unit's row in the boot record needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowContext<'a> {
    /// The kernel parameters.
    pub(super) params: &'a Params,
    /// The guest's properties that decide how daemons run.
    pub(super) daemons: DaemonContext,
    /// Time at which the agent began to listen, from its own report, µs.
    pub(super) agent_listening_us: Option<u64>,
}

/// The boot plan in execution.
#[derive(Debug)]
pub(super) struct Boot {
    executor: Executor<UnitId>,
    effects: VecDeque<Effect>,
    /// Units that need a thread. They start after all units that need none, so that they do not
    /// delay the agent.
    threads: VecDeque<(UnitId, Run)>,
    /// Processor time of each unit, µs.
    processor_us: BTreeMap<UnitId, u64>,
    /// Time and processor time at the start of PID 1.
    begin: Moment,
}

impl Boot {
    /// Creates the plan; no unit has started.
    ///
    /// # Errors
    /// The boot plan that is compiled into PID 1 is invalid.
    pub(super) fn new(begin: Moment) -> Result<Self, PlanError> {
        let executor = Executor::new(&check(PLAN)?);
        Ok(Self { executor, effects: VecDeque::new(), threads: VecDeque::new(), processor_us: BTreeMap::new(), begin })
    }

    fn step(&mut self, now: u64, event: Event<UnitId>) {
        self.effects.extend(self.executor.step(now, event));
    }

    fn index(&self, unit: UnitId) -> Option<usize> {
        self.executor.slots().iter().position(|slot| slot.node.id == unit)
    }

    fn id(&self, index: usize) -> Option<UnitId> {
        self.executor.slots().get(index).map(|slot| slot.node.id)
    }

    /// Returns the time and the processor time at the start of PID 1.
    pub(super) fn begin_moment(&self) -> Moment {
        self.begin
    }

    /// Begins the boot.
    pub(super) fn begin(&mut self, now: u64) {
        self.step(now, Event::Begin);
    }

    /// Ends a unit.
    pub(super) fn end(&mut self, now: u64, unit: UnitId, end: End) {
        if let Some(index) = self.index(unit) {
            self.step(now, Event::Ended(index, end));
        }
    }

    /// Creates the attach unit of each GPU.
    pub(super) fn found_gpus(&mut self, now: u64, gpus: &[Address]) {
        if let Some(template) = self.index(UnitId::GpuAttachTemplate) {
            self.step(now, Event::Expanded(template, gpus.iter().copied().map(UnitId::GpuAttach).collect()));
        }
    }

    /// Times out the units whose deadlines have expired.
    pub(super) fn clock(&mut self, now: u64) {
        if self.next_deadline().is_some_and(|at| at <= now) {
            self.step(now, Event::Clock);
        }
    }

    /// Returns when [`Boot::clock`] is due next, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.executor.next_deadline()
    }

    /// Replaces the deadlines of units.
    pub(super) fn set_deadlines(&mut self, deadlines: &[(UnitId, Duration)]) {
        for (unit, limit) in deadlines {
            self.executor.set_deadline(unit, micros(*limit));
        }
    }

    /// Queues a unit for the start of its thread.
    pub(super) fn defer(&mut self, unit: UnitId, run: Run) {
        self.threads.push_back((unit, run));
    }

    /// Returns the next work item and removes it from the queue. Threads are started last.
    pub(super) fn next_due(&mut self) -> Option<Due> {
        while let Some(effect) = self.effects.pop_front() {
            let due = match effect {
                Effect::Start(index) => self.id(index).map(Due::Start),
                Effect::Ended(index) => self.id(index).map(Due::Ended),
                Effect::RequiredFailed(index) => self.id(index).map(Due::RequiredFailed),
                Effect::Late(index) => self.id(index).map(Due::Late),
                Effect::Finished => Some(Due::Finished),
            };
            if due.is_some() {
                return due;
            }
        }
        self.threads.pop_front().map(|(unit, run)| Due::StartThread(unit, run))
    }

    /// Returns the state of a unit.
    pub(super) fn unit(&self, unit: UnitId) -> Option<&Slot<UnitId>> {
        self.executor.slots().iter().find(|slot| slot.node.id == unit)
    }

    /// Returns the unit that caused the skip of a skipped unit.
    pub(super) fn cause(&self, unit: UnitId) -> Option<UnitId> {
        self.unit(unit)?.cause.and_then(|index| self.id(index))
    }

    /// Returns all units, without templates.
    pub(super) fn units(&self) -> impl Iterator<Item = UnitId> + '_ {
        self.executor.slots().iter().filter(|slot| !slot.is_template()).map(|slot| slot.node.id)
    }

    /// Returns whether a required unit failed.
    pub(super) fn failed(&self) -> bool {
        self.executor.failed().is_some()
    }

    /// Returns whether a unit failed or timed out.
    pub(super) fn degraded(&self) -> bool {
        self.executor.degraded()
    }

    /// Adds processor time to a unit.
    pub(super) fn worked(&mut self, unit: UnitId, processor_us: u64) {
        *self.processor_us.entry(unit).or_default() += processor_us;
    }

    /// Returns the total processor time of all units, µs.
    pub(super) fn processor_us(&self) -> u64 {
        self.processor_us.values().sum()
    }

    /// Returns the boot record's rows of all units of the plan, before any has run.
    pub(super) fn plan_rows(&self) -> Vec<(UnitId, Unit)> {
        let slots = self.executor.slots();
        let units = slots.iter().filter(|slot| !slot.is_template());
        units.map(|slot| (slot.node.id, unit_of(slot, slots))).collect()
    }

    /// Returns a unit's row in the boot record, and for an instance of a template the unit before
    /// which the row is inserted.
    pub(super) fn row(&self, unit: UnitId, context: RowContext<'_>) -> Option<(Unit, Option<UnitId>)> {
        let slots = self.executor.slots();
        let slot = self.unit(unit)?;
        let mut row = unit_of(slot, slots);
        match unit {
            UnitId::Agent if row.ready_us.is_some() => row.ready_us = context.agent_listening_us.or(row.ready_us),
            UnitId::GpuAttach(_) => row.deadline_us = micros(context.params.attach_deadline),
            UnitId::GpuSettings => row.deadline_us = micros(context.params.settings_deadline),
            UnitId::Daemon(daemon) => {
                row.deadline_us = micros(daemon_spec(daemon).deadline);
                row.severity = daemon_spec(daemon).severity_in(context.daemons);
            }
            _ => {}
        }
        row.processor_us = self.processor_us.get(&unit).copied();
        // Rows of instances are inserted at the template's position in the plan.
        let next = slot.template.and_then(|template| self.id(template + 1));
        Some((row, next))
    }
}

#[cfg(test)]
mod tests {
    use firstlight_boot_record::Outcome;

    use super::*;

    /// Returns all due work items as text.
    fn drained(boot: &mut Boot) -> Vec<String> {
        let text = |due| match due {
            Due::StartThread(unit, _) => format!("thread {unit}"),
            due => format!("{due:?}"),
        };
        std::iter::from_fn(|| boot.next_due()).map(text).collect()
    }

    fn boot() -> Boot {
        Boot::new(Moment { at_us: 0, processor_us: 0 }).unwrap()
    }

    fn ok() -> End {
        End::Ok(String::new())
    }

    fn pci(bus: u8) -> Address {
        format!("0000:{bus:02x}:00.0").parse().unwrap()
    }

    #[test]
    fn units_with_threads_start_after_those_without() {
        let mut boot = boot();
        boot.begin(0);
        assert_eq!(drained(&mut boot), ["Start(Mounts)"]);
        boot.defer(UnitId::Mounts, |_| (ok(), crate::actions::Product::Nothing));
        boot.end(1, UnitId::Mounts, ok());
        let due = drained(&mut boot);
        assert_eq!(due.first().map(String::as_str), Some("Ended(Mounts)"));
        assert_eq!(due.last().map(String::as_str), Some("thread mounts"));
    }

    #[test]
    fn found_gpus_become_units_at_their_templates_position() {
        let mut boot = boot();
        boot.begin(0);
        for unit in [UnitId::Mounts, UnitId::CommandLine] {
            boot.end(1, unit, ok());
        }
        let before = boot.units().count();
        boot.found_gpus(2, &[pci(1), pci(2)]);
        assert_eq!(boot.units().count(), before + 2);
        let params = Params::default();
        let context = RowContext { params: &params, daemons: DaemonContext::default(), agent_listening_us: None };
        let (row, next) = boot.row(UnitId::GpuAttach(pci(2)), context).unwrap();
        assert_eq!(
            (row.name.as_str(), row.pci, next),
            ("gpu-attach[0000:02:00.0]", Some(pci(2)), Some(UnitId::GpuSettings))
        );
        assert_eq!((row.outcome, row.deadline_us), (Outcome::Pending, micros(params.attach_deadline)));
        assert!(boot.row(UnitId::GpuAttach(pci(3)), context).is_none());
    }

    #[test]
    fn unit_past_its_deadline_times_out_and_its_end_is_late() {
        let mut boot = boot();
        boot.begin(0);
        boot.set_deadlines(&[(UnitId::Mounts, Duration::from_secs(1))]);
        assert_eq!(boot.next_deadline(), Some(1_000_000));
        drained(&mut boot);
        boot.clock(999_999);
        assert_eq!(drained(&mut boot), [""; 0]);
        boot.clock(1_000_000);
        let due = drained(&mut boot);
        assert!(due.contains(&"RequiredFailed(Mounts)".to_owned()) && boot.failed() && boot.degraded());
        assert_eq!(boot.cause(UnitId::CommandLine), Some(UnitId::Mounts));
        boot.end(2_000_000, UnitId::Mounts, ok());
        assert_eq!(drained(&mut boot), ["Late(Mounts)"]);
    }

    #[test]
    fn processor_time_of_a_unit_adds_up() {
        let mut boot = boot();
        boot.worked(UnitId::Mounts, 3);
        boot.worked(UnitId::Mounts, 4);
        boot.worked(UnitId::Vsock, 1);
        assert_eq!(boot.processor_us(), 8);
        let params = Params::default();
        let context = RowContext { params: &params, daemons: DaemonContext::default(), agent_listening_us: None };
        assert_eq!(boot.row(UnitId::Mounts, context).unwrap().0.processor_us, Some(7));
    }
}
