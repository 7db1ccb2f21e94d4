//! dm-verity: a tree of hashes over an image, by which the kernel checks every
//! block it reads; `Documentation/admin-guide/device-mapper/verity.rst`.
//!
//! Hash format 1, SHA-256, blocks of 4096 bytes, no superblock: what
//! `veritysetup format --no-superblock` writes, and what Kata's runtimes
//! expect. The salt is never random: the same image gives the same tree.

mod check;

use std::io::{self, Read};

use sha2::{Digest, Sha256};

pub use check::{Bad, Failed, check};
pub use firstlight_verity::{BLOCK, DIGEST, Hash, MAX_SALT, Params, ParamsError};

/// Hashes in a block.
const FAN_OUT: u64 = (BLOCK / DIGEST) as u64;

/// Hashes blocks, each with the salt before it.
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

/// The numbers of hash blocks of every level, from the data up to the one
/// block whose hash is the root. One block of data needs none.
fn levels(data_blocks: u64) -> Vec<u64> {
    let mut levels = Vec::new();
    let mut blocks = data_blocks;
    while blocks > 1 {
        blocks = blocks.div_ceil(FAN_OUT);
        levels.push(blocks);
    }
    levels
}

/// Hash blocks of all levels together.
#[must_use]
pub fn hash_blocks(data_blocks: u64) -> u64 {
    levels(data_blocks).iter().sum()
}

/// A hash tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// What a kernel must be told to check the rest.
    pub params: Params,
    /// The hash device, from its first byte: the topmost level first.
    pub blocks: Vec<u8>,
}

/// The tree over all of `data`, which must have whole blocks.
///
/// # Errors
/// A failed read, no data, or a part of a block at the end.
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
        return Err(io::Error::other("there is no data to hash"));
    }
    // Each level is made of the one below until there is one hash.
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

/// Fills `block`; no at the end of the data.
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

/// The salt of an image for which none is given: another image, another salt,
/// and the same one at every build.
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
