//! The disk that a guest boots from: a partition table as PCs have it since
//! the eighties, the file system in the first partition, and dm-verity's hash
//! tree in the second. It is the layout of Kata's images, whose runtimes name
//! the partitions `/dev/vda1` and `/dev/vda2`.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use firstlight_image::digest::Hashing;

use super::verity::{self, BLOCK};
use crate::cache::{self, io_error};

/// Bytes of a sector, in which the table counts.
const SECTOR: usize = 512;
/// Partitions begin at multiples of this, as every partitioning tool has it.
const ALIGNMENT: u64 = 1 << 20;
/// The type of a partition for Linux.
const LINUX: u8 = 0x83;
/// Where the table is in the first sector, and how long an entry is.
const TABLE: usize = 446;
const ENTRY: usize = 16;
/// What the first sector ends with.
const MARK: [u8; 2] = [0x55, 0xaa];
/// An address of the old kind that says: see the number of the sector.
const BY_NUMBER: [u8; 3] = [0xfe, 0xff, 0xff];

/// A part of a disk, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Where it begins.
    pub start: u64,
    /// How long it is.
    pub size: u64,
}

impl Partition {
    /// Where what comes after it may begin.
    fn end(self) -> u64 {
        (self.start + self.size).next_multiple_of(ALIGNMENT)
    }
}

/// The first sector of a disk with `partitions`; `signature` is the disk's
/// number, from which Linux makes names of partitions.
///
/// # Errors
/// More than four partitions, or one that the table cannot describe.
pub fn table(partitions: &[Partition], signature: u32) -> io::Result<[u8; SECTOR]> {
    let mut sector = [0; SECTOR];
    sector[TABLE - 6..TABLE - 2].copy_from_slice(&signature.to_le_bytes());
    let places = sector[TABLE..TABLE + 4 * ENTRY].chunks_exact_mut(ENTRY);
    if partitions.len() > places.len() {
        return Err(io::Error::other("a partition table has four places"));
    }
    for (entry, partition) in places.zip(partitions) {
        let count =
            |bytes: u64| u32::try_from(bytes / SECTOR as u64).ok().filter(|_| bytes.is_multiple_of(SECTOR as u64));
        let (Some(start), Some(size)) = (count(partition.start), count(partition.size)) else {
            return Err(io::Error::other("a partition table counts up to 2 TiB, in sectors of 512 bytes"));
        };
        entry[1..4].copy_from_slice(&BY_NUMBER);
        entry[4] = LINUX;
        entry[5..8].copy_from_slice(&BY_NUMBER);
        entry[8..12].copy_from_slice(&start.to_le_bytes());
        entry[12..16].copy_from_slice(&size.to_le_bytes());
    }
    sector[510..].copy_from_slice(&MARK);
    Ok(sector)
}

/// The partitions that the first sector of a disk of `length` bytes describes;
/// none where there is no table.
///
/// # Errors
/// A partition that is not on the disk.
pub fn partitions(sector: &[u8; SECTOR], length: u64) -> Result<Vec<Partition>, String> {
    if sector[510..] != MARK {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(sector[TABLE..TABLE + 4 * ENTRY].chunks_exact(ENTRY)) {
        let word = |at: usize| entry[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let partition = Partition { start: word(8) * SECTOR as u64, size: word(12) * SECTOR as u64 };
        if entry[4] == 0 || partition.size == 0 {
            continue;
        }
        if partition.start == 0 || partition.start + partition.size > length {
            return Err(format!("partition {number} lies outside the file"));
        }
        found.push(partition);
    }
    Ok(found)
}

/// The partitions of the disk in `file`.
///
/// # Errors
/// A failed read, or a table that describes another disk.
pub fn partitions_of(file: &File) -> io::Result<Vec<Partition>> {
    let length = file.metadata()?.len();
    let mut sector = [0; SECTOR];
    if length < SECTOR as u64 {
        return Ok(Vec::new());
    }
    file.read_exact_at(&mut sector, 0)?;
    partitions(&sector, length).map_err(io::Error::other)
}

/// What is in a partition of `file`; several may be read by turns.
pub fn inside(file: &File, partition: Partition) -> impl Read {
    BufReader::with_capacity(1 << 18, Inside { file, at: partition.start, end: partition.start + partition.size })
}

/// Reads where it is told to, and does not move the file's own place.
struct Inside<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for Inside<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(bytes.len());
        let read = self.file.read_at(&mut bytes[..left], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// A finished disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The file system.
    pub data: Partition,
    /// The hash tree and what names it.
    pub verity: Option<(Partition, verity::Params)>,
}

/// How a disk is put together.
#[derive(Debug, Clone)]
pub struct Layout<'a> {
    /// The image's name, from which the default salt is made.
    pub name: &'a str,
    /// The disk's number.
    pub signature: u32,
    /// Whether there is a hash tree, and its salt where it is not the default.
    pub verity: Option<Option<&'a [u8]>>,
}

/// Writes the disk `image` around the file system `content`.
///
/// # Errors
/// A failed file operation, or a file system that does not fit.
pub fn assemble(layout: &Layout<'_>, content: &Path, image: &Path) -> Result<Disk, cache::Error> {
    let open = || File::open(content).map_err(io_error("open", content));
    let length = open()?.metadata().map_err(io_error("inspect", content))?.len();
    // Checked blocks are whole.
    let data = Partition { start: ALIGNMENT, size: length.next_multiple_of(BLOCK as u64) };
    let padded = || Ok::<_, cache::Error>(BufReader::with_capacity(1 << 20, open()?).chain(zeros(data.size - length)));
    let tree = match layout.verity {
        None => None,
        Some(salt) => {
            let default;
            let salt = match salt {
                Some(salt) => salt,
                None => {
                    let mut hashing = Hashing::new(io::sink());
                    io::copy(&mut padded()?, &mut hashing).map_err(io_error("read", content))?;
                    default = verity::default_salt(layout.name, &hashing.finish().0);
                    &default
                }
            };
            Some(verity::tree(&mut padded()?, salt).map_err(io_error("hash", content))?)
        }
    };
    let hashes = tree.as_ref().map(|tree| {
        // One block of data needs no hash block; a partition must not be empty.
        let size = (tree.blocks.len() as u64).max(BLOCK as u64);
        (Partition { start: data.end(), size }, tree)
    });
    let parts: Vec<Partition> = std::iter::once(data).chain(hashes.map(|(partition, _)| partition)).collect();
    let write = || -> io::Result<()> {
        let mut file = File::create(image)?;
        file.write_all(&table(&parts, layout.signature)?)?;
        file.seek(SeekFrom::Start(data.start))?;
        io::copy(&mut File::open(content)?, &mut file)?;
        if let Some((partition, tree)) = hashes {
            file.seek(SeekFrom::Start(partition.start))?;
            file.write_all(&tree.blocks)?;
        }
        let end = parts.last().map_or(0, |part| part.start + part.size);
        // What was not written reads as zero.
        file.set_len(end)
    };
    write().map_err(io_error("write", image))?;
    Ok(Disk { data, verity: hashes.map(|(partition, tree)| (partition, tree.params.clone())) })
}

fn zeros(count: u64) -> impl Read {
    io::repeat(0).take(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn partition() -> impl Strategy<Value = Partition> {
        (1u64..1 << 31, 1u64..1 << 31).prop_map(|(start, size)| Partition { start: start * 512, size: size * 512 })
    }

    proptest! {
        #[test]
        fn tables_are_read_back(partitions in proptest::collection::vec(partition(), 1..=4), signature in any::<u32>()) {
            let sector = table(&partitions, signature).unwrap();
            prop_assert_eq!(super::partitions(&sector, u64::MAX), Ok(partitions.clone()));
            let last = partitions.iter().map(|it| it.start + it.size).max().unwrap();
            prop_assert!(super::partitions(&sector, last).is_ok());
            prop_assert!(super::partitions(&sector, last - 1).is_err());
        }

        #[test]
        fn no_sector_panics(bytes in proptest::collection::vec(any::<u8>(), 64), length in any::<u64>()) {
            let mut sector = [0; 512];
            sector[446..510].copy_from_slice(&bytes);
            sector[510..].copy_from_slice(&MARK);
            if let Ok(found) = super::partitions(&sector, length) {
                prop_assert!(found.iter().all(|it| it.start + it.size <= length));
            }
        }
    }

    #[test]
    fn what_the_table_cannot_say_is_refused() {
        let one = Partition { start: 1 << 20, size: 512 };
        assert!(table(&[one; 5], 0).is_err());
        assert!(table(&[Partition { size: 1 << 41, ..one }], 0).unwrap_err().to_string().contains("2 TiB"));
        assert!(table(&[Partition { size: 100, ..one }], 0).is_err());
    }

    fn assembled(content: &[u8], verity: Option<Option<&[u8]>>) -> (Vec<u8>, Disk) {
        let dir = tempfile::tempdir().unwrap();
        let (content_path, image) = (dir.path().join("content"), dir.path().join("image"));
        std::fs::write(&content_path, content).unwrap();
        let disk = assemble(&Layout { name: "x", signature: 0x1234_5678, verity }, &content_path, &image).unwrap();
        let file = File::open(&image).unwrap();
        let found = partitions_of(&file).unwrap();
        assert_eq!(found[0], disk.data);
        if let Some((partition, params)) = &disk.verity {
            assert_eq!(found[1], *partition);
            let (mut data, mut hashes) = (inside(&file, found[0]), inside(&file, found[1]));
            assert_eq!(verity::check(&mut data, &mut hashes, params).unwrap(), None);
        }
        (std::fs::read(&image).unwrap(), disk)
    }

    #[test]
    fn kata_finds_data_and_hashes() {
        let content = vec![5; (1 << 20) + 4096];
        let (bytes, disk) = assembled(&content, Some(None));
        assert_eq!(disk.data, Partition { start: 1 << 20, size: (1 << 20) + 4096 });
        let (hashes, params) = disk.verity.clone().unwrap();
        assert_eq!(hashes, Partition { start: 3 << 20, size: 4 * 4096 });
        assert_eq!((params.data_blocks, params.salt.len()), (257, 32));
        assert_eq!(&bytes[1 << 20..(2 << 20) + 4096], &content);
        assert_eq!(bytes.len() as u64, hashes.start + hashes.size);
        assert_eq!(&bytes[440..444], &0x1234_5678u32.to_le_bytes());
        let (again, same) = assembled(&content, Some(None));
        assert!(again == bytes && same == disk);
        let (_, salted) = assembled(&content, Some(Some(b"abc")));
        assert_eq!(salted.verity.unwrap().1.salt, b"abc");
        let (plain, disk) = assembled(&content, None);
        assert_eq!((plain.len(), disk.verity), ((2 << 20) + 4096, None));
    }

    #[test]
    fn half_blocks_are_filled_up() {
        let (bytes, disk) = assembled(b"tiny", Some(None));
        assert_eq!(disk.data.size, 4096);
        let (hashes, params) = disk.verity.unwrap();
        assert_eq!((params.data_blocks, hashes.size), (1, 4096));
        assert!(bytes[(1 << 20) + 4..].iter().all(|byte| *byte == 0));
    }
}
