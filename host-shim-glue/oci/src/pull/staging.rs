//! The image in the making: a directory beside the one that it will be.
//!
//! `DIR` is made as `.DIR.pulling` beside it. In there a blob has its name
//! only when it is whole and on the disk, so what a killed pull leaves is what
//! the next one needs not fetch; parts of blobs are thrown away. The directory
//! takes its name in one step, or changes places with the image before it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firstlight_image::digest::{self, Hashing};
use firstlight_progress::{Bar, Progress};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::json;
use tempfile::NamedTempFile;

use super::document::{Descriptor, Digest, OCI_INDEX};
use super::error::{COPY_AGAIN, Error, input, io_error};

/// The image layout in the making.
const LAYOUT: &str = "layout";
/// Parts of blobs.
const PARTS: &str = "parts";
/// The file by which a directory says that it is a layout.
pub(crate) const MARK: &str = "oci-layout";

/// An image in the making. Nobody else pulls into the same directory until it is dropped.
#[derive(Debug)]
pub(crate) struct Staging {
    out: PathBuf,
    dir: PathBuf,
    /// Blobs that this process has verified, and their sizes.
    whole: BTreeMap<Digest, u64>,
    /// What is being brought, on a terminal.
    bar: Arc<Bar>,
    /// The directory is gone, or another pull's.
    done: bool,
    _lock: File,
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // Best effort. A failed pull leaves what the next one needs not fetch, and otherwise nothing.
        let _ = fs::remove_dir_all(self.parts());
        for dir in [self.blobs(), self.dir.join(LAYOUT).join("blobs"), self.dir.join(LAYOUT), self.dir.clone()] {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A blob in the making.
pub(crate) struct Blob {
    file: Hashing<NamedTempFile>,
    written: u64,
    limit: u64,
    bar: Arc<Bar>,
}

impl Blob {
    /// How much of it is there.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }
}

impl Write for Blob {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Checked before it reaches the disk: a peer does not decide how full that gets.
        if bytes.len() as u64 > self.limit - self.written {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {} bytes", self.limit)));
        }
        let count = self.file.write(bytes)?;
        self.written += count as u64;
        self.bar.set(self.written);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Staging {
    /// Begins an image that will be the directory `out`.
    pub(crate) fn begin(out: &Path, progress: Progress) -> Result<Self, Error> {
        // A link at the end would be replaced instead of what it leads to.
        let out = fs::canonicalize(out).unwrap_or_else(|_| out.to_owned());
        let refused = |why: &str, next| Err(input(out.display().to_string(), "write the image there", why, next));
        let Some(name) = out.file_name() else {
            return refused("this names no new directory", "give --out another directory");
        };
        if let Ok(mut entries) = fs::read_dir(&out) {
            if entries.next().is_some() && !out.join(MARK).is_file() {
                return refused(
                    "it is not empty, and no image layout",
                    "give --out another directory, or remove that one",
                );
            }
        } else if out.symlink_metadata().is_ok() {
            return refused("it is no directory", "give --out another directory, or remove that file");
        }
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(".pulling");
        let dir = out.with_file_name(hidden);
        let lock = lock(&dir, progress)?;
        let staging = Self { out, dir, whole: BTreeMap::new(), bar: Arc::new(Bar::none()), done: false, _lock: lock };
        remove_directory(&staging.dir.join(PARTS))?;
        for dir in [staging.blobs(), staging.dir.join(PARTS)] {
            fs::create_dir_all(&dir).map_err(io_error("create directory", &dir))?;
        }
        Ok(staging)
    }

    fn blobs(&self) -> PathBuf {
        self.dir.join(LAYOUT).join("blobs/sha256")
    }

    /// Where parts may lie until this pull ends.
    pub(crate) fn parts(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    /// Where a blob is when it is whole.
    pub(crate) fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// Whether a blob is there and whole, here or in the image that `out` is already.
    pub(crate) fn has(&mut self, wanted: &Descriptor) -> Result<bool, Error> {
        if self.whole.get(&wanted.digest) == Some(&wanted.size) {
            return Ok(true);
        }
        let place = self.path(&wanted.digest);
        let older = self.out.join("blobs/sha256").join(wanted.digest.hex());
        for candidate in [&place, &older] {
            let Ok(data) = fs::symlink_metadata(candidate) else { continue };
            let (hash, size) = match data.is_file() && data.len() == wanted.size {
                true => digest::of_file(candidate).map_err(io_error("read", candidate))?,
                false => (String::new(), 0),
            };
            if hash == wanted.digest.hex() && size == wanted.size {
                if *candidate != place && fs::hard_link(candidate, &place).is_err() {
                    // Another file system, or one without links.
                    let mut source = File::open(candidate).map_err(io_error("read", candidate))?;
                    let mut blob = self.blob(wanted.size)?;
                    io::copy(&mut source, &mut blob).map_err(io_error("copy", candidate))?;
                    self.finish_blob(blob, wanted, &candidate.display().to_string())?;
                }
                self.whole.insert(wanted.digest.clone(), wanted.size);
                return Ok(true);
            }
            if *candidate == place {
                // What a disk has damaged helps nobody.
                if data.is_dir() { fs::remove_dir_all(&place) } else { fs::remove_file(&place) }
                    .map_err(io_error("remove", &place))?;
            }
        }
        Ok(false)
    }

    /// A new blob of at most `limit` bytes.
    pub(crate) fn blob(&self, limit: u64) -> Result<Blob, Error> {
        let parts = self.parts();
        let file = NamedTempFile::new_in(&parts).map_err(io_error("make a file in", &parts))?;
        Ok(Blob { file: Hashing::new(file), written: 0, limit, bar: Arc::clone(&self.bar) })
    }

    /// Blobs that begin from now on move this bar; the one before is taken off the terminal.
    pub(crate) fn show(&mut self, bar: impl FnOnce() -> Bar) {
        self.bar = Arc::new(Bar::none());
        self.bar = Arc::new(bar());
    }

    /// Gives a blob its name if it is what was wanted.
    pub(crate) fn finish_blob(&mut self, blob: Blob, wanted: &Descriptor, object: &str) -> Result<(), Error> {
        let written = blob.written;
        let (hash, file) = blob.file.finish();
        if written != wanted.size || hash != wanted.digest.hex() {
            let why = format!("it has {written} bytes and sha256:{hash}; expected were {} bytes", wanted.size);
            return Err(input(format!("{object}: {}", wanted.digest), "verify the blob", why, COPY_AGAIN));
        }
        self.keep(file, &wanted.digest, wanted.size)
    }

    /// Gives a blob of unknown content its name.
    pub(crate) fn finish_any(&mut self, blob: Blob) -> Result<(Digest, u64), Error> {
        let written = blob.written;
        let (hash, file) = blob.file.finish();
        let digest = Digest::of_hex(hash);
        self.keep(file, &digest, written)?;
        Ok((digest, written))
    }

    fn keep(&mut self, file: NamedTempFile, digest: &Digest, size: u64) -> Result<(), Error> {
        let place = self.path(digest);
        readable(file.as_file())
            .and_then(|()| file.as_file().sync_all())
            .map_err(io_error("write to the disk", &place))?;
        file.persist(&place).map_err(|error| io_error("rename into place", &place)(error.error))?;
        self.whole.insert(digest.clone(), size);
        Ok(())
    }

    /// A document of which all is known.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<Digest, Error> {
        let mut blob = self.blob(bytes.len() as u64)?;
        blob.write_all(bytes).map_err(io_error("write", &self.parts()))?;
        Ok(self.finish_any(blob)?.0)
    }

    /// A document that is here and whole.
    pub(crate) fn read(&self, digest: &Digest) -> Result<Vec<u8>, Error> {
        let path = self.path(digest);
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(io_error("open", &path))?;
        file.take(super::limits::DOCUMENT).read_to_end(&mut bytes).map_err(io_error("read", &path))?;
        Ok(bytes)
    }

    /// The image is whole: `manifest` and these blobs. Gives it its name.
    pub(crate) fn finish(mut self, manifest: &Descriptor, blobs: &BTreeSet<Digest>) -> Result<(), Error> {
        let layout = self.dir.join(LAYOUT);
        let all = self.blobs();
        for entry in fs::read_dir(&all).map_err(io_error("list", &all))? {
            let entry = entry.map_err(io_error("list", &all))?;
            let name = entry.file_name();
            // Of a pull of another image that was killed.
            if !blobs.iter().any(|digest| digest.hex() == name) {
                fs::remove_file(entry.path()).map_err(io_error("remove", &entry.path()))?;
            }
        }
        let index = json!({ "schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [manifest] });
        for (name, text) in [("index.json", index.to_string()), (MARK, r#"{"imageLayoutVersion":"1.0.0"}"#.to_owned())]
        {
            let path = layout.join(name);
            let written = File::create(&path).and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            });
            written.map_err(io_error("write", &path))?;
        }
        for dir in [&all, &layout] {
            File::open(dir).and_then(|open| open.sync_all()).map_err(io_error("write to the disk", dir))?;
        }
        self.publish(&layout)?;
        let parent = self.out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent).and_then(|open| open.sync_all()).map_err(io_error("write to the disk", parent))?;
        self.done = true;
        remove_directory(&self.dir)
    }

    fn publish(&self, layout: &Path) -> Result<(), Error> {
        // An empty directory is replaced as well.
        let Err(error) = fs::rename(layout, &self.out) else { return Ok(()) };
        if !matches!(error.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::NOTEMPTY | Errno::EXIST)) {
            return Err(io_error("rename into place", &self.out)(error));
        }
        match renameat_with(CWD, layout, CWD, &self.out, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(()),
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                // This file system cannot exchange: for a moment there is neither.
                let old = self.dir.join(PARTS).join("old");
                fs::rename(&self.out, &old).map_err(io_error("move away", &self.out))?;
                Ok(fs::rename(layout, &self.out).map_err(io_error("rename into place", &self.out))?)
            }
            Err(error) => Err(io_error("exchange with the new image", &self.out)(error.into())),
        }
    }
}

/// Temporary files are private; an image is as readable as other files.
fn readable(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

fn remove_directory(dir: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("remove", dir)(error)),
        _ => Ok(()),
    }
}

/// Makes and locks the directory. Who waited for a lock may hold one on a directory
/// that is gone, because the other pull has ended: then once more.
fn lock(dir: &Path, progress: Progress) -> Result<File, Error> {
    loop {
        fs::create_dir_all(dir).map_err(io_error("create directory", dir))?;
        let file = match File::open(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(io_error("open", dir))?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.say(format_args!("waiting for another pull that holds {}", dir.display()));
                file.lock().map_err(io_error("lock", dir))?;
            }
            Err(TryLockError::Error(source)) => return Err(io_error("lock", dir)(source)),
        }
        let mine = file.metadata().map_err(io_error("read", dir))?;
        if fs::metadata(dir).is_ok_and(|there| (there.dev(), there.ino()) == (mine.dev(), mine.ino())) {
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests;
