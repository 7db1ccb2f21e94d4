//! Reads the directory tree of an EROFS image: names, modes and sizes, but not
//! the contents of files, so no decompression is needed. The format is specified in
//! `Documentation/filesystems/erofs.rst` and `fs/erofs/erofs_fs.h` of the kernel.
//!
//! The image is untrusted input: every offset is checked against the file size, a
//! directory that is reachable twice is an error, and the number and length of
//! paths are limited.

use std::collections::BTreeSet;
use std::io::{self, Read, Seek, SeekFrom};

use crate::format::cpio::file_type;

const MAGIC: u32 = 0xe0f5_e1e2;
/// Offset of the superblock.
const SUPERBLOCK: u64 = 1024;
/// Supported incompatible features, and those that do not affect directories:
/// everything up to prefixes of extended attributes.
const KNOWN_FEATURES: u32 = 0x7f;
/// Size of an inode slot in bytes: an inode number times this is its offset.
const INODE_SLOT: u64 = 32;
/// Size of a directory entry without its name.
const ENTRY: usize = 12;
/// Limit of paths and link targets in bytes, `PATH_MAX` of Linux.
const MAX_PATH: usize = 4096;
/// Limit of the number of entries.
const MAX_ENTRIES: usize = 1 << 20;
/// Limit of the total length of all paths in bytes.
const MAX_TOTAL_PATHS: usize = 64 << 20;
/// Limit of the size of a directory in bytes.
const MAX_DIRECTORY: u64 = 64 << 20;

/// One entry of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path without leading slash; empty for the root.
    pub path: String,
    /// Type and permission bits.
    pub mode: u32,
    /// User and group id.
    pub owner: (u32, u32),
    /// Size of a regular file in bytes.
    pub size: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Target of a symbolic link.
    pub target: Option<String>,
}

/// An opened image.
pub struct Image<R> {
    input: R,
    /// Offset of the image in `input`.
    start: u64,
    length: u64,
    block_bits: u32,
    inodes: u64,
    root: u64,
}

/// The inode fields used here.
struct Inode {
    number: u64,
    mode: u32,
    owner: (u32, u32),
    size: u64,
    /// The union `i_u`: a block address, or a device number.
    union: u32,
    layout: u16,
    /// Offset of the inline data, which follows the inode and its attributes.
    inline_data: u64,
}

mod layout {
    pub(super) const PLAIN: u16 = 0;
    pub(super) const INLINE: u16 = 2;
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("invalid EROFS image: {}", what.into()))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |two| u16::from_le_bytes([two[0], two[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl<R: Read + Seek> Image<R> {
    /// Opens the image of `length` bytes at offset `start` of `input`; returns
    /// `None` if there is no EROFS superblock.
    ///
    /// # Errors
    /// A failed read, or an unsupported image.
    pub fn open(input: R, start: u64, length: u64) -> io::Result<Option<Self>> {
        let mut image = Self { input, start, length, block_bits: 12, inodes: 0, root: 0 };
        if length < SUPERBLOCK + 128 {
            return Ok(None);
        }
        let block = image.bytes(SUPERBLOCK, 128)?;
        if u32_at(&block, 0) != MAGIC {
            return Ok(None);
        }
        let features = u32_at(&block, 80);
        if features & !KNOWN_FEATURES != 0 {
            return Err(invalid(format!("unsupported features {features:#x}; use a newer image-builder")));
        }
        let bits = u32::from(block[12]);
        // Byte 90 is `dirblkbits`, which must be zero: directory blocks are as large as others.
        if !(9..=16).contains(&bits) || block[90] != 0 {
            return Err(invalid("unsupported block size"));
        }
        image.block_bits = bits;
        image.root = u64::from(u16_at(&block, 14));
        image.inodes = u64::from(u32_at(&block, 40)) << bits;
        Ok(Some(image))
    }

    /// Returns all entries of the image in depth-first order: a directory before
    /// its contents, and siblings sorted by name as on disk.
    ///
    /// # Errors
    /// A failed read, or an invalid image.
    pub fn entries(&mut self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let mut seen = BTreeSet::new();
        let root = self.inode(self.root)?;
        if root.mode & file_type::MASK != file_type::DIRECTORY {
            return Err(invalid("the root inode is not a directory"));
        }
        let mut pending = vec![(String::new(), root)];
        let mut total_path_length = 0;
        while let Some((path, inode)) = pending.pop() {
            let kind = inode.mode & file_type::MASK;
            let names = if kind == file_type::DIRECTORY {
                if !seen.insert(inode.number) {
                    return Err(invalid(format!("directory /{path} is linked twice")));
                }
                self.names(&inode)?
            } else {
                Vec::new()
            };
            entries.push(self.entry(&path, &inode)?);
            let first_child = pending.len();
            for (name, number) in names {
                let path = if path.is_empty() { name } else { format!("{path}/{name}") };
                total_path_length += path.len();
                let exceeded = entries.len() + pending.len() >= MAX_ENTRIES || total_path_length >= MAX_TOTAL_PATHS;
                if exceeded || path.len() >= MAX_PATH {
                    return Err(invalid("too many or too long paths"));
                }
                pending.push((path, self.inode(number)?));
            }
            // `pending` is a stack: reversed, so that the first child is popped first.
            pending[first_child..].reverse();
        }
        Ok(entries)
    }

    fn entry(&mut self, path: &str, inode: &Inode) -> io::Result<Entry> {
        let (path, mode, owner) = (path.to_owned(), inode.mode, inode.owner);
        let mut entry = Entry { path, mode, owner, size: 0, device: (0, 0), target: None };
        match inode.mode & file_type::MASK {
            file_type::REGULAR => entry.size = inode.size,
            file_type::CHARACTER | file_type::BLOCK => {
                let device = inode.union;
                entry.device = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
            }
            file_type::SYMLINK => {
                let target = String::from_utf8(self.data(inode, MAX_PATH as u64)?);
                entry.target = Some(target.map_err(|_| invalid("a link target is not UTF-8"))?);
            }
            _ => {}
        }
        Ok(entry)
    }

    /// Reads the inode `number`.
    fn inode(&mut self, number: u64) -> io::Result<Inode> {
        let offset = number
            .checked_mul(INODE_SLOT)
            .and_then(|slot| slot.checked_add(self.inodes))
            .ok_or_else(|| invalid("an inode number is out of range"))?;
        let bytes = self.bytes(offset, 32)?;
        let format = u16_at(&bytes, 0);
        let attributes = match u16_at(&bytes, 2) {
            0 => 0,
            count => 12 + 4 * (u64::from(count) - 1),
        };
        let (mode, union) = (u32::from(u16_at(&bytes, 4)), u32_at(&bytes, 16));
        let layout = format >> 1 & 7;
        if format & 1 == 0 {
            let owner = (u32::from(u16_at(&bytes, 24)), u32::from(u16_at(&bytes, 26)));
            let (size, inline_data) = (u64::from(u32_at(&bytes, 8)), offset + 32 + attributes);
            return Ok(Inode { number, mode, owner, size, union, layout, inline_data });
        }
        let bytes = self.bytes(offset, 64)?;
        let owner = (u32_at(&bytes, 24), u32_at(&bytes, 28));
        Ok(Inode { number, mode, owner, size: u64_at(&bytes, 8), union, layout, inline_data: offset + 64 + attributes })
    }

    /// Reads the data of an uncompressed inode.
    fn data(&mut self, inode: &Inode, limit: u64) -> io::Result<Vec<u8>> {
        if inode.size > limit.min(self.length) {
            return Err(invalid("a directory or link is too large"));
        }
        let block = 1u64 << self.block_bits;
        let offset = u64::from(inode.union) << self.block_bits;
        match inode.layout {
            layout::PLAIN => self.bytes(offset, inode.size),
            layout::INLINE => {
                // Only the tail, a partial last block, is stored inline.
                let whole = inode.size.saturating_sub(1) / block * block;
                let mut data = if whole == 0 { Vec::new() } else { self.bytes(offset, whole)? };
                data.extend(self.bytes(inode.inline_data, inode.size - whole)?);
                Ok(data)
            }
            _ => Err(invalid("a directory or link is compressed")),
        }
    }

    /// Reads the names in a directory and their inode numbers.
    fn names(&mut self, inode: &Inode) -> io::Result<Vec<(String, u64)>> {
        let data = self.data(inode, MAX_DIRECTORY)?;
        let mut names = Vec::new();
        for block in data.chunks(1 << self.block_bits) {
            // The first name follows the last entry, so its offset gives the number of entries.
            let count = usize::from(u16_at(block, 8)) / ENTRY;
            if count == 0 || count * ENTRY > block.len() {
                return Err(invalid("a directory block without entries"));
            }
            for index in 0..count {
                let entry = &block[index * ENTRY..(index + 1) * ENTRY];
                let start = usize::from(u16_at(entry, 8));
                let end =
                    if index + 1 < count { usize::from(u16_at(block, (index + 1) * ENTRY + 8)) } else { block.len() };
                let name = block.get(start..end).ok_or_else(|| invalid("a name is outside its directory block"))?;
                // The last name of a block is padded with zeros.
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                let name = std::str::from_utf8(name).map_err(|_| invalid("a name is not UTF-8"))?;
                match name {
                    "." | ".." => {}
                    name if name.is_empty() || name.contains('/') => {
                        return Err(invalid(format!("invalid name {name:?}")));
                    }
                    name => names.push((name.to_owned(), u64_at(entry, 0))),
                }
            }
        }
        Ok(names)
    }

    fn bytes(&mut self, at: u64, count: u64) -> io::Result<Vec<u8>> {
        if at.checked_add(count).is_none_or(|end| end > self.length) {
            return Err(invalid(format!("{count} bytes at offset {at} are beyond its end")));
        }
        self.input.seek(SeekFrom::Start(self.start + at))?;
        let mut bytes = Vec::new();
        self.input.by_ref().take(count).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != count {
            return Err(invalid("truncated"));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    const BLOCK: usize = 4096;

    /// Builds an image with `/bin/sh`, `/dev/null`, `/link`.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 3 * BLOCK];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(1024, &MAGIC.to_le_bytes());
        put(1024 + 12, &[12]);
        put(1024 + 14, &1u16.to_le_bytes());
        put(1024 + 40, &1u32.to_le_bytes());
        // Compact inodes followed by their inline data, from block 1 on.
        let mut inode = |number: usize, mode: u32, size: usize, word: u32, data: &[u8]| {
            let at = BLOCK + number * 32;
            let layout: u16 = if data.is_empty() { 0 } else { layout::INLINE << 1 };
            put(at, &layout.to_le_bytes());
            put(at + 4, &u16::try_from(mode).unwrap().to_le_bytes());
            put(at + 8, &u32::try_from(size).unwrap().to_le_bytes());
            put(at + 16, &word.to_le_bytes());
            put(at + 24, &7u16.to_le_bytes());
            put(at + 32, data);
        };
        let directory = |names: &[(&str, u64)]| {
            let mut data = Vec::new();
            let mut end = names.len() * ENTRY;
            for (name, number) in names {
                data.extend_from_slice(&number.to_le_bytes());
                data.extend_from_slice(&u16::try_from(end).unwrap().to_le_bytes());
                data.extend_from_slice(&[0, 0]);
                end += name.len();
            }
            names.iter().for_each(|(name, _)| data.extend_from_slice(name.as_bytes()));
            data
        };
        let root = directory(&[(".", 1), ("..", 1), ("bin", 8), ("dev", 16), ("link", 24)]);
        inode(1, 0o040755, root.len(), 0, &root);
        let bin = directory(&[(".", 8), ("..", 1), ("sh", 26)]);
        inode(8, 0o040700, bin.len(), 0, &bin);
        let dev = directory(&[(".", 16), ("..", 1), ("null", 28)]);
        inode(16, 0o040755, dev.len(), 0, &dev);
        inode(24, 0o120777, 4, 0, b"/run");
        inode(26, 0o100755, 1234, 2, b"");
        inode(28, 0o020666, 0, (0x12345 & 0xff) | 0x123 << 8 | (0x12345 & !0xff) << 12, b"");
        image
    }

    fn listed(bytes: &[u8]) -> io::Result<Option<Vec<Entry>>> {
        let image = Image::open(Cursor::new(bytes), 0, bytes.len() as u64)?;
        image.map(|mut image| image.entries()).transpose()
    }

    #[test]
    fn entries_are_listed() {
        let mut moved = vec![9; 512];
        moved.extend_from_slice(&image());
        let length = moved.len() as u64 - 512;
        let entries = Image::open(Cursor::new(moved), 512, length).unwrap().unwrap().entries().unwrap();
        let paths: Vec<&str> = entries.iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!(paths, ["", "bin", "bin/sh", "dev", "dev/null", "link"]);
        assert_eq!((entries[1].mode, entries[1].owner), (0o040700, (7, 0)));
        assert_eq!(entries[2].size, 1234);
        assert_eq!(entries[4].device, (0x123, 0x12345));
        assert_eq!(entries[5].target.as_deref(), Some("/run"));
    }

    #[test]
    fn other_files_then_none() {
        assert_eq!(listed(b"short").unwrap(), None);
        assert_eq!(listed(&vec![0; 9000]).unwrap(), None);
    }

    #[test]
    fn corrupt_image_then_error_names_the_cause() {
        let broken = |at: usize, bytes: &[u8]| {
            let mut image = image();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            listed(&image).unwrap_err().to_string()
        };
        assert!(broken(1024 + 80, &[0, 1]).contains("features"));
        assert!(broken(1024 + 12, &[40]).contains("size"));
        // The entry `bin` refers to the root inode.
        let bin = BLOCK + 32 + 32 + 2 * ENTRY;
        assert!(broken(bin, &[1]).contains("twice"));
        assert!(broken(bin, &[0xff; 8]).contains("out of range"));
        assert!(broken(bin, &[0xff, 0xff]).contains("beyond its end"));
        assert!(broken(BLOCK + 32 + 32 + 5 * ENTRY + 3, b"b/n").contains("b/n"));
        assert!(broken(BLOCK + 32 + 8, &[0xff; 4]).contains("too large"));
    }

    proptest! {
        #[test]
        fn corrupt_image_does_not_panic(places in proptest::collection::vec((0usize..3 * BLOCK, any::<u8>()), 1..6)) {
            let mut bytes = image();
            for (at, byte) in places {
                bytes[at] = byte;
            }
            let _ = listed(&bytes);
        }
    }
}
