//! Selects the partition for a request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::gpus::Gpus;
use crate::table::{Partition, PartitionId, Table};

/// The GPUs that are not available.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocation {
    /// GPUs of active partitions, and of activations in progress.
    pub busy: Gpus,
    /// GPUs excluded from allocation.
    pub quarantined: Gpus,
}

/// The requested GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Any partition with this number of GPUs.
    Count(u32),
    /// Exactly these GPUs.
    Exactly(Gpus),
}

/// The selected partition, and what it blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The partition.
    pub partition: Partition,
    /// Larger partitions that are free now and would be blocked.
    pub blocked: Vec<PartitionId>,
}

/// The number of free partitions by size.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Free {
    /// Free partitions by size, including sizes with none.
    pub by_size: BTreeMap<u32, u32>,
    /// The largest size with a free partition; 0 if there is none.
    pub largest: u32,
}

/// Why no partition was selected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No partition has this size.
    #[error("no partition has {asked} GPUs; there are partitions of {}", size_list(sizes))]
    NoSuchSize {
        /// The requested number of GPUs.
        asked: u32,
        /// The existing sizes.
        sizes: Vec<u32>,
    },
    /// No partition has exactly these GPUs.
    #[error("no partition has exactly the GPUs {asked}{}", near(of_size))]
    NoSuchSet {
        /// The requested GPUs.
        asked: Gpus,
        /// Partitions of the same size.
        of_size: Vec<Partition>,
    },
    /// All partitions of this size are taken.
    #[error("no partition of {asked} GPUs is free: {}{}", unavailable_text(*busy, *quarantined), largest_text(*largest))]
    NoneFree {
        /// The requested number of GPUs.
        asked: u32,
        /// GPUs in use.
        busy: Gpus,
        /// Quarantined GPUs.
        quarantined: Gpus,
        /// The largest size with a free partition.
        largest: u32,
    },
    /// The partition is not free.
    #[error("GPUs {asked} are partition {partition}, and it is not free: {}", unavailable_text(*busy, *quarantined))]
    Taken {
        /// The requested GPUs.
        asked: Gpus,
        /// The partition with exactly these GPUs.
        partition: PartitionId,
        /// Those in use.
        busy: Gpus,
        /// Those quarantined.
        quarantined: Gpus,
    },
}

fn size_list(numbers: &[u32]) -> String {
    match numbers {
        [] => "no size: the fabric manager knows no partition".to_owned(),
        [one] => one.to_string(),
        [rest @ .., last] => {
            let rest: Vec<String> = rest.iter().map(ToString::to_string).collect();
            format!("{} and {last}", rest.join(", "))
        }
    }
}

fn near(of_size: &[Partition]) -> String {
    if of_size.is_empty() {
        return String::new();
    }
    let sets: Vec<String> =
        of_size.iter().map(|partition| format!("{} (partition {})", partition.gpus, partition.id)).collect();
    format!("; partitions of this size: {}", sets.join(", "))
}

fn unavailable_text(busy: Gpus, quarantined: Gpus) -> String {
    let one = |gpus: Gpus, what: &str| (!gpus.is_empty()).then(|| format!("GPUs {gpus} are {what}"));
    let parts: Vec<String> = [one(busy, "taken"), one(quarantined, "quarantined")].into_iter().flatten().collect();
    parts.join(", ")
}

fn largest_text(largest: u32) -> String {
    match largest {
        0 => "; nothing is free".to_owned(),
        largest => format!("; the largest that is free has {largest}"),
    }
}

impl Allocation {
    fn conflicts_with(&self, partition: &Partition) -> bool {
        partition.gpus.overlaps(self.busy.with(self.quarantined))
    }
}

impl Table {
    /// Selects a partition: among the free ones that fit, the one that blocks the fewest larger free partitions; on a
    /// tie the one that blocks the smaller ones, then the one with the fewest unused GPUs in overlapping larger
    /// partitions, then the one with the lowest id.
    ///
    /// # Errors
    /// No such partition exists, or none is free.
    pub fn plan(&self, state: &Allocation, request: Request) -> Result<Choice, PlanError> {
        match request {
            Request::Count(count) => self.of_count(state, count),
            Request::Exactly(gpus) => self.exactly(state, gpus),
        }
    }

    fn of_count(&self, state: &Allocation, count: u32) -> Result<Choice, PlanError> {
        let is_free: Vec<bool> = self.partitions.iter().map(|partition| !state.conflicts_with(partition)).collect();
        let candidates = (0..self.partitions.len()).filter(|at| self.partitions[*at].gpus.count() == count);
        let best = candidates.clone().filter(|at| is_free[*at]).min_by_key(|at| self.cost(state, &is_free, *at));
        if let Some(at) = best {
            return Ok(self.choice(&is_free, at));
        }
        if candidates.count() == 0 {
            return Err(PlanError::NoSuchSize { asked: count, sizes: self.sizes() });
        }
        let Allocation { busy, quarantined } = *state;
        let all = self.gpus();
        Err(PlanError::NoneFree {
            asked: count,
            busy: busy.and(all),
            quarantined: quarantined.and(all),
            largest: self.free(state).largest,
        })
    }

    fn exactly(&self, state: &Allocation, gpus: Gpus) -> Result<Choice, PlanError> {
        let Some(at) = self.partitions.iter().position(|partition| partition.gpus == gpus) else {
            let of_size = self.partitions.iter().filter(|partition| partition.gpus.count() == gpus.count());
            return Err(PlanError::NoSuchSet { asked: gpus, of_size: of_size.cloned().collect() });
        };
        let partition = &self.partitions[at];
        if state.conflicts_with(partition) {
            let (busy, quarantined) = (state.busy.and(gpus), state.quarantined.and(gpus));
            return Err(PlanError::Taken { asked: gpus, partition: partition.id, busy, quarantined });
        }
        let is_free: Vec<bool> = self.partitions.iter().map(|partition| !state.conflicts_with(partition)).collect();
        Ok(self.choice(&is_free, at))
    }

    /// Returns the indices of larger free partitions that share a GPU with this one.
    fn blocked_by<'a>(&'a self, is_free: &'a [bool], at: usize) -> impl Iterator<Item = usize> + 'a {
        let size = self.partitions[at].gpus.count();
        self.conflicts[at]
            .iter()
            .copied()
            .filter(move |other| is_free[*other] && self.partitions[*other].gpus.count() > size)
    }

    fn choice(&self, is_free: &[bool], at: usize) -> Choice {
        let blocked = self.blocked_by(is_free, at).map(|other| self.partitions[other].id).collect();
        Choice { partition: self.partitions[at].clone(), blocked }
    }

    /// Returns the sort key, lowest first: blocked larger partitions, their GPUs, unused GPUs around it, its id.
    fn cost(&self, state: &Allocation, is_free: &[bool], at: usize) -> (usize, u32, u32, PartitionId) {
        let (mut count, mut gpus) = (0, 0);
        for other in self.blocked_by(is_free, at) {
            count += 1;
            gpus += self.partitions[other].gpus.count();
        }
        let partition = &self.partitions[at];
        let around = self.conflicts[at].iter().map(|other| &self.partitions[*other]);
        let larger = around.filter(|other| other.gpus.count() > partition.gpus.count());
        let taken = state.busy.with(state.quarantined);
        let unused = larger.map(|other| other.gpus.without(taken).count()).sum();
        (count, gpus, unused, partition.id)
    }

    /// Returns the free partitions.
    #[must_use]
    pub fn free(&self, state: &Allocation) -> Free {
        let mut by_size: BTreeMap<u32, u32> = self.sizes().into_iter().map(|size| (size, 0)).collect();
        for partition in self.partitions.iter().filter(|partition| !state.conflicts_with(partition)) {
            *by_size.entry(partition.gpus.count()).or_default() += 1;
        }
        let largest = by_size.iter().rev().find(|(_, count)| **count > 0).map_or(0, |(size, _)| *size);
        Free { by_size, largest }
    }
}

#[cfg(test)]
mod tests;
