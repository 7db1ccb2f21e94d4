use super::*;
use proptest::prelude::*;

/// Different in every block, and the same at every run.
fn data(blocks: usize) -> Vec<u8> {
    let mut data = vec![0; blocks * BLOCK];
    for (index, block) in data.chunks_exact_mut(BLOCK).enumerate() {
        block[..8].copy_from_slice(&(index as u64 + 1).to_le_bytes());
    }
    data
}

fn made(data: &[u8], salt: &[u8]) -> Tree {
    tree(&mut &data[..], salt).unwrap()
}

fn checked(data: &[u8], hashes: &[u8], params: &Params) -> Option<Bad> {
    check(&mut &data[..], &mut &hashes[..], params).unwrap()
}

/// By hand, from the text of the kernel's documentation.
#[test]
fn two_blocks_by_hand() {
    let data = data(2);
    let hash = |parts: &[&[u8]]| -> Hash {
        parts.iter().fold(Sha256::new(), |state, part| state.chain_update(part)).finalize().into()
    };
    let mut top = [hash(&[b"salt", &data[..BLOCK]]), hash(&[b"salt", &data[BLOCK..]])].concat();
    top.resize(BLOCK, 0);
    let tree = made(&data, b"salt");
    assert_eq!(tree.params.root_hash, hash(&[b"salt", &top]));
    assert_eq!(tree.blocks, top);
    // One block is its own top: nothing is between it and the root hash.
    let one = made(&data[..BLOCK], b"salt");
    assert_eq!((one.params.root_hash, one.blocks.len()), (hash(&[b"salt", &data[..BLOCK]]), 0));
}

#[test]
fn levels_are_as_many_as_are_needed() {
    assert_eq!(levels(1), Vec::<u64>::new());
    assert_eq!(levels(2), [1]);
    assert_eq!(levels(128), [1]);
    assert_eq!(levels(129), [2, 1]);
    assert_eq!(levels(128 * 128), [128, 1]);
    assert_eq!(levels(128 * 128 + 1), [129, 2, 1]);
    assert_eq!(hash_blocks(128 * 128 + 1), 132);
}

#[test]
fn what_is_not_whole_is_refused() {
    assert!(tree(&mut &b""[..], b"").unwrap_err().to_string().contains("no data"));
    let error = tree(&mut &vec![1; BLOCK + 7][..], b"").unwrap_err().to_string();
    assert!(error.contains("7 bytes into a block"), "{error}");
    let data = data(130);
    let tree = made(&data, b"");
    let short = check(&mut &data[..129 * BLOCK], &mut &tree.blocks[..], &tree.params).unwrap_err();
    assert!(matches!(short, Failed::Short { of: "data", block: 129, expected: 130 }), "{short}");
    let short = check(&mut &data[..], &mut &tree.blocks[..BLOCK], &tree.params).unwrap_err();
    assert!(matches!(short, Failed::Short { of: "hash tree", block: 1, expected: 3 }), "{short}");
    // Parameters that claim more than there is cost no memory.
    let params = Params { data_blocks: 1 << 50, ..tree.params };
    let short = check(&mut &data[..], &mut &tree.blocks[..], &params).unwrap_err();
    assert!(matches!(short, Failed::Short { of: "hash tree", block: 3, .. }), "{short}");
}

#[test]
fn a_bad_block_is_named() {
    let mut data = data(300);
    let tree = made(&data, b"");
    data[200 * BLOCK] ^= 1;
    data[299 * BLOCK] ^= 1;
    let bad = checked(&data, &tree.blocks, &tree.params).unwrap();
    assert_eq!(bad, Bad::Data { block: 200 });
    assert!(bad.to_string().contains("block 200 of the data (byte 819200)"), "{bad}");
    let mut hashes = tree.blocks.clone();
    hashes[2 * BLOCK + 5] ^= 0x80;
    assert_eq!(checked(&data, &hashes, &tree.params), Some(Bad::Hashes { level: 0, block: 2 }));
    let other = Params { root_hash: [7; DIGEST], ..tree.params.clone() };
    assert_eq!(checked(&data, &tree.blocks, &other), Some(Bad::Hashes { level: 1, block: 0 }));
}

#[test]
fn salts_differ_by_name_and_content() {
    assert_eq!(default_salt("a", "bc"), default_salt("a", "bc"));
    assert_ne!(default_salt("a", "bc"), default_salt("ab", "c"));
    assert_ne!(default_salt("a", "bc"), default_salt("a", "bd"));
    assert_eq!(default_salt("a", "b").len(), DIGEST);
}

#[test]
fn parameters_are_katas_words() {
    let params = made(&data(3), &[0xab, 1]).params;
    let text = params.to_string();
    let root = hex::encode(params.root_hash);
    assert_eq!(text, format!("root_hash={root},salt=ab01,data_blocks=3,data_block_size=4096,hash_block_size=4096"));
    assert_eq!(text.parse::<Params>().unwrap(), params);
    // Kata's own documents have another order.
    let other = format!("root_hash={root},salt=AB01,data_blocks=3,hash_block_size=4096,data_block_size=4096");
    assert_eq!(other.parse::<Params>().unwrap(), params);
    for (from, to, key) in [
        ("data_blocks=3", "data_blocks=0", "data_blocks"),
        ("data_blocks=3", "data_blocks=99999999999999999", "data_blocks"),
        ("data_block_size=4096", "data_block_size=512", "data_block_size"),
        ("salt=ab01", "salt=ab0", "salt"),
        ("salt=ab01", "salt=", "salt"),
        ("salt=ab01", "salt=ab01,salt=ab01", "salt"),
        (",salt=ab01", "", "salt"),
        ("root_hash=", "root_hash=00", "root_hash"),
        ("root_hash=", "what=", "what"),
    ] {
        let wrong = text.replacen(from, to, 1).parse::<Params>().unwrap_err();
        assert_eq!(wrong.key, key, "{wrong}");
    }
}

proptest! {
    /// Whatever bit is flipped, wherever: it is found, and in the right block.
    #[test]
    fn a_flipped_bit_is_found(
        blocks in 1usize..300,
        salt in proptest::collection::vec(any::<u8>(), 0..40),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let mut data = data(blocks);
        let mut tree = made(&data, &salt);
        prop_assert_eq!(tree.blocks.len() as u64, hash_blocks(blocks as u64) * BLOCK as u64);
        prop_assert_eq!(checked(&data, &tree.blocks, &tree.params), None);
        let at = at.index(data.len() + tree.blocks.len());
        match at.checked_sub(data.len()) {
            None => data[at] ^= 1 << bit,
            Some(at) => tree.blocks[at] ^= 1 << bit,
        }
        let found = checked(&data, &tree.blocks, &tree.params);
        let block = |at: usize| (at / BLOCK) as u64;
        match at.checked_sub(data.len()) {
            None => prop_assert_eq!(found, Some(Bad::Data { block: block(at) })),
            Some(at) => prop_assert!(
                matches!(found, Some(Bad::Hashes { block: found, .. }) if found == block(at)), "{:?}", found
            ),
        }
    }

    #[test]
    fn no_text_panics(text in "(root_hash|salt|data_blocks)?[=,0-9a-f-]{0,80}") {
        if let Ok(params) = text.parse::<Params>() {
            prop_assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
        }
    }
}
