use super::*;
use crate::known::{self, KnownBaseboard};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

fn gpus(ids: &[u32]) -> Gpus {
    Gpus::of(ids.iter().copied()).unwrap()
}

fn busy(ids: &[u32]) -> Allocation {
    Allocation { busy: gpus(ids), quarantined: Gpus::NONE }
}

/// Finds the expected plan by exhaustive search.
struct Oracle<'a> {
    table: &'a Table,
    taken: Gpus,
}

impl Oracle<'_> {
    fn free(&self) -> impl Iterator<Item = &Partition> {
        self.table
            .partitions()
            .iter()
            .filter(|partition| partition.gpus.ids().all(|id| !self.taken.ids().any(|other| other == id)))
    }

    /// Returns larger free partitions that share a GPU with this one.
    fn blocked(&self, one: &Partition) -> Vec<PartitionId> {
        let larger = self.free().filter(|other| other.gpus.count() > one.gpus.count());
        larger
            .filter(|other| other.gpus.ids().any(|id| one.gpus.ids().any(|own| own == id)))
            .map(|other| other.id)
            .collect()
    }

    fn judge(&self, state: &Allocation) {
        for size in 0..=17 {
            let candidates: Vec<&Partition> = self.free().filter(|one| one.gpus.count() == size).collect();
            match self.table.plan(state, Request::Count(size)) {
                Ok(choice) => {
                    assert!(candidates.contains(&&choice.partition), "{state:?}: {choice:?}");
                    assert_eq!(choice.blocked, self.blocked(&choice.partition));
                    let fewest = candidates.iter().map(|one| self.blocked(one).len()).min();
                    assert_eq!(Some(choice.blocked.len()), fewest, "{state:?}: {choice:?}");
                }
                Err(refusal) => {
                    assert!(candidates.is_empty(), "{state:?}: {refusal} although {candidates:?}");
                    let no_size = matches!(refusal, PlanError::NoSuchSize { .. });
                    assert_eq!(no_size, !self.table.sizes().contains(&size), "{refusal}");
                }
            }
        }
        for partition in self.table.partitions() {
            let planned = self.table.plan(state, Request::Exactly(partition.gpus));
            assert_eq!(planned.is_ok(), self.free().any(|one| one == partition), "{state:?}: {partition:?}");
            assert!(planned.is_err() || planned.unwrap().partition == *partition);
        }
        let free = self.table.free(state);
        assert_eq!(free.largest, self.free().map(|one| one.gpus.count()).max().unwrap_or(0));
        for (size, count) in free.by_size {
            assert_eq!(usize::try_from(count).unwrap(), self.free().filter(|one| one.gpus.count() == size).count());
        }
    }
}

/// Returns every set of partitions that can be active together.
fn reachable(table: &Table) -> BTreeSet<Vec<PartitionId>> {
    let mut seen = BTreeSet::from([Vec::new()]);
    let mut queue = VecDeque::from([Vec::new()]);
    while let Some(active) = queue.pop_front() {
        let taken = union(table, &active);
        for partition in table.partitions().iter().filter(|one| !one.gpus.overlaps(taken)) {
            let mut next = active.clone();
            next.push(partition.id);
            next.sort_unstable();
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    seen
}

fn union(table: &Table, active: &[PartitionId]) -> Gpus {
    active.iter().fold(Gpus::NONE, |all, id| all.with(table.get(*id).unwrap().gpus))
}

#[test]
fn every_state_of_eight_gpus_and_every_request() {
    for known in [&known::H100, &known::B200, &known::A100_8] {
        let table = known.table();
        let states = reachable(&table);
        // A pair has 5 states (none, either single, both, the pair), four GPUs 5*5+1 = 26, and eight 26*26+1 = 677.
        assert_eq!(states.len(), 677, "{}", known.name);
        for active in &states {
            let taken = union(&table, active);
            Oracle { table: &table, taken }.judge(&Allocation { busy: taken, quarantined: Gpus::NONE });
            // And with each GPU quarantined, in use or not.
            for id in 1..=8 {
                let quarantined = gpus(&[id]);
                Oracle { table: &table, taken: taken.with(quarantined) }
                    .judge(&Allocation { busy: taken, quarantined });
            }
        }
    }
}

#[test]
fn plan_prefers_partitions_beside_used_gpus() {
    let table = known::H100.table();
    let chosen = |state: &Allocation, size| table.plan(state, Request::Count(size)).unwrap();
    // On an empty baseboard every single GPU blocks its pair, its four and all eight.
    assert_eq!(chosen(&busy(&[]), 1), Choice { partition: table.get(7).unwrap().clone(), blocked: vec![0, 1, 3] });
    // The second goes beside the first, then into the same four, then to the others.
    assert_eq!(chosen(&busy(&[1]), 1).partition.gpus, gpus(&[3]));
    assert_eq!(chosen(&busy(&[1, 3]), 1).partition.gpus, gpus(&[2]));
    assert_eq!(chosen(&busy(&[1]), 2).partition.gpus, gpus(&[2, 4]));
    assert_eq!(chosen(&busy(&[1]), 4).partition.gpus, gpus(&[5, 6, 7, 8]));
    assert_eq!(chosen(&busy(&[5]), 2).partition.gpus, gpus(&[6, 8]));
    // A quarantined GPU counts as used: it blocks the partitions that contain it.
    let state = Allocation { busy: Gpus::NONE, quarantined: gpus(&[8]) };
    assert_eq!(chosen(&state, 1).partition.gpus, gpus(&[6]));
}

#[test]
fn plan_errors_name_the_alternatives() {
    let table = known::H100.table();
    let said = |state: &Allocation, request| table.plan(state, request).unwrap_err().to_string();
    assert_eq!(said(&busy(&[]), Request::Count(3)), "no partition has 3 GPUs; there are partitions of 1, 2, 4 and 8");
    assert_eq!(said(&busy(&[]), Request::Count(0)), "no partition has 0 GPUs; there are partitions of 1, 2, 4 and 8");
    assert_eq!(
        said(&busy(&[]), Request::Exactly(gpus(&[1, 2]))),
        "no partition has exactly the GPUs 1,2; partitions of this size: 1,3 (partition 3), 2,4 (partition 4), \
         5,7 (partition 5), 6,8 (partition 6)"
    );
    assert_eq!(said(&busy(&[]), Request::Exactly(Gpus::NONE)), "no partition has exactly the GPUs none");
    let state = Allocation { busy: gpus(&[1, 6]), quarantined: gpus(&[2]) };
    assert_eq!(
        said(&state, Request::Count(4)),
        "no partition of 4 GPUs is free: GPUs 1,6 are taken, GPUs 2 are quarantined; the largest that is free has 2"
    );
    assert_eq!(
        said(&state, Request::Exactly(gpus(&[2, 4]))),
        "GPUs 2,4 are partition 4, and it is not free: GPUs 2 are quarantined"
    );
    let all = Allocation { busy: gpus(&[1, 2, 3, 4, 5, 6, 7, 8]), quarantined: gpus(&[40]) };
    assert!(said(&all, Request::Count(1)).ends_with("GPUs 1,2,3,4,5,6,7,8 are taken; nothing is free"));
    let none = Table::default().plan(&busy(&[]), Request::Count(1)).unwrap_err().to_string();
    assert_eq!(none, "no partition has 1 GPUs; there are partitions of no size: the fabric manager knows no partition");
}

/// A deterministic random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit).unwrap()).unwrap()
    }
}

#[test]
fn a_million_random_steps_on_a_table_that_is_not_a_tree() {
    let table = known::A100_16.table();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut active: Vec<&Partition> = Vec::new();
    let (mut served, mut refused) = (0, 0);
    for step in 0..1_000_000_u32 {
        let taken = active.iter().fold(Gpus::NONE, |all, one| all.with(one.gpus));
        let sum: u32 = active.iter().map(|one| one.gpus.count()).sum();
        assert_eq!(taken.count(), sum, "two active partitions share a GPU at step {step}");
        if random.below(2) == 0 && !active.is_empty() {
            active.swap_remove(random.below(active.len()));
            continue;
        }
        let size = [1, 2, 4, 8, 16][random.below(5)];
        let state = Allocation { busy: taken, quarantined: Gpus::NONE };
        let free = |one: &&Partition| one.gpus.count() == size && !one.gpus.overlaps(taken);
        match table.plan(&state, Request::Count(size)) {
            Ok(choice) => {
                served += 1;
                active.push(table.get(choice.partition.id).unwrap());
            }
            Err(refusal) => {
                refused += 1;
                assert!(!table.partitions().iter().any(|one| free(&one)), "step {step}: {refusal}");
            }
        }
        if step % 1000 == 0 {
            Oracle { table: &table, taken }.judge(&state);
        }
    }
    assert!(served > 100_000 && refused > 100_000, "{served} served, {refused} refused");
}

proptest! {
    /// For any table the plan equals the exhaustive search.
    #[test]
    fn any_table_and_any_state(
        sets in prop::collection::btree_set(prop::collection::btree_set(0_u32..10, 1..6), 0..12),
        busy in prop::collection::btree_set(0_u32..10, 0..6),
        quarantined in prop::collection::btree_set(0_u32..10, 0..3),
    ) {
        let rows = (0..).zip(&sets).map(|(id, set)| Partition { id: id * 3, gpus: Gpus::of(set.iter().copied()).unwrap() });
        let table = Table::new(rows).unwrap();
        let (busy, quarantined) = (Gpus::of(busy).unwrap(), Gpus::of(quarantined).unwrap());
        Oracle { table: &table, taken: busy.with(quarantined) }.judge(&Allocation { busy, quarantined });
    }
}

#[test]
fn every_known_table_serves_its_largest_size_first() {
    for known in known::ALL {
        let KnownBaseboard { name, .. } = known;
        let table = known.table();
        let free = table.free(&Allocation::default());
        assert_eq!(Some(&free.largest), table.sizes().last(), "{name}");
        assert!(table.plan(&Allocation::default(), Request::Count(free.largest)).is_ok());
    }
}
