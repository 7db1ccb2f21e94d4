//! What FM lists, checked, and compared with what is known.

use std::collections::BTreeSet;

use firstlight_partitions::{Gpus, Partition, PartitionId, Table};
use firstlight_sys::nvfm;

use crate::refused::Refused;
use crate::state::{Change, State};

/// A look at the fabric.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// All partitions.
    pub table: Table,
    /// Those that are active.
    pub active: BTreeSet<PartitionId>,
    /// What FM says of each.
    pub listed: Vec<nvfm::Partition>,
}

/// A step on the way to what is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It is active, and known from now on.
    Found {
        /// Which.
        partition: PartitionId,
        /// Its GPUs.
        gpus: Gpus,
        /// Whose.
        owner: String,
    },
    /// To activate or deactivate.
    Change(Change),
}

impl Look {
    /// FM's list, if it can be.
    ///
    /// # Errors
    /// Numbers, GPUs or active partitions that contradict each other.
    pub fn of(listed: &[nvfm::Partition]) -> Result<Self, Refused> {
        let mut partitions = Vec::with_capacity(listed.len());
        for one in listed {
            let wrong = |why: String| Refused::Listed { partition: one.id, why };
            let gpus =
                Gpus::of(one.gpus.iter().map(|gpu| gpu.physical_id)).map_err(|error| wrong(error.to_string()))?;
            if usize::try_from(gpus.count()).ok() != Some(one.gpus.len()) {
                return Err(wrong("a GPU is listed twice".to_owned()));
            }
            partitions.push(Partition { id: one.id, gpus });
        }
        let table = Table::new(partitions)?;
        let active: BTreeSet<PartitionId> = listed.iter().filter(|one| one.is_active).map(|one| one.id).collect();
        let look = Self { table, active, listed: listed.to_vec() };
        let mut seen: Vec<&Partition> = Vec::new();
        for one in look.table.partitions().iter().filter(|one| look.active.contains(&one.id)) {
            if let Some(other) = seen.iter().find(|other| other.gpus.meets(one.gpus)) {
                return Err(Refused::Impossible(other.id, one.id, other.gpus.and(one.gpus)));
            }
            seen.push(one);
        }
        Ok(look)
    }

    /// GPUs of partitions that are active.
    #[must_use]
    pub fn busy(&self) -> Gpus {
        let active = self.table.partitions().iter().filter(|one| self.active.contains(&one.id));
        active.fold(Gpus::NONE, |all, one| all.with(one.gpus))
    }

    /// The GPU at a PCI address as the kernel writes it, without the function, where FM lists addresses.
    #[must_use]
    pub fn gpu_at(&self, device: &str) -> Option<u32> {
        let gpus = self.listed.iter().flat_map(|one| &one.gpus);
        // FM's domain has eight digits.
        let is = |pci: &str| {
            let pci = pci.to_ascii_lowercase();
            let pci = pci.rsplit_once('.').map_or(pci.as_str(), |(slot, _)| slot);
            pci == device || pci.strip_prefix("0000") == Some(device)
        };
        // What is not known is written as zeros.
        gpus.filter(|gpu| gpu.pci.bytes().any(|byte| matches!(byte, b'1'..=b'9' | b'a'..=b'f' | b'A'..=b'F')))
            .find(|gpu| is(&gpu.pci))
            .map(|gpu| gpu.physical_id)
    }

    /// The partition of this number.
    ///
    /// # Errors
    /// There is none.
    pub fn partition(&self, id: PartitionId) -> Result<&Partition, Refused> {
        let ids = || self.table.partitions().iter().map(|one| one.id).collect();
        self.table.get(id).ok_or_else(|| Refused::NoPartition { id, ids: ids() })
    }

    /// Partitions that somebody has, and FM has not.
    #[must_use]
    pub fn lost(&self, state: &State) -> Vec<PartitionId> {
        state.holdings.keys().copied().filter(|id| !self.active.contains(id)).collect()
    }

    /// Partitions that FM has active, and nobody has.
    #[must_use]
    pub fn foreign(&self, state: &State) -> Vec<PartitionId> {
        let under_way = state.under_way.as_ref().map(|begun| begun.change.partition());
        let known = |id: &PartitionId| state.holdings.contains_key(id) || under_way == Some(*id);
        self.active.iter().copied().filter(|id| !known(id)).collect()
    }

    /// What leads from here to exactly these partitions for these owners: first
    /// what takes away, then what is known anew, then what is added.
    ///
    /// # Errors
    /// What is wanted cannot be.
    pub fn steps(&self, state: &State, wanted: &[(PartitionId, String)]) -> Result<Vec<Step>, Refused> {
        let mut rows: Vec<(&Partition, &String)> = Vec::new();
        for (id, owner) in wanted {
            let partition = self.partition(*id)?;
            if let Some((other, _)) = rows.iter().find(|(other, _)| other.gpus.meets(partition.gpus)) {
                return Err(Refused::Overlap(other.id, partition.id, other.gpus.and(partition.gpus)));
            }
            rows.push((partition, owner));
        }
        let unwanted = self.active.iter().filter(|id| rows.iter().all(|(partition, _)| partition.id != **id));
        let mut steps: Vec<Step> = unwanted.map(|id| Step::Change(Change::Deactivate { partition: *id })).collect();
        let (there, missing): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|(partition, _)| self.active.contains(&partition.id));
        for (partition, owner) in there {
            let is_known = state.holdings.get(&partition.id).is_some_and(|holding| holding.owner == *owner);
            if !is_known {
                steps.push(Step::Found { partition: partition.id, gpus: partition.gpus, owner: owner.clone() });
            }
        }
        steps.extend(missing.into_iter().map(|(partition, owner)| {
            let (partition, gpus) = (partition.id, partition.gpus);
            Step::Change(Change::Activate { partition, gpus, owner: owner.clone() })
        }));
        Ok(steps)
    }
}
