//! An image against its hash tree, as the kernel would check it block by block.

use std::fmt;
use std::io::{self, Read};

use serde::Serialize;

use super::{BLOCK, DIGEST, Hash, Params, Salted, levels, read_block};

/// The first block that is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
pub enum Bad {
    /// A block of hashes. What is below it cannot be judged.
    Hashes {
        /// How far above the data: 0 is hashes of data.
        level: usize,
        /// Its number on the hash device.
        block: u64,
    },
    /// A block of data.
    Data {
        /// Its number.
        block: u64,
    },
}

impl fmt::Display for Bad {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hashes { level, block } => write!(
                formatter,
                "block {block} of the hash tree (level {level}, byte {} of the hashes) has another hash than the {}",
                block * BLOCK as u64,
                if *block == 0 { "root hash" } else { "level above says" }
            ),
            Self::Data { block } => {
                let byte = block * BLOCK as u64;
                write!(formatter, "block {block} of the data (byte {byte}) has another hash than the tree says")
            }
        }
    }
}

/// Why an image could not be checked to its end.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// It ends before the parameters say.
    #[error("the {of} ends at block {block}, {expected} blocks are expected")]
    Short {
        /// Data or hashes.
        of: &'static str,
        /// The first one that is missing.
        block: u64,
        /// How many there should be.
        expected: u64,
    },
    /// It could not be read.
    #[error("cannot read the {of}")]
    Read {
        /// Data or hashes.
        of: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// Checks `data` against `hashes`, both from their first byte, and `hashes`
/// against the root hash; the first block that is wrong, if one is. Levels are
/// checked from the root hash down, as the kernel does.
///
/// # Errors
/// The image is shorter than `params` say, or cannot be read.
pub fn check(data: &mut dyn Read, hashes: &mut dyn Read, params: &Params) -> Result<Option<Bad>, Failed> {
    let salted = Salted::new(&params.salt);
    let mut block = vec![0; BLOCK];
    // The hashes that the level above has of the next one.
    let mut expected = params.root_hash.to_vec();
    let mut number = 0;
    let levels = levels(params.data_blocks);
    for (level, blocks) in levels.iter().enumerate().rev() {
        // Grows with what is there, not with what parameters claim.
        let mut own = Vec::new();
        for index in 0..*blocks {
            let total = levels.iter().sum();
            next(hashes, &mut block, "hash tree", number, total)?;
            if !matches(&expected, index, &salted.hash(&block)) {
                return Ok(Some(Bad::Hashes { level, block: number }));
            }
            own.extend_from_slice(&block);
            number += 1;
        }
        expected = own;
    }
    for number in 0..params.data_blocks {
        next(data, &mut block, "data", number, params.data_blocks)?;
        if !matches(&expected, number, &salted.hash(&block)) {
            return Ok(Some(Bad::Data { block: number }));
        }
    }
    Ok(None)
}

fn next(from: &mut dyn Read, block: &mut [u8], of: &'static str, number: u64, expected: u64) -> Result<(), Failed> {
    match read_block(from, block) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Failed::Short { of, block: number, expected }),
        Err(source) => Err(Failed::Read { of, source }),
    }
}

/// Whether the hash number `index` of `hashes` is `hash`.
fn matches(hashes: &[u8], index: u64, hash: &Hash) -> bool {
    let place = usize::try_from(index).ok().and_then(|index| index.checked_mul(DIGEST));
    place.and_then(|start| hashes.get(start..start.checked_add(DIGEST)?)) == Some(hash.as_slice())
}
