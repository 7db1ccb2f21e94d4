//! Which partition a request gets.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::gpus::Gpus;
use crate::table::{Partition, PartitionId, Table};

/// What is taken on a baseboard.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// GPUs of active partitions, and of those that are promised.
    pub busy: Gpus,
    /// GPUs that nobody may have: in quarantine, or not known to be where the map says.
    pub barred: Gpus,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// So many GPUs, whichever.
    Count(u32),
    /// Exactly these.
    Exactly(Gpus),
}

/// The partition for a request, and what taking it costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The partition.
    pub partition: Partition,
    /// Larger partitions that are free now and will not be, by number.
    pub blocks: Vec<PartitionId>,
}

/// How many partitions of a size could be had now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Free {
    /// Free partitions by size; sizes without one are there with 0.
    pub by_size: BTreeMap<u32, u32>,
    /// The largest size that can be had; 0 if none can.
    pub largest: u32,
}

/// Why a request gets nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No partition has that many GPUs, whatever is free.
    #[error("no partition has {asked} GPUs; there are partitions of {}", words(sizes))]
    NoSize {
        /// What was asked for.
        asked: u32,
        /// The sizes that there are.
        sizes: Vec<u32>,
    },
    /// No partition has exactly these GPUs, whatever is free.
    #[error("no partition has exactly the GPUs {asked}{}", near(of_size))]
    NoSuchSet {
        /// What was asked for.
        asked: Gpus,
        /// Partitions with as many.
        of_size: Vec<Partition>,
    },
    /// There are such partitions, and none is free.
    #[error("no partition of {asked} GPUs is free: {}{}", busy_words(*busy, *barred), largest_words(*largest))]
    NoneFree {
        /// How many GPUs were asked for.
        asked: u32,
        /// GPUs that others have.
        busy: Gpus,
        /// GPUs that nobody may have.
        barred: Gpus,
        /// The largest size that can be had.
        largest: u32,
    },
    /// Some of these GPUs are not to be had.
    #[error("GPUs {asked} are partition {partition}, and it is not free: {}", busy_words(*busy, *barred))]
    Taken {
        /// What was asked for.
        asked: Gpus,
        /// The partition that they are.
        partition: PartitionId,
        /// Those of them that others have.
        busy: Gpus,
        /// Those of them that nobody may have.
        barred: Gpus,
    },
}

fn words(numbers: &[u32]) -> String {
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
    format!("; with as many there are {}", sets.join(", "))
}

fn busy_words(busy: Gpus, barred: Gpus) -> String {
    let one = |gpus: Gpus, what: &str| (!gpus.is_empty()).then(|| format!("GPUs {gpus} are {what}"));
    let parts: Vec<String> = [one(busy, "taken"), one(barred, "in quarantine")].into_iter().flatten().collect();
    parts.join(", ")
}

fn largest_words(largest: u32) -> String {
    match largest {
        0 => "; nothing is free".to_owned(),
        largest => format!("; the largest that is free has {largest}"),
    }
}

impl State {
    fn takes(&self, partition: &Partition) -> bool {
        partition.gpus.meets(self.busy.with(self.barred))
    }
}

impl Table {
    /// The partition for a request: of those that are free and fit, the one
    /// that blocks the fewest larger partitions that are free; of equals the
    /// one that blocks the smaller ones, then the one in whose surroundings most
    /// is taken already, then the first.
    ///
    /// # Errors
    /// There is no such partition at all, or none is free.
    pub fn plan(&self, state: &State, request: Request) -> Result<Choice, Refusal> {
        match request {
            Request::Count(count) => self.of_count(state, count),
            Request::Exactly(gpus) => self.exactly(state, gpus),
        }
    }

    fn of_count(&self, state: &State, count: u32) -> Result<Choice, Refusal> {
        let is_free: Vec<bool> = self.partitions.iter().map(|partition| !state.takes(partition)).collect();
        let candidates = (0..self.partitions.len()).filter(|at| self.partitions[*at].gpus.count() == count);
        let best = candidates.clone().filter(|at| is_free[*at]).min_by_key(|at| self.cost(state, &is_free, *at));
        if let Some(at) = best {
            return Ok(self.choice(&is_free, at));
        }
        if candidates.count() == 0 {
            return Err(Refusal::NoSize { asked: count, sizes: self.sizes() });
        }
        let State { busy, barred } = *state;
        let all = self.gpus();
        Err(Refusal::NoneFree {
            asked: count,
            busy: busy.and(all),
            barred: barred.and(all),
            largest: self.free(state).largest,
        })
    }

    fn exactly(&self, state: &State, gpus: Gpus) -> Result<Choice, Refusal> {
        let Some(at) = self.partitions.iter().position(|partition| partition.gpus == gpus) else {
            let of_size = self.partitions.iter().filter(|partition| partition.gpus.count() == gpus.count());
            return Err(Refusal::NoSuchSet { asked: gpus, of_size: of_size.cloned().collect() });
        };
        let partition = &self.partitions[at];
        if state.takes(partition) {
            let (busy, barred) = (state.busy.and(gpus), state.barred.and(gpus));
            return Err(Refusal::Taken { asked: gpus, partition: partition.id, busy, barred });
        }
        let is_free: Vec<bool> = self.partitions.iter().map(|partition| !state.takes(partition)).collect();
        Ok(self.choice(&is_free, at))
    }

    /// Larger ones that are free and have a GPU of it, by place.
    fn blocked<'a>(&'a self, is_free: &'a [bool], at: usize) -> impl Iterator<Item = usize> + 'a {
        let size = self.partitions[at].gpus.count();
        self.conflicts[at]
            .iter()
            .copied()
            .filter(move |other| is_free[*other] && self.partitions[*other].gpus.count() > size)
    }

    fn choice(&self, is_free: &[bool], at: usize) -> Choice {
        let blocks = self.blocked(is_free, at).map(|other| self.partitions[other].id).collect();
        Choice { partition: self.partitions[at].clone(), blocks }
    }

    /// Smaller is better: larger partitions blocked, their GPUs, what is still unused around it, its number.
    fn cost(&self, state: &State, is_free: &[bool], at: usize) -> (usize, u32, u32, PartitionId) {
        let (mut count, mut gpus) = (0, 0);
        for other in self.blocked(is_free, at) {
            count += 1;
            gpus += self.partitions[other].gpus.count();
        }
        let partition = &self.partitions[at];
        let around = self.conflicts[at].iter().map(|other| &self.partitions[*other]);
        let larger = around.filter(|other| other.gpus.count() > partition.gpus.count());
        let taken = state.busy.with(state.barred);
        let unused = larger.map(|other| other.gpus.without(taken).count()).sum();
        (count, gpus, unused, partition.id)
    }

    /// What could be had now.
    #[must_use]
    pub fn free(&self, state: &State) -> Free {
        let mut by_size: BTreeMap<u32, u32> = self.sizes().into_iter().map(|size| (size, 0)).collect();
        for partition in self.partitions.iter().filter(|partition| !state.takes(partition)) {
            *by_size.entry(partition.gpus.count()).or_default() += 1;
        }
        let largest = by_size.iter().rev().find(|(_, count)| **count > 0).map_or(0, |(size, _)| *size);
        Free { by_size, largest }
    }
}

#[cfg(test)]
mod tests;
