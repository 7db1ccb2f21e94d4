//! The writer: same entries, same bytes.

use std::io::{self, Read, Write};

use super::{Error, HEADER, LONGEST_NAME, MAGIC, TRAILER, file_type, padding};

/// Archives are padded to this. Others pad to 512, which is enough for readers;
/// but QEMU's microvm puts an archive right below the end of memory, where its
/// firmware has put ACPI's tables. One of whole pages leaves the last page.
const BLOCK: u64 = 4096;

/// Writes an archive whose bytes depend on names, modes and contents only:
/// owner and group are root, times are zero, inodes count from one.
pub struct Writer<W> {
    output: W,
    written: u64,
    inode: u32,
}

struct Header<'a> {
    name: &'a str,
    mode: u32,
    links: u32,
    size: u32,
    device: (u32, u32),
}

impl<W: Write> Writer<W> {
    /// Begins an archive.
    pub fn new(output: W) -> Self {
        Self { output, written: 0, inode: 0 }
    }

    /// A regular file with `size` bytes from `data`.
    ///
    /// # Errors
    /// A name or size the format cannot hold, a failed read or write, or
    /// `data` with another length than `size`.
    pub fn file(&mut self, name: &str, permissions: u32, size: u64, data: &mut dyn Read) -> Result<(), Error> {
        let short = u32::try_from(size).map_err(|_| Error::TooLarge { name: name.to_owned(), size })?;
        self.header(&Header { name, mode: file_type::REGULAR | permissions, links: 1, size: short, device: (0, 0) })?;
        // One byte more than promised shows that the file grew.
        let copied = io::copy(&mut data.take(size + 1), &mut self.output).map_err(failed("copying", name))?;
        if copied != size {
            return Err(Error::Changed { name: name.to_owned(), expected: size, found: copied });
        }
        self.written += copied;
        self.pad(name)
    }

    /// A directory.
    ///
    /// # Errors
    /// A name the format cannot hold, or a failed write.
    pub fn directory(&mut self, name: &str, permissions: u32) -> Result<(), Error> {
        self.header(&Header { name, mode: file_type::DIRECTORY | permissions, links: 2, size: 0, device: (0, 0) })
    }

    /// A symbolic link to `target`.
    ///
    /// # Errors
    /// A name the format cannot hold, or a failed write.
    pub fn symlink(&mut self, name: &str, target: &str) -> Result<(), Error> {
        check_name(target)?;
        let size = u32::try_from(target.len()).map_err(|_| Error::Name { name: target.to_owned() })?;
        self.header(&Header { name, mode: file_type::SYMLINK | 0o777, links: 1, size, device: (0, 0) })?;
        self.put(name, target.as_bytes())?;
        self.pad(name)
    }

    /// A character device node.
    ///
    /// # Errors
    /// A name the format cannot hold, or a failed write.
    pub fn character_device(&mut self, name: &str, permissions: u32, major: u32, minor: u32) -> Result<(), Error> {
        let mode = file_type::CHARACTER | permissions;
        self.header(&Header { name, mode, links: 1, size: 0, device: (major, minor) })
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// A failed write.
    pub fn finish(mut self) -> Result<W, Error> {
        // The end mark has no inode of its own.
        self.inode = u32::MAX;
        self.header(&Header { name: TRAILER, mode: 0, links: 1, size: 0, device: (0, 0) })?;
        let rest = (BLOCK - self.written % BLOCK) % BLOCK;
        io::copy(&mut io::repeat(0).take(rest), &mut self.output).map_err(failed("padding", TRAILER))?;
        self.output.flush().map_err(failed("flushing", TRAILER))?;
        Ok(self.output)
    }

    fn header(&mut self, header: &Header<'_>) -> Result<(), Error> {
        let Header { name, mode, links, size, device } = *header;
        check_name(name)?;
        self.inode = self.inode.wrapping_add(1);
        let name_size = u32::try_from(name.len() + 1).map_err(|_| Error::Name { name: name.to_owned() })?;
        // Owner, group and time are zero; so are the device the file was on
        // and the checksum, which this variant does not use.
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        let mut text = Vec::with_capacity(HEADER + name.len() + 4);
        text.extend_from_slice(MAGIC);
        for field in fields {
            text.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        text.extend_from_slice(name.as_bytes());
        text.push(0);
        self.put(name, &text)?;
        self.pad(name)
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.output.write_all(bytes).map_err(failed("writing", name))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, name: &str) -> Result<(), Error> {
        self.put(name, &[0; 4][..padding(self.written)])
    }
}

fn check_name(name: &str) -> Result<(), Error> {
    if name.is_empty() || name.len() >= LONGEST_NAME || name.contains('\0') {
        return Err(Error::Name { name: name.to_owned() });
    }
    Ok(())
}

fn failed(doing: &'static str, name: &str) -> impl FnOnce(io::Error) -> Error {
    let name = name.to_owned();
    move |source| Error::Io { doing, name, source }
}
