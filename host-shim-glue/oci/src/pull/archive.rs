//! Tar archives whose entries are read in any order.
//!
//! Nothing is unpacked: an archive is a table of names, and where the bytes of
//! each are. Names that lead out are refused, not cleaned.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::EntryType;

use super::entry_name::{followed, plain};
use super::error::{Error, OTHER_TOOL, input, io_error};
use super::limits;

/// An archive, its names read.
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
    /// Of `docker save` in former times, for a layer that is there already.
    Link {
        target: String,
    },
}

/// Links that lead to links, at most so many.
const HOPS: usize = 8;

const READ: &str = "read the archive";

impl Archive {
    /// Opens the archive at `path`. One that is packed with gzip is unpacked
    /// into a nameless file in `parts` first.
    pub(crate) fn open(path: &Path, parts: &Path) -> Result<Self, Error> {
        let mut file = File::open(path).map_err(io_error("open", path))?;
        let mut magic = [0; 4];
        let known = read_up_to(&mut file, &mut magic).map_err(io_error("read", path))?;
        file.rewind().map_err(io_error("read", path))?;
        match &magic[..known] {
            [0x1f, 0x8b, ..] => file = unpacked(file, path, parts)?,
            [0x28, 0xb5, 0x2f, 0xfd] | [0xfd, b'7', b'z', b'X'] | [b'B', b'Z', b'h', _] => {
                let why = "it is packed, and not with gzip";
                return Err(input(path.display().to_string(), READ, why, "unpack it first"));
            }
            _ => {}
        }
        Self::read(file, path)
    }

    /// Reads the table of an archive that is not packed.
    fn read(file: File, path: &Path) -> Result<Self, Error> {
        let size = file.metadata().map_err(io_error("read", path))?.len();
        let again = file.try_clone().map_err(io_error("open", path))?;
        let entries = table(again, size).map_err(|why| input(path.display().to_string(), READ, why, OTHER_TOOL))?;
        Ok(Self { file, path: path.to_owned(), entries })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is a file or a link of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The bytes of an entry, and how many there are.
    pub(crate) fn open_entry(&self, name: &str) -> Result<(Window<'_>, u64), Error> {
        let wrong = |why: String| input(self.path.display().to_string(), READ, why, OTHER_TOOL);
        let mut at = plain(name).map_err(wrong)?;
        for _ in 0..HOPS {
            match self.entries.get(&at) {
                Some(Entry::File { offset, size }) => {
                    return Ok((Window { file: &self.file, offset: *offset, left: *size }, *size));
                }
                Some(Entry::Link { target }) => at.clone_from(target),
                None => return Err(wrong(format!("it has no file {:?}, which it speaks of", name))),
            }
        }
        Err(wrong(format!("{name:?} leads from link to link")))
    }

    /// A document of the archive.
    pub(crate) fn document(&self, name: &str) -> Result<Vec<u8>, Error> {
        let (mut window, size) = self.open_entry(name)?;
        let object = || format!("{}: {name}", self.path.display());
        if size > limits::DOCUMENT {
            return Err(input(object(), READ, super::document::too_large(size), OTHER_TOOL));
        }
        let mut bytes = Vec::new();
        window.read_to_end(&mut bytes).map_err(io_error("read", &self.path))?;
        Ok(bytes)
    }
}

/// A part of a file, read without moving the file's own position.
#[derive(Debug)]
pub(crate) struct Window<'a> {
    file: &'a File,
    offset: u64,
    left: u64,
}

impl Read for Window<'_> {
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

fn read_up_to(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut known = 0;
    while known < bytes.len() {
        match reader.read(&mut bytes[known..])? {
            0 => break,
            count => known += count,
        }
    }
    Ok(known)
}

fn unpacked(file: File, path: &Path, parts: &Path) -> Result<File, Error> {
    let object = path.display().to_string();
    let mut plain = tempfile::tempfile_in(parts).map_err(io_error("make a file in", parts))?;
    let mut reader = MultiGzDecoder::new(io::BufReader::new(file)).take(limits::ARCHIVE + 1);
    let mut buffer = vec![0; 1 << 16];
    let mut size: u64 = 0;
    loop {
        let count = match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) => return Err(input(object, "unpack the archive", error.to_string(), super::error::COPY_AGAIN)),
        };
        size += count as u64;
        if size > limits::ARCHIVE {
            return Err(input(
                object,
                "unpack the archive",
                format!("more than {} bytes", limits::ARCHIVE),
                OTHER_TOOL,
            ));
        }
        plain.write_all(&buffer[..count]).map_err(io_error("write", parts))?;
    }
    plain.seek(SeekFrom::Start(0)).map_err(io_error("read", parts))?;
    Ok(plain)
}

fn table(file: impl Read + Seek, size: u64) -> Result<BTreeMap<String, Entry>, String> {
    let mut entries = BTreeMap::new();
    let mut archive = tar::Archive::new(file);
    let all = archive.entries_with_seek().map_err(|error| error.to_string())?;
    for (number, entry) in all.enumerate() {
        if number == limits::ENTRIES {
            return Err(format!("more than {} entries", limits::ENTRIES));
        }
        let entry = entry.map_err(|error| format!("entry {}: {error}", number + 1))?;
        let path = entry.path_bytes();
        let name = std::str::from_utf8(&path).map_err(|_| format!("entry {}: a name that is no text", number + 1))?;
        let name = plain(name)?;
        let new = match entry.header().entry_type() {
            EntryType::Directory | EntryType::XGlobalHeader => continue,
            EntryType::Regular | EntryType::Continuous => {
                let (offset, length) = (entry.raw_file_position(), entry.size());
                if offset.checked_add(length).is_none_or(|end| end > size) {
                    return Err(format!("it ends in the middle of {name:?}: it is not all there"));
                }
                Entry::File { offset, size: length }
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().ok_or_else(|| format!("link {name:?} leads nowhere"))?;
                let target = std::str::from_utf8(&target).map_err(|_| format!("link {name:?} is no text"))?;
                Entry::Link { target: followed(&name, target)? }
            }
            other => {
                return Err(format!(
                    "entry {name:?} is of type {other:?}; there may be files, directories and links inside"
                ));
            }
        };
        if entries.contains_key(&name) {
            return Err(format!("{name:?} is in it twice"));
        }
        entries.insert(name, new);
    }
    Ok(entries)
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
    fn files_are_found_also_through_links_and_gzip() {
        let mut tar = Vec::new();
        entry(&mut tar, b'5', "a/", "", b"");
        entry(&mut tar, b'0', "./a/layer.tar", "", b"bytes");
        entry(&mut tar, b'2', "b/layer.tar", "../a/layer.tar", b"");
        entry(&mut tar, b'2', "c", "c", b"");
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&tar).unwrap();
        for bytes in [tar, gzip.finish().unwrap()] {
            let archive = open(&bytes).unwrap();
            assert_eq!(archive.document("b/layer.tar").unwrap(), b"bytes");
            assert!(archive.has("a/layer.tar") && !archive.has("a"));
            for (name, said) in [("none", "no file"), ("c", "from link to link"), ("../x", "leads out")] {
                let error = archive.document(name).unwrap_err().to_string();
                assert!(error.contains(said) && error.contains("a.tar"), "{error}");
            }
        }
    }

    #[test]
    fn hostile_entries_are_named() {
        type Make = fn(&mut Vec<u8>);
        let cases: [(&str, Make); 9] = [
            ("leads out", |t| entry(t, b'0', "../x", "", b"")),
            ("leads out", |t| entry(t, b'0', "a/../../x", "", b"")),
            ("leads out", |t| entry(t, b'0', "/etc/passwd", "", b"")),
            ("link \"l\" leads out", |t| entry(t, b'2', "l", "/etc/passwd", b"")),
            ("link \"a/l\" leads out", |t| entry(t, b'2', "a/l", "../../x", b"")),
            ("type Link", |t| entry(t, b'1', "l", "x", b"")),
            ("type Char", |t| entry(t, b'3', "dev", "", b"")),
            ("twice", |t| {
                entry(t, b'0', "x", "", b"1");
                entry(t, b'0', "./x", "", b"2");
            }),
            ("not all there", |t| {
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
        assert!(open(b"\x1f\x8bnothing").unwrap_err().contains("cannot unpack the archive"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_table_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..2000), at in 0usize..600) {
            let mut tar = Vec::new();
            entry(&mut tar, b'0', "manifest.json", "", b"[]");
            let at = at.min(tar.len());
            tar.splice(at..(at + bytes.len().min(8)).min(tar.len()), bytes.drain(..bytes.len().min(8)));
            let size = tar.len() as u64;
            if let Ok(entries) = table(io::Cursor::new(&tar), size) {
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
