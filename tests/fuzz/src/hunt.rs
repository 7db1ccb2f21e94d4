//! One target: run inputs, keep those that reach something new, mutate them.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::coverage::{self, Reached};
use crate::mutate::Mutator;
use crate::targets::Target;

/// When to stop.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    /// After that time.
    After(Duration),
    /// After so many inputs.
    Inputs(u64),
}

/// How a hunt went.
#[derive(Debug)]
pub(crate) struct Hunted {
    /// Inputs that were run.
    pub(crate) inputs: u64,
    /// Edges that were taken; 0 without coverage.
    pub(crate) edges: usize,
    /// Inputs that reached something new, in the order in which they were found; the seeds first.
    pub(crate) pool: Vec<Vec<u8>>,
    /// One that made the target panic.
    pub(crate) crash: Option<Vec<u8>>,
}

/// Runs a target on its seeds, on `corpus`, and on what is made of both.
///
/// Each input is written to `current` first, so that it is known even if it
/// ends this process.
pub(crate) fn hunt(
    target: &Target,
    corpus: Vec<Vec<u8>>,
    end: End,
    seed: u64,
    guided: bool,
    current: Option<&File>,
) -> Hunted {
    let guided = guided && coverage::is_there();
    let begin = Instant::now();
    let mut reached = Reached::default();
    let mut hunted = Hunted { inputs: 0, edges: 0, pool: Vec::new(), crash: None };
    let mut mutator = Mutator::new(seed);
    let mut given = target.seeds.iter().map(|seed| seed.to_vec()).chain(corpus).chain([Vec::new()]);
    loop {
        // What is known is replayed as a whole before the clock counts.
        let (input, is_given) = match given.next() {
            Some(input) => (input, true),
            None => (mutator.next(&hunted.pool), false),
        };
        let over = match end {
            End::After(time) => begin.elapsed() >= time,
            End::Inputs(most) => hunted.inputs >= most,
        };
        if over && !is_given {
            break;
        }
        hunted.inputs += 1;
        if let Some(file) = current {
            note(file, &input);
        }
        coverage::reset();
        let panicked = catch_unwind(AssertUnwindSafe(|| (target.read)(&input))).is_err();
        let mut run = Vec::new();
        if guided {
            coverage::taken(|edge, count| run.push((edge, count)));
        }
        if panicked {
            hunted.crash = Some(input);
            break;
        }
        let news = reached.note(run);
        // Without guidance only what was given is mutated.
        if news || (is_given && !guided) {
            hunted.pool.push(input);
        }
    }
    hunted.edges = reached.edges();
    hunted
}

/// The most bytes of an input that is kept in the tree.
const KEPT: usize = 2048;

/// The most inputs of a target that are kept in the tree.
const MOST: usize = 40;

/// The few inputs of a pool that together take most of the edges: again and
/// again the one that adds most, the shorter of two that add the same.
pub(crate) fn least(target: &Target, mut pool: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    pool.retain(|input| input.len() <= KEPT);
    pool.sort();
    pool.sort_by_key(Vec::len);
    let edges = |input: Vec<u8>| {
        coverage::reset();
        let fine = catch_unwind(AssertUnwindSafe(|| (target.read)(&input))).is_ok();
        let mut run = BTreeSet::new();
        coverage::taken(|edge, _| {
            run.insert(edge);
        });
        fine.then_some((input, run))
    };
    let mut runs: Vec<_> = pool.into_iter().filter_map(edges).collect();
    let mut kept = Vec::new();
    while kept.len() < MOST {
        // Of equals the last is taken, so the shortest comes last.
        let best = runs.iter().enumerate().rev().max_by_key(|(_, (_, edges))| edges.len()).map(|(index, _)| index);
        let Some(best) = best else { break };
        let (input, taken) = runs.remove(best);
        if taken.is_empty() {
            break;
        }
        for (_, edges) in &mut runs {
            edges.retain(|edge| !taken.contains(edge));
        }
        kept.push(input);
    }
    kept
}

/// A length and the input: one write, no truncation. That it fails is no reason not to hunt.
fn note(file: &File, input: &[u8]) {
    let mut bytes = u64::try_from(input.len()).unwrap_or(u64::MAX).to_le_bytes().to_vec();
    bytes.extend_from_slice(input);
    let _ = file.write_all_at(&bytes, 0);
}

/// What [`note`] wrote last.
pub(crate) fn noted(bytes: &[u8]) -> Option<Vec<u8>> {
    let (length, input) = bytes.split_first_chunk()?;
    input.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::TARGETS;

    #[test]
    fn a_reader_that_panics_is_found() {
        let target = Target { name: "x", seeds: &[b"abcd"], read: |bytes| assert!(!bytes.contains(&0xff), "found") };
        let hunted = hunt(&target, Vec::new(), End::Inputs(100_000), 1, true, None);
        assert!(hunted.crash.is_some_and(|input| input.contains(&0xff)));
    }

    #[test]
    fn every_target_takes_what_is_known_and_some_mutations() {
        for target in TARGETS {
            let corpus = crate::corpus::load(target.name);
            let known = u64::try_from(corpus.len() + target.seeds.len()).unwrap();
            let hunted = hunt(target, corpus, End::Inputs(known + 30), 7, true, None);
            assert!(hunted.inputs > known && hunted.crash.is_none(), "{}: {:?}", target.name, hunted.crash);
        }
    }

    #[test]
    fn the_current_input_is_known_though_a_longer_one_came_before() {
        let file = tempfile::NamedTempFile::new().unwrap();
        note(file.as_file(), b"a long one");
        note(file.as_file(), b"short");
        assert_eq!(noted(&std::fs::read(file.path()).unwrap()), Some(b"short".to_vec()));
        assert_eq!(noted(b"\x09\0\0\0\0\0\0\0short"), None);
        assert_eq!(noted(b""), None);
    }
}
