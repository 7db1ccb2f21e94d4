//! FM's partition list, validated, and compared with the daemon's state.

use std::collections::BTreeSet;

use firstlight_partitions::{Gpus, Partition, PartitionId, Table};
use firstlight_sys::nvfm;

use crate::error::EngineError;
use crate::state::{Change, State};

/// A validated partition list of FM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FabricSnapshot {
    /// All partitions.
    pub table: Table,
    /// The active ones.
    pub active: BTreeSet<PartitionId>,
    /// FM's own entries.
    pub listed: Vec<nvfm::Partition>,
}

/// A step of a reconciliation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Records the owner of a partition that is active already.
    Adopt {
        /// The partition.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
        /// Its owner.
        owner: String,
    },
    /// Activates or deactivates a partition.
    Change(Change),
}

impl FabricSnapshot {
    /// Validates FM's list.
    ///
    /// # Errors
    /// Contradicting ids, GPUs or active partitions.
    pub fn of(listed: &[nvfm::Partition]) -> Result<Self, EngineError> {
        let mut partitions = Vec::with_capacity(listed.len());
        for one in listed {
            let wrong = |reason: String| EngineError::InvalidPartition { partition: one.id, reason };
            let gpus =
                Gpus::of(one.gpus.iter().map(|gpu| gpu.physical_id)).map_err(|error| wrong(error.to_string()))?;
            if usize::try_from(gpus.count()).ok() != Some(one.gpus.len()) {
                return Err(wrong("a GPU is listed twice".to_owned()));
            }
            partitions.push(Partition { id: one.id, gpus });
        }
        let table = Table::new(partitions)?;
        let active: BTreeSet<PartitionId> = listed.iter().filter(|one| one.is_active).map(|one| one.id).collect();
        let snapshot = Self { table, active, listed: listed.to_vec() };
        let mut seen: Vec<&Partition> = Vec::new();
        for one in snapshot.table.partitions().iter().filter(|one| snapshot.active.contains(&one.id)) {
            if let Some(other) = seen.iter().find(|other| other.gpus.overlaps(one.gpus)) {
                return Err(EngineError::ActiveOverlap(other.id, one.id, other.gpus.and(one.gpus)));
            }
            seen.push(one);
        }
        Ok(snapshot)
    }

    /// Returns the GPUs of active partitions.
    #[must_use]
    pub fn busy(&self) -> Gpus {
        let active = self.table.partitions().iter().filter(|one| self.active.contains(&one.id));
        active.fold(Gpus::NONE, |all, one| all.with(one.gpus))
    }

    /// Returns the GPU at a PCI address as the kernel writes it (without a function), where FM lists addresses.
    #[must_use]
    pub fn gpu_at(&self, device: &str) -> Option<u32> {
        let gpus = self.listed.iter().flat_map(|one| &one.gpus);
        // FM writes the domain with eight digits.
        let is = |pci: &str| {
            let pci = pci.to_ascii_lowercase();
            let pci = pci.rsplit_once('.').map_or(pci.as_str(), |(slot, _)| slot);
            pci == device || pci.strip_prefix("0000") == Some(device)
        };
        // FM writes an unknown address as zeros.
        gpus.filter(|gpu| gpu.pci.bytes().any(|byte| matches!(byte, b'1'..=b'9' | b'a'..=b'f' | b'A'..=b'F')))
            .find(|gpu| is(&gpu.pci))
            .map(|gpu| gpu.physical_id)
    }

    /// Returns the partition with this id.
    ///
    /// # Errors
    /// There is none.
    pub fn partition(&self, id: PartitionId) -> Result<&Partition, EngineError> {
        let ids = || self.table.partitions().iter().map(|one| one.id).collect();
        self.table.get(id).ok_or_else(|| EngineError::UnknownPartition { id, ids: ids() })
    }

    /// Returns assigned partitions that FM does not list as active.
    #[must_use]
    pub fn lost(&self, state: &State) -> Vec<PartitionId> {
        state.assignments.keys().copied().filter(|id| !self.active.contains(id)).collect()
    }

    /// Returns partitions that FM lists as active and that have no recorded owner.
    #[must_use]
    pub fn unowned(&self, state: &State) -> Vec<PartitionId> {
        let in_progress = state.in_progress.as_ref().map(|pending| pending.change.partition());
        let known = |id: &PartitionId| state.assignments.contains_key(id) || in_progress == Some(*id);
        self.active.iter().copied().filter(|id| !known(id)).collect()
    }

    /// Returns the steps to exactly these partitions and owners: first deactivations, then adoptions, then
    /// activations.
    ///
    /// # Errors
    /// The desired partitions are invalid.
    pub fn steps(&self, state: &State, desired: &[(PartitionId, String)]) -> Result<Vec<Step>, EngineError> {
        let mut rows: Vec<(&Partition, &String)> = Vec::new();
        for (id, owner) in desired {
            let partition = self.partition(*id)?;
            if let Some((other, _)) = rows.iter().find(|(other, _)| other.gpus.overlaps(partition.gpus)) {
                return Err(EngineError::Overlap(other.id, partition.id, other.gpus.and(partition.gpus)));
            }
            rows.push((partition, owner));
        }
        let unwanted = self.active.iter().filter(|id| rows.iter().all(|(partition, _)| partition.id != **id));
        let mut steps: Vec<Step> = unwanted.map(|id| Step::Change(Change::Deactivate { partition: *id })).collect();
        let (there, missing): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|(partition, _)| self.active.contains(&partition.id));
        for (partition, owner) in there {
            let is_known = state.assignments.get(&partition.id).is_some_and(|assignment| assignment.owner == *owner);
            if !is_known {
                steps.push(Step::Adopt { partition: partition.id, gpus: partition.gpus, owner: owner.clone() });
            }
        }
        steps.extend(missing.into_iter().map(|(partition, owner)| {
            let (partition, gpus) = (partition.id, partition.gpus);
            Step::Change(Change::Activate { partition, gpus, owner: owner.clone() })
        }));
        Ok(steps)
    }
}
