//! Mutations.

use fastrand::Rng;

/// Longest input.
const MAX: usize = 16 * 1024;

/// Makes inputs from seeds; the same number gives the same inputs.
pub(crate) struct Mutator {
    rng: Rng,
    seeds: &'static [&'static [u8]],
}

/// Pieces that parsers stumble over.
const PIECES: &[&[u8]] = &[
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
    pub(crate) fn new(seed: u64, seeds: &'static [&'static [u8]]) -> Self {
        Self { rng: Rng::with_seed(seed), seeds }
    }

    fn seed(&mut self) -> &'static [u8] {
        self.rng.choice(self.seeds).copied().unwrap_or_default()
    }

    /// The next input.
    pub(crate) fn next(&mut self) -> Vec<u8> {
        let mut input = self.seed().to_vec();
        for _ in 0..self.rng.u8(0..6) {
            self.mutate(&mut input);
        }
        input.truncate(MAX);
        input
    }

    fn mutate(&mut self, input: &mut Vec<u8>) {
        let at = self.rng.usize(0..=input.len());
        let end = self.rng.usize(at..=input.len());
        match self.rng.u8(0..7) {
            0 => input.truncate(at),
            1 => drop(input.drain(at..end)),
            2 => {
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            3 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << self.rng.u8(0..8);
                }
            }
            4 => {
                let piece = self.rng.choice(PIECES).copied().unwrap_or_default();
                input.splice(at..end.min(at + 4), piece.iter().copied());
            }
            5 => {
                let other = self.seed();
                let from = self.rng.usize(0..=other.len());
                input.splice(at..end, other[from..].iter().copied());
            }
            _ => {
                for byte in &mut input[at..end] {
                    *byte = self.rng.u8(..);
                }
            }
        }
    }
}
