//! The list of partitions that a fabric manager knows, checked.

use serde::{Deserialize, Serialize};

use crate::gpus::Gpus;

/// FM's number of a partition.
pub type PartitionId = u32;

/// What a partition is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// FM's number.
    pub id: PartitionId,
    /// Its GPUs.
    pub gpus: Gpus,
}

/// A list that no fabric manager should give.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A number is there twice.
    #[error("partition {0} is in the table twice")]
    Twice(PartitionId),
    /// Nothing is in it.
    #[error("partition {0} has no GPU")]
    Empty(PartitionId),
    /// Which one would be activated cannot be known.
    #[error("partitions {0} and {1} have the same GPUs ({2})")]
    Same(PartitionId, PartitionId, Gpus),
}

/// All partitions of a baseboard, in order of number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(crate) partitions: Vec<Partition>,
    /// For each, those that have a GPU of it, itself among them, by place.
    pub(crate) conflicts: Vec<Vec<usize>>,
}

impl Table {
    /// A checked table.
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
        let meets = |one: &Partition| {
            let others = partitions.iter().enumerate().filter(|(_, other)| other.gpus.meets(one.gpus));
            others.map(|(at, _)| at).collect()
        };
        let conflicts = partitions.iter().map(meets).collect();
        Ok(Self { partitions, conflicts })
    }

    /// All partitions, in order of number.
    #[must_use]
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    /// The partition of this number.
    #[must_use]
    pub fn get(&self, id: PartitionId) -> Option<&Partition> {
        self.place(id).map(|at| &self.partitions[at])
    }

    pub(crate) fn place(&self, id: PartitionId) -> Option<usize> {
        self.partitions.binary_search_by_key(&id, |partition| partition.id).ok()
    }

    /// The partition of exactly these GPUs.
    #[must_use]
    pub fn of_gpus(&self, gpus: Gpus) -> Option<&Partition> {
        self.partitions.iter().find(|partition| partition.gpus == gpus)
    }

    /// Every GPU that is in a partition.
    #[must_use]
    pub fn gpus(&self) -> Gpus {
        self.partitions.iter().fold(Gpus::NONE, |all, partition| all.with(partition.gpus))
    }

    /// The sizes that there are, smallest first.
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
    fn a_table_is_asked_by_number_and_by_gpus() {
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
