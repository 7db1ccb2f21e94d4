//! Files of which not every piece has come.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use ttrpc::Code;

use super::place::Place;
use super::{Failed, Finish};
use crate::error::{Error, Result};

/// How many files may be incomplete at a time; of more, the oldest is given up.
pub(super) const MOST: usize = 64;

/// One file. When it is dropped incomplete, nothing of it stays.
#[derive(Debug)]
struct Part {
    dir: OwnedFd,
    temporary: String,
    file: File,
    /// How much of it is there, from the beginning.
    len: u64,
    renamed: bool,
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = rustix::fs::unlinkat(&self.dir, &self.temporary, AtFlags::empty());
        }
    }
}

/// A file's entry: the part is out while a piece of it is being written.
#[derive(Debug)]
struct Entry {
    number: u64,
    part: Option<Part>,
}

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    entries: BTreeMap<String, Entry>,
}

/// The incomplete files by name. The lock is never held while something is written.
#[derive(Debug, Default)]
pub(super) struct Parts(Mutex<Inner>);

impl Parts {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a piece at its offset, and puts the file in its place if it is the last one.
    pub(super) fn piece(
        &self,
        name: &str,
        place: Place,
        offset: u64,
        data: &[u8],
        finish: Finish,
    ) -> Result<std::result::Result<(), Failed>> {
        let (number, part) = if offset == 0 {
            (self.begin(name), None)
        } else {
            let (number, part) = self.out(name, offset)?;
            (number, Some(part))
        };
        let result = part.map_or_else(|| Part::new(place.dir), Ok).and_then(|mut part| {
            part.write(offset, data)?;
            if part.len == finish.size {
                return part.finish(&place.name, finish).map(|()| None);
            }
            Ok(Some(part))
        });
        match result {
            Ok(Some(part)) => {
                self.back(name, number, part);
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

    /// Begins a file, whatever of it there was, and gives the oldest one up if there are too many.
    fn begin(&self, name: &str) -> u64 {
        let mut inner = self.inner();
        inner.last += 1;
        let number = inner.last;
        let mut given_up = vec![inner.entries.insert(name.to_owned(), Entry { number, part: None })];
        if inner.entries.len() > MOST {
            let oldest = inner.entries.iter().min_by_key(|(_, entry)| entry.number).map(|(name, _)| name.clone());
            given_up.push(oldest.and_then(|name| inner.entries.remove(&name)));
        }
        drop(inner);
        // Without the lock: their files are removed now.
        drop(given_up);
        number
    }

    /// Takes a file out to write on.
    fn out(&self, name: &str, offset: u64) -> Result<(u64, Part)> {
        let missing = |what: &str| {
            Error::new(Code::FAILED_PRECONDITION, format!("a piece at {offset}, but {what}; begin again at offset 0"))
        };
        let mut inner = self.inner();
        let entry = inner.entries.get_mut(name).ok_or_else(|| missing("the file was not begun or was given up"))?;
        let len = entry.part.as_ref().map(|part| part.len);
        match len {
            None => Err(missing("another piece is being written")),
            Some(len) if offset > len => Err(missing(&format!("only {len} bytes are there"))),
            Some(_) => {
                let number = entry.number;
                entry.part.take().map(|part| (number, part)).ok_or_else(|| missing("another piece is being written"))
            }
        }
    }

    /// Puts a file back, unless it has begun anew or has been given up meanwhile.
    fn back(&self, name: &str, number: u64, part: Part) {
        let mut inner = self.inner();
        if let Some(entry) = inner.entries.get_mut(name).filter(|entry| entry.number == number) {
            entry.part = Some(part);
        }
        // Otherwise the part ends here, and its file with it.
    }

    fn forget(&self, name: &str, number: u64) {
        let mut inner = self.inner();
        if inner.entries.get(name).is_some_and(|entry| entry.number == number) {
            inner.entries.remove(name);
        }
    }
}

impl Part {
    fn new(dir: OwnedFd) -> std::result::Result<Self, Failed> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = fresh(|name| rustix::fs::openat(&dir, name, flags, Mode::RUSR | Mode::WUSR));
        let (temporary, file) = made.map_err(|error| Failed::new("make a temporary file".to_owned(), error.into()))?;
        Ok(Self { dir, temporary, file: file.into(), len: 0, renamed: false })
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> std::result::Result<(), Failed> {
        let failed = |error| Failed::new(format!("write {} bytes at {offset}", data.len()), error);
        self.file.write_all_at(data, offset).map_err(failed)?;
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        self.len = self.len.max(offset.saturating_add(len));
        Ok(())
    }

    fn finish(&mut self, name: &str, finish: Finish) -> std::result::Result<(), Failed> {
        let step = |what: &'static str| move |error: Errno| Failed::new(what.to_owned(), error.into());
        rustix::fs::fchown(&self.file, finish.owner.user, finish.owner.group).map_err(step("owner"))?;
        // After the owner, whose change takes bits away.
        rustix::fs::fchmod(&self.file, finish.mode).map_err(step("mode"))?;
        rustix::fs::renameat(&self.dir, &self.temporary, &self.dir, name).map_err(step("rename"))?;
        self.renamed = true;
        Ok(())
    }
}

/// Makes something under a name that nobody has and nobody can guess.
pub(super) fn fresh<T>(mut make: impl FnMut(&str) -> rustix::io::Result<T>) -> rustix::io::Result<(String, T)> {
    loop {
        // The standard library's hash keys are random; two of them make 128 bits.
        let random = || RandomState::new().hash_one(0);
        let name = format!(".firstlight-copy-{:016x}{:016x}", random(), random());
        match make(&name) {
            Err(Errno::EXIST) => {}
            made => return made.map(|made| (name, made)),
        }
    }
}
