//! Writes a file tree to an archive of any format.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};

use firstlight_image::{FileRecord, digest::Hashing};
use firstlight_progress::Bar;

use super::Error;
use sha1::Sha1;

use crate::cache::digests::CachedFile;
use crate::cache::io_error;
use crate::format::cpio;
use crate::tree::{Content, Node, Tree};

/// Every regular file of an image, by path.
pub(crate) type Files = BTreeMap<String, FileRecord>;

/// A writer of archive entries. A directory is added before its contents.
pub(super) trait ArchiveWriter {
    fn directory(&mut self, path: &str, mode: u32) -> Result<(), Error>;
    fn symlink(&mut self, path: &str, target: &str) -> Result<(), Error>;
    fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> Result<(), Error>;
    /// Adds a regular file; fails unless `data` has exactly `size` bytes.
    fn file(&mut self, path: &str, mode: u32, size: u64, data: &mut dyn Read) -> Result<(), Error>;
}

impl<W: Write> ArchiveWriter for cpio::Writer<W> {
    fn directory(&mut self, path: &str, mode: u32) -> Result<(), Error> {
        Ok(self.directory(path, mode)?)
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<(), Error> {
        Ok(self.symlink(path, target)?)
    }

    fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> Result<(), Error> {
        Ok(self.character_device(path, mode, major, minor)?)
    }

    fn file(&mut self, path: &str, mode: u32, size: u64, data: &mut dyn Read) -> Result<(), Error> {
        Ok(self.file(path, mode, size, data)?)
    }
}

/// Discards all entries; used to compute the [`Files`] of a tree without writing it.
pub(super) struct NullArchive;

impl ArchiveWriter for NullArchive {
    fn directory(&mut self, _: &str, _: u32) -> Result<(), Error> {
        Ok(())
    }

    fn symlink(&mut self, _: &str, _: &str) -> Result<(), Error> {
        Ok(())
    }

    fn character_device(&mut self, _: &str, _: u32, _: u32, _: u32) -> Result<(), Error> {
        Ok(())
    }

    fn file(&mut self, path: &str, _: u32, size: u64, data: &mut dyn Read) -> Result<(), Error> {
        let found = io::copy(data, &mut io::sink()).map_err(|source| Error::Entry { path: path.to_owned(), source })?;
        if found == size {
            return Ok(());
        }
        Err(Error::Changed { path: path.to_owned(), expected: size, found })
    }
}

/// Writes all entries of `tree` to `archive` in path order, and returns the
/// record of every regular file; `bar` counts the bytes read.
pub(super) fn write_tree(tree: &Tree, archive: &mut dyn ArchiveWriter, bar: &Bar) -> Result<Files, Error> {
    let mut files = Files::new();
    for (path, node) in tree.iter() {
        match node {
            Node::Directory { mode } => archive.directory(path, *mode)?,
            Node::Symlink { target } => archive.symlink(path, target)?,
            Node::Character { mode, major, minor } => archive.character_device(path, *mode, *major, *minor)?,
            Node::File { mode, content } => {
                let (mut data, size) = open_content(content)?;
                let mut hashing = Hashing::new(Hashing::<_, Sha1>::with_algorithm(bar.reading(&mut *data)));
                archive.file(path, *mode, size, &mut hashing)?;
                let (sha256, inner) = hashing.finish();
                if let Content::Cached(cached) = content {
                    cached.verify(&sha256)?;
                }
                let (sha1, mode) = (Some(inner.finish().0), Some(*mode));
                files.insert(path.to_owned(), FileRecord { size, sha256, sha1, mode, origin: None });
            }
        }
    }
    Ok(files)
}

/// Opens the content of a file, and returns a reader and the size in bytes.
pub(crate) fn open_content(content: &Content) -> Result<(Box<dyn Read + '_>, u64), Error> {
    Ok(match content {
        Content::Bytes(bytes) => (Box::new(&bytes[..]), bytes.len() as u64),
        Content::File(path) | Content::Cached(CachedFile { file: path, .. }) => {
            let file = File::open(path).map_err(io_error("open", path))?;
            let metadata = file.metadata().map_err(io_error("inspect", path))?;
            if !metadata.is_file() {
                return Err(io_error("copy", path)(io::Error::other("not a regular file")).into());
            }
            (Box::new(file), metadata.len())
        }
    })
}
