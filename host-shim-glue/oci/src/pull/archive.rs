//! Random access to the entries of an untrusted tar archive.
//!
//! Nothing is unpacked: an archive is a table of entry names and the positions of their
//! content. Names and links that escape the archive are refused.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::EntryType;

use super::entry_name::{normalize, resolve_link};
use super::error::{COPY_AGAIN, PullError, RECREATE, file_error, invalid, too_large};
use super::limits;

/// An archive whose table of entries has been read.
#[derive(Debug)]
pub(crate) struct Archive {
    file: File,
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, PartialEq, Eq)]
enum Entry {
    File {
        offset: u64,
        size: u64,
    },
    /// Old versions of `docker save` write one for a layer that two images share.
    Link {
        target: String,
    },
}

/// Maximum number of links that are followed for one name.
const MAX_LINKS: usize = 8;

const READ_ARCHIVE: &str = "read the archive";
const DECOMPRESS_ARCHIVE: &str = "decompress the archive";

impl Archive {
    /// Opens the archive at `path`. An archive compressed with gzip is decompressed to an
    /// unnamed file in `parts` first.
    pub(crate) fn open(path: &Path, parts: &Path) -> Result<Self, PullError> {
        let mut file = File::open(path).map_err(file_error("open", path))?;
        let mut magic = [0; 4];
        let count = read_up_to(&mut file, &mut magic).map_err(file_error("read", path))?;
        file.rewind().map_err(file_error("read", path))?;
        match &magic[..count] {
            [0x1f, 0x8b, ..] => file = decompress(file, path, parts)?,
            // zstd, xz, bzip2.
            [0x28, 0xb5, 0x2f, 0xfd] | [0xfd, b'7', b'z', b'X'] | [b'B', b'Z', b'h', _] => {
                let reason = "it is compressed, but not with gzip";
                return Err(invalid(path.display().to_string(), READ_ARCHIVE, reason, "decompress it first"));
            }
            _ => {}
        }
        Self::read_table(file, path)
    }

    fn read_table(file: File, path: &Path) -> Result<Self, PullError> {
        let size = file.metadata().map_err(file_error("read", path))?.len();
        let reader = file.try_clone().map_err(file_error("open", path))?;
        let entries = read_entries(reader, size)
            .map_err(|reason| invalid(path.display().to_string(), READ_ARCHIVE, reason, RECREATE))?;
        Ok(Self { file, path: path.to_owned(), entries })
    }

    /// Returns the path of the archive.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether there is a file or a link with this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Opens an entry; returns its content and its size.
    pub(crate) fn open_entry(&self, name: &str) -> Result<(EntryReader<'_>, u64), PullError> {
        let error = |reason: String| invalid(self.path.display().to_string(), READ_ARCHIVE, reason, RECREATE);
        let mut current = normalize(name).map_err(error)?;
        for _ in 0..MAX_LINKS {
            match self.entries.get(&current) {
                Some(Entry::File { offset, size }) => {
                    return Ok((EntryReader { file: &self.file, offset: *offset, left: *size }, *size));
                }
                Some(Entry::Link { target }) => current.clone_from(target),
                None => return Err(error(format!("it has no file {name:?}, to which it refers"))),
            }
        }
        Err(error(format!("{name:?} leads through more than {MAX_LINKS} links")))
    }

    /// Reads a JSON document.
    pub(crate) fn read_document(&self, name: &str) -> Result<Vec<u8>, PullError> {
        let (mut reader, size) = self.open_entry(name)?;
        if size > limits::DOCUMENT {
            let object = format!("{}: {name}", self.path.display());
            return Err(invalid(object, READ_ARCHIVE, too_large(size), RECREATE));
        }
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map_err(file_error("read", &self.path))?;
        Ok(bytes)
    }
}

/// Reads an entry, without moving the position of the shared file.
#[derive(Debug)]
pub(crate) struct EntryReader<'a> {
    file: &'a File,
    offset: u64,
    left: u64,
}

impl Read for EntryReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        let count = self.file.read_at(&mut bytes[..most], self.offset)?;
        if count == 0 && most > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ends in the middle of a file"));
        }
        self.offset += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// Reads until `bytes` is full or the reader ends; returns the number of bytes.
fn read_up_to(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < bytes.len() {
        match reader.read(&mut bytes[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// Decompresses an archive to an unnamed file in `parts`.
fn decompress(file: File, path: &Path, parts: &Path) -> Result<File, PullError> {
    let error = |reason: String, advice| invalid(path.display().to_string(), DECOMPRESS_ARCHIVE, reason, advice);
    let mut output = tempfile::tempfile_in(parts).map_err(file_error("create a file in", parts))?;
    let mut reader = MultiGzDecoder::new(io::BufReader::new(file)).take(limits::ARCHIVE + 1);
    let mut buffer = vec![0; 1 << 16];
    let mut size: u64 = 0;
    loop {
        let count = reader.read(&mut buffer).map_err(|cause| error(cause.to_string(), COPY_AGAIN))?;
        if count == 0 {
            break;
        }
        size += count as u64;
        if size > limits::ARCHIVE {
            return Err(error(format!("it has more than {} bytes", limits::ARCHIVE), RECREATE));
        }
        output.write_all(&buffer[..count]).map_err(file_error("write", parts))?;
    }
    output.rewind().map_err(file_error("read", parts))?;
    Ok(output)
}

/// Reads the table of an archive of `size` bytes.
fn read_entries(file: impl Read + Seek, size: u64) -> Result<BTreeMap<String, Entry>, String> {
    let mut entries = BTreeMap::new();
    let mut archive = tar::Archive::new(file);
    let all = archive.entries_with_seek().map_err(|error| error.to_string())?;
    for (number, entry) in all.enumerate() {
        if number == limits::ENTRIES {
            return Err(format!("it has more than {} entries", limits::ENTRIES));
        }
        let entry = entry.map_err(|error| format!("entry {}: {error}", number + 1))?;
        let path = entry.path_bytes();
        let name = std::str::from_utf8(&path).map_err(|_| format!("entry {}: its name is not UTF-8", number + 1))?;
        let name = normalize(name)?;
        let Some(new) = read_entry(&entry, &name, size)? else { continue };
        if entries.contains_key(&name) {
            return Err(format!("it has {name:?} twice"));
        }
        entries.insert(name, new);
    }
    Ok(entries)
}

/// Returns the entry for the table; `None` for a directory.
fn read_entry<R: Read>(entry: &tar::Entry<'_, R>, name: &str, size: u64) -> Result<Option<Entry>, String> {
    match entry.header().entry_type() {
        EntryType::Directory | EntryType::XGlobalHeader => Ok(None),
        EntryType::Regular | EntryType::Continuous => {
            let (offset, length) = (entry.raw_file_position(), entry.size());
            if offset.checked_add(length).is_none_or(|end| end > size) {
                return Err(format!("it is truncated: it ends in the middle of {name:?}"));
            }
            Ok(Some(Entry::File { offset, size: length }))
        }
        EntryType::Symlink => {
            let target = entry.link_name_bytes().ok_or_else(|| format!("link {name:?} has no target"))?;
            let target =
                std::str::from_utf8(&target).map_err(|_| format!("the target of link {name:?} is not UTF-8"))?;
            Ok(Some(Entry::Link { target: resolve_link(name, target)? }))
        }
        other => Err(format!(
            "entry {name:?} has the type {other:?}; only files, directories and symbolic links are supported"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A tar entry with any name, also those that the tar crate refuses to write.
    fn entry(out: &mut Vec<u8>, kind: u8, path: &str, link: &str, data: &[u8]) {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(EntryType::new(kind));
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(512), 0);
    }

    fn open(bytes: &[u8]) -> Result<Archive, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar");
        std::fs::write(&path, bytes).unwrap();
        Archive::open(&path, dir.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn files_are_found_through_links_and_gzip() {
        let mut tar = Vec::new();
        entry(&mut tar, b'5', "a/", "", b"");
        entry(&mut tar, b'0', "./a/layer.tar", "", b"bytes");
        entry(&mut tar, b'2', "b/layer.tar", "../a/layer.tar", b"");
        entry(&mut tar, b'2', "c", "c", b"");
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&tar).unwrap();
        for bytes in [tar, gzip.finish().unwrap()] {
            let archive = open(&bytes).unwrap();
            assert_eq!(archive.read_document("b/layer.tar").unwrap(), b"bytes");
            assert!(archive.has("a/layer.tar") && !archive.has("a"));
            for (name, said) in [("none", "no file"), ("c", "links"), ("../x", "escapes")] {
                let error = archive.read_document(name).unwrap_err().to_string();
                assert!(error.contains(said) && error.contains("a.tar"), "{error}");
            }
        }
    }

    #[test]
    fn hostile_entry_is_refused_with_its_name() {
        type Make = fn(&mut Vec<u8>);
        let cases: [(&str, Make); 9] = [
            ("escapes", |t| entry(t, b'0', "../x", "", b"")),
            ("escapes", |t| entry(t, b'0', "a/../../x", "", b"")),
            ("escapes", |t| entry(t, b'0', "/etc/passwd", "", b"")),
            ("link \"l\" escapes", |t| entry(t, b'2', "l", "/etc/passwd", b"")),
            ("link \"a/l\" escapes", |t| entry(t, b'2', "a/l", "../../x", b"")),
            ("type Link", |t| entry(t, b'1', "l", "x", b"")),
            ("type Char", |t| entry(t, b'3', "dev", "", b"")),
            ("twice", |t| {
                entry(t, b'0', "x", "", b"1");
                entry(t, b'0', "./x", "", b"2");
            }),
            ("truncated", |t| {
                entry(t, b'0', "whole", "", &[7; 2000]);
                t.truncate(1500);
            }),
        ];
        for (said, make) in cases {
            let mut tar = Vec::new();
            make(&mut tar);
            let error = open(&tar).unwrap_err();
            assert!(error.contains(said) && error.contains("a.tar"), "{said}: {error}");
        }
        assert!(open(b"\x28\xb5\x2f\xfd....").unwrap_err().contains("not with gzip"));
        assert!(open(b"\x1f\x8bnothing").unwrap_err().contains("failed to decompress the archive"));
    }

    proptest! {
        #[test]
        fn entries_of_arbitrary_bytes_are_inside_the_archive(mut bytes in prop::collection::vec(any::<u8>(), 0..2000), at in 0usize..600) {
            let mut tar = Vec::new();
            entry(&mut tar, b'0', "manifest.json", "", b"[]");
            let at = at.min(tar.len());
            tar.splice(at..(at + bytes.len().min(8)).min(tar.len()), bytes.drain(..bytes.len().min(8)));
            let size = tar.len() as u64;
            if let Ok(entries) = read_entries(io::Cursor::new(&tar), size) {
                for (name, entry) in entries {
                    prop_assert!(!name.starts_with('/') && name.split('/').all(|part| part != ".."));
                    if let Entry::File { offset, size: length } = entry {
                        prop_assert!(offset + length <= size);
                    }
                }
            }
        }
    }
}
