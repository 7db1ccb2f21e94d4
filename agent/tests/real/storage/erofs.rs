//! Builds minimal EROFS images: one directory with one file, uncompressed; see the kernel's fs/erofs/erofs_fs.h.

use crate::support::require_file_system;

const BLOCK: usize = 4096;
/// Block 1 contains the inodes, 2 the directory, 3 the file.
const INODES: usize = BLOCK;
const ROOT: u64 = 0;
const FILE: u64 = 1;

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Writes a compact inode with a flat, uncompressed data layout.
fn inode(image: &mut [u8], number: u64, mode: u16, links: u16, size: u32, block: u32) {
    let at = INODES + usize::try_from(number).unwrap() * 32;
    put(image, at + 4, &mode.to_le_bytes());
    put(image, at + 6, &links.to_le_bytes());
    put(image, at + 8, &size.to_le_bytes());
    put(image, at + 16, &block.to_le_bytes());
    put(image, at + 20, &(u32::try_from(number).unwrap() + 1).to_le_bytes());
}

/// Builds an image with one file.
pub(super) fn image(name: &str, text: &str) -> Vec<u8> {
    require_file_system("erofs");
    let mut image = vec![0; 4 * BLOCK];
    put(&mut image, 1024, &0xE0F5_E1E2_u32.to_le_bytes());
    image[1024 + 12] = 12; // blocks of 4096 bytes
    put(&mut image, 1024 + 14, &u16::try_from(ROOT).unwrap().to_le_bytes());
    put(&mut image, 1024 + 16, &2_u64.to_le_bytes()); // inodes
    put(&mut image, 1024 + 36, &4_u32.to_le_bytes()); // blocks
    put(&mut image, 1024 + 40, &1_u32.to_le_bytes()); // where inodes begin

    let mut names: [(&str, u64, u8); 3] = [(".", ROOT, 2), ("..", ROOT, 2), (name, FILE, 1)];
    names.sort_unstable();
    let mut at = 12 * names.len();
    for (number, (name, inode, kind)) in names.iter().enumerate() {
        let entry = 2 * BLOCK + 12 * number;
        put(&mut image, entry, &inode.to_le_bytes());
        put(&mut image, entry + 8, &u16::try_from(at).unwrap().to_le_bytes());
        image[entry + 10] = *kind;
        put(&mut image, 2 * BLOCK + at, name.as_bytes());
        at += name.len();
    }
    inode(&mut image, ROOT, 0o040_755, 2, u32::try_from(at).unwrap(), 2);
    inode(&mut image, FILE, 0o100_644, 1, u32::try_from(text.len()).unwrap(), 3);
    put(&mut image, 3 * BLOCK, text.as_bytes());
    image
}
