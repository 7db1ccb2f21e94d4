//! The validated list of a fabric manager's partitions.

use serde::{Deserialize, Serialize};

use crate::gpus::Gpus;

/// FM's partition id.
pub type PartitionId = u32;

/// A partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// FM's partition id.
    pub id: PartitionId,
    /// Its GPUs.
    pub gpus: Gpus,
}

/// An invalid partition list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A number appears twice.
    #[error("partition {0} is in the table twice")]
    Twice(PartitionId),
    /// A partition without GPUs.
    #[error("partition {0} has no GPU")]
    Empty(PartitionId),
    /// Two partitions have the same GPUs, so a request for them would be ambiguous.
    #[error("partitions {0} and {1} have the same GPUs ({2})")]
    Same(PartitionId, PartitionId, Gpus),
}

/// All partitions of a baseboard, sorted by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(crate) partitions: Vec<Partition>,
    /// For each partition, the indices of those that share a GPU with it, including itself.
    pub(crate) conflicts: Vec<Vec<usize>>,
}

impl Table {
    /// Validates a list of partitions.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn new(partitions: impl IntoIterator<Item = Partition>) -> Result<Self, TableError> {
        let mut partitions: Vec<Partition> = partitions.into_iter().collect();
        partitions.sort_by_key(|partition| partition.id);
        for (at, partition) in partitions.iter().enumerate() {
            if partition.gpus.is_empty() {
                return Err(TableError::Empty(partition.id));
            }
            for other in &partitions[..at] {
                if other.id == partition.id {
                    return Err(TableError::Twice(partition.id));
                }
                if other.gpus == partition.gpus {
                    return Err(TableError::Same(other.id, partition.id, partition.gpus));
                }
            }
        }
        let overlaps = |one: &Partition| {
            let others = partitions.iter().enumerate().filter(|(_, other)| other.gpus.overlaps(one.gpus));
            others.map(|(at, _)| at).collect()
        };
        let conflicts = partitions.iter().map(overlaps).collect();
        Ok(Self { partitions, conflicts })
    }

    /// Returns all partitions, sorted by id.
    #[must_use]
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    /// Returns the partition with this id.
    #[must_use]
    pub fn get(&self, id: PartitionId) -> Option<&Partition> {
        self.place(id).map(|at| &self.partitions[at])
    }

    pub(crate) fn place(&self, id: PartitionId) -> Option<usize> {
        self.partitions.binary_search_by_key(&id, |partition| partition.id).ok()
    }

    /// Returns the partition of exactly these GPUs.
    #[must_use]
    pub fn of_gpus(&self, gpus: Gpus) -> Option<&Partition> {
        self.partitions.iter().find(|partition| partition.gpus == gpus)
    }

    /// Returns all GPUs of the table.
    #[must_use]
    pub fn gpus(&self) -> Gpus {
        self.partitions.iter().fold(Gpus::NONE, |all, partition| all.with(partition.gpus))
    }

    /// Returns the existing sizes, smallest first.
    #[must_use]
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.partitions.iter().map(|partition| partition.gpus.count()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::known;

    fn partition(id: u32, gpus: &[u32]) -> Partition {
        Partition { id, gpus: Gpus::of(gpus.iter().copied()).unwrap() }
    }

    #[test]
    fn contradictions_are_named() {
        for (partitions, error) in [
            (vec![partition(1, &[1]), partition(1, &[2])], TableError::Twice(1)),
            (vec![partition(7, &[])], TableError::Empty(7)),
            (vec![partition(4, &[1, 2]), partition(2, &[2, 1])], TableError::Same(2, 4, Gpus::of([1, 2]).unwrap())),
        ] {
            assert_eq!(Table::new(partitions).unwrap_err(), error);
        }
        assert!(Table::new([]).unwrap().partitions().is_empty());
    }

    #[test]
    fn table_finds_partitions_by_id_and_by_gpus() {
        let table = known::H100.table();
        assert_eq!(table.get(3).unwrap().gpus.to_string(), "1,3");
        assert_eq!(table.get(15), None);
        assert_eq!(table.of_gpus(Gpus::of([8, 6]).unwrap()).unwrap().id, 6);
        assert_eq!(table.of_gpus(Gpus::of([1, 2]).unwrap()), None, "1 and 2 are no pair of an H100's");
        assert_eq!((table.gpus().count(), table.sizes()), (8, vec![1, 2, 4, 8]));
        let conflicts = |id: u32| table.conflicts[table.place(id).unwrap()].len();
        assert_eq!((conflicts(0), conflicts(1), conflicts(3), conflicts(7)), (15, 8, 5, 4));
    }
}
