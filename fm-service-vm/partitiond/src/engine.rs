//! The engine: changes to the fabric, one at a time.

use std::fmt;
use std::time::Instant;

use firstlight_partitions::{Allocation, Gpus, PartitionId, Request};
use firstlight_pci::Address;
use firstlight_sys::nvfm;

use crate::change_stats::ChangeStats;
use crate::error::EngineError;
use crate::error_class::ErrorClass;
use crate::fabric::Fabric;
use crate::fault::{Fault, Kind};
use crate::journal::Journal;
use crate::module_map_store::ModuleMapStore;
use crate::snapshot::{FabricSnapshot, Step};
use crate::state::{Change, KernelLogPosition, Outcome, PendingChange, Record, State};

mod module_map;

pub use module_map::{ModuleMapUpdate, ModuleMapUpdateResult, PartitionRequest};

/// Selects the GPUs of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartitionSelector {
    /// Any partition with this number of GPUs.
    Count(u32),
    /// Exactly these GPUs.
    Gpus(Gpus),
    /// The GPUs of this partition.
    Partition(PartitionId),
    /// Exactly the GPUs at these host addresses.
    Pci(Vec<Address>),
}

impl fmt::Display for PartitionSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count} GPUs"),
            Self::Gpus(gpus) => write!(f, "GPUs {gpus}"),
            Self::Partition(id) => write!(f, "partition {id}"),
            Self::Pci(places) => {
                let places: Vec<String> = places.iter().map(ToString::to_string).collect();
                write!(f, "GPUs at {}", places.join(","))
            }
        }
    }
}

/// The result of an activation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activated {
    /// The partition.
    pub partition: PartitionId,
    /// Its GPUs.
    pub gpus: Gpus,
    /// The same request had activated it before.
    pub already_done: bool,
}

/// The engine: FM, the journal, and the state.
pub struct Engine<F> {
    fabric: F,
    journal: Journal,
    state: State,
    module_map: ModuleMapStore,
    /// Counts and durations of changes.
    change_stats: ChangeStats,
    /// FM's last list, and when it was received.
    last_snapshot: Option<(FabricSnapshot, Instant)>,
    /// Called whenever the state has changed.
    observer: Box<dyn FnMut(&State) + Send>,
}

impl<F: fmt::Debug> fmt::Debug for Engine<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fabric, journal, state, .. } = self;
        f.debug_struct("Engine").field("fabric", fabric).field("journal", journal).field("state", state).finish()
    }
}

fn check_text(what: &'static str, text: &str) -> Result<(), EngineError> {
    if (1..=128).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(EngineError::InvalidText { what, text: text.chars().take(200).collect() })
}

impl<F> Engine<F> {
    /// Returns the journal's length, in bytes.
    #[must_use]
    pub fn journal_end(&self) -> u64 {
        self.journal.end()
    }

    /// Returns the state, without calling FM.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns counts and durations of changes.
    #[must_use]
    pub fn change_stats(&self) -> &ChangeStats {
        &self.change_stats
    }

    /// Returns FM's last list, and when it was received.
    #[must_use]
    pub fn last_snapshot(&self) -> Option<&(FabricSnapshot, Instant)> {
        self.last_snapshot.as_ref()
    }
}

impl<F: Fabric> Engine<F> {
    /// Continues from the journal. A change in progress is settled before the next one.
    #[must_use]
    pub fn new(fabric: F, (journal, state): (Journal, State)) -> Self {
        let (module_map, change_stats) = (ModuleMapStore::default(), ChangeStats::default());
        Self { fabric, journal, state, module_map, change_stats, last_snapshot: None, observer: Box::new(|_| {}) }
    }

    /// Sets the function that is called whenever the state has changed, also before and after calls to FM.
    pub fn observe(&mut self, observer: impl FnMut(&State) + Send + 'static) {
        self.observer = Box::new(observer);
    }

    /// Returns the fabric manager.
    pub fn fabric(&mut self) -> &mut F {
        &mut self.fabric
    }

    fn write(&mut self, record: Record) -> Result<(), EngineError> {
        let mut state = self.state.clone();
        state.apply(record.clone()).map_err(EngineError::InvalidRecord)?;
        self.journal.append(&record, &state)?;
        self.state = state;
        (self.observer)(&self.state);
        Ok(())
    }

    fn snapshot(&mut self, doing: &str) -> Result<FabricSnapshot, EngineError> {
        let listed = self.fabric.partitions();
        let snapshot = FabricSnapshot::of(
            &listed.map_err(|error| EngineError::FabricManager { doing: doing.to_owned(), error })?,
        )?;
        self.last_snapshot = Some((snapshot.clone(), Instant::now()));
        Ok(snapshot)
    }

    /// Lists the partitions, settles a change in progress, and records partitions that FM has lost.
    ///
    /// # Errors
    /// FM does not answer or its list is rejected, or the journal cannot be written.
    pub fn settle(&mut self) -> Result<FabricSnapshot, EngineError> {
        let mut snapshot = match self.snapshot("list the partitions") {
            Err(EngineError::FabricManager { error, .. }) if self.restore_active(&error) => {
                self.snapshot("list the partitions")?
            }
            other => other?,
        };
        if let Some(pending) = self.state.in_progress.clone() {
            let is_active = snapshot.active.contains(&pending.change.partition());
            match &pending.change {
                Change::Activate { .. } if is_active => self.write(Record::Finished(Outcome::Done))?,
                Change::Activate { .. } => {
                    let reason = "interrupted; the fabric manager does not list it as active".to_owned();
                    self.write(Record::Finished(Outcome::Failed { reason }))?;
                }
                // The caller's tenant has ended, and no success was returned: retry.
                Change::Deactivate { partition } if is_active => {
                    let partition = *partition;
                    let answer = self.fabric.deactivate(partition);
                    snapshot = self.finish_change(&pending, answer)?;
                }
                Change::Deactivate { .. } => self.write(Record::Finished(Outcome::Done))?,
            }
        }
        let lost = snapshot.lost(&self.state);
        if !lost.is_empty() {
            let reason = "the fabric manager restarted without state and lists them as not active".to_owned();
            self.write(Record::Lost { partitions: lost, reason })?;
        }
        Ok(snapshot)
    }

    /// Sends the list of active partitions to an FM that was restarted with `--restart`: it waits for the list, and
    /// exits without it. An FM that restarted without state refuses it. A partition whose change is in progress is
    /// left out: its tenant does not run yet, or no longer.
    fn restore_active(&mut self, error: &nvfm::Error) -> bool {
        // With an empty journal the daemon must not claim that no partition is active.
        if ErrorClass::of_error(error) != ErrorClass::NotReady || self.state.last_change == 0 {
            return false;
        }
        let in_progress = self.state.in_progress.as_ref().map(|pending| pending.change.partition());
        let held = self.state.assignments.keys().copied();
        let ids: Vec<PartitionId> = held.filter(|id| in_progress != Some(*id)).collect();
        self.fabric.set_activated(&ids).is_ok()
    }

    /// Records the outcome of a change, whatever FM has replied: its list decides.
    fn finish_change(
        &mut self,
        pending: &PendingChange,
        answer: Result<(), nvfm::Error>,
    ) -> Result<FabricSnapshot, EngineError> {
        let partition = pending.change.partition();
        let unknown = |reason: String| EngineError::OutcomeUnknown { number: pending.number, partition, reason };
        let snapshot = self.snapshot("list the partitions").map_err(|error| match &answer {
            Ok(()) => unknown(error.to_string()),
            Err(first) => unknown(format!("{first}; then {error}")),
        })?;
        let desired = matches!(pending.change, Change::Activate { .. });
        if snapshot.active.contains(&partition) == desired {
            self.write(Record::Finished(Outcome::Done))?;
            return Ok(snapshot);
        }
        let verb = if desired { "activate" } else { "deactivate" };
        let doing = format!("{verb} partition {partition}");
        let code = nvfm::Code::GENERIC;
        // FM reported success, but its list says otherwise.
        let error = answer.err().unwrap_or(nvfm::Error::Refused { call: "fmGetSupportedFabricPartitions", code });
        self.write(Record::Finished(Outcome::Failed { reason: error.to_string() }))?;
        Err(EngineError::FabricManager { doing, error })
    }

    fn execute(&mut self, request: &str, summary: &str, change: Change) -> Result<FabricSnapshot, EngineError> {
        let number = self.state.last_change + 1;
        let pending = PendingChange { number, request: request.to_owned(), summary: summary.to_owned(), change };
        self.write(Record::Started(pending.clone()))?;
        let since = Instant::now();
        let answer = match pending.change {
            Change::Activate { partition, .. } => self.fabric.activate(partition),
            Change::Deactivate { partition } => self.fabric.deactivate(partition),
        };
        let result = self.finish_change(&pending, answer);
        self.change_stats.count(&pending.change, &result, since.elapsed());
        result
    }

    /// Returns the change of a completed request with the same id.
    fn completed_change(&self, request: &str, summary: &str) -> Result<Option<&Change>, EngineError> {
        let used = |was: &str| EngineError::RequestIdReused { request: request.to_owned(), was: was.to_owned() };
        if let Some(pending) =
            self.state.in_progress.as_ref().filter(|pending| pending.request == request && pending.summary != summary)
        {
            return Err(used(&pending.summary));
        }
        match self.state.completed_request(request) {
            Some(known) if known.summary == summary => Ok(Some(&known.change)),
            Some(known) => Err(used(&known.summary)),
            None => Ok(None),
        }
    }

    /// Returns the result of the same activation if its partition is still assigned. A late retry must not activate
    /// it again.
    fn completed_activation(&self, request: &str, summary: &str) -> Result<Option<Activated>, EngineError> {
        let Some(Change::Activate { partition, gpus, owner }) = self.completed_change(request, summary)? else {
            return Ok(None);
        };
        if self.state.assignments.get(partition).is_some_and(|assignment| assignment.owner == *owner) {
            return Ok(Some(Activated { partition: *partition, gpus: *gpus, already_done: true }));
        }
        Err(EngineError::AssignmentEnded { request: request.to_owned(), partition: *partition })
    }

    fn check_outage(&self) -> Result<(), EngineError> {
        match &self.state.outage {
            Some(outage) => {
                Err(EngineError::Outage { partitions: outage.partitions.clone(), reason: outage.reason.clone() })
            }
            None => Ok(()),
        }
    }

    /// Returns the partition that a request would get now, without activating it.
    ///
    /// # Errors
    /// Why the request would be refused.
    pub fn plan(
        &mut self,
        partition_request: impl Into<PartitionRequest>,
    ) -> Result<firstlight_partitions::Choice, EngineError> {
        let partition_request = partition_request.into();
        let snapshot = self.settle()?;
        let request = match &partition_request.selector {
            PartitionSelector::Count(count) => Request::Count(*count),
            PartitionSelector::Gpus(gpus) => Request::Exactly(*gpus),
            PartitionSelector::Partition(id) => Request::Exactly(snapshot.partition(*id)?.gpus),
            PartitionSelector::Pci(places) => Request::Exactly(self.module_map.known().at(places)?),
        };
        let taken = Allocation { busy: self.state.busy().with(snapshot.busy()), quarantined: self.state.quarantined() };
        let choice = snapshot.table.plan(&taken, request)?;
        self.check_map(&snapshot, &partition_request, &choice.partition)?;
        // It is unknown which GPUs a switch's links lead to. A single GPU needs none.
        match self.state.faulty_switches.iter().next().filter(|_| choice.partition.gpus.count() > 1) {
            Some((switch, reason)) => Err(EngineError::FaultySwitch { switch: switch.clone(), reason: reason.clone() }),
            None => Ok(choice),
        }
    }

    /// Activates a partition for `owner`. Idempotent by request id.
    ///
    /// # Errors
    /// Why it was refused; after [`EngineError::OutcomeUnknown`] the change may still complete.
    pub fn activate(
        &mut self,
        request: &str,
        partition_request: impl Into<PartitionRequest>,
        owner: &str,
    ) -> Result<Activated, EngineError> {
        check_text("request id", request)?;
        check_text("owner", owner)?;
        let partition_request = partition_request.into();
        let summary = format!("activate {} for {owner}", partition_request.selector);
        if let Some(activated) = self.completed_activation(request, &summary)? {
            return Ok(activated);
        }
        let choice = self.plan(partition_request);
        // `plan` may have settled this very request, if it was interrupted.
        if let Some(activated) = self.completed_activation(request, &summary)? {
            return Ok(activated);
        }
        self.check_outage()?;
        let partition = choice?.partition;
        let (id, gpus) = (partition.id, partition.gpus);
        self.execute(request, &summary, Change::Activate { partition: id, gpus, owner: owner.to_owned() })?;
        Ok(Activated { partition: id, gpus, already_done: false })
    }

    /// Deactivates a partition of `owner`; returns whether it was active. Its tenant has to have ended.
    ///
    /// # Errors
    /// Why it was refused; after [`EngineError::OutcomeUnknown`] it is retried when FM answers.
    pub fn deactivate(&mut self, request: &str, partition: PartitionId, owner: &str) -> Result<bool, EngineError> {
        check_text("request id", request)?;
        check_text("owner", owner)?;
        let summary = format!("deactivate partition {partition} of {owner}");
        if self.completed_change(request, &summary)?.is_some() {
            return Ok(true);
        }
        let snapshot = self.settle()?;
        if self.completed_change(request, &summary)?.is_some() {
            return Ok(true);
        }
        snapshot.partition(partition)?;
        match self.state.assignments.get(&partition) {
            Some(assignment) if assignment.owner != owner => {
                let (holder, owner) = (assignment.owner.clone(), owner.to_owned());
                Err(EngineError::OwnedByOther { partition, holder, owner })
            }
            Some(_) => self.execute(request, &summary, Change::Deactivate { partition }).map(|_| true),
            None if snapshot.active.contains(&partition) => Err(EngineError::Unowned { partition }),
            None => Ok(false),
        }
    }

    /// Returns the steps that would make the active partitions and owners exactly these.
    ///
    /// # Errors
    /// The desired partitions are invalid, or FM does not answer.
    pub fn steps(&mut self, desired: &[(PartitionId, String)]) -> Result<Vec<Step>, EngineError> {
        desired.iter().try_for_each(|(_, owner)| check_text("owner", owner))?;
        self.settle()?.steps(&self.state, desired)
    }

    /// Makes the active partitions and owners exactly these. The caller knows which tenants run: all other partitions
    /// are deactivated. Ends an outage.
    ///
    /// # Errors
    /// As [`Engine::steps`]; or a step failed, and those before it have been done.
    pub fn reconcile(&mut self, request: &str, desired: &[(PartitionId, String)]) -> Result<Vec<Step>, EngineError> {
        check_text("request id", request)?;
        let steps = self.steps(desired)?;
        for (at, step) in steps.iter().enumerate() {
            match step.clone() {
                Step::Adopt { partition, gpus, owner } => self.write(Record::Adopted { partition, gpus, owner })?,
                Step::Change(change) => {
                    let summary = format!("reconcile: step {at}");
                    self.execute(&format!("{request}/{at}"), &summary, change)?;
                }
            }
        }
        if self.state.outage.is_some() {
            self.write(Record::Reconciled)?;
        }
        Ok(steps)
    }

    /// Excludes a GPU from allocation. Its current owner keeps it until deactivation.
    ///
    /// # Errors
    /// There is no such GPU, FM does not answer, or the journal cannot be written.
    pub fn quarantine(&mut self, gpu: u32, reason: &str) -> Result<(), EngineError> {
        let gpus = self.settle()?.table.gpus();
        if !gpus.ids().any(|id| id == gpu) {
            return Err(EngineError::UnknownGpu { gpu, gpus });
        }
        let reason: String = reason.chars().filter(|letter| !letter.is_control()).take(200).collect();
        if self.state.quarantined.get(&gpu) == Some(&reason) {
            Ok(())
        } else {
            self.write(Record::Quarantined { gpu, reason })
        }
    }

    /// Returns a GPU to allocation; returns whether it was quarantined.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn release(&mut self, gpu: u32) -> Result<bool, EngineError> {
        let was = self.state.quarantined.contains_key(&gpu);
        if was {
            self.write(Record::Released { gpu })?;
        }
        Ok(was)
    }

    /// Processes a fault from the kernel log, each once; returns whether it affects allocation. After a fatal SXid no
    /// partition of several GPUs is activated until the switch is released; a GPU with an Xid is quarantined.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn kernel_fault(&mut self, boot_id: &str, sequence: u64, fault: &Fault) -> Result<bool, EngineError> {
        let reason = fault.to_string();
        let record = match fault.kind {
            Kind::FatalSxid => Record::SwitchFaulty { switch: fault.device.clone(), reason },
            // FM lists PCI addresses before H100 only.
            Kind::Xid => match self.last_snapshot.as_ref().and_then(|(snapshot, _)| snapshot.gpu_at(&fault.device)) {
                Some(gpu) => Record::Quarantined { gpu, reason },
                None => return Ok(false),
            },
            Kind::NonFatalSxid => return Ok(false),
        };
        let is_known = |position: &KernelLogPosition| position.boot_id == boot_id && position.sequence >= sequence;
        if !self.state.kernel_log.as_ref().is_some_and(is_known) {
            self.write(record)?;
            self.write(Record::KernelLogRead(KernelLogPosition { boot_id: boot_id.to_owned(), sequence }))?;
        }
        Ok(true)
    }

    /// Clears the fatal error of a switch.
    ///
    /// # Errors
    /// The switch is not marked faulty, or the journal cannot be written.
    pub fn release_switch(&mut self, switch: &str) -> Result<(), EngineError> {
        if !self.state.faulty_switches.contains_key(switch) {
            let there = self.state.faulty_switches.keys().cloned().collect::<Vec<_>>().join(", ");
            let switch = switch.chars().filter(|letter| !letter.is_control()).take(32).collect();
            return Err(EngineError::SwitchNotFaulty { switch, there });
        }
        self.write(Record::SwitchReleased { switch: switch.to_owned() })
    }
}

#[cfg(test)]
mod tests;
