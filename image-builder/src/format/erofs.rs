//! Names, modes and sizes of an EROFS image, for listing it: no contents, and
//! so no unpacking. `Documentation/filesystems/erofs.rst` and the kernel's
//! `fs/erofs/erofs_fs.h` are the text.
//!
//! The image is hostile: every number is checked against the file, a directory
//! is visited once, and depth and number of entries have ends.

use std::collections::BTreeSet;
use std::io::{self, Read, Seek, SeekFrom};

use crate::cpio::file_type;

const MAGIC: u32 = 0xe0f5_e1e2;
/// Where the superblock is, and how much of it is read.
const SUPERBLOCK: u64 = 1024;
/// Features that we know, or that do not change where names are: everything
/// up to prefixes of extended attributes.
const KNOWN_FEATURES: u32 = 0x7f;
/// Inodes are counted in units of this.
const UNIT: u64 = 32;
/// Bytes of a directory's entry without its name.
const ENTRY: usize = 12;
/// Paths of Linux are shorter than this, and so are targets of links.
const LONGEST_PATH: usize = 4096;
/// More entries than any image of ours will have.
const MOST_ENTRIES: usize = 1 << 20;
/// And all their paths together.
const MOST_TEXT: usize = 64 << 20;
/// A directory has fewer bytes than this.
const LARGEST_DIRECTORY: u64 = 64 << 20;

/// One entry of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path without leading slash; empty for the root.
    pub path: String,
    /// Type and permission bits.
    pub mode: u32,
    /// Owner's and group's number.
    pub owner: (u32, u32),
    /// Bytes of a file's contents.
    pub size: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Where a symbolic link points to.
    pub target: Option<String>,
}

/// An image that can be listed.
pub struct Image<R> {
    input: R,
    /// Where the image begins in `input`, and its length.
    start: u64,
    length: u64,
    block_bits: u32,
    inodes: u64,
    root: u64,
}

/// An inode, as far as it matters here.
struct Inode {
    number: u64,
    mode: u32,
    owner: (u32, u32),
    size: u64,
    /// Depends on what it is: a block, or a device.
    word: u32,
    layout: u16,
    /// Where what is kept with the inode begins.
    after: u64,
}

mod layout {
    pub(super) const PLAIN: u16 = 0;
    pub(super) const INLINE: u16 = 2;
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not an EROFS image that can be read: {}", what.into()))
}

fn half(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |two| u16::from_le_bytes([two[0], two[1]]))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

impl<R: Read + Seek> Image<R> {
    /// Opens the image of `length` bytes that begins at `start` of `input`;
    /// none if there is no EROFS.
    ///
    /// # Errors
    /// A failed read, or an image that is not understood.
    pub fn open(input: R, start: u64, length: u64) -> io::Result<Option<Self>> {
        let mut image = Self { input, start, length, block_bits: 12, inodes: 0, root: 0 };
        if length < SUPERBLOCK + 128 {
            return Ok(None);
        }
        let block = image.bytes(SUPERBLOCK, 128)?;
        if word(&block, 0) != MAGIC {
            return Ok(None);
        }
        let features = word(&block, 80);
        if features & !KNOWN_FEATURES != 0 {
            return Err(bad(format!("it has features that are newer than this program ({features:#x})")));
        }
        let bits = u32::from(block[12]);
        // Of directories' blocks, which no image has larger than the others.
        if !(9..=16).contains(&bits) || block[90] != 0 {
            return Err(bad("its blocks have an impossible size"));
        }
        image.block_bits = bits;
        image.root = u64::from(half(&block, 14));
        image.inodes = u64::from(word(&block, 40)) << bits;
        Ok(Some(image))
    }

    /// Everything in the image, each directory before what is in it, in the
    /// order of the directories, which is that of names.
    ///
    /// # Errors
    /// A failed read, or an image that is not as it should be.
    pub fn entries(&mut self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let mut seen = BTreeSet::new();
        let root = self.inode(self.root)?;
        if root.mode & file_type::MASK != file_type::DIRECTORY {
            return Err(bad("its root is no directory"));
        }
        let mut waiting = vec![(String::new(), root)];
        let mut text = 0;
        while let Some((path, inode)) = waiting.pop() {
            let kind = inode.mode & file_type::MASK;
            let names = if kind == file_type::DIRECTORY {
                if !seen.insert(inode.number) {
                    return Err(bad(format!("the directory /{path} is in it twice")));
                }
                self.names(&inode)?
            } else {
                Vec::new()
            };
            entries.push(self.entry(&path, &inode)?);
            let below = waiting.len();
            for (name, number) in names {
                let path = if path.is_empty() { name } else { format!("{path}/{name}") };
                text += path.len();
                let most = entries.len() + waiting.len() >= MOST_ENTRIES || text >= MOST_TEXT;
                if most || path.len() >= LONGEST_PATH {
                    return Err(bad("its paths are too long or too many"));
                }
                waiting.push((path, self.inode(number)?));
            }
            // The last is taken first.
            waiting[below..].reverse();
        }
        Ok(entries)
    }

    fn entry(&mut self, path: &str, inode: &Inode) -> io::Result<Entry> {
        let (path, mode, owner) = (path.to_owned(), inode.mode, inode.owner);
        let mut entry = Entry { path, mode, owner, size: 0, device: (0, 0), target: None };
        match inode.mode & file_type::MASK {
            file_type::REGULAR => entry.size = inode.size,
            file_type::CHARACTER | file_type::BLOCK => {
                let device = inode.word;
                entry.device = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
            }
            file_type::SYMLINK => {
                let target = String::from_utf8(self.data(inode, LONGEST_PATH as u64)?);
                entry.target = Some(target.map_err(|_| bad("the target of a link is not UTF-8"))?);
            }
            _ => {}
        }
        Ok(entry)
    }

    /// The inode number `number`.
    fn inode(&mut self, number: u64) -> io::Result<Inode> {
        let place = number
            .checked_mul(UNIT)
            .and_then(|offset| offset.checked_add(self.inodes))
            .ok_or_else(|| bad("an inode that is nowhere"))?;
        let bytes = self.bytes(place, 32)?;
        let format = half(&bytes, 0);
        let attributes = match half(&bytes, 2) {
            0 => 0,
            count => 12 + 4 * (u64::from(count) - 1),
        };
        let (mode, word_of) = (u32::from(half(&bytes, 4)), word(&bytes, 16));
        let layout = format >> 1 & 7;
        if format & 1 == 0 {
            let owner = (u32::from(half(&bytes, 24)), u32::from(half(&bytes, 26)));
            let (size, after) = (u64::from(word(&bytes, 8)), place + 32 + attributes);
            return Ok(Inode { number, mode, owner, size, word: word_of, layout, after });
        }
        let bytes = self.bytes(place, 64)?;
        let owner = (word(&bytes, 24), word(&bytes, 28));
        Ok(Inode { number, mode, owner, size: long(&bytes, 8), word: word_of, layout, after: place + 64 + attributes })
    }

    /// What an inode holds, if it is not packed.
    fn data(&mut self, inode: &Inode, limit: u64) -> io::Result<Vec<u8>> {
        if inode.size > limit.min(self.length) {
            return Err(bad("a directory or a link that is too large"));
        }
        let block = 1u64 << self.block_bits;
        let place = u64::from(inode.word) << self.block_bits;
        match inode.layout {
            layout::PLAIN => self.bytes(place, inode.size),
            layout::INLINE => {
                // All but the last block is elsewhere; that one is here.
                let whole = inode.size.saturating_sub(1) / block * block;
                let mut data = if whole == 0 { Vec::new() } else { self.bytes(place, whole)? };
                data.extend(self.bytes(inode.after, inode.size - whole)?);
                Ok(data)
            }
            _ => Err(bad("a packed directory or link")),
        }
    }

    /// The names in a directory, and the inodes they are of.
    fn names(&mut self, inode: &Inode) -> io::Result<Vec<(String, u64)>> {
        let data = self.data(inode, LARGEST_DIRECTORY)?;
        let mut names = Vec::new();
        for block in data.chunks(1 << self.block_bits) {
            // The first name begins behind the last entry.
            let count = usize::from(half(block, 8)) / ENTRY;
            if count == 0 || count * ENTRY > block.len() {
                return Err(bad("a directory without entries"));
            }
            for index in 0..count {
                let entry = &block[index * ENTRY..(index + 1) * ENTRY];
                let start = usize::from(half(entry, 8));
                let end =
                    if index + 1 < count { usize::from(half(block, (index + 1) * ENTRY + 8)) } else { block.len() };
                let name = block.get(start..end).ok_or_else(|| bad("a name outside its directory"))?;
                // The last of a block is filled up with zeroes.
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                let name = std::str::from_utf8(name).map_err(|_| bad("a name that is not UTF-8"))?;
                match name {
                    "." | ".." => {}
                    name if name.is_empty() || name.contains('/') => return Err(bad(format!("the name {name:?}"))),
                    name => names.push((name.to_owned(), long(entry, 0))),
                }
            }
        }
        Ok(names)
    }

    fn bytes(&mut self, at: u64, count: u64) -> io::Result<Vec<u8>> {
        if at.checked_add(count).is_none_or(|end| end > self.length) {
            return Err(bad(format!("{count} bytes at byte {at} are outside of it")));
        }
        self.input.seek(SeekFrom::Start(self.start + at))?;
        let mut bytes = Vec::new();
        self.input.by_ref().take(count).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != count {
            return Err(bad("it ends early"));
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

    /// An image made by hand: `/bin/sh`, `/dev/null`, `/link`.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 3 * BLOCK];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(1024, &MAGIC.to_le_bytes());
        put(1024 + 12, &[12]);
        put(1024 + 14, &1u16.to_le_bytes());
        put(1024 + 40, &1u32.to_le_bytes());
        // Compact inodes with what they hold behind them, from block 1 on.
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
    fn other_files_are_none() {
        assert_eq!(listed(b"short").unwrap(), None);
        assert_eq!(listed(&vec![0; 9000]).unwrap(), None);
    }

    #[test]
    fn damage_is_named() {
        let broken = |at: usize, bytes: &[u8]| {
            let mut image = image();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            listed(&image).unwrap_err().to_string()
        };
        assert!(broken(1024 + 80, &[0, 1]).contains("newer"));
        assert!(broken(1024 + 12, &[40]).contains("size"));
        // `bin` is the root again.
        let bin = BLOCK + 32 + 32 + 2 * ENTRY;
        assert!(broken(bin, &[1]).contains("twice"));
        assert!(broken(bin, &[0xff; 8]).contains("nowhere"));
        assert!(broken(bin, &[0xff, 0xff]).contains("outside"));
        assert!(broken(BLOCK + 32 + 32 + 5 * ENTRY + 3, b"b/n").contains("b/n"));
        assert!(broken(BLOCK + 32 + 8, &[0xff; 4]).contains("too large"));
    }

    proptest! {
        #[test]
        fn no_damage_panics(places in proptest::collection::vec((0usize..3 * BLOCK, any::<u8>()), 1..6)) {
            let mut bytes = image();
            for (at, byte) in places {
                bytes[at] = byte;
            }
            let _ = listed(&bytes);
        }
    }
}
