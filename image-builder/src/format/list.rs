//! Lists the entries of an image: names, modes, sizes, targets.

use std::fs::File;
use std::io::{self, BufReader, Seek};
use std::path::Path;

use serde::Serialize;

use crate::format::cpio::{self, file_type};
use crate::format::disk;
use crate::format::erofs;
use crate::format::unpack;

/// Why an image cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is a corrupt archive.
    #[error(transparent)]
    Cpio(#[from] cpio::Error),
    /// Its format is not supported.
    #[error(
        "unsupported format; expected an initramfs (uncompressed or lz4, zstd, xz, gzip), EROFS, or a disk with EROFS: {hint}"
    )]
    Unknown {
        /// Which program lists it.
        hint: &'static str,
    },
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// With leading slash.
    pub path: String,
    /// `directory`, `file`, `symlink`, `device` or `other`.
    pub kind: &'static str,
    /// Permission bits.
    pub mode: u32,
    /// Bytes of contents.
    pub size: u64,
    /// Major and minor number of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
    /// Where a symbolic link points to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// Calls `each` for every entry of `image`, in the image's order.
///
/// # Errors
/// An unsupported or corrupt image, or the error of `each`.
pub fn list<E: From<Error>>(image: &Path, mut each: impl FnMut(Entry) -> Result<(), E>) -> Result<(), E> {
    let open = || File::open(image).map_err(Error::from);
    if let Some(mut erofs) = find_erofs(open()?).map_err(Error::from)? {
        return erofs.entries().map_err(Error::from)?.into_iter().try_for_each(|entry| each(of_erofs(entry)));
    }
    if let Some(hint) = other(&mut open()?).map_err(Error::from)? {
        return Err(Error::Unknown { hint }.into());
    }
    let archive = unpack::decompress(BufReader::with_capacity(1 << 16, open()?)).map_err(Error::from)?;
    for entry in cpio::Reader::listing(BufReader::new(archive)) {
        each(of_cpio(entry.map_err(Error::from)?))?;
    }
    Ok(())
}

/// Opens EROFS at the start of the file or in the first partition.
fn find_erofs(file: File) -> io::Result<Option<erofs::Image<File>>> {
    let length = file.metadata()?.len();
    if let Some(image) = erofs::Image::open(file.try_clone()?, 0, length)? {
        return Ok(Some(image));
    }
    // Other files may look like a disk with an invalid partition table.
    match disk::read_partitions(&file).ok().and_then(|partitions| partitions.first().copied()) {
        Some(first) => erofs::Image::open(file, first.start, first.size),
        None => Ok(None),
    }
}

/// Returns a hint which program lists an unsupported format.
fn other(file: &mut File) -> io::Result<Option<&'static str>> {
    const SQUASHFS: &str = "squashfs is listed by unsquashfs -lls, of the package squashfs-tools";
    const EXT4: &str = "ext4 is listed by debugfs -R 'ls -l', of the package e2fsprogs";
    let partitions = disk::read_partitions(file).unwrap_or_default();
    for start in std::iter::once(0).chain(partitions.first().map(|first| first.start)) {
        let mut head = Vec::new();
        file.seek(io::SeekFrom::Start(start))?;
        io::Read::read_to_end(&mut io::Read::take(&mut *file, 2048), &mut head)?;
        if head.starts_with(b"hsqs") {
            return Ok(Some(SQUASHFS));
        }
        if head.get(1080..1082) == Some(&[0x53, 0xef]) {
            return Ok(Some(EXT4));
        }
    }
    Ok(None)
}

fn kind(mode: u32) -> &'static str {
    match mode & file_type::MASK {
        file_type::DIRECTORY => "directory",
        file_type::REGULAR => "file",
        file_type::SYMLINK => "symlink",
        file_type::CHARACTER | file_type::BLOCK => "device",
        _ => "other",
    }
}

fn of_cpio(entry: cpio::Entry) -> Entry {
    let kind = kind(entry.mode);
    Entry {
        path: format!("/{}", entry.name),
        kind,
        mode: entry.mode & !file_type::MASK,
        size: if kind == "file" { u64::from(entry.size) } else { 0 },
        device: (kind == "device").then_some(entry.device),
        target: (kind == "symlink").then(|| String::from_utf8_lossy(&entry.data).into_owned()),
    }
}

fn of_erofs(entry: erofs::Entry) -> Entry {
    let kind = kind(entry.mode);
    Entry {
        path: format!("/{}", entry.path),
        kind,
        mode: entry.mode & !file_type::MASK,
        size: entry.size,
        device: (kind == "device").then_some(entry.device),
        target: entry.target,
    }
}

impl std::fmt::Display for Entry {
    /// Formats like `ls -l`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let letter = match self.kind {
            "directory" => 'd',
            "symlink" => 'l',
            "device" => 'c',
            "file" => '-',
            _ => '?',
        };
        let size = match (self.kind, self.device) {
            ("file", _) => self.size.to_string(),
            (_, Some((major, minor))) => format!("{major},{minor}"),
            _ => String::new(),
        };
        // Untrusted input: names must not contain terminal escape sequences.
        write!(formatter, "{letter}{:04o} {size:>10} {}", self.mode, self.path.escape_debug())?;
        match &self.target {
            Some(target) => write!(formatter, " -> {}", target.escape_debug()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(bytes: &[u8]) -> Result<Vec<String>, Error> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let mut lines = Vec::new();
        list(file.path(), |entry| {
            lines.push(entry.to_string());
            Ok::<_, Error>(())
        })?;
        Ok(lines)
    }

    #[test]
    fn compressed_and_plain_archives_are_listed() {
        let mut archive = cpio::Writer::new(Vec::new());
        archive.directory("dev", 0o755).unwrap();
        archive.character_device("dev/null", 0o666, 1, 3).unwrap();
        archive.file("e\u{1b}vil", 0o4755, 5, &mut &b"12345"[..]).unwrap();
        archive.symlink("run", "/var/run").unwrap();
        let plain = archive.finish().unwrap();
        let packed = ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
        let expected = [
            "d0755            /dev",
            "c0666        1,3 /dev/null",
            "-4755          5 /e\\u{1b}vil",
            "l0777            /run -> /var/run",
        ];
        assert_eq!(listed(&plain).unwrap(), expected);
        assert_eq!(listed(&packed).unwrap(), expected);
    }

    #[test]
    fn unsupported_format_error_names_the_tool() {
        assert!(matches!(listed(b"just a text").unwrap_err(), Error::Cpio(_)));
        let error = listed(&[&b"hsqs"[..], &[0; 3000]].concat()).unwrap_err().to_string();
        assert!(error.contains("unsquashfs"), "{error}");
    }
}
