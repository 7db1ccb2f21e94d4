//! What the daemon knows: who has which partition, what is under way, which GPUs
//! nobody may have. It is made of records alone, so that what a journal says and
//! what the daemon knows are the same.

use std::collections::{BTreeMap, VecDeque};

use firstlight_partitions::{Gpus, PartitionId};
use serde::{Deserialize, Serialize};

/// Requests of which the outcome is remembered, so that one that is sent again is not done again.
const REMEMBERED: usize = 1024;

/// Something that changes what the fabric connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Change {
    /// A partition is to be active.
    Activate {
        /// Which.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
        /// For whom.
        owner: String,
    },
    /// It is to be active no more.
    Deactivate {
        /// Which.
        partition: PartitionId,
    },
}

impl Change {
    /// The partition that it is about.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        match self {
            Self::Activate { partition, .. } | Self::Deactivate { partition } => *partition,
        }
    }
}

/// A change under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begun {
    /// Counts changes.
    pub number: u64,
    /// Who asked, so that the same request is known again.
    pub request: String,
    /// What was asked for, in one line: the same request has to ask for the same.
    pub asked: String,
    /// What is changed.
    pub change: Change,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ended {
    /// The fabric is as it was to be.
    Done,
    /// It is as it was before.
    Undone {
        /// Why.
        why: String,
    },
}

/// One line of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Record {
    /// Everything so far.
    Snapshot(Box<State>),
    /// The fabric manager is about to be asked.
    Begun(Begun),
    /// What is under way has ended.
    Ended(Ended),
    /// A partition is active without having been asked for: it was before this journal.
    Found {
        /// Which.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
        /// Whose it is, as the list of tenants says.
        owner: String,
    },
    /// A GPU may not be given to anybody.
    Barred {
        /// Its module id.
        gpu: u32,
        /// Why.
        reason: String,
    },
    /// It may again.
    Released {
        /// Its module id.
        gpu: u32,
    },
    /// The fabric has forgotten its partitions while tenants had them.
    Lost {
        /// Which.
        partitions: Vec<PartitionId>,
        /// How it came to that.
        why: String,
    },
    /// Somebody who knows the tenants has said what is to be.
    Reconciled,
    /// A switch has had an error that it does not get over by itself.
    Faulty {
        /// Its PCI address in this machine.
        switch: String,
        /// What the kernel said.
        reason: String,
    },
    /// Somebody has looked at it, and it is good again.
    Mended {
        /// Its PCI address in this machine.
        switch: String,
    },
    /// The kernel's log was heard up to here.
    Heard(Heard),
}

/// A partition that is active for somebody.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Holding {
    /// Its GPUs.
    pub gpus: Gpus,
    /// Whose it is.
    pub owner: String,
}

/// The fabric has lost what tenants relied on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outage {
    /// Partitions that were active.
    pub partitions: Vec<PartitionId>,
    /// How it came to that.
    pub why: String,
}

/// A request that was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remembered {
    /// Its identifier.
    pub request: String,
    /// What it asked for.
    pub asked: String,
    /// What was changed for it.
    pub change: Change,
}

/// A place in the kernel's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heard {
    /// In which life of the machine: numbers begin anew with it.
    pub boot: String,
    /// The record's number.
    pub number: u64,
}

/// Everything that the journal's records come to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The last change's number.
    pub number: u64,
    /// Partitions that are active for somebody, as far as anybody was told.
    pub holdings: BTreeMap<PartitionId, Holding>,
    /// What was begun and has not ended.
    pub under_way: Option<Begun>,
    /// GPUs that nobody may have, and why.
    pub barred: BTreeMap<u32, String>,
    /// If the fabric has forgotten partitions.
    pub outage: Option<Outage>,
    /// Switches that are not to be relied on, by their PCI addresses, and why.
    #[serde(default)]
    pub faulty: BTreeMap<String, String>,
    /// Up to where the kernel's log is known.
    #[serde(default)]
    pub heard: Option<Heard>,
    /// Requests that were done, oldest first.
    pub remembered: VecDeque<Remembered>,
}

impl State {
    /// What a record changes.
    ///
    /// # Errors
    /// It does not fit to what was before: nothing that keeps this journal writes that.
    pub fn apply(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::Snapshot(state) => *self = *state,
            Record::Begun(begun) => {
                if let Some(other) = &self.under_way {
                    return Err(format!("change {} begins while {} is under way", begun.number, other.number));
                }
                if begun.number != self.number + 1 {
                    return Err(format!("change {} follows {}", begun.number, self.number));
                }
                self.number = begun.number;
                self.under_way = Some(begun);
            }
            Record::Ended(ended) => {
                let begun = self.under_way.take().ok_or("nothing is under way that could end")?;
                if ended == Ended::Done {
                    self.done(begun);
                }
            }
            Record::Found { partition, gpus, owner } => {
                self.holdings.insert(partition, Holding { gpus, owner });
            }
            Record::Barred { gpu, reason } => drop(self.barred.insert(gpu, reason)),
            Record::Released { gpu } => drop(self.barred.remove(&gpu)),
            Record::Lost { partitions, why } => {
                self.holdings.retain(|id, _| !partitions.contains(id));
                // What was lost before and not reconciled is lost still.
                let earlier = self.outage.take().map(|outage| outage.partitions).unwrap_or_default();
                let mut all: Vec<PartitionId> = earlier.into_iter().chain(partitions).collect();
                all.sort_unstable();
                all.dedup();
                self.outage = Some(Outage { partitions: all, why });
            }
            Record::Reconciled => self.outage = None,
            Record::Faulty { switch, reason } => drop(self.faulty.insert(switch, reason)),
            Record::Mended { switch } => drop(self.faulty.remove(&switch)),
            Record::Heard(heard) => self.heard = Some(heard),
        }
        Ok(())
    }

    fn done(&mut self, begun: Begun) {
        match &begun.change {
            Change::Activate { partition, gpus, owner } => {
                let holding = Holding { gpus: *gpus, owner: owner.clone() };
                self.holdings.insert(*partition, holding);
            }
            Change::Deactivate { partition } => {
                self.holdings.remove(partition);
            }
        }
        let Begun { request, asked, change, .. } = begun;
        self.remembered.retain(|one| one.request != request);
        self.remembered.push_back(Remembered { request, asked, change });
        if self.remembered.len() > REMEMBERED {
            self.remembered.pop_front();
        }
    }

    /// The outcome of a request that was done.
    #[must_use]
    pub fn remembers(&self, request: &str) -> Option<&Remembered> {
        self.remembered.iter().rev().find(|one| one.request == request)
    }

    /// GPUs of everybody's partitions, and of the one under way.
    #[must_use]
    pub fn busy(&self) -> Gpus {
        let held = self.holdings.values().fold(Gpus::NONE, |all, holding| all.with(holding.gpus));
        match self.under_way.as_ref().map(|begun| &begun.change) {
            Some(Change::Activate { gpus, .. }) => held.with(*gpus),
            _ => held,
        }
    }

    /// GPUs that nobody may have.
    #[must_use]
    pub fn barred(&self) -> Gpus {
        Gpus::of(self.barred.keys().copied()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(ids: &[u32]) -> Gpus {
        Gpus::of(ids.iter().copied()).unwrap()
    }

    fn begun(number: u64, request: &str, change: Change) -> Record {
        Record::Begun(Begun { number, request: request.into(), asked: "a".into(), change })
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
    fn only_what_is_done_is_held_and_remembered() {
        let first = state([begun(1, "r1", activate(3, &[1, 3]))]);
        assert!(first.holdings.is_empty() && first.remembers("r1").is_none());
        assert_eq!(first.busy(), gpus(&[1, 3]), "nobody else gets them meanwhile");
        let mut undone = first.clone();
        undone.apply(Record::Ended(Ended::Undone { why: "x".into() })).unwrap();
        assert_eq!((undone.busy(), undone.remembers("r1"), undone.number), (Gpus::NONE, None, 1));
        let mut done = first;
        done.apply(Record::Ended(Ended::Done)).unwrap();
        assert_eq!(done.holdings[&3].owner, "t");
        assert_eq!(done.remembers("r1").unwrap().change.partition(), 3);
        done.apply(begun(2, "r2", Change::Deactivate { partition: 3 })).unwrap();
        assert_eq!(done.busy(), gpus(&[1, 3]), "as long as it is not done");
        done.apply(Record::Ended(Ended::Done)).unwrap();
        assert!(done.busy().is_empty() && done.remembers("r2").is_some());
        assert!(done.remembers("r1").is_some(), "a request that comes late is known still");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut one = state([begun(1, "r", activate(3, &[1]))]);
        assert!(one.apply(begun(2, "s", activate(4, &[2]))).unwrap_err().contains("while 1 is under way"));
        let mut none = State::default();
        assert!(none.apply(Record::Ended(Ended::Done)).is_err());
        assert!(none.apply(begun(7, "r", activate(3, &[1]))).unwrap_err().contains("change 7 follows 0"));
    }

    #[test]
    fn an_outage_takes_what_was_held_until_somebody_reconciles() {
        let found = |partition, ids: &[u32]| Record::Found { partition, gpus: gpus(ids), owner: "t".into() };
        let lost = |partitions: &[u32]| Record::Lost { partitions: partitions.to_vec(), why: "w".into() };
        let mut state = state([found(3, &[1, 3]), found(8, &[2]), lost(&[3]), found(9, &[3]), lost(&[9])]);
        assert_eq!(state.outage.as_ref().unwrap().partitions, [3, 9]);
        assert_eq!(state.busy(), gpus(&[2]));
        state.apply(Record::Reconciled).unwrap();
        assert_eq!(state.outage, None);
    }

    #[test]
    fn the_oldest_requests_are_forgotten() {
        let mut state = State::default();
        for number in 1..=REMEMBERED as u64 + 1 {
            state.apply(begun(number, &format!("r{number}"), activate(u32::try_from(number).unwrap(), &[1]))).unwrap();
            state.apply(Record::Ended(Ended::Done)).unwrap();
        }
        assert!(state.remembers("r1").is_none() && state.remembers("r2").is_some());
        assert_eq!(state.remembered.len(), REMEMBERED);
    }
}
