//! Effects of failed and hanging units on the guest: computed by running the plan with each unit
//! and fault. Not used by PID 1; `examples/failures.rs` prints the table of the documentation.

use std::fmt::Write as _;
use std::time::Duration;

use firstlight_boot_record::{Outcome, Severity};

use crate::clock::micros;
use crate::daemons::table::{DAEMONS, daemon_spec};
use crate::executor::{Effect, End, Event, Executor};
use crate::params::Params;
use crate::plan::{Graph, PlanError, check};
use crate::restart;
use crate::unit_id::UnitId;
use crate::units::PLAN;

/// The fault of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The unit fails immediately.
    Fails,
    /// The unit does not end.
    Hangs,
}

/// The state of the guest after a fault.
#[derive(Debug)]
pub struct FaultResult {
    /// The unit with the fault; of GPUs, the second.
    pub faulty: usize,
    /// All units, at the end of the boot.
    pub executor: Executor<UnitId>,
    /// Time from the unit's start to its end in the record.
    pub detected_after: Duration,
    /// The executor's effects, in order.
    pub effects: Vec<Effect>,
}

/// Number of GPUs of the guest.
const GPUS: usize = 2;

/// Returns the maximum duration of a unit: its own deadline, or that of the component that
/// supervises it.
fn limit(unit: UnitId, own: Option<Duration>) -> Duration {
    match unit {
        UnitId::GpuAttachTemplate => Params::default().attach_deadline,
        UnitId::GpuSettings => Params::default().settings_deadline,
        UnitId::Daemon(daemon) => daemon_spec(daemon).deadline,
        _ => own.unwrap_or_default(),
    }
}

/// Boots a guest with two GPUs in which all units but one succeed. A unit takes one millisecond,
/// and daemons without a fault are not enabled.
///
/// # Errors
/// The plan is invalid.
pub fn inject_fault(unit: usize, fault: Fault) -> Result<FaultResult, PlanError> {
    let graph: Graph<UnitId> = check(PLAN)?;
    let mut executor = Executor::new(&graph);
    let template = |executor: &Executor<UnitId>, at: usize| executor.slots()[at].template.unwrap_or(at);
    let mut now = 0;
    let mut queue = executor.step(now, Event::Begin);
    let mut effects = Vec::new();
    let (mut faulty, mut hanging) = (unit, None);
    loop {
        let mut running = Vec::new();
        effects.extend(queue.iter().copied());
        for effect in queue.drain(..) {
            if let Effect::Start(at) = effect {
                running.push(at);
            }
        }
        for at in running {
            let spec = &PLAN[template(&executor, at)];
            // Of several instances the last one has the fault.
            let is_faulty = template(&executor, at) == unit
                && (spec.per.is_none() || at == executor.slots().len().saturating_sub(1));
            now += 1000;
            let end = if !is_faulty && matches!(spec.id, UnitId::Daemon(_)) {
                End::NotNeeded("it is not enabled".to_owned())
            } else if !is_faulty {
                End::Ok(String::new())
            } else {
                faulty = at;
                if fault == Fault::Hangs {
                    hanging = Some(at);
                    continue;
                }
                End::Failed("the reason".to_owned())
            };
            if spec.id == UnitId::PciScan && !matches!(end, End::Failed(_)) {
                let gpus = (0..GPUS).filter_map(|gpu| format!("0000:{:02x}:00.0", gpu + 1).parse().ok());
                let gpus = gpus.map(UnitId::GpuAttach).collect();
                let attach = PLAN.iter().position(|spec| spec.id == UnitId::GpuAttachTemplate).unwrap_or_default();
                queue.extend(executor.step(now, Event::Expanded(attach, gpus)));
            }
            queue.extend(executor.step(now, Event::Ended(at, end)));
        }
        if queue.is_empty() {
            let Some(at) = hanging.take() else { break };
            let spec = &PLAN[template(&executor, at)];
            let start = executor.slots()[at].start_us.unwrap_or_default();
            now = start + micros(limit(spec.id, spec.deadline));
            // A unit with its own timeout reports it itself.
            let event = match spec.deadline {
                Some(_) => Event::Clock,
                None => Event::Ended(at, End::TimedOut("the reason".to_owned())),
            };
            queue = executor.step(now, event);
        }
    }
    let slot = &executor.slots()[faulty];
    let detected_after = slot.end_us.unwrap_or_default().saturating_sub(slot.start_us.unwrap_or_default());
    Ok(FaultResult { faulty, executor, detected_after: Duration::from_micros(detected_after), effects })
}

impl FaultResult {
    /// Returns the names of units that were skipped because of the fault.
    #[must_use]
    pub fn skipped(&self) -> Vec<UnitId> {
        let slots = self.executor.slots().iter();
        let because = slots.filter(|slot| slot.outcome == Outcome::Skipped && slot.cause == Some(self.faulty));
        because.map(|slot| slot.node.id).collect()
    }

    /// Returns whether a unit succeeded; of a template's instances, the first.
    #[must_use]
    pub fn serves(&self, unit: UnitId) -> bool {
        let mut slots = self.executor.slots().iter().filter(|slot| !slot.is_template());
        slots.find(|slot| slot.node.id.name() == unit.name()).is_some_and(|slot| slot.outcome == Outcome::Ok)
    }

    fn guest(&self) -> &'static str {
        match (self.serves(UnitId::Agent), self.serves(UnitId::GpuAttachTemplate)) {
            _ if self.executor.failed().is_some() => "`firstlight.on-failure`",
            _ if !self.serves(UnitId::Vsock) => "degraded, and the host cannot reach the agent",
            (false, _) => "degraded, and it serves no requests",
            (true, false) => "degraded; containers without a GPU run, others fail with the cause",
            (true, true) => "degraded; containers run",
        }
    }
}

/// Formats a list of units for a table cell.
fn listed(units: &[UnitId]) -> String {
    let names: Vec<String> = units.iter().map(ToString::to_string).collect();
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

/// Returns the table of failures as Markdown.
///
/// # Errors
/// The plan is invalid.
pub fn print() -> Result<String, PlanError> {
    let mut text = String::from(
        "| unit | fault | reported after | outcome | does not run | the guest | where to look |\n|---|---|---|---|---|---|---|\n",
    );
    for (unit, spec) in PLAN.iter().enumerate() {
        for (fault, word) in [(Fault::Fails, "fails"), (Fault::Hangs, "hangs")] {
            let result = inject_fault(unit, fault)?;
            let slot = &result.executor.slots()[result.faulty];
            let after =
                if fault == Fault::Fails { "at once".to_owned() } else { format!("{:?}", result.detected_after) };
            let skipped = match slot.node.severity {
                Severity::Required => "all that has not begun".to_owned(),
                _ => listed(&result.skipped()),
            };
            let outcome = match slot.outcome {
                Outcome::TimedOut => "timed-out",
                _ => "failed",
            };
            let name = if spec.per.is_some() { format!("{}[PCI]", spec.id) } else { spec.id.to_string() };
            let guest = result.guest();
            // Writing into a string cannot fail.
            let _ = writeln!(text, "| {name} | {word} | {after} | {outcome} | {skipped} | {guest} | {} |", spec.hint);
        }
    }
    let again = format!(
        "started again after 100 ms, doubled each time; {} times in {:?}, then",
        restart::MOST,
        restart::WINDOW
    );
    let _ = writeln!(
        text,
        "| agent | dies later | at once | event `agent-exited` | - | {again} `firstlight.on-failure`; \
         `firstlight.agent-restart=poweroff` powers off instead | its last lines above; agent.log=debug |"
    );
    for spec in DAEMONS {
        let then = match spec.severity {
            Severity::Required => "`firstlight.on-failure`",
            _ => "it is left alone, and the guest is degraded",
        };
        let _ = writeln!(
            text,
            "| {} | dies later | at once | event `daemon-exited` | - | {again} {then} | {} |",
            spec.name, spec.hint
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<(usize, Fault, FaultResult)> {
        let faults = [Fault::Fails, Fault::Hangs];
        let each = (0..PLAN.len()).flat_map(|unit| faults.map(|fault| (unit, fault)));
        each.map(|(unit, fault)| (unit, fault, inject_fault(unit, fault).unwrap())).collect()
    }

    #[test]
    fn every_fault_is_reported_in_time_with_its_cause() {
        for (unit, fault, result) in all() {
            let (spec, slot) = (&PLAN[unit], &result.executor.slots()[result.faulty]);
            let name = spec.id.name();
            assert_eq!(slot.node.id.name(), name);
            let expected = if fault == Fault::Fails { Outcome::Failed } else { Outcome::TimedOut };
            assert_eq!(slot.outcome, expected, "{name} {fault:?}");
            assert!(result.executor.finished(), "{name} {fault:?}: the boot does not end");
            let most = if fault == Fault::Fails { Duration::from_secs(1) } else { limit(spec.id, spec.deadline) };
            assert!(
                result.detected_after <= most && most > Duration::ZERO,
                "{name} {fault:?}: {:?}",
                result.detected_after
            );
            if fault == Fault::Hangs && spec.deadline.is_some() {
                assert!(slot.detail.contains("deadline of") && slot.detail.ends_with(spec.hint), "{}", slot.detail);
            }
            assert!(!spec.hint.is_empty(), "{name} has no hint");
            for other in result.executor.slots().iter().filter(|other| other.cause == Some(result.faulty)) {
                assert!(other.detail.contains(&slot.node.id.to_string()), "{}: {}", other.node.id, other.detail);
            }
        }
    }

    #[test]
    fn severity_decides_the_state_of_the_guest() {
        for (unit, fault, result) in all() {
            let spec = &PLAN[unit];
            let policies = result.effects.iter().filter(|effect| matches!(effect, Effect::RequiredFailed(_))).count();
            let required = spec.severity == Severity::Required;
            assert_eq!(policies, usize::from(required), "{} {fault:?}", spec.id);
            // The failure of a unit that is not required affects neither the agent nor another GPU.
            assert!(required || result.serves(UnitId::Agent), "{} {fault:?}", spec.id);
            assert_eq!(result.executor.failed(), required.then_some(result.faulty), "{} {fault:?}", spec.id);
            if spec.id == UnitId::GpuAttachTemplate {
                assert!(result.serves(UnitId::GpuAttachTemplate) && result.serves(UnitId::Cdi), "the other GPU");
            }
        }
    }

    #[test]
    fn gpus_fail_only_with_units_that_they_need() {
        let without: Vec<&str> = all()
            .into_iter()
            .filter(|(unit, fault, result)| {
                *fault == Fault::Fails
                    && PLAN[*unit].severity != Severity::Required
                    && !result.serves(UnitId::GpuAttachTemplate)
            })
            .map(|(unit, ..)| PLAN[unit].id.name())
            .collect();
        assert_eq!(without, ["pci-scan", "mode", "modules-nvidia", "nodes"]);
    }

    #[test]
    fn table_has_every_unit_with_both_faults() {
        let text = print().unwrap();
        for spec in PLAN {
            let start = if spec.per.is_some() { format!("| {}[PCI] | ", spec.id) } else { format!("| {} | ", spec.id) };
            let rows = text.lines().filter(|line| line.starts_with(&start));
            let (fails, hangs): (Vec<_>, Vec<_>) = rows
                .filter(|row| !row.contains("dies later"))
                .partition(|row| row.contains("| fails | at once | failed |"));
            assert_eq!((fails.len(), hangs.len()), (1, 1), "{}", spec.id);
            assert!(hangs[0].contains("| hangs | ") && hangs[0].contains("| timed-out |"), "{}", hangs[0]);
        }
    }
}
