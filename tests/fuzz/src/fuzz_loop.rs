//! The fuzzing loop of one target: runs inputs, adds those with new coverage to the pool, mutates the pool.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::coverage::{self, CoverageMap};
use crate::mutate::Mutator;
use crate::targets::Target;

/// When to stop.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StopCondition {
    /// After this time.
    After(Duration),
    /// After this number of inputs.
    Inputs(u64),
}

/// The result of a fuzzing run.
#[derive(Debug)]
pub(crate) struct FuzzResult {
    /// Number of inputs that were run.
    pub(crate) inputs: u64,
    /// Number of edges that were taken; 0 without instrumentation.
    pub(crate) edges: usize,
    /// Inputs that reached new coverage, in the order in which they were found; the seeds first.
    pub(crate) pool: Vec<Vec<u8>>,
    /// The input that made the target panic.
    pub(crate) crash: Option<Vec<u8>>,
}

/// Runs a target on its seeds, on `corpus`, and on mutations of both.
///
/// Each input is written to `current` before it runs, so that it is known even
/// if it ends this process.
pub(crate) fn fuzz(
    target: &Target,
    corpus: Vec<Vec<u8>>,
    stop: StopCondition,
    seed: u64,
    guided: bool,
    current: Option<&File>,
) -> FuzzResult {
    let guided = guided && coverage::is_available();
    let begin = Instant::now();
    let mut reached = CoverageMap::default();
    let mut result = FuzzResult { inputs: 0, edges: 0, pool: Vec::new(), crash: None };
    let mut mutator = Mutator::new(seed);
    let mut initial = target.seeds.iter().map(|seed| seed.to_vec()).chain(corpus).chain([Vec::new()]);
    loop {
        // Seeds and corpus are always run completely, whatever the stop condition.
        let (input, is_initial) = match initial.next() {
            Some(input) => (input, true),
            None => (mutator.next(&result.pool), false),
        };
        let stop_now = match stop {
            StopCondition::After(time) => begin.elapsed() >= time,
            StopCondition::Inputs(limit) => result.inputs >= limit,
        };
        if stop_now && !is_initial {
            break;
        }
        result.inputs += 1;
        if let Some(file) = current {
            record_input(file, &input);
        }
        coverage::reset();
        let panicked = catch_unwind(AssertUnwindSafe(|| (target.read)(&input))).is_err();
        let mut run = Vec::new();
        if guided {
            coverage::for_each_taken_edge(|edge, count| run.push((edge, count)));
        }
        if panicked {
            result.crash = Some(input);
            break;
        }
        let is_new = reached.merge(run);
        // Without guidance only the seeds and the corpus are mutated.
        if is_new || (is_initial && !guided) {
            result.pool.push(input);
        }
    }
    result.edges = reached.edges();
    result
}

/// Longest input, in bytes, that is written to the corpus.
const MAX_CORPUS_INPUT_BYTES: usize = 2048;

/// Largest number of inputs in a target's corpus.
const MAX_CORPUS_INPUTS: usize = 40;

/// Minimizes a pool to the few inputs that together cover most edges (greedy
/// set cover): each step takes the input that adds most edges, the shorter of equals.
pub(crate) fn minimize(target: &Target, mut pool: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    pool.retain(|input| input.len() <= MAX_CORPUS_INPUT_BYTES);
    pool.sort();
    pool.sort_by_key(Vec::len);
    let edges = |input: Vec<u8>| {
        coverage::reset();
        let survived = catch_unwind(AssertUnwindSafe(|| (target.read)(&input))).is_ok();
        let mut run = BTreeSet::new();
        coverage::for_each_taken_edge(|edge, _| {
            run.insert(edge);
        });
        survived.then_some((input, run))
    };
    let mut runs: Vec<_> = pool.into_iter().filter_map(edges).collect();
    let mut chosen = Vec::new();
    while chosen.len() < MAX_CORPUS_INPUTS {
        // max_by_key takes the last of equals, so the shortest comes last.
        let best = runs.iter().enumerate().rev().max_by_key(|(_, (_, edges))| edges.len()).map(|(index, _)| index);
        let Some(best) = best else { break };
        let (input, taken) = runs.remove(best);
        if taken.is_empty() {
            break;
        }
        for (_, edges) in &mut runs {
            edges.retain(|edge| !taken.contains(edge));
        }
        chosen.push(input);
    }
    chosen
}

/// Records the current input as its length and its bytes: one write, no truncation. A write error does not stop fuzzing.
fn record_input(file: &File, input: &[u8]) {
    let mut bytes = u64::try_from(input.len()).unwrap_or(u64::MAX).to_le_bytes().to_vec();
    bytes.extend_from_slice(input);
    let _ = file.write_all_at(&bytes, 0);
}

/// Returns the input that [`record_input`] wrote last.
pub(crate) fn recorded_input(bytes: &[u8]) -> Option<Vec<u8>> {
    let (length, input) = bytes.split_first_chunk()?;
    input.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::TARGETS;

    #[test]
    fn panic_of_target_is_reported_with_its_input() {
        let target = Target { name: "x", seeds: &[b"abcd"], read: |bytes| assert!(!bytes.contains(&0xff), "found") };
        let result = fuzz(&target, Vec::new(), StopCondition::Inputs(100_000), 1, true, None);
        assert!(result.crash.is_some_and(|input| input.contains(&0xff)));
    }

    #[test]
    fn every_target_survives_its_corpus_and_some_mutations() {
        for target in TARGETS {
            let corpus = crate::corpus::load(target.name);
            let known = u64::try_from(corpus.len() + target.seeds.len()).unwrap();
            let result = fuzz(target, corpus, StopCondition::Inputs(known + 30), 7, true, None);
            assert!(result.inputs > known && result.crash.is_none(), "{}: {:?}", target.name, result.crash);
        }
    }

    #[test]
    fn recorded_input_after_a_longer_one_is_exact() {
        let file = tempfile::NamedTempFile::new().unwrap();
        record_input(file.as_file(), b"a long one");
        record_input(file.as_file(), b"short");
        assert_eq!(recorded_input(&std::fs::read(file.path()).unwrap()), Some(b"short".to_vec()));
        assert_eq!(recorded_input(b"\x09\0\0\0\0\0\0\0short"), None);
        assert_eq!(recorded_input(b""), None);
    }
}
