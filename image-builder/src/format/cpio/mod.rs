//! The archive format of initial RAM file systems: cpio, "newc" variant.
//!
//! The format is a row of entries, each a 110-byte header of hexadecimal
//! numbers, a name and the data, both padded to four bytes; it ends with an
//! entry named `TRAILER!!!`. The kernel documents it in
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.

mod read;
mod write;

pub use read::{Entry, Reader};
pub use write::Writer;

/// Length of an entry's header.
const HEADER: usize = 110;
/// What every header begins with.
const MAGIC: &[u8; 6] = b"070701";
/// The name of the entry that ends the archive.
const TRAILER: &str = "TRAILER!!!";
/// The kernel refuses longer names (its PATH_MAX, end mark included).
const LONGEST_NAME: usize = 4096;

/// File type bits of a mode, as in `stat`.
pub mod file_type {
    /// The bits that hold the type.
    pub const MASK: u32 = 0o170_000;
    /// A regular file.
    pub const REGULAR: u32 = 0o100_000;
    /// A directory.
    pub const DIRECTORY: u32 = 0o040_000;
    /// A symbolic link; its target is the data.
    pub const SYMLINK: u32 = 0o120_000;
    /// A character device.
    pub const CHARACTER: u32 = 0o020_000;
    /// A block device.
    pub const BLOCK: u32 = 0o060_000;
}

/// Bytes of padding after `length` bytes.
fn padding(length: u64) -> usize {
    // Below four, so the cast keeps the value.
    (length.wrapping_neg() & 3) as usize
}

/// What is wrong with an archive, or with what should go into one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive could not be written or read.
    #[error("cpio: {doing} {name:?} failed")]
    Io {
        /// What was done.
        doing: &'static str,
        /// To which entry.
        name: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The bytes are not an archive of this format.
    #[error("not a newc cpio archive: {what} at byte {offset}")]
    Format {
        /// What is wrong.
        what: &'static str,
        /// Where the entry begins.
        offset: u64,
    },
    /// A name is empty, too long, or holds a zero byte.
    #[error("cpio cannot hold the name {name:?}: it is empty, too long or holds a zero byte")]
    Name {
        /// The name.
        name: String,
    },
    /// A file is larger than the format can say.
    #[error("cpio cannot hold {name:?}: {size} bytes are more than 4 GiB less one")]
    TooLarge {
        /// The file.
        name: String,
        /// Its size.
        size: u64,
    },
    /// A file changed between being measured and being copied.
    #[error("{name:?} changed while it was copied: {expected} bytes expected, {found} found; build again")]
    Changed {
        /// The file.
        name: String,
        /// The size in the header.
        expected: u64,
        /// The bytes that were there.
        found: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Item {
        File(Vec<u8>, u32),
        Directory,
        Link(String),
        Device(u32, u32),
    }

    fn item() -> impl Strategy<Value = Item> {
        prop_oneof![
            (proptest::collection::vec(any::<u8>(), 0..70), 0u32..0o1000)
                .prop_map(|(data, mode)| Item::File(data, mode)),
            Just(Item::Directory),
            "[a-z/.]{1,20}".prop_map(Item::Link),
            (0u32..256, 0u32..256).prop_map(|(major, minor)| Item::Device(major, minor)),
        ]
    }

    fn written(items: &[(String, Item)]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new());
        for (name, item) in items {
            match item {
                Item::File(data, mode) => writer.file(name, *mode, data.len() as u64, &mut &data[..]).unwrap(),
                Item::Directory => writer.directory(name, 0o755).unwrap(),
                Item::Link(target) => writer.symlink(name, target).unwrap(),
                Item::Device(major, minor) => writer.character_device(name, 0o600, *major, *minor).unwrap(),
            }
        }
        writer.finish().unwrap()
    }

    proptest! {
        #[test]
        fn written_archive_is_read_back(items in proptest::collection::vec(("[a-z0-9/._-]{1,40}", item()), 0..12)) {
            let bytes = written(&items);
            prop_assert_eq!(bytes.len() % 4096, 0);
            prop_assert_eq!(&written(&items), &bytes);
            let entries: Vec<Entry> = Reader::new(&bytes[..]).collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(entries.len(), items.len());
            for (inode, (entry, (name, item))) in (1u32..).zip(entries.iter().zip(&items)) {
                prop_assert_eq!(&entry.name, name);
                prop_assert_eq!(entry.inode, inode);
                prop_assert_eq!((entry.owner, entry.group, entry.modified), (0, 0, 0));
                match item {
                    Item::File(data, mode) => {
                        prop_assert_eq!(&entry.data, data);
                        prop_assert_eq!(entry.mode, file_type::REGULAR | mode);
                    }
                    Item::Directory => prop_assert_eq!(entry.mode, file_type::DIRECTORY | 0o755),
                    Item::Link(target) => prop_assert_eq!(entry.data.as_slice(), target.as_bytes()),
                    Item::Device(major, minor) => prop_assert_eq!(entry.device, (*major, *minor)),
                }
            }
        }

        #[test]
        fn arbitrary_bytes_do_not_panic_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Reader::new(&bytes[..]).count();
        }

        #[test]
        fn damaged_archives_do_not_panic_the_reader(at in 0usize..400, with in any::<u8>()) {
            let mut bytes = written(&[("dir".into(), Item::Directory), ("dir/file".into(), Item::File(vec![7; 33], 0o644))]);
            let at = at % bytes.len();
            bytes[at] = with;
            let _ = Reader::new(&bytes[..]).count();
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_format() {
        let bytes = written(&[("dev/null".into(), Item::Device(1, 3))]);
        let header = "070701\
            00000001\
            00002180\
            00000000\
            00000000\
            00000001\
            00000000\
            00000000\
            00000000\
            00000000\
            00000001\
            00000003\
            00000009\
            00000000";
        assert_eq!(std::str::from_utf8(&bytes[..110]).unwrap(), header);
        assert_eq!(&bytes[110..120], b"dev/null\0\0");
    }

    #[test]
    fn oversized_entry_is_rejected() {
        let mut writer = Writer::new(Vec::new());
        assert!(matches!(writer.directory("", 0o755), Err(Error::Name { .. })));
        assert!(matches!(writer.directory("a\0b", 0o755), Err(Error::Name { .. })));
        assert!(matches!(writer.directory(&"x".repeat(4096), 0o755), Err(Error::Name { .. })));
        assert!(matches!(writer.file("f", 0o644, 1 << 32, &mut &b""[..]), Err(Error::TooLarge { .. })));
        let mut writer = Writer::new(Vec::new());
        let short = writer.file("f", 0o644, 10, &mut &b"123"[..]);
        assert!(matches!(short, Err(Error::Changed { expected: 10, found: 3, .. })));
    }

    /// The reference implementation agrees, where it is installed.
    #[test]
    fn the_cpio_program_reads_it() {
        use std::io::Write;
        use std::process::{Command, Stdio};
        let spawned = Command::new("cpio").args(["-t", "--quiet"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut cpio) = spawned else { return };
        let bytes = written(&[
            ("etc".into(), Item::Directory),
            ("etc/odd".into(), Item::File(b"12345".to_vec(), 0o644)),
            ("etc/link".into(), Item::Link("odd".into())),
        ]);
        cpio.stdin.take().unwrap().write_all(&bytes).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "etc\netc/odd\netc/link\n");
    }
}
