//! The journal file: every change is on the disk before it is acknowledged.
//!
//! A file of records: length, checksums and JSON, each on the disk before the next is written. So a crash can damage
//! only the last one, which was not acknowledged yet; it is truncated. Damage before it is not caused by a crash: it
//! is reported with its offset, and the daemon refuses to start.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::state::{Record, State};

/// The file's magic bytes.
const MAGIC: &[u8; 8] = b"FLNVLJ1\n";
/// A record's header: length, CRC-32 of the length, CRC-32 of the record, little-endian.
const HEADER: usize = 12;
/// The maximum length of a record, far above a snapshot of some hundred partitions and requests.
const MAX_RECORD: usize = 4 << 20;
/// Number of records after which the file is compacted to one snapshot.
const COMPACT_AFTER: usize = 4096;

/// Errors of the journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("failed to {what} {}: {source}", path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another daemon has locked the journal.
    #[error("{} is in use: another daemon runs on it", path.display())]
    Locked {
        /// The journal.
        path: PathBuf,
    },
    /// The journal is corrupt.
    #[error(
        "{} is damaged at byte {at}: {what}; a crash does not cause this. Move it away and reconcile with the list of running tenants: \
         the fabric manager is not called before", path.display()
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// The offset of the damage.
        at: usize,
        /// What is wrong there.
        what: String,
    },
    /// A record is too long to be read again.
    #[error("a record of {bytes} bytes is too long for {}", path.display())]
    TooLong {
        /// The journal.
        path: PathBuf,
        /// The record's length.
        bytes: usize,
    },
}

/// The open journal, locked against other daemons.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    end: u64,
    records: usize,
    /// Number of records after which it is compacted.
    compact_after: usize,
    /// An append failed half way: the file is truncated to `end` before the next.
    needs_truncation: bool,
}

/// The result of replaying a journal.
#[derive(Debug, PartialEq, Eq)]
pub struct Replayed {
    /// The state after all records.
    pub state: State,
    /// The offset after the last complete record.
    pub end: usize,
    /// The number of records.
    pub records: usize,
}

/// Replays a journal's bytes.
///
/// # Errors
/// Offset and description of damage that a crash cannot cause.
pub fn replay(bytes: &[u8]) -> Result<Replayed, (usize, String)> {
    let written = bytes.len() - bytes.iter().rev().take_while(|byte| **byte == 0).count();
    if MAGIC.starts_with(bytes.get(..written).unwrap_or_default()) {
        // A new file whose magic did not reach the disk completely.
        return Ok(Replayed { state: State::default(), end: 0, records: 0 });
    }
    let mut rest = bytes.strip_prefix(MAGIC).ok_or((0, "it does not begin like a journal".to_owned()))?;
    let mut replayed = Replayed { state: State::default(), end: MAGIC.len(), records: 0 };
    while !rest.is_empty() {
        let at = replayed.end;
        let Some(record) = record(rest).map_err(|what| (at, what))? else { break };
        let length = HEADER + record.len();
        let parsed: Record = serde_json::from_slice(record).map_err(|error| (at, error.to_string()))?;
        replayed.state.apply(parsed).map_err(|what| (at, what))?;
        replayed.end += length;
        replayed.records += 1;
        rest = rest.get(length..).unwrap_or_default();
    }
    Ok(replayed)
}

/// Returns the record at the start of `bytes`; `None` if it is the last one and was truncated by a crash.
fn record(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let word = |at: usize| {
        let word = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(word))
    };
    let (Some(length), Some(of_length), Some(of_record)) = (word(0), word(4), word(8)) else { return Ok(None) };
    // A file can be extended before its content is on the disk.
    let is_torn = bytes.iter().skip(HEADER).all(|byte| *byte == 0);
    if crc32fast::hash(&length.to_le_bytes()) != of_length {
        return if is_torn { Ok(None) } else { Err("checksum mismatch of the length".to_owned()) };
    }
    let length = usize::try_from(length).ok().filter(|length| *length <= MAX_RECORD);
    let end = HEADER + length.ok_or("a record is too long")?;
    match bytes.get(HEADER..end) {
        Some(record) if crc32fast::hash(record) == of_record => Ok(Some(record)),
        _ if bytes.iter().skip(end).all(|byte| *byte == 0) => Ok(None),
        _ => Err("checksum mismatch of the record".to_owned()),
    }
}

fn framed(path: &Path, record: &Record) -> Result<Vec<u8>, Error> {
    let failed = |source: serde_json::Error| Error::File {
        what: "encode a record of",
        path: path.to_owned(),
        source: source.into(),
    };
    let text = serde_json::to_vec(record).map_err(failed)?;
    match u32::try_from(text.len()) {
        Ok(length) if text.len() <= MAX_RECORD => {
            let mut bytes = Vec::with_capacity(HEADER + text.len());
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(&crc32fast::hash(&length.to_le_bytes()).to_le_bytes());
            bytes.extend_from_slice(&crc32fast::hash(&text).to_le_bytes());
            bytes.extend_from_slice(&text);
            Ok(bytes)
        }
        _ => Err(Error::TooLong { path: path.to_owned(), bytes: text.len() }),
    }
}

fn failed<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
    move |source| Error::File { what, path: path.to_owned(), source }
}

/// Syncs the parent directory, without which the file's directory entry may be lost.
fn sync_directory(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl Journal {
    /// Opens or creates the journal and replays it.
    ///
    /// # Errors
    /// It cannot be read or written, another daemon has locked it, or it is damaged.
    pub fn open(path: &Path) -> Result<(Self, State), Error> {
        let mut file = open(path).map_err(failed("open", path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(failed("lock", path)(source)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed("read", path))?;
        let damaged = |(at, what)| Error::Damaged { path: path.to_owned(), at, what };
        let Replayed { state, end, records } = replay(&bytes).map_err(damaged)?;
        let mut journal = Self {
            path: path.to_owned(),
            file,
            end: end as u64,
            records,
            compact_after: COMPACT_AFTER,
            needs_truncation: end < bytes.len(),
        };
        if end == 0 {
            journal.needs_truncation = true;
            journal.write(MAGIC)?;
            sync_directory(path).map_err(failed("sync the directory of", path))?;
        } else {
            journal.cut()?;
        }
        Ok((journal, state))
    }

    /// Appends a record and syncs it. `state` is the state after the record; from time to time the journal is
    /// compacted to it.
    ///
    /// # Errors
    /// The record may not be on the disk, so the caller must not rely on it.
    pub fn append(&mut self, record: &Record, state: &State) -> Result<(), Error> {
        if self.records >= self.compact_after {
            match self.write_compacted(state) {
                Ok((file, new, end)) => return self.replace(file, &new, end),
                // If compaction fails, the long journal stays in use.
                Err(_) => self.records = self.compact_after / 2,
            }
        }
        let bytes = framed(&self.path, record)?;
        self.write(&bytes)?;
        self.records += 1;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.cut()?;
        self.needs_truncation = true;
        let written = self.file.write_all_at(bytes, self.end).and_then(|()| self.file.sync_data());
        written.map_err(failed("write", &self.path))?;
        self.end += bytes.len() as u64;
        self.needs_truncation = false;
        Ok(())
    }

    /// Truncates the file after the last complete record.
    fn cut(&mut self) -> Result<(), Error> {
        if self.needs_truncation {
            let cut = self.file.set_len(self.end).and_then(|()| self.file.sync_all());
            cut.map_err(failed("truncate", &self.path))?;
            self.needs_truncation = false;
        }
        Ok(())
    }

    /// Writes the state as a new journal beside this one.
    fn write_compacted(&self, state: &State) -> Result<(File, PathBuf, u64), Error> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let bytes = [&MAGIC[..], &framed(&self.path, &Record::Snapshot(Box::new(state.clone())))?].concat();
        let write = || -> io::Result<File> {
            let mut file = open(&new)?;
            file.try_lock().map_err(io::Error::from)?;
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            Ok(file)
        };
        let file = write().map_err(failed("write", &new))?;
        Ok((file, new, bytes.len() as u64))
    }

    /// Replaces this journal by the compacted one.
    fn replace(&mut self, file: File, new: &Path, end: u64) -> Result<(), Error> {
        fs::rename(new, &self.path).map_err(failed("replace", &self.path))?;
        (self.file, self.end, self.records, self.needs_truncation) = (file, end, 1, false);
        sync_directory(&self.path).map_err(failed("sync the directory of", &self.path))
    }

    /// Returns the offset after the last record, in bytes.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }
}

#[cfg(test)]
pub(crate) mod tests;
