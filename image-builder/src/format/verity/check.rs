//! Verifies an image against its hash tree, block by block as the kernel does.

use std::fmt;
use std::io::{self, Read};

use serde::Serialize;

use super::{BLOCK, DIGEST, Hash, Params, Salted, levels, read_block};

/// The first block whose hash does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
pub enum CorruptBlock {
    /// A block of the hash tree; the blocks below it are not verified.
    Hashes {
        /// Its level: 0 has the hashes of data blocks.
        level: usize,
        /// Its index on the hash device.
        block: u64,
    },
    /// A data block.
    Data {
        /// Its index.
        block: u64,
    },
}

impl fmt::Display for CorruptBlock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hashes { level, block } => write!(
                formatter,
                "block {block} of the hash tree (level {level}, byte {} of the hash device) does not match {}",
                block * BLOCK as u64,
                if *block == 0 { "the root hash" } else { "its hash in the level above" }
            ),
            Self::Data { block } => {
                let byte = block * BLOCK as u64;
                write!(formatter, "block {block} of the data (byte {byte}) does not match its hash in the tree")
            }
        }
    }
}

/// Why a check could not be completed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The data or the hash tree is shorter than the parameters require.
    #[error("the {of} ends at block {block}, expected {expected} blocks")]
    Short {
        /// `data` or `hash tree`.
        of: &'static str,
        /// Index of the first missing block.
        block: u64,
        /// Expected number of blocks.
        expected: u64,
    },
    /// A read failed.
    #[error("failed to read the {of}")]
    Read {
        /// `data` or `hash tree`.
        of: &'static str,
        /// The I/O error.
        source: io::Error,
    },
}

/// Checks `hashes` against the root hash and `data` against `hashes`, both read from
/// their first byte, and returns the first corrupt block. Levels are checked from the
/// root hash down, as in the kernel.
///
/// # Errors
/// The input is shorter than `params` require, or a read failed.
pub fn check(data: &mut dyn Read, hashes: &mut dyn Read, params: &Params) -> Result<Option<CorruptBlock>, CheckError> {
    let salted = Salted::new(&params.salt);
    let mut block = vec![0; BLOCK];
    // The expected hashes of the blocks of the current level.
    let mut expected = params.root_hash.to_vec();
    let mut number = 0;
    let levels = levels(params.data_blocks);
    for (level, blocks) in levels.iter().enumerate().rev() {
        // Grows with the blocks read: the parameters are untrusted.
        let mut level_hashes = Vec::new();
        for index in 0..*blocks {
            let total = levels.iter().sum();
            read_next(hashes, &mut block, "hash tree", number, total)?;
            if !matches(&expected, index, &salted.hash(&block)) {
                return Ok(Some(CorruptBlock::Hashes { level, block: number }));
            }
            level_hashes.extend_from_slice(&block);
            number += 1;
        }
        expected = level_hashes;
    }
    for number in 0..params.data_blocks {
        read_next(data, &mut block, "data", number, params.data_blocks)?;
        if !matches(&expected, number, &salted.hash(&block)) {
            return Ok(Some(CorruptBlock::Data { block: number }));
        }
    }
    Ok(None)
}

fn read_next(
    input: &mut dyn Read,
    block: &mut [u8],
    of: &'static str,
    number: u64,
    expected: u64,
) -> Result<(), CheckError> {
    match read_block(input, block) {
        Ok(true) => Ok(()),
        Ok(false) => Err(CheckError::Short { of, block: number, expected }),
        Err(source) => Err(CheckError::Read { of, source }),
    }
}

/// Returns whether the hash at `index` of `hashes` is `hash`.
fn matches(hashes: &[u8], index: u64, hash: &Hash) -> bool {
    let offset = usize::try_from(index).ok().and_then(|index| index.checked_mul(DIGEST));
    offset.and_then(|start| hashes.get(start..start.checked_add(DIGEST)?)) == Some(hash.as_slice())
}
