//! The staging directory, in which the new image layout is created.
//!
//! A pull to `DIR` works in `.DIR.pulling` beside it. A blob is renamed to its final name
//! there only when it is verified and synced, so that the next pull can use the blobs of
//! a killed one; partial blobs are removed. The complete layout is renamed to `DIR`, or
//! exchanged with the existing layout.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firstlight_image::digest::{self as hash, Hashing};
use firstlight_progress::{Bar, Progress};
use oci_spec::image::{Descriptor, Digest, ImageIndex, MediaType};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use tempfile::NamedTempFile;

use super::digest;
use super::error::{COPY_AGAIN, PullError, file_error, invalid};

/// The subdirectory with the new layout.
const LAYOUT: &str = "layout";
/// The subdirectory with partial blobs.
const PARTS: &str = "parts";
/// The file that marks a directory as an image layout.
pub(crate) const LAYOUT_FILE: &str = "oci-layout";

/// A staging directory. Other pulls to the same directory wait until it is dropped.
#[derive(Debug)]
pub(crate) struct Staging {
    out: PathBuf,
    dir: PathBuf,
    /// Blobs that this process has verified, and their sizes.
    verified: HashMap<Digest, u64>,
    /// The progress bar of the current blob.
    bar: Arc<Bar>,
    /// The directory is removed, or belongs to another pull.
    finished: bool,
    _lock: File,
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // Best effort. A failed pull leaves its complete blobs; directories are removed if empty.
        let _ = fs::remove_dir_all(self.parts());
        for dir in [self.blobs(), self.dir.join(LAYOUT).join("blobs"), self.dir.join(LAYOUT), self.dir.clone()] {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A blob that is being written.
pub(crate) struct PartialBlob {
    file: Hashing<NamedTempFile>,
    written: u64,
    limit: u64,
    bar: Arc<Bar>,
}

impl PartialBlob {
    /// Returns the number of bytes written.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }
}

impl Write for PartialBlob {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Checked before the bytes are written, so that a registry cannot fill the disk.
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
    /// Creates and locks the staging directory of a pull to `out`.
    pub(crate) fn begin(out: &Path, progress: Progress) -> Result<Self, PullError> {
        // The target of a symbolic link is replaced, not the link.
        let out = fs::canonicalize(out).unwrap_or_else(|_| out.to_owned());
        check_destination(&out)?;
        let mut name = std::ffi::OsString::from(".");
        name.push(out.file_name().unwrap_or_default());
        name.push(".pulling");
        let dir = out.with_file_name(name);
        let lock = lock(&dir, progress)?;
        let bar = Arc::new(Bar::none());
        let staging = Self { out, dir, verified: HashMap::new(), bar, finished: false, _lock: lock };
        remove_directory(&staging.parts())?;
        for dir in [staging.blobs(), staging.parts()] {
            fs::create_dir_all(&dir).map_err(file_error("create directory", &dir))?;
        }
        Ok(staging)
    }

    fn blobs(&self) -> PathBuf {
        self.dir.join(LAYOUT).join("blobs/sha256")
    }

    /// Returns the directory for temporary files; it is removed when the pull ends.
    pub(crate) fn parts(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    /// Returns the path of a complete blob.
    pub(crate) fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.digest())
    }

    /// Returns whether a blob is available and intact: in the staging directory, or in
    /// the layout that is replaced, from which it is linked or copied.
    pub(crate) fn has(&mut self, descriptor: &Descriptor) -> Result<bool, PullError> {
        let (digest, size) = (descriptor.digest(), descriptor.size());
        if self.verified.get(digest) == Some(&size) {
            return Ok(true);
        }
        let staged = self.path(digest);
        if is_intact(&staged, descriptor)? {
            self.verified.insert(digest.clone(), size);
            return Ok(true);
        }
        remove_any(&staged)?;
        let existing = self.out.join("blobs/sha256").join(digest.digest());
        if !is_intact(&existing, descriptor)? {
            return Ok(false);
        }
        if fs::hard_link(&existing, &staged).is_err() {
            // Another file system, or one without hard links.
            let mut source = File::open(&existing).map_err(file_error("read", &existing))?;
            let mut blob = self.new_blob(size)?;
            io::copy(&mut source, &mut blob).map_err(file_error("copy", &existing))?;
            self.finish_blob(blob, descriptor, &existing.display().to_string())?;
        }
        self.verified.insert(digest.clone(), size);
        Ok(true)
    }

    /// Starts a blob of at most `limit` bytes.
    pub(crate) fn new_blob(&self, limit: u64) -> Result<PartialBlob, PullError> {
        let parts = self.parts();
        let file = NamedTempFile::new_in(&parts).map_err(file_error("create a file in", &parts))?;
        Ok(PartialBlob { file: Hashing::new(file), written: 0, limit, bar: Arc::clone(&self.bar) })
    }

    /// Replaces the progress bar; blobs started later advance the new one.
    pub(crate) fn show(&mut self, bar: impl FnOnce() -> Bar) {
        // The old bar is dropped before the new one is created: one is active at a time.
        self.bar = Arc::new(Bar::none());
        self.bar = Arc::new(bar());
    }

    /// Renames a blob to its final name if its size and digest match.
    pub(crate) fn finish_blob(
        &mut self,
        blob: PartialBlob,
        descriptor: &Descriptor,
        object: &str,
    ) -> Result<(), PullError> {
        let written = blob.written;
        let (sha256, file) = blob.file.finish();
        if written != descriptor.size() || sha256 != descriptor.digest().digest() {
            let reason = format!("it has {written} bytes and sha256:{sha256}; expected {} bytes", descriptor.size());
            return Err(invalid(format!("{object}: {}", descriptor.digest()), "verify the blob", reason, COPY_AGAIN));
        }
        self.publish_blob(file, descriptor.digest(), descriptor.size())
    }

    /// Renames a blob to the name of its content; returns its digest and its size.
    pub(crate) fn finish_unverified(&mut self, blob: PartialBlob) -> Result<(Digest, u64), PullError> {
        let written = blob.written;
        let (sha256, file) = blob.file.finish();
        let digest = digest::from_sha256(&sha256)?;
        self.publish_blob(file, &digest, written)?;
        Ok((digest, written))
    }

    fn publish_blob(&mut self, file: NamedTempFile, digest: &Digest, size: u64) -> Result<(), PullError> {
        let path = self.path(digest);
        // Temporary files are private; files of a layout are readable.
        file.as_file()
            .set_permissions(fs::Permissions::from_mode(0o644))
            .and_then(|()| file.as_file().sync_all())
            .map_err(file_error("sync", &path))?;
        file.persist(&path).map_err(|error| file_error("rename into place", &path)(error.error))?;
        self.verified.insert(digest.clone(), size);
        Ok(())
    }

    /// Writes a document as a blob; returns its digest.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<Digest, PullError> {
        let mut blob = self.new_blob(bytes.len() as u64)?;
        blob.write_all(bytes).map_err(file_error("write", &self.parts()))?;
        Ok(self.finish_unverified(blob)?.0)
    }

    /// Reads a document that is complete.
    pub(crate) fn read(&self, digest: &Digest) -> Result<Vec<u8>, PullError> {
        let path = self.path(digest);
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(file_error("open", &path))?;
        file.take(super::limits::DOCUMENT).read_to_end(&mut bytes).map_err(file_error("read", &path))?;
        Ok(bytes)
    }

    /// Publishes the layout of `manifest`, which has these blobs.
    pub(crate) fn finish(mut self, manifest: &Descriptor, blobs: &HashSet<Digest>) -> Result<(), PullError> {
        let layout = self.dir.join(LAYOUT);
        self.remove_other_blobs(blobs)?;
        write_layout_files(&layout, manifest)?;
        for dir in [&self.blobs(), &layout] {
            sync_directory(dir)?;
        }
        self.publish(&layout)?;
        let parent = self.out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_directory(parent)?;
        self.finished = true;
        remove_directory(&self.dir)
    }

    /// Removes blobs that a killed pull of another image has left.
    fn remove_other_blobs(&self, blobs: &HashSet<Digest>) -> Result<(), PullError> {
        let dir = self.blobs();
        for entry in fs::read_dir(&dir).map_err(file_error("list", &dir))? {
            let entry = entry.map_err(file_error("list", &dir))?;
            let name = entry.file_name();
            if !blobs.iter().any(|digest| digest.digest() == name) {
                fs::remove_file(entry.path()).map_err(file_error("remove", &entry.path()))?;
            }
        }
        Ok(())
    }

    fn publish(&self, layout: &Path) -> Result<(), PullError> {
        // rename replaces an empty directory as well.
        let Err(error) = fs::rename(layout, &self.out) else { return Ok(()) };
        if !matches!(error.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::NOTEMPTY | Errno::EXIST)) {
            return Err(file_error("rename into place", &self.out)(error));
        }
        match renameat_with(CWD, layout, CWD, &self.out, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(()),
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                // Without RENAME_EXCHANGE the replacement is not atomic: between the two
                // renames the path does not exist.
                let old = self.parts().join("old");
                fs::rename(&self.out, &old).map_err(file_error("move away", &self.out))?;
                fs::rename(layout, &self.out).map_err(file_error("rename into place", &self.out))
            }
            Err(error) => Err(file_error("exchange with the new image", &self.out)(error.into())),
        }
    }
}

/// Refuses a path without a name, a file, and a directory that is neither empty nor an
/// image layout.
fn check_destination(out: &Path) -> Result<(), PullError> {
    let refused =
        |reason: &str, advice| Err(invalid(out.display().to_string(), "write the image layout", reason, advice));
    if out.file_name().is_none() {
        return refused("the path does not end in a name", "give --out another directory");
    }
    if let Ok(mut entries) = fs::read_dir(out) {
        if entries.next().is_some() && !out.join(LAYOUT_FILE).is_file() {
            return refused(
                "the directory is not empty and not an image layout",
                "give --out another directory, or remove this one",
            );
        }
    } else if out.symlink_metadata().is_ok() {
        return refused("it is not a directory", "give --out another directory, or remove this file");
    }
    Ok(())
}

/// Returns whether `path` is a regular file with the size and the digest of the blob.
fn is_intact(path: &Path, descriptor: &Descriptor) -> Result<bool, PullError> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(false) };
    if !metadata.is_file() || metadata.len() != descriptor.size() {
        return Ok(false);
    }
    let (sha256, size) = hash::of_file(path).map_err(file_error("read", path))?;
    Ok(sha256 == descriptor.digest().digest() && size == descriptor.size())
}

fn write_layout_files(layout: &Path, manifest: &Descriptor) -> Result<(), PullError> {
    let mut index = ImageIndex::default();
    index.set_media_type(Some(MediaType::ImageIndex)).set_manifests(vec![manifest.clone()]);
    let path = layout.join("index.json");
    let index = serde_json::to_vec(&index).map_err(|error| file_error("write", &path)(error.into()))?;
    let marker = br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec();
    for (name, bytes) in [("index.json", index), (LAYOUT_FILE, marker)] {
        let path = layout.join(name);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&bytes)?;
            file.sync_all()
        });
        written.map_err(file_error("write", &path))?;
    }
    Ok(())
}

fn sync_directory(dir: &Path) -> Result<(), PullError> {
    File::open(dir).and_then(|open| open.sync_all()).map_err(file_error("sync", dir))
}

/// Removes a directory, if it exists.
fn remove_directory(dir: &Path) -> Result<(), PullError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(file_error("remove", dir)(error)),
        _ => Ok(()),
    }
}

/// Removes a file or a directory, if it exists.
fn remove_any(path: &Path) -> Result<(), PullError> {
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(metadata) if metadata.is_dir() => remove_directory(path),
        Ok(_) => fs::remove_file(path).map_err(file_error("remove", path)),
    }
}

/// Creates and locks the directory. The previous holder of the lock removes the directory
/// when it has finished, so the lock may be on a removed directory: then it is created again.
fn lock(dir: &Path, progress: Progress) -> Result<File, PullError> {
    loop {
        fs::create_dir_all(dir).map_err(file_error("create directory", dir))?;
        let file = match File::open(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(file_error("open", dir))?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.say(format_args!("waiting for another pull that holds {}", dir.display()));
                file.lock().map_err(file_error("lock", dir))?;
            }
            Err(TryLockError::Error(source)) => return Err(file_error("lock", dir)(source)),
        }
        let locked = file.metadata().map_err(file_error("read", dir))?;
        if fs::metadata(dir).is_ok_and(|current| (current.dev(), current.ino()) == (locked.dev(), locked.ino())) {
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests;
