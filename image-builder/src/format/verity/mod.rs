//! dm-verity hash trees, with which the kernel verifies every block that it reads; see
//! `Documentation/admin-guide/device-mapper/verity.rst`.
//!
//! Hash format 1, SHA-256, blocks of 4096 bytes, no superblock: the output of
//! `veritysetup format --no-superblock`, which Kata's runtimes expect. The salt
//! is never random, so that builds are reproducible.

mod check;

use std::io::{self, Read};

use sha2::{Digest, Sha256};

pub use check::{CheckError, CorruptBlock, check};
pub use firstlight_verity::{BLOCK, DIGEST, Hash, MAX_SALT, Params, ParamsError};

/// Number of hashes in a block.
const FAN_OUT: u64 = (BLOCK / DIGEST) as u64;

/// Hashes a block with the salt as prefix.
#[derive(Clone)]
struct Salted(Sha256);

impl Salted {
    fn new(salt: &[u8]) -> Self {
        Self(Sha256::new().chain_update(salt))
    }

    fn hash(&self, block: &[u8]) -> Hash {
        self.0.clone().chain_update(block).finalize().into()
    }
}

/// Returns the number of hash blocks of each level, from the lowest level up to the
/// single block whose hash is the root hash. One data block needs no level.
fn levels(data_blocks: u64) -> Vec<u64> {
    let mut levels = Vec::new();
    let mut blocks = data_blocks;
    while blocks > 1 {
        blocks = blocks.div_ceil(FAN_OUT);
        levels.push(blocks);
    }
    levels
}

/// Returns the total number of hash blocks of all levels.
#[must_use]
pub fn hash_blocks(data_blocks: u64) -> u64 {
    levels(data_blocks).iter().sum()
}

/// A hash tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// The parameters of the device-mapper target.
    pub params: Params,
    /// Content of the hash device: the topmost level first.
    pub blocks: Vec<u8>,
}

/// Computes the hash tree of `data`, whose size must be a multiple of the block size.
///
/// # Errors
/// A failed read, no data, or a partial block at the end.
pub fn tree(data: &mut dyn Read, salt: &[u8]) -> io::Result<Tree> {
    let salted = Salted::new(salt);
    let mut level = Vec::new();
    let mut data_blocks = 0;
    let mut block = vec![0; BLOCK];
    while read_block(data, &mut block)? {
        level.extend_from_slice(&salted.hash(&block));
        data_blocks += 1;
    }
    if data_blocks == 0 {
        return Err(io::Error::other("no data to hash"));
    }
    // Each level has the hashes of the level below, until one hash remains.
    let mut tree = Vec::new();
    while level.len() > DIGEST {
        level.resize(level.len().next_multiple_of(BLOCK), 0);
        let above = level.chunks_exact(BLOCK).flat_map(|block| salted.hash(block)).collect();
        tree.push(std::mem::replace(&mut level, above));
    }
    tree.reverse();
    let root_hash = Hash::try_from(level.as_slice()).map_err(io::Error::other)?;
    Ok(Tree { params: Params { root_hash, salt: salt.to_vec(), data_blocks }, blocks: tree.concat() })
}

/// Fills `block`; returns false at the end of the data.
fn read_block(data: &mut dyn Read, block: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < block.len() {
        match data.read(&mut block[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::Error::other(format!("the data ends {filled} bytes into a block of {BLOCK}"))),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Returns the default salt, derived from the image's name and content, so that it
/// differs between images but not between builds.
#[must_use]
pub fn default_salt(name: &str, content: &str) -> Vec<u8> {
    let mut state = Sha256::new();
    for part in ["firstlight dm-verity salt", name, content] {
        state.update((part.len() as u64).to_le_bytes());
        state.update(part);
    }
    state.finalize().to_vec()
}

#[cfg(test)]
mod tests;
