//! Incomplete files.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use ttrpc::Code;

use super::destination::Destination;
use super::{Completion, StepError};
use crate::error::{Error, Result};

/// Upper bound on incomplete files; beyond it the oldest is discarded.
pub(super) const MAX_INCOMPLETE: usize = 64;

/// One incomplete file; deleted on drop unless it was completed.
#[derive(Debug)]
struct IncompleteFile {
    dir: OwnedFd,
    temporary: String,
    file: File,
    /// Bytes received, from the beginning.
    len: u64,
    renamed: bool,
}

impl Drop for IncompleteFile {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = rustix::fs::unlinkat(&self.dir, &self.temporary, AtFlags::empty());
        }
    }
}

/// Entry of a file: `part` is `None` while a chunk is being written.
#[derive(Debug)]
struct Entry {
    number: u64,
    part: Option<IncompleteFile>,
}

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    entries: BTreeMap<String, Entry>,
}

/// The incomplete files by name. The lock is never held during a write.
#[derive(Debug, Default)]
pub(super) struct IncompleteFiles(Mutex<Inner>);

impl IncompleteFiles {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a chunk at its offset, and renames the file to its name after the last one.
    pub(super) fn write_chunk(
        &self,
        name: &str,
        destination: Destination,
        offset: u64,
        data: &[u8],
        finish: Completion,
    ) -> Result<std::result::Result<(), StepError>> {
        let (number, part) = if offset == 0 {
            (self.begin(name), None)
        } else {
            let (number, part) = self.take_for_write(name, offset)?;
            (number, Some(part))
        };
        let result = part.map_or_else(|| IncompleteFile::new(destination.dir), Ok).and_then(|mut part| {
            part.write(offset, data)?;
            if part.len == finish.size {
                return part.finish(&destination.name, finish).map(|()| None);
            }
            Ok(Some(part))
        });
        match result {
            Ok(Some(part)) => {
                self.put_back(name, number, part);
                Ok(Ok(()))
            }
            Ok(None) => {
                self.forget(name, number);
                Ok(Ok(()))
            }
            Err(failed) => {
                self.forget(name, number);
                Ok(Err(failed))
            }
        }
    }

    /// Starts a file from scratch, and discards the oldest one if there are too many.
    fn begin(&self, name: &str) -> u64 {
        let mut inner = self.inner();
        inner.last += 1;
        let number = inner.last;
        let mut discarded = vec![inner.entries.insert(name.to_owned(), Entry { number, part: None })];
        if inner.entries.len() > MAX_INCOMPLETE {
            let oldest = inner.entries.iter().min_by_key(|(_, entry)| entry.number).map(|(name, _)| name.clone());
            discarded.push(oldest.and_then(|name| inner.entries.remove(&name)));
        }
        drop(inner);
        // Outside the lock: drop deletes their files.
        drop(discarded);
        number
    }

    /// Takes a file from the table for a write.
    fn take_for_write(&self, name: &str, offset: u64) -> Result<(u64, IncompleteFile)> {
        let missing = |what: &str| {
            Error::new(Code::FAILED_PRECONDITION, format!("chunk at {offset}, but {what}; restart at offset 0"))
        };
        let mut inner = self.inner();
        let entry = inner.entries.get_mut(name).ok_or_else(|| missing("the file was not started or was discarded"))?;
        let len = entry.part.as_ref().map(|part| part.len);
        match len {
            None => Err(missing("another chunk is being written")),
            Some(len) if offset > len => Err(missing(&format!("only {len} bytes were received"))),
            Some(_) => {
                let number = entry.number;
                entry.part.take().map(|part| (number, part)).ok_or_else(|| missing("another chunk is being written"))
            }
        }
    }

    /// Returns a file to the table, unless it was restarted or discarded in the meantime.
    fn put_back(&self, name: &str, number: u64, part: IncompleteFile) {
        let mut inner = self.inner();
        if let Some(entry) = inner.entries.get_mut(name).filter(|entry| entry.number == number) {
            entry.part = Some(part);
        }
        // Otherwise dropping the part deletes its file.
    }

    fn forget(&self, name: &str, number: u64) {
        let mut inner = self.inner();
        if inner.entries.get(name).is_some_and(|entry| entry.number == number) {
            inner.entries.remove(name);
        }
    }
}

impl IncompleteFile {
    fn new(dir: OwnedFd) -> std::result::Result<Self, StepError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = create_unique(|name| rustix::fs::openat(&dir, name, flags, Mode::RUSR | Mode::WUSR));
        let (temporary, file) =
            made.map_err(|error| StepError::new("create a temporary file".to_owned(), error.into()))?;
        Ok(Self { dir, temporary, file: file.into(), len: 0, renamed: false })
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> std::result::Result<(), StepError> {
        let failed = |error| StepError::new(format!("write {} bytes at {offset}", data.len()), error);
        self.file.write_all_at(data, offset).map_err(failed)?;
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        self.len = self.len.max(offset.saturating_add(len));
        Ok(())
    }

    fn finish(&mut self, name: &str, finish: Completion) -> std::result::Result<(), StepError> {
        let step = |what: &'static str| move |error: Errno| StepError::new(what.to_owned(), error.into());
        rustix::fs::fchown(&self.file, finish.owner.user, finish.owner.group).map_err(step("set the owner"))?;
        // After chown, which clears mode bits.
        rustix::fs::fchmod(&self.file, finish.mode).map_err(step("set the mode"))?;
        rustix::fs::renameat(&self.dir, &self.temporary, &self.dir, name).map_err(step("rename"))?;
        self.renamed = true;
        Ok(())
    }
}

/// Creates a file under an unused and unpredictable name.
pub(super) fn create_unique<T>(mut make: impl FnMut(&str) -> rustix::io::Result<T>) -> rustix::io::Result<(String, T)> {
    loop {
        // `RandomState` keys are random; two hashes give 128 bits.
        let random = || RandomState::new().hash_one(0);
        let name = format!(".firstlight-copy-{:016x}{:016x}", random(), random());
        match make(&name) {
            Err(Errno::EXIST) => {}
            made => return made.map(|made| (name, made)),
        }
    }
}
