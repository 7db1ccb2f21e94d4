//! Writes the tar archive that is the input of `mkfs.erofs`, `mksquashfs` and
//! `mke2fs`. With an archive instead of a directory, owners, times and order do
//! not depend on the host's file system, and root is not needed. The format is GNU
//! tar, which all three support.

use std::io::{self, Read, Write};

use super::Error;
use super::archive::ArchiveWriter;

/// Size of a header in bytes; data is padded to a multiple of it.
const RECORD: usize = 512;
/// The archive is padded to a multiple of this, in bytes.
const BLOCK: u64 = 10240;

/// Offsets of the header fields.
mod field {
    use std::ops::Range;

    pub(super) const NAME: Range<usize> = 0..100;
    pub(super) const MODE: Range<usize> = 100..108;
    pub(super) const OWNER: Range<usize> = 108..116;
    pub(super) const GROUP: Range<usize> = 116..124;
    pub(super) const SIZE: Range<usize> = 124..136;
    pub(super) const TIME: Range<usize> = 136..148;
    pub(super) const CHECKSUM: Range<usize> = 148..156;
    pub(super) const KIND: usize = 156;
    pub(super) const TARGET: Range<usize> = 157..257;
    pub(super) const MAGIC: Range<usize> = 257..265;
    pub(super) const MAJOR: Range<usize> = 329..337;
    pub(super) const MINOR: Range<usize> = 337..345;
}

mod kind {
    pub(super) const REGULAR: u8 = b'0';
    pub(super) const SYMLINK: u8 = b'2';
    pub(super) const CHARACTER: u8 = b'3';
    pub(super) const DIRECTORY: u8 = b'5';
    /// The data is the name of the next entry.
    pub(super) const LONG_NAME: u8 = b'L';
    /// The data is the link target of the next entry.
    pub(super) const LONG_TARGET: u8 = b'K';
}

/// Writes an archive whose bytes depend only on names, modes and contents.
pub(super) struct TarWriter<W> {
    output: W,
    written: u64,
}

/// The variable fields of a header.
#[derive(Clone, Copy, Default)]
struct Entry<'a> {
    kind: u8,
    mode: u32,
    size: u64,
    target: &'a str,
    device: (u32, u32),
}

impl<W: Write> TarWriter<W> {
    /// Creates an archive that begins with the root directory.
    pub(super) fn new(output: W) -> Result<Self, Error> {
        let mut archive = Self { output, written: 0 };
        archive.header("./", &Entry { kind: kind::DIRECTORY, mode: 0o755, ..Entry::default() })?;
        Ok(archive)
    }

    /// Writes the end of the archive. The reader may exit after two empty records,
    /// before the padding is written, so a broken pipe is not an error here: the
    /// reader's exit status tells whether it succeeded.
    pub(super) fn finish(mut self) -> Result<W, Error> {
        let rest = (BLOCK - (self.written + 2 * RECORD as u64) % BLOCK) % BLOCK;
        let end = self.output.write_all(&[0; 2 * RECORD]);
        let end = end.and_then(|()| io::copy(&mut io::repeat(0).take(rest), &mut self.output));
        match end.and_then(|_| self.output.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(failed("end of the archive")(error)),
            _ => Ok(self.output),
        }
    }

    fn header(&mut self, path: &str, entry: &Entry<'_>) -> Result<(), Error> {
        if entry.target.len() > field::TARGET.len() {
            self.long(kind::LONG_TARGET, path, entry.target)?;
        }
        if path.len() > field::NAME.len() {
            self.long(kind::LONG_NAME, path, path)?;
        }
        let mut header = [0; RECORD];
        text(&mut header[field::NAME], path);
        number(&mut header[field::MODE], u64::from(entry.mode));
        number(&mut header[field::OWNER], 0);
        number(&mut header[field::GROUP], 0);
        number(&mut header[field::SIZE], entry.size);
        number(&mut header[field::TIME], 0);
        header[field::KIND] = entry.kind;
        text(&mut header[field::TARGET], entry.target);
        header[field::MAGIC].copy_from_slice(b"ustar  \0");
        number(&mut header[field::MAJOR], u64::from(entry.device.0));
        number(&mut header[field::MINOR], u64::from(entry.device.1));
        // The checksum is computed with its own field filled with blanks.
        header[field::CHECKSUM].fill(b' ');
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        let digits = format!("{sum:06o}\0 ");
        header[field::CHECKSUM].copy_from_slice(digits.as_bytes());
        self.put(path, &header)
    }

    /// Writes an entry whose data is a name too long for a header.
    fn long(&mut self, kind: u8, path: &str, value: &str) -> Result<(), Error> {
        let size = value.len() as u64 + 1;
        self.header("././@LongLink", &Entry { kind, mode: 0o644, size, ..Entry::default() })?;
        self.put(path, value.as_bytes())?;
        self.put(path, b"\0")?;
        self.pad(path)
    }

    fn put(&mut self, path: &str, bytes: &[u8]) -> Result<(), Error> {
        self.output.write_all(bytes).map_err(failed(path))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, path: &str) -> Result<(), Error> {
        let over = usize::try_from(self.written % RECORD as u64).unwrap_or_default();
        self.put(path, &[0; RECORD][..(RECORD - over) % RECORD])
    }
}

impl<W: Write> ArchiveWriter for TarWriter<W> {
    fn directory(&mut self, path: &str, mode: u32) -> Result<(), Error> {
        self.header(&format!("{path}/"), &Entry { kind: kind::DIRECTORY, mode, ..Entry::default() })
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<(), Error> {
        self.header(path, &Entry { kind: kind::SYMLINK, mode: 0o777, target, ..Entry::default() })
    }

    fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> Result<(), Error> {
        self.header(path, &Entry { kind: kind::CHARACTER, mode, device: (major, minor), ..Entry::default() })
    }

    fn file(&mut self, path: &str, mode: u32, size: u64, data: &mut dyn Read) -> Result<(), Error> {
        self.header(path, &Entry { kind: kind::REGULAR, mode, size, ..Entry::default() })?;
        // Reads one byte more than expected, to detect a file that grew.
        let copied = io::copy(&mut data.take(size + 1), &mut self.output).map_err(failed(path))?;
        if copied != size {
            return Err(Error::Changed { path: path.to_owned(), expected: size, found: copied });
        }
        self.written += copied;
        self.pad(path)
    }
}

/// Writes as much of `value` as fits; a longer one is in a preceding entry.
fn text(field: &mut [u8], value: &str) {
    let length = value.len().min(field.len());
    field[..length].copy_from_slice(&value.as_bytes()[..length]);
}

/// Writes octal digits and a zero byte; a larger value is written big-endian with
/// the highest bit set.
fn number(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    let octal = format!("{value:0digits$o}");
    if octal.len() == digits {
        field[..digits].copy_from_slice(octal.as_bytes());
        return;
    }
    let bytes = value.to_be_bytes();
    let start = field.len() - bytes.len();
    field[start..].copy_from_slice(&bytes);
    field[0] |= 0x80;
}

fn failed(path: &str) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Entry { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Vec<(String, tar::Header, String, Vec<u8>)> {
        let mut archive = tar::Archive::new(bytes);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut data = Vec::new();
            entry.read_to_end(&mut data).unwrap();
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            let link = entry.link_name_bytes().map(|name| name.into_owned()).unwrap_or_default();
            (path, entry.header().clone(), String::from_utf8(link).unwrap(), data)
        });
        entries.collect()
    }

    /// Accepts a number of bytes, then fails with this error.
    struct FailsAfter(usize, io::ErrorKind);

    impl Write for FailsAfter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.0.min(bytes.len()) {
                0 if !bytes.is_empty() => Err(self.1.into()),
                taken => {
                    self.0 -= taken;
                    Ok(taken)
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn reader_closes_the_pipe_after_the_end_then_no_error() {
        use io::ErrorKind::{BrokenPipe, StorageFull};
        // The record of the root directory, and the first end record.
        for (room, kind, good) in [
            (2 * RECORD, BrokenPipe, true),
            (3 * RECORD, BrokenPipe, true),
            (2 * RECORD, StorageFull, false),
            (3 * RECORD, StorageFull, false),
        ] {
            let finished = TarWriter::new(FailsAfter(room, kind)).unwrap().finish();
            assert_eq!(finished.is_ok(), good, "{room} {kind}");
        }
        // Before the end a broken pipe is an error.
        assert!(TarWriter::new(FailsAfter(RECORD - 1, BrokenPipe)).is_err());
    }

    proptest! {
        /// The tar crate reads back what was written.
        #[test]
        fn archive_is_read_back_by_another_implementation(
            name in "[a-z]{1,30}(/[a-z0-9._ é-]{1,90}){0,4}",
            target in "[a-z./]{1,150}",
            data in proptest::collection::vec(any::<u8>(), 0..1300),
            mode in 0u32..0o10000,
        ) {
            let mut tar = TarWriter::new(Vec::new()).unwrap();
            tar.directory(&name, mode).unwrap();
            tar.file(&name, mode, data.len() as u64, &mut &data[..]).unwrap();
            tar.symlink(&name, &target).unwrap();
            tar.character_device(&name, 0o600, 195, 255).unwrap();
            let bytes = tar.finish().unwrap();
            prop_assert_eq!(bytes.len() % 10240, 0);
            let entries = read(&bytes);
            prop_assert_eq!(entries.len(), 5);
            for (_, header, _, _) in &entries {
                prop_assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 0));
                prop_assert_eq!(header.username().unwrap(), Some(""));
            }
            prop_assert_eq!(entries[0].0.as_str(), "./");
            prop_assert_eq!(&entries[1].0, &format!("{name}/"));
            prop_assert_eq!(entries[1].1.mode().unwrap(), mode);
            prop_assert_eq!((&entries[2].0, &entries[2].3), (&name, &data));
            prop_assert_eq!((&entries[3].0, &entries[3].2), (&name, &target));
            prop_assert_eq!(entries[4].1.device_major().unwrap().zip(entries[4].1.device_minor().unwrap()), Some((195, 255)));
        }
    }

    #[test]
    fn file_changes_while_copied_then_error() {
        let mut tar = TarWriter::new(Vec::new()).unwrap();
        let grown = tar.file("a", 0o644, 2, &mut &b"123"[..]).unwrap_err();
        assert!(matches!(grown, Error::Changed { expected: 2, found: 3, .. }), "{grown}");
        let mut tar = TarWriter::new(Vec::new()).unwrap();
        let shrunk = tar.file("a", 0o644, 9, &mut &b"123"[..]).unwrap_err();
        assert!(shrunk.to_string().contains("build again"), "{shrunk}");
    }

    #[test]
    fn size_beyond_octal_range_then_binary() {
        let mut field = [0; 12];
        number(&mut field, 0o77777777777);
        assert_eq!(&field, b"77777777777\0");
        let mut field = [0; 12];
        number(&mut field, 1 << 33);
        assert_eq!(field, [0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
    }
}
