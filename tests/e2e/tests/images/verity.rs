//! Our hash trees beside those of `veritysetup`.

use std::fs;
use std::path::Path;

use firstlight_image_builder::format::verity::{BLOCK, Params, tree};
use firstlight_image_builder::packages::tools::Kit;

use crate::trees::says;

/// Runs `veritysetup`, which wants no device, no superblock, and no right.
fn veritysetup(action: &str, data: &Path, hashes: &Path, more: &[&str]) -> String {
    says(Kit::Verity, "veritysetup", |command| {
        command.arg(action).arg(data).arg(hashes).args(more).arg("--no-superblock");
    })
}

#[test]
fn byte_for_byte_veritysetups() {
    let dir = tempfile::tempdir().unwrap();
    let (data_path, hash_path) = (dir.path().join("data"), dir.path().join("hashes"));
    for (blocks, salt) in [
        (1, vec![1]),
        (2, vec![0xab; 32]),
        (127, vec![0xab; 32]),
        (128, vec![9, 8, 7]),
        (129, vec![0xab; 32]),
        (128 * 128, vec![0xab; 32]),
        (128 * 128 + 1, vec![0xcd; 256]),
        (300, Vec::new()),
    ] {
        let mut data = vec![0; blocks * BLOCK];
        for (number, block) in (1u64..).zip(data.chunks_exact_mut(BLOCK)) {
            block[4000..4008].copy_from_slice(&number.to_le_bytes());
        }
        fs::write(&data_path, &data).unwrap();
        let _ = fs::remove_file(&hash_path);
        let salt_text = if salt.is_empty() { "-".to_owned() } else { hex::encode(&salt) };
        let sizes = ["--data-block-size=4096", "--hash-block-size=4096", "--hash=sha256", "--format=1"];
        let salted = format!("--salt={salt_text}");
        let said = veritysetup("format", &data_path, &hash_path, &[&sizes[..], &[&salted]].concat());
        let ours = tree(&mut &data[..], &salt).unwrap();
        let root = said.lines().find_map(|line| line.strip_prefix("Root hash:")).unwrap().trim();
        assert_eq!(hex::encode(ours.params.root_hash), root, "{blocks} blocks: {said}");
        let theirs = fs::read(&hash_path).unwrap();
        assert!(ours.blocks == theirs, "{blocks} blocks: {} and {} bytes", ours.blocks.len(), theirs.len());
    }
}

#[test]
fn veritysetup_verifies_a_disk_of_ours() {
    use firstlight_image_builder::format::disk::{Layout, assemble};
    let dir = tempfile::tempdir().unwrap();
    let (content, image) = (dir.path().join("content"), dir.path().join("image"));
    fs::write(&content, vec![3; 777 * BLOCK]).unwrap();
    let made = assemble(&Layout { name: "x", signature: 1, verity: Some(None) }, &content, &image).unwrap();
    let (hashes, Params { root_hash, salt, data_blocks }) = made.verity.unwrap();
    // It reads parts of files only where it hashes: each part becomes a file.
    let bytes = fs::read(&image).unwrap();
    let part = |name: &str, start: u64, size: u64| {
        let (start, size) = (usize::try_from(start).unwrap(), usize::try_from(size).unwrap());
        let path = dir.path().join(name);
        fs::write(&path, &bytes[start..start + size]).unwrap();
        path
    };
    let data = part("data", made.data.start, made.data.size);
    let tree = part("tree", hashes.start, hashes.size);
    let blocks = format!("--data-blocks={data_blocks}");
    let salt = format!("--salt={}", hex::encode(&salt));
    let root = hex::encode(root_hash);
    let sizes = ["--data-block-size=4096", "--hash-block-size=4096", "--hash=sha256", "--format=1"];
    veritysetup("verify", &data, &tree, &[&[root.as_str()], &sizes[..], &[&blocks, &salt]].concat());
}
