//! Disk images: an MBR partition table, the file system in the first
//! partition, and the dm-verity hash tree in the second. This is the layout of
//! Kata's images, whose runtimes use the partitions as `/dev/vda1` and `/dev/vda2`.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use firstlight_image::digest::Hashing;

use super::verity::{self, BLOCK};
use crate::cache::{self, io_error};

/// Sector size in bytes, the unit of the partition table.
const SECTOR: usize = 512;
/// Alignment of partitions in bytes, as used by common partitioning tools.
const ALIGNMENT: u64 = 1 << 20;
/// MBR partition type of a Linux file system.
const LINUX: u8 = 0x83;
/// Offset of the partition table in the first sector, and the size of an entry.
const TABLE: usize = 446;
const ENTRY: usize = 16;
/// Boot signature, the last two bytes of the first sector.
const BOOT_SIGNATURE: [u8; 2] = [0x55, 0xaa];
/// CHS address that marks the LBA fields as the valid ones.
const LBA_ONLY: [u8; 3] = [0xfe, 0xff, 0xff];

/// A partition; offsets are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Offset of the first byte.
    pub start: u64,
    /// Size in bytes.
    pub size: u64,
}

impl Partition {
    /// Returns the aligned offset at which the next partition may begin.
    fn next_start(self) -> u64 {
        (self.start + self.size).next_multiple_of(ALIGNMENT)
    }
}

/// Returns the first sector of a disk with `partitions`; `signature` is the disk
/// identifier, from which Linux derives PARTUUIDs.
///
/// # Errors
/// More than four partitions, or one that the table cannot describe.
pub fn partition_table(partitions: &[Partition], signature: u32) -> io::Result<[u8; SECTOR]> {
    let mut sector = [0; SECTOR];
    sector[TABLE - 6..TABLE - 2].copy_from_slice(&signature.to_le_bytes());
    let slots = sector[TABLE..TABLE + 4 * ENTRY].chunks_exact_mut(ENTRY);
    if partitions.len() > slots.len() {
        return Err(io::Error::other("an MBR partition table has at most four entries"));
    }
    for (entry, partition) in slots.zip(partitions) {
        let count =
            |bytes: u64| u32::try_from(bytes / SECTOR as u64).ok().filter(|_| bytes.is_multiple_of(SECTOR as u64));
        let (Some(start), Some(size)) = (count(partition.start), count(partition.size)) else {
            return Err(io::Error::other(
                "an MBR partition must begin and end within 2 TiB, at a multiple of 512 bytes",
            ));
        };
        entry[1..4].copy_from_slice(&LBA_ONLY);
        entry[4] = LINUX;
        entry[5..8].copy_from_slice(&LBA_ONLY);
        entry[8..12].copy_from_slice(&start.to_le_bytes());
        entry[12..16].copy_from_slice(&size.to_le_bytes());
    }
    sector[510..].copy_from_slice(&BOOT_SIGNATURE);
    Ok(sector)
}

/// Parses the partition table in the first sector of a disk of `length` bytes;
/// returns no partitions if the sector has no boot signature.
///
/// # Errors
/// A partition lies outside the disk.
pub fn parse_partitions(sector: &[u8; SECTOR], length: u64) -> Result<Vec<Partition>, String> {
    if sector[510..] != BOOT_SIGNATURE {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(sector[TABLE..TABLE + 4 * ENTRY].chunks_exact(ENTRY)) {
        let field = |at: usize| entry[at..at + 4].iter().rev().fold(0, |field, byte| field << 8 | u64::from(*byte));
        let partition = Partition { start: field(8) * SECTOR as u64, size: field(12) * SECTOR as u64 };
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

/// Returns the partitions of the disk image `file`.
///
/// # Errors
/// A failed read, or a partition outside the disk.
pub fn read_partitions(file: &File) -> io::Result<Vec<Partition>> {
    let length = file.metadata()?.len();
    let mut sector = [0; SECTOR];
    if length < SECTOR as u64 {
        return Ok(Vec::new());
    }
    file.read_exact_at(&mut sector, 0)?;
    parse_partitions(&sector, length).map_err(io::Error::other)
}

/// Returns a reader of a partition of `file`. Readers of one file are independent.
pub fn partition_reader(file: &File, partition: Partition) -> impl Read {
    BufReader::with_capacity(
        1 << 18,
        PartitionReader { file, at: partition.start, end: partition.start + partition.size },
    )
}

/// Reads a byte range with `pread`, which leaves the offset of the file unchanged.
struct PartitionReader<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for PartitionReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(bytes.len());
        let read = self.file.read_at(&mut bytes[..left], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// The layout of a written disk image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The partition with the file system.
    pub data: Partition,
    /// The partition with the dm-verity hash tree, and its parameters.
    pub verity: Option<(Partition, verity::Params)>,
}

/// Settings of a disk image.
#[derive(Debug, Clone)]
pub struct Layout<'a> {
    /// The image's name, from which the default salt is derived.
    pub name: &'a str,
    /// The disk identifier.
    pub signature: u32,
    /// `None` for no hash tree, `Some(None)` for the default salt.
    pub verity: Option<Option<&'a [u8]>>,
}

/// Writes the disk image `image` with the file system `content` and its hash tree.
///
/// # Errors
/// A failed file operation, or a file system that does not fit.
pub fn assemble(layout: &Layout<'_>, content: &Path, image: &Path) -> Result<Disk, cache::Error> {
    let open = || File::open(content).map_err(io_error("open", content));
    let length = open()?.metadata().map_err(io_error("inspect", content))?.len();
    // dm-verity covers whole blocks, so the file system is padded.
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
        (Partition { start: data.next_start(), size }, tree)
    });
    let parts: Vec<Partition> = std::iter::once(data).chain(hashes.map(|(partition, _)| partition)).collect();
    let write = || -> io::Result<()> {
        let mut file = File::create(image)?;
        file.write_all(&partition_table(&parts, layout.signature)?)?;
        file.seek(SeekFrom::Start(data.start))?;
        io::copy(&mut File::open(content)?, &mut file)?;
        if let Some((partition, tree)) = hashes {
            file.seek(SeekFrom::Start(partition.start))?;
            file.write_all(&tree.blocks)?;
        }
        let end = parts.last().map_or(0, |part| part.start + part.size);
        // Unwritten ranges read as zeros.
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
        fn partition_table_round_trips(partitions in proptest::collection::vec(partition(), 1..=4), signature in any::<u32>()) {
            let sector = partition_table(&partitions, signature).unwrap();
            prop_assert_eq!(parse_partitions(&sector, u64::MAX), Ok(partitions.clone()));
            let last = partitions.iter().map(|part| part.start + part.size).max().unwrap();
            prop_assert!(parse_partitions(&sector, last).is_ok());
            prop_assert!(parse_partitions(&sector, last - 1).is_err());
        }

        #[test]
        fn arbitrary_sector_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 64), length in any::<u64>()) {
            let mut sector = [0; 512];
            sector[446..510].copy_from_slice(&bytes);
            sector[510..].copy_from_slice(&BOOT_SIGNATURE);
            if let Ok(found) = parse_partitions(&sector, length) {
                prop_assert!(found.iter().all(|part| part.start + part.size <= length));
            }
        }
    }

    #[test]
    fn partitions_beyond_the_limits_of_mbr_then_error() {
        let one = Partition { start: 1 << 20, size: 512 };
        assert!(partition_table(&[one; 5], 0).is_err());
        assert!(partition_table(&[Partition { size: 1 << 41, ..one }], 0).unwrap_err().to_string().contains("2 TiB"));
        assert!(partition_table(&[Partition { size: 100, ..one }], 0).is_err());
    }

    fn assemble_image(content: &[u8], verity: Option<Option<&[u8]>>) -> (Vec<u8>, Disk) {
        let dir = tempfile::tempdir().unwrap();
        let (content_path, image) = (dir.path().join("content"), dir.path().join("image"));
        std::fs::write(&content_path, content).unwrap();
        let disk = assemble(&Layout { name: "x", signature: 0x1234_5678, verity }, &content_path, &image).unwrap();
        let file = File::open(&image).unwrap();
        let found = read_partitions(&file).unwrap();
        assert_eq!(found[0], disk.data);
        if let Some((partition, params)) = &disk.verity {
            assert_eq!(found[1], *partition);
            let (mut data, mut hashes) = (partition_reader(&file, found[0]), partition_reader(&file, found[1]));
            assert_eq!(verity::check(&mut data, &mut hashes, params).unwrap(), None);
        }
        (std::fs::read(&image).unwrap(), disk)
    }

    #[test]
    fn disk_has_kata_layout_and_valid_hash_tree() {
        let content = vec![5; (1 << 20) + 4096];
        let (bytes, disk) = assemble_image(&content, Some(None));
        assert_eq!(disk.data, Partition { start: 1 << 20, size: (1 << 20) + 4096 });
        let (hashes, params) = disk.verity.clone().unwrap();
        assert_eq!(hashes, Partition { start: 3 << 20, size: 4 * 4096 });
        assert_eq!((params.data_blocks, params.salt.len()), (257, 32));
        assert_eq!(&bytes[1 << 20..(2 << 20) + 4096], &content);
        assert_eq!(bytes.len() as u64, hashes.start + hashes.size);
        assert_eq!(&bytes[440..444], &0x1234_5678u32.to_le_bytes());
        let (again, same) = assemble_image(&content, Some(None));
        assert!(again == bytes && same == disk);
        let (_, salted) = assemble_image(&content, Some(Some(b"abc")));
        assert_eq!(salted.verity.unwrap().1.salt, b"abc");
        let (plain, disk) = assemble_image(&content, None);
        assert_eq!((plain.len(), disk.verity), ((2 << 20) + 4096, None));
    }

    #[test]
    fn partial_block_then_padded_with_zeros() {
        let (bytes, disk) = assemble_image(b"tiny", Some(None));
        assert_eq!(disk.data.size, 4096);
        let (hashes, params) = disk.verity.unwrap();
        assert_eq!((params.data_blocks, hashes.size), (1, 4096));
        assert!(bytes[(1 << 20) + 4..].iter().all(|byte| *byte == 0));
    }
}
