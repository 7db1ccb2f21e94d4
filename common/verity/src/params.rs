//! dm-verity parameters in the format of Kata's configuration.

use std::fmt;
use std::str::FromStr;

use crate::{BLOCK, DIGEST, Hash};

/// Maximum salt size of the kernel, bytes.
pub const MAX_SALT: usize = 256;
/// Maximum data blocks: sector counts are limited to 63 bits.
const MAX_BLOCKS: u64 = (1 << 63) / BLOCK as u64;

/// The parameters by which the kernel verifies a device.
///
/// As text: `root_hash=..,salt=..,data_blocks=N,data_block_size=4096,hash_block_size=4096`,
/// which is the value of Kata's `kernel_verity_params` and `verity_params`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// The hash of the topmost block.
    pub root_hash: Hash,
    /// Salt hashed before every block.
    pub salt: Vec<u8>,
    /// Blocks of data, each of 4096 bytes.
    pub data_blocks: u64,
}

/// Why dm-verity parameters are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid dm-verity parameters: {key}: {reason}")]
pub struct ParamsError {
    /// The key.
    pub key: String,
    /// Why it is invalid.
    pub reason: &'static str,
}

impl fmt::Display for Params {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { root_hash, data_blocks, .. } = self;
        write!(
            formatter,
            "root_hash={},salt={},data_blocks={data_blocks},data_block_size={BLOCK},hash_block_size={BLOCK}",
            hex::encode(root_hash),
            self.salt_text(),
        )
    }
}

impl Params {
    /// Returns the size of the data, bytes.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data_blocks * BLOCK as u64
    }

    /// Returns the salt in hexadecimal; `-` means no salt, as in the kernel.
    #[must_use]
    pub fn salt_text(&self) -> String {
        if self.salt.is_empty() { "-".to_owned() } else { hex::encode(&self.salt) }
    }

    /// Returns the size of the mapped device in sectors of 512 bytes.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.data_bytes() / 512
    }

    /// Returns the table parameters of the device mapper's `verity` target, version first
    /// (`Documentation/admin-guide/device-mapper/verity.rst`): without a superblock
    /// the tree starts at the first block of the hash device.
    #[must_use]
    pub fn target(&self, data: &str, hashes: &str) -> String {
        let (blocks, root, salt) = (self.data_blocks, hex::encode(self.root_hash), self.salt_text());
        format!("1 {data} {hashes} {BLOCK} {BLOCK} {blocks} 0 sha256 {root} {salt}")
    }
}

impl FromStr for Params {
    type Err = ParamsError;

    fn from_str(text: &str) -> Result<Self, ParamsError> {
        let wrong = |key: &str, reason| ParamsError { key: key.to_owned(), reason };
        let mut values: [Option<&str>; 5] = [None; 5];
        const KEYS: [&str; 5] = ["root_hash", "salt", "data_blocks", "data_block_size", "hash_block_size"];
        for pair in text.split(',') {
            let (key, value) = pair.split_once('=').ok_or_else(|| wrong(pair, "expected KEY=VALUE"))?;
            let Some(slot) = KEYS.iter().position(|known| *known == key).and_then(|at| values.get_mut(at)) else {
                return Err(wrong(key, "unknown key"));
            };
            if slot.replace(value).is_some() {
                return Err(wrong(key, "given twice"));
            }
        }
        let [root_hash, salt, data_blocks, data_block_size, hash_block_size] = values;
        let given = |value: Option<&'_ str>, key: &str| value.map(str::to_owned).ok_or_else(|| wrong(key, "missing"));
        let root_hash = hex::decode(given(root_hash, "root_hash")?)
            .ok()
            .and_then(|bytes| Hash::try_from(bytes).ok())
            .ok_or_else(|| wrong("root_hash", "expected 64 hexadecimal digits"))?;
        let salt = match given(salt, "salt")?.as_str() {
            "-" => Vec::new(),
            text => hex::decode(text)
                .ok()
                .filter(|salt| !salt.is_empty() && salt.len() <= MAX_SALT)
                .ok_or_else(|| wrong("salt", "expected up to 256 bytes in hexadecimal, or -"))?,
        };
        for (key, value) in [("data_block_size", data_block_size), ("hash_block_size", hash_block_size)] {
            if given(value, key)? != BLOCK.to_string() {
                return Err(wrong(key, "only 4096 is supported"));
            }
        }
        let data_blocks = given(data_blocks, "data_blocks")?
            .parse()
            .ok()
            .filter(|blocks| (1..=MAX_BLOCKS).contains(blocks))
            .ok_or_else(|| wrong("data_blocks", "expected a number of blocks, at least 1"))?;
        Ok(Self { root_hash, salt, data_blocks })
    }
}

const _: () = assert!(DIGEST == 32);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params() -> Params {
        Params { root_hash: [0xf2; DIGEST], salt: vec![6, 0x5c], data_blocks: 92_041 }
    }

    #[test]
    fn target_parameters_match_the_text() {
        let root = "f2".repeat(32);
        let target = params().target("/dev/vda1", "/dev/vda2");
        assert_eq!(target, format!("1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 {root} 065c"));
        assert_eq!(params().sectors(), 736_328);
        assert!(Params { salt: Vec::new(), ..params() }.target("a", "b").ends_with(" -"));
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_round_trips(text in "[a-z_=,0-9-]{0,120}") {
            if let Ok(params) = text.parse::<Params>() {
                prop_assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
            }
        }

        #[test]
        fn damaged_text_is_refused_or_round_trips(at in 0..130_usize, byte in 32_u8..127) {
            let mut text = params().to_string().into_bytes();
            let at = at % text.len();
            text[at] = byte;
            if let Ok(params) = String::from_utf8(text).unwrap().parse::<Params>() {
                prop_assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
            }
        }
    }
}
