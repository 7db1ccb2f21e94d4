//! Edge coverage of an input, as SanitizerCoverage counts it.
//!
//! `cargo xtask fuzz` compiles with `-C passes=sancov-module`: every edge of
//! control flow gets an 8-bit counter, and code emitted by the compiler
//! registers the counters' addresses at program start. Without those flags
//! there are no counters, and mutation is unguided.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Registered counter ranges, as address and length, without duplicates.
static COUNTER_RANGES: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The compiler's counters.
///
/// Unsafe code outside of `common/sys`: the symbols are the compiler's, and no
/// product contains them.
#[expect(unsafe_code, reason = "SanitizerCoverage calls these symbols and owns the counters")]
mod abi {
    use super::{AtomicU8, AtomicU64, COUNTER_RANGES, Counters, PoisonError};

    /// Registers a section of counters. Called before `main`, once per codegen unit.
    // SAFETY: the name and the type are those of LLVM's SanitizerCoverage, and no other object defines it.
    #[unsafe(no_mangle)]
    extern "C" fn __sanitizer_cov_8bit_counters_init(begin: *mut u8, end: *mut u8) {
        let range = (begin as usize, (end as usize).saturating_sub(begin as usize));
        let mut ranges = COUNTER_RANGES.lock().unwrap_or_else(PoisonError::into_inner);
        if range.1 > 0 && !ranges.contains(&range) {
            ranges.push(range);
        }
    }

    /// Returns the counters of a registered range: eight per aligned word, and the unaligned ones at both ends.
    pub(super) fn counters((address, length): (usize, usize)) -> Counters {
        // SAFETY: the compiler's code registered this range as its section of counters, which is writable and lives
        // as long as the program. Its increments are plain single-byte stores; accessed through atomics, a race with
        // another thread can at worst lose a count. AtomicU8 and AtomicU64 have the size of u8 and u64 and no
        // invalid values, and align_to guarantees the alignment.
        unsafe {
            let bytes: &'static [AtomicU8] = std::slice::from_raw_parts(address as *const AtomicU8, length);
            bytes.align_to::<AtomicU64>()
        }
    }
}

/// Counters before the first whole word, in words, and after the last.
type Counters = (&'static [AtomicU8], &'static [AtomicU64], &'static [AtomicU8]);

/// Returns all counters of the program; empty if it was compiled without instrumentation.
fn counters() -> &'static [Counters] {
    static ALL: OnceLock<Vec<Counters>> = OnceLock::new();
    let collect =
        || COUNTER_RANGES.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().map(abi::counters).collect();
    ALL.get_or_init(collect)
}

/// Returns whether the program has coverage counters.
pub(crate) fn is_available() -> bool {
    !counters().is_empty()
}

/// Resets all counters before a run.
pub(crate) fn reset() {
    for (before, words, after) in counters() {
        for counter in before.iter().chain(*after) {
            counter.store(0, Ordering::Relaxed);
        }
        for word in *words {
            // Most words are zero, and reading is cheaper than writing.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// Calls `edge` with the index and count of every edge that the run has taken.
pub(crate) fn for_each_taken_edge(mut edge: impl FnMut(usize, u8)) {
    let mut base = 0;
    let mut some = |number: usize, count: u8| {
        if count != 0 {
            edge(number, count);
        }
    };
    for (before, words, after) in counters() {
        for (number, counter) in before.iter().enumerate() {
            some(base + number, counter.load(Ordering::Relaxed));
        }
        base += before.len();
        for (number, word) in words.iter().enumerate() {
            let word = word.load(Ordering::Relaxed);
            if word != 0 {
                for (byte, count) in word.to_ne_bytes().into_iter().enumerate() {
                    some(base + number * 8 + byte, count);
                }
            }
        }
        base += words.len() * 8;
        for (number, counter) in after.iter().enumerate() {
            some(base + number, counter.load(Ordering::Relaxed));
        }
        base += after.len();
    }
}

/// The coverage of all runs so far: per edge, a bitmap of its count buckets.
#[derive(Debug, Default)]
pub(crate) struct CoverageMap {
    edges: Vec<u8>,
}

impl CoverageMap {
    /// Merges a run's edges; returns whether the run reached a new edge or count bucket.
    pub(crate) fn merge(&mut self, run: impl IntoIterator<Item = (usize, u8)>) -> bool {
        let mut is_new = false;
        for (edge, count) in run {
            if edge >= self.edges.len() {
                self.edges.resize(edge + 1, 0);
            }
            if let Some(known) = self.edges.get_mut(edge) {
                is_new |= *known & count_bucket(count) == 0;
                *known |= count_bucket(count);
            }
        }
        is_new
    }

    /// Returns the number of edges taken by any run.
    pub(crate) fn edges(&self) -> usize {
        self.edges.iter().filter(|edge| **edge != 0).count()
    }
}

/// Returns the bit of a count's bucket: 1, 2, 3, 4-7, 8-15, 16-31, 32-127, more.
fn count_bucket(count: u8) -> u8 {
    match count {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 4,
        4..=7 => 8,
        8..=15 => 16,
        16..=31 => 32,
        32..=127 => 64,
        128.. => 128,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_edges_and_count_buckets_are_new_only_once() {
        let mut reached = CoverageMap::default();
        assert!(reached.merge([(3, 1)]));
        assert!(!reached.merge([(3, 1)]));
        assert!(reached.merge([(3, 1), (9, 1)]));
        assert!(reached.merge([(3, 200)]));
        assert!(!reached.merge([(3, 130), (9, 1)]));
        assert!(!reached.merge([]));
        assert_eq!(reached.edges(), 2);
    }
}
