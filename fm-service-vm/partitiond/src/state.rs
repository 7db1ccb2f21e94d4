//! The daemon's state: the owner of each partition, the change in progress, quarantined GPUs. It is built from
//! records only, so that replaying the journal restores it.

use std::collections::{BTreeMap, VecDeque};

use firstlight_partitions::{Gpus, PartitionId};
use serde::{Deserialize, Serialize};

/// Number of completed requests that are remembered, so that a retry is not executed again.
const MAX_COMPLETED_REQUESTS: usize = 1024;

/// A change of the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Change {
    /// Activates a partition.
    Activate {
        /// The partition.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
        /// Its owner.
        owner: String,
    },
    /// Deactivates a partition.
    Deactivate {
        /// The partition.
        partition: PartitionId,
    },
}

impl Change {
    /// Returns the partition that is changed.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        match self {
            Self::Activate { partition, .. } | Self::Deactivate { partition } => *partition,
        }
    }
}

/// A change in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PendingChange {
    /// The change's number, counted from 1.
    pub number: u64,
    /// The request id.
    pub request: String,
    /// The request in one line: a retry has to match it.
    pub summary: String,
    /// The change.
    pub change: Change,
}

/// The outcome of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Outcome {
    /// The change was made.
    Done,
    /// The fabric is unchanged.
    Failed {
        /// The cause.
        reason: String,
    },
}

/// A record of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Record {
    /// The complete state.
    Snapshot(Box<State>),
    /// A change is about to be requested from the fabric manager.
    Started(PendingChange),
    /// The change in progress has finished.
    Finished(Outcome),
    /// A partition was active without a recorded owner, from before this journal.
    Adopted {
        /// The partition.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
        /// Its owner, from the list of running tenants.
        owner: String,
    },
    /// A GPU was excluded from allocation.
    Quarantined {
        /// Its module id.
        gpu: u32,
        /// The cause.
        reason: String,
    },
    /// A GPU was returned to allocation.
    Released {
        /// Its module id.
        gpu: u32,
    },
    /// The fabric manager restarted without state while tenants had partitions.
    Lost {
        /// The lost partitions.
        partitions: Vec<PartitionId>,
        /// The cause.
        reason: String,
    },
    /// A caller who knows the running tenants has reconciled.
    Reconciled,
    /// A switch had a fatal SXid.
    SwitchFaulty {
        /// Its PCI address in this machine.
        switch: String,
        /// The kernel's message.
        reason: String,
    },
    /// An operator has released the switch.
    SwitchReleased {
        /// Its PCI address in this machine.
        switch: String,
    },
    /// The kernel log was processed up to here.
    KernelLogRead(KernelLogPosition),
}

/// A partition that is assigned to an owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assignment {
    /// Its GPUs.
    pub gpus: Gpus,
    /// Its owner.
    pub owner: String,
}

/// Partitions that were lost while tenants had them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outage {
    /// The lost partitions.
    pub partitions: Vec<PartitionId>,
    /// The cause.
    pub reason: String,
}

/// A completed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletedRequest {
    /// The request id.
    pub request: String,
    /// The request in one line.
    pub summary: String,
    /// The change that it made.
    pub change: Change,
}

/// A position in the kernel log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelLogPosition {
    /// The boot id: sequence numbers restart with each boot.
    pub boot_id: String,
    /// The record's sequence number.
    pub sequence: u64,
}

/// The state after all records of the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The number of the last change.
    pub last_change: u64,
    /// Assigned partitions, as acknowledged to callers.
    pub assignments: BTreeMap<PartitionId, Assignment>,
    /// The change in progress.
    pub in_progress: Option<PendingChange>,
    /// Quarantined GPUs, with the reason.
    pub quarantined: BTreeMap<u32, String>,
    /// Set while lost partitions are not reconciled.
    pub outage: Option<Outage>,
    /// Switches with a fatal error, by PCI address, with the kernel's message.
    #[serde(default)]
    pub faulty_switches: BTreeMap<String, String>,
    /// The position up to which the kernel log was processed.
    #[serde(default)]
    pub kernel_log: Option<KernelLogPosition>,
    /// Completed requests, oldest first.
    pub completed_requests: VecDeque<CompletedRequest>,
}

impl State {
    /// Applies a record.
    ///
    /// # Errors
    /// The record contradicts the state: no daemon writes that.
    pub fn apply(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::Snapshot(state) => *self = *state,
            Record::Started(pending) => {
                if let Some(other) = &self.in_progress {
                    return Err(format!("change {} starts while {} is in progress", pending.number, other.number));
                }
                if pending.number != self.last_change + 1 {
                    return Err(format!("change {} follows {}", pending.number, self.last_change));
                }
                self.last_change = pending.number;
                self.in_progress = Some(pending);
            }
            Record::Finished(outcome) => {
                let pending = self.in_progress.take().ok_or("no change is in progress to finish")?;
                if outcome == Outcome::Done {
                    self.done(pending);
                }
            }
            Record::Adopted { partition, gpus, owner } => {
                self.assignments.insert(partition, Assignment { gpus, owner });
            }
            Record::Quarantined { gpu, reason } => drop(self.quarantined.insert(gpu, reason)),
            Record::Released { gpu } => drop(self.quarantined.remove(&gpu)),
            Record::Lost { partitions, reason } => {
                self.assignments.retain(|id, _| !partitions.contains(id));
                // Partitions lost earlier and not reconciled stay lost.
                let earlier = self.outage.take().map(|outage| outage.partitions).unwrap_or_default();
                let mut all: Vec<PartitionId> = earlier.into_iter().chain(partitions).collect();
                all.sort_unstable();
                all.dedup();
                self.outage = Some(Outage { partitions: all, reason });
            }
            Record::Reconciled => self.outage = None,
            Record::SwitchFaulty { switch, reason } => drop(self.faulty_switches.insert(switch, reason)),
            Record::SwitchReleased { switch } => drop(self.faulty_switches.remove(&switch)),
            Record::KernelLogRead(position) => self.kernel_log = Some(position),
        }
        Ok(())
    }

    fn done(&mut self, pending: PendingChange) {
        match &pending.change {
            Change::Activate { partition, gpus, owner } => {
                let assignment = Assignment { gpus: *gpus, owner: owner.clone() };
                self.assignments.insert(*partition, assignment);
            }
            Change::Deactivate { partition } => {
                self.assignments.remove(partition);
            }
        }
        let PendingChange { request, summary, change, .. } = pending;
        self.completed_requests.retain(|one| one.request != request);
        self.completed_requests.push_back(CompletedRequest { request, summary, change });
        if self.completed_requests.len() > MAX_COMPLETED_REQUESTS {
            self.completed_requests.pop_front();
        }
    }

    /// Returns a completed request.
    #[must_use]
    pub fn completed_request(&self, request: &str) -> Option<&CompletedRequest> {
        self.completed_requests.iter().rev().find(|one| one.request == request)
    }

    /// Returns the GPUs of assigned partitions, and of an activation in progress.
    #[must_use]
    pub fn busy(&self) -> Gpus {
        let held = self.assignments.values().fold(Gpus::NONE, |all, assignment| all.with(assignment.gpus));
        match self.in_progress.as_ref().map(|pending| &pending.change) {
            Some(Change::Activate { gpus, .. }) => held.with(*gpus),
            _ => held,
        }
    }

    /// Returns the quarantined GPUs.
    #[must_use]
    pub fn quarantined(&self) -> Gpus {
        Gpus::of(self.quarantined.keys().copied()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(ids: &[u32]) -> Gpus {
        Gpus::of(ids.iter().copied()).unwrap()
    }

    fn pending(number: u64, request: &str, change: Change) -> Record {
        Record::Started(PendingChange { number, request: request.into(), summary: "a".into(), change })
    }

    fn activate(partition: u32, ids: &[u32]) -> Change {
        Change::Activate { partition, gpus: gpus(ids), owner: "t".into() }
    }

    fn state(records: impl IntoIterator<Item = Record>) -> State {
        let mut state = State::default();
        records.into_iter().for_each(|record| state.apply(record).unwrap());
        state
    }

    #[test]
    fn only_completed_changes_are_assigned_and_remembered() {
        let first = state([pending(1, "r1", activate(3, &[1, 3]))]);
        assert!(first.assignments.is_empty() && first.completed_request("r1").is_none());
        assert_eq!(first.busy(), gpus(&[1, 3]), "reserved during the activation");
        let mut undone = first.clone();
        undone.apply(Record::Finished(Outcome::Failed { reason: "x".into() })).unwrap();
        assert_eq!((undone.busy(), undone.completed_request("r1"), undone.last_change), (Gpus::NONE, None, 1));
        let mut done = first;
        done.apply(Record::Finished(Outcome::Done)).unwrap();
        assert_eq!(done.assignments[&3].owner, "t");
        assert_eq!(done.completed_request("r1").unwrap().change.partition(), 3);
        done.apply(pending(2, "r2", Change::Deactivate { partition: 3 })).unwrap();
        assert_eq!(done.busy(), gpus(&[1, 3]), "until it is done");
        done.apply(Record::Finished(Outcome::Done)).unwrap();
        assert!(done.busy().is_empty() && done.completed_request("r2").is_some());
        assert!(done.completed_request("r1").is_some(), "a late retry is still known");
    }

    #[test]
    fn inconsistent_records_are_refused() {
        let mut one = state([pending(1, "r", activate(3, &[1]))]);
        assert!(one.apply(pending(2, "s", activate(4, &[2]))).unwrap_err().contains("while 1 is in progress"));
        let mut none = State::default();
        assert!(none.apply(Record::Finished(Outcome::Done)).is_err());
        assert!(none.apply(pending(7, "r", activate(3, &[1]))).unwrap_err().contains("change 7 follows 0"));
    }

    #[test]
    fn outage_removes_lost_assignments_until_reconciled() {
        let found = |partition, ids: &[u32]| Record::Adopted { partition, gpus: gpus(ids), owner: "t".into() };
        let lost = |partitions: &[u32]| Record::Lost { partitions: partitions.to_vec(), reason: "w".into() };
        let mut state = state([found(3, &[1, 3]), found(8, &[2]), lost(&[3]), found(9, &[3]), lost(&[9])]);
        assert_eq!(state.outage.as_ref().unwrap().partitions, [3, 9]);
        assert_eq!(state.busy(), gpus(&[2]));
        state.apply(Record::Reconciled).unwrap();
        assert_eq!(state.outage, None);
    }

    #[test]
    fn oldest_completed_requests_are_dropped() {
        let mut state = State::default();
        for number in 1..=MAX_COMPLETED_REQUESTS as u64 + 1 {
            state
                .apply(pending(number, &format!("r{number}"), activate(u32::try_from(number).unwrap(), &[1])))
                .unwrap();
            state.apply(Record::Finished(Outcome::Done)).unwrap();
        }
        assert!(state.completed_request("r1").is_none() && state.completed_request("r2").is_some());
        assert_eq!(state.completed_requests.len(), MAX_COMPLETED_REQUESTS);
    }
}
