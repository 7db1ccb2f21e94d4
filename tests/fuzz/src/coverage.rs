//! Which edges of the program an input has taken.
//!
//! `cargo xtask fuzz` compiles with `-C passes=sancov-module`: every edge of
//! control flow gets a counter of eight bits, and at the program's start the
//! compiler's code tells where the counters are. Without those flags there are
//! none, and inputs are mutated blindly.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Where counters are, as address and length; each once, however often it is told.
static TOLD: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The compiler's counters.
///
/// The one place with unsafe code outside of `common/sys`: the symbols are the
/// compiler's own, and nothing that ships has them.
#[expect(unsafe_code, reason = "the compiler's coverage calls these symbols and owns the counters")]
mod abi {
    use super::{AtomicU8, AtomicU64, Counters, PoisonError, TOLD};

    /// Called before `main`, once per compiled unit, with the ends of the counters' section.
    // SAFETY: the name and the type are those of LLVM's SanitizerCoverage, and no other object defines it.
    #[unsafe(no_mangle)]
    extern "C" fn __sanitizer_cov_8bit_counters_init(begin: *mut u8, end: *mut u8) {
        let range = (begin as usize, (end as usize).saturating_sub(begin as usize));
        let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
        if range.1 > 0 && !told.contains(&range) {
            told.push(range);
        }
    }

    /// The counters of a range that was told, eight to a word, and those that are left at its ends.
    pub(super) fn counters((address, length): (usize, usize)) -> Counters {
        // SAFETY: the compiler's code told that this is its section of counters, which is writable and lives as
        // long as the program. Its increments are plain stores of single bytes; seen through atomics the worst
        // that a race with another thread can do is a lost count. AtomicU8 and AtomicU64 have the size of u8 and
        // u64 and no invalid values, and align_to sees to the alignment.
        unsafe {
            let bytes: &'static [AtomicU8] = std::slice::from_raw_parts(address as *const AtomicU8, length);
            bytes.align_to::<AtomicU64>()
        }
    }
}

/// Counters before the first whole word, in words, and after the last.
type Counters = (&'static [AtomicU8], &'static [AtomicU64], &'static [AtomicU8]);

/// All counters of the program; empty if it was compiled without.
fn counters() -> &'static [Counters] {
    static ALL: OnceLock<Vec<Counters>> = OnceLock::new();
    let told = || TOLD.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().map(abi::counters).collect();
    ALL.get_or_init(told)
}

/// Whether inputs can be judged by what they reach.
pub(crate) fn is_there() -> bool {
    !counters().is_empty()
}

/// Begins a run.
pub(crate) fn reset() {
    for (before, words, after) in counters() {
        for counter in before.iter().chain(*after) {
            counter.store(0, Ordering::Relaxed);
        }
        for word in *words {
            // Most are zero, and reading is cheaper than writing.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// Gives every edge that the run has taken, with its count.
pub(crate) fn taken(mut edge: impl FnMut(usize, u8)) {
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

/// What all runs so far have reached: per edge the orders of magnitude of its counts.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    edges: Vec<u8>,
}

impl Reached {
    /// Notes a run's edges; whether there was anything new.
    pub(crate) fn note(&mut self, run: impl IntoIterator<Item = (usize, u8)>) -> bool {
        let mut news = false;
        for (edge, count) in run {
            if edge >= self.edges.len() {
                self.edges.resize(edge + 1, 0);
            }
            if let Some(known) = self.edges.get_mut(edge) {
                news |= *known & order(count) == 0;
                *known |= order(count);
            }
        }
        news
    }

    /// How many edges have been taken at all.
    pub(crate) fn edges(&self) -> usize {
        self.edges.iter().filter(|edge| **edge != 0).count()
    }
}

/// A count's order of magnitude as a bit: 1, 2, 3, 4-7, 8-15, 16-31, 32-127, more.
fn order(count: u8) -> u8 {
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
    fn new_edges_and_new_orders_of_magnitude_are_news_once() {
        let mut reached = Reached::default();
        assert!(reached.note([(3, 1)]));
        assert!(!reached.note([(3, 1)]));
        assert!(reached.note([(3, 1), (9, 1)]));
        assert!(reached.note([(3, 200)]));
        assert!(!reached.note([(3, 130), (9, 1)]));
        assert!(!reached.note([]));
        assert_eq!(reached.edges(), 2);
    }
}
