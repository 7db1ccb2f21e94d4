//! The reader, for listing an image and for tests.

use std::io::{self, Read};

use super::{Error, HEADER, LONGEST_NAME, MAGIC, TRAILER, file_type, padding};

/// One entry of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path without a leading slash.
    pub name: String,
    /// Inode number.
    pub inode: u32,
    /// Type and permission bits, see [`super::file_type`].
    pub mode: u32,
    /// Owner's number.
    pub owner: u32,
    /// Group's number.
    pub group: u32,
    /// Seconds since 1970.
    pub modified: u32,
    /// Major and minor number of a device node.
    pub device: (u32, u32),
    /// Bytes of contents.
    pub size: u32,
    /// Contents, unless only entries are listed, or the target of a symbolic link.
    pub data: Vec<u8>,
}

/// Reads entries one after the other, up to the end mark.
pub struct Reader<R> {
    input: R,
    offset: u64,
    ended: bool,
    contents: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the archive that `input` holds.
    pub fn new(input: R) -> Self {
        Self { input, offset: 0, ended: false, contents: true }
    }

    /// The same without the contents of files: an archive that is small when
    /// packed may hold more than there is memory.
    pub fn listing(input: R) -> Self {
        Self { contents: false, ..Self::new(input) }
    }

    fn entry(&mut self) -> Result<Option<Entry>, Error> {
        let start = self.offset;
        let format = |what| Error::Format { what, offset: start };
        let header = self.take(HEADER as u64)?;
        if !header.starts_with(MAGIC) {
            return Err(format("no magic number"));
        }
        let mut fields = [0u32; 13];
        for (field, digits) in fields.iter_mut().zip(header[MAGIC.len()..].chunks_exact(8)) {
            let digits = std::str::from_utf8(digits).map_err(|_| format("a number that is not text"))?;
            *field = u32::from_str_radix(digits, 16).map_err(|_| format("a number that is not hexadecimal"))?;
        }
        let [inode, mode, owner, group, _, modified, size, _, _, major, minor, name_size, _] = fields;
        if name_size == 0 || name_size as usize > LONGEST_NAME {
            return Err(format("a name of impossible length"));
        }
        let mut name = self.take(u64::from(name_size))?;
        if name.pop() != Some(0) {
            return Err(format("a name without its end mark"));
        }
        let name = String::from_utf8(name).map_err(|_| format("a name that is not UTF-8"))?;
        self.skip_padding()?;
        if name == TRAILER {
            return Ok(None);
        }
        let is_link = mode & file_type::MASK == file_type::SYMLINK;
        if is_link && size as usize >= LONGEST_NAME {
            return Err(format("a link's target of impossible length"));
        }
        let data = if is_link || self.contents {
            self.take(u64::from(size))?
        } else {
            self.skip(u64::from(size))?;
            Vec::new()
        };
        self.skip_padding()?;
        Ok(Some(Entry { name, inode, mode, owner, group, modified, device: (major, minor), size, data }))
    }

    fn skip(&mut self, size: u64) -> Result<(), Error> {
        let skipped = io::copy(&mut self.input.by_ref().take(size), &mut io::sink());
        if skipped.map_err(|source| self.failed(source))? != size {
            return Err(self.short());
        }
        self.offset += size;
        Ok(())
    }

    fn short(&self) -> Error {
        Error::Format { what: "the end of the file inside an entry", offset: self.offset }
    }

    fn take(&mut self, size: u64) -> Result<Vec<u8>, Error> {
        // Grows with what is there, not with what a header claims.
        let mut bytes = Vec::new();
        let read = self.input.by_ref().take(size).read_to_end(&mut bytes).map_err(|source| self.failed(source))?;
        if read as u64 != size {
            return Err(self.short());
        }
        self.offset += size;
        Ok(bytes)
    }

    fn skip_padding(&mut self) -> Result<(), Error> {
        self.take(padding(self.offset) as u64).map(drop)
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Io { doing: "reading at byte", name: self.offset.to_string(), source }
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<Entry, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let entry = self.entry().transpose();
        self.ended = !matches!(entry, Some(Ok(_)));
        entry
    }
}
