use super::*;
use proptest::prelude::*;

/// Returns deterministic data that differs in every block.
fn data(blocks: usize) -> Vec<u8> {
    let mut data = vec![0; blocks * BLOCK];
    for (index, block) in data.chunks_exact_mut(BLOCK).enumerate() {
        block[..8].copy_from_slice(&(index as u64 + 1).to_le_bytes());
    }
    data
}

fn build_tree(data: &[u8], salt: &[u8]) -> Tree {
    tree(&mut &data[..], salt).unwrap()
}

fn checked(data: &[u8], hashes: &[u8], params: &Params) -> Option<CorruptBlock> {
    check(&mut &data[..], &mut &hashes[..], params).unwrap()
}

/// The expected tree is computed as described in the kernel's documentation.
#[test]
fn tree_of_two_blocks_matches_the_kernel_documentation() {
    let data = data(2);
    let hash = |parts: &[&[u8]]| -> Hash {
        parts.iter().fold(Sha256::new(), |state, part| state.chain_update(part)).finalize().into()
    };
    let mut top = [hash(&[b"salt", &data[..BLOCK]]), hash(&[b"salt", &data[BLOCK..]])].concat();
    top.resize(BLOCK, 0);
    let tree = build_tree(&data, b"salt");
    assert_eq!(tree.params.root_hash, hash(&[b"salt", &top]));
    assert_eq!(tree.blocks, top);
    // The root hash of one block is the hash of that block.
    let one = build_tree(&data[..BLOCK], b"salt");
    assert_eq!((one.params.root_hash, one.blocks.len()), (hash(&[b"salt", &data[..BLOCK]]), 0));
}

#[test]
fn number_of_levels_is_minimal() {
    assert_eq!(levels(1), Vec::<u64>::new());
    assert_eq!(levels(2), [1]);
    assert_eq!(levels(128), [1]);
    assert_eq!(levels(129), [2, 1]);
    assert_eq!(levels(128 * 128), [128, 1]);
    assert_eq!(levels(128 * 128 + 1), [129, 2, 1]);
    assert_eq!(hash_blocks(128 * 128 + 1), 132);
}

#[test]
fn partial_or_missing_blocks_then_error() {
    assert!(tree(&mut &b""[..], b"").unwrap_err().to_string().contains("no data"));
    let error = tree(&mut &vec![1; BLOCK + 7][..], b"").unwrap_err().to_string();
    assert!(error.contains("7 bytes into a block"), "{error}");
    let data = data(130);
    let tree = build_tree(&data, b"");
    let short = check(&mut &data[..129 * BLOCK], &mut &tree.blocks[..], &tree.params).unwrap_err();
    assert!(matches!(short, CheckError::Short { of: "data", block: 129, expected: 130 }), "{short}");
    let short = check(&mut &data[..], &mut &tree.blocks[..BLOCK], &tree.params).unwrap_err();
    assert!(matches!(short, CheckError::Short { of: "hash tree", block: 1, expected: 3 }), "{short}");
    // Too large parameters do not cause large allocations.
    let params = Params { data_blocks: 1 << 50, ..tree.params };
    let short = check(&mut &data[..], &mut &tree.blocks[..], &params).unwrap_err();
    assert!(matches!(short, CheckError::Short { of: "hash tree", block: 3, .. }), "{short}");
}

#[test]
fn corrupt_block_is_reported_by_index() {
    let mut data = data(300);
    let tree = build_tree(&data, b"");
    data[200 * BLOCK] ^= 1;
    data[299 * BLOCK] ^= 1;
    let bad = checked(&data, &tree.blocks, &tree.params).unwrap();
    assert_eq!(bad, CorruptBlock::Data { block: 200 });
    assert!(bad.to_string().contains("block 200 of the data (byte 819200)"), "{bad}");
    let mut hashes = tree.blocks.clone();
    hashes[2 * BLOCK + 5] ^= 0x80;
    assert_eq!(checked(&data, &hashes, &tree.params), Some(CorruptBlock::Hashes { level: 0, block: 2 }));
    let other = Params { root_hash: [7; DIGEST], ..tree.params.clone() };
    assert_eq!(checked(&data, &tree.blocks, &other), Some(CorruptBlock::Hashes { level: 1, block: 0 }));
}

#[test]
fn salts_differ_by_name_and_content() {
    assert_eq!(default_salt("a", "bc"), default_salt("a", "bc"));
    assert_ne!(default_salt("a", "bc"), default_salt("ab", "c"));
    assert_ne!(default_salt("a", "bc"), default_salt("a", "bd"));
    assert_eq!(default_salt("a", "b").len(), DIGEST);
}

#[test]
fn parameters_have_kata_format() {
    let params = build_tree(&data(3), &[0xab, 1]).params;
    let text = params.to_string();
    let root = hex::encode(params.root_hash);
    assert_eq!(text, format!("root_hash={root},salt=ab01,data_blocks=3,data_block_size=4096,hash_block_size=4096"));
    assert_eq!(text.parse::<Params>().unwrap(), params);
    // Kata's documentation has another order.
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
    /// A flipped bit anywhere is detected, and attributed to its block.
    #[test]
    fn flipped_bit_then_its_block_is_reported(
        blocks in 1usize..300,
        salt in proptest::collection::vec(any::<u8>(), 0..40),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let mut data = data(blocks);
        let mut tree = build_tree(&data, &salt);
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
            None => prop_assert_eq!(found, Some(CorruptBlock::Data { block: block(at) })),
            Some(at) => prop_assert!(
                matches!(found, Some(CorruptBlock::Hashes { block: found, .. }) if found == block(at)), "{:?}", found
            ),
        }
    }

    #[test]
    fn arbitrary_parameters_do_not_panic(text in "(root_hash|salt|data_blocks)?[=,0-9a-f-]{0,80}") {
        if let Ok(params) = text.parse::<Params>() {
            prop_assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
        }
    }
}
