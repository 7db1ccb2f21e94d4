//! Mutations.

use fastrand::Rng;

/// Longest input, in bytes.
const MAX_INPUT_BYTES: usize = 16 * 1024;

/// Mutates inputs; deterministic for a given seed and pool.
pub(crate) struct Mutator {
    rng: Rng,
}

/// Dictionary of tokens at which parsers often fail.
const DICTIONARY: &[&[u8]] = &[
    b"\0",
    b"\xff",
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"=",
    b"/",
    b"..",
    b"\n",
    b"\xc3\x28",
    b"-1",
    b"0x",
    b"18446744073709551616",
    b"1e400",
    b"null",
    b"\\u0000",
    b"%s",
];

impl Mutator {
    pub(crate) fn new(seed: u64) -> Self {
        Self { rng: Rng::with_seed(seed) }
    }

    /// Picks an input of the pool; half the time one of the eight newest, which have been mutated least.
    fn pick<'a>(&mut self, pool: &'a [Vec<u8>]) -> &'a [u8] {
        let newest = pool.len().saturating_sub(8);
        let from = if self.rng.bool() { newest } else { 0 };
        self.rng.choice(pool.get(from..).unwrap_or_default()).map_or(&[], Vec::as_slice)
    }

    /// Returns the next input.
    pub(crate) fn next(&mut self, pool: &[Vec<u8>]) -> Vec<u8> {
        let mut input = self.pick(pool).to_vec();
        for _ in 0..=self.rng.u8(0..5) {
            self.mutate(&mut input, pool);
        }
        input.truncate(MAX_INPUT_BYTES);
        input
    }

    fn mutate(&mut self, input: &mut Vec<u8>, pool: &[Vec<u8>]) {
        let at = self.rng.usize(0..=input.len());
        let end = self.rng.usize(at..=input.len());
        match self.rng.u8(0..10) {
            0 => input.truncate(at),
            1 => drop(input.drain(at..end)),
            2 => {
                let copy = input[at..end].to_vec();
                input.splice(at..at, copy);
            }
            3 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << self.rng.u8(0..8);
                }
            }
            4 => {
                let token = self.rng.choice(DICTIONARY).copied().unwrap_or_default();
                input.splice(at..end.min(at + 4), token.iter().copied());
            }
            5 => {
                let other = self.pick(pool);
                let from = self.rng.usize(0..=other.len());
                input.splice(at..end, other[from..].iter().copied());
            }
            6 => input.insert(at, self.rng.u8(..)),
            7 | 8 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = self.rng.u8(..);
                }
            }
            _ => {
                for byte in &mut input[at..end] {
                    *byte = self.rng.u8(..);
                }
            }
        }
    }
}
