//! What names a hash tree, in the words of Kata's configuration.

use std::fmt;
use std::str::FromStr;

use crate::{BLOCK, DIGEST, Hash};

/// The kernel takes no longer salt.
pub const LONGEST_SALT: usize = 256;
/// No device has more sectors than fit into 63 bits.
const MOST_BLOCKS: u64 = (1 << 63) / BLOCK as u64;

/// What the kernel must be told to check a device.
///
/// As text: `root_hash=..,salt=..,data_blocks=N,data_block_size=4096,hash_block_size=4096`,
/// which is the value of Kata's `kernel_verity_params` and `verity_params`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// The hash of the topmost block.
    pub root_hash: Hash,
    /// What is hashed before every block.
    pub salt: Vec<u8>,
    /// Blocks of data, each of 4096 bytes.
    pub data_blocks: u64,
}

/// Why a text names no hash tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no dm-verity parameters: {key}: {what}")]
pub struct ParamsError {
    /// The key.
    pub key: String,
    /// What is wrong with it.
    pub what: &'static str,
}

impl fmt::Display for Params {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { root_hash, data_blocks, .. } = self;
        write!(
            formatter,
            "root_hash={},salt={},data_blocks={data_blocks},data_block_size={BLOCK},hash_block_size={BLOCK}",
            hex(root_hash),
            self.salt_text(),
        )
    }
}

impl Params {
    /// Bytes of data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data_blocks * BLOCK as u64
    }

    /// The salt in hexadecimal; `-` is the kernel's word for none.
    #[must_use]
    pub fn salt_text(&self) -> String {
        if self.salt.is_empty() { "-".to_owned() } else { hex(&self.salt) }
    }

    /// Sectors of 512 bytes of the device that the device mapper makes of it.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.data_bytes() / 512
    }

    /// What the device mapper's target `verity` is told, version first
    /// (`Documentation/admin-guide/device-mapper/verity.rst`): without a super
    /// block the tree begins with the first block of the hash device.
    #[must_use]
    pub fn target(&self, data: &str, hashes: &str) -> String {
        let (blocks, root, salt) = (self.data_blocks, hex(&self.root_hash), self.salt_text());
        format!("1 {data} {hashes} {BLOCK} {BLOCK} {blocks} 0 sha256 {root} {salt}")
    }
}

impl FromStr for Params {
    type Err = ParamsError;

    fn from_str(text: &str) -> Result<Self, ParamsError> {
        let wrong = |key: &str, what| ParamsError { key: key.to_owned(), what };
        let mut values: [Option<&str>; 5] = [None; 5];
        const KEYS: [&str; 5] = ["root_hash", "salt", "data_blocks", "data_block_size", "hash_block_size"];
        for pair in text.split(',') {
            let (key, value) = pair.split_once('=').ok_or_else(|| wrong(pair, "expected KEY=VALUE"))?;
            let Some(slot) = KEYS.iter().position(|known| *known == key).and_then(|at| values.get_mut(at)) else {
                return Err(wrong(key, "nobody knows this key"));
            };
            if slot.replace(value).is_some() {
                return Err(wrong(key, "given twice"));
            }
        }
        let [root_hash, salt, data_blocks, data_block_size, hash_block_size] = values;
        let given = |value: Option<&'_ str>, key: &str| value.map(str::to_owned).ok_or_else(|| wrong(key, "missing"));
        let root_hash = bytes_of(&given(root_hash, "root_hash")?)
            .and_then(|bytes| Hash::try_from(bytes).ok())
            .ok_or_else(|| wrong("root_hash", "expected 64 hexadecimal digits"))?;
        let salt = match given(salt, "salt")?.as_str() {
            "-" => Vec::new(),
            text => bytes_of(text)
                .filter(|salt| !salt.is_empty() && salt.len() <= LONGEST_SALT)
                .ok_or_else(|| wrong("salt", "expected up to 256 bytes in hexadecimal, or -"))?,
        };
        for (key, value) in [("data_block_size", data_block_size), ("hash_block_size", hash_block_size)] {
            if given(value, key)? != BLOCK.to_string() {
                return Err(wrong(key, "only 4096 is known here"));
            }
        }
        let data_blocks = given(data_blocks, "data_blocks")?
            .parse()
            .ok()
            .filter(|blocks| (1..=MOST_BLOCKS).contains(blocks))
            .ok_or_else(|| wrong("data_blocks", "expected a number of blocks, at least 1"))?;
        Ok(Self { root_hash, salt, data_blocks })
    }
}

const _: () = assert!(DIGEST == 32);

/// `bytes` in hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What `text` says in hexadecimal.
#[must_use]
pub fn bytes_of(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    digits.chunks_exact(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params() -> Params {
        Params { root_hash: [0xf2; DIGEST], salt: vec![6, 0x5c], data_blocks: 92_041 }
    }

    #[test]
    fn the_target_is_told_what_the_text_says() {
        let root = "f2".repeat(32);
        let target = params().target("/dev/vda1", "/dev/vda2");
        assert_eq!(target, format!("1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 {root} 065c"));
        assert_eq!(params().sectors(), 736_328);
        assert!(Params { salt: Vec::new(), ..params() }.target("a", "b").ends_with(" -"));
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_says_itself(text in "[a-z_=,0-9-]{0,120}") {
            if let Ok(params) = text.parse::<Params>() {
                prop_assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
            }
        }

        #[test]
        fn a_damaged_text_is_refused_or_says_itself(at in 0..130_usize, byte in 32_u8..127) {
            let mut text = params().to_string().into_bytes();
            let at = at % text.len();
            text[at] = byte;
            if let Ok(params) = String::from_utf8(text).unwrap().parse::<Params>() {
                prop_assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
            }
        }
    }
}
