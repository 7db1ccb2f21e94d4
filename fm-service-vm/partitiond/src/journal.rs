//! What was begun and what came of it, on the disk before anybody relies on it.
//!
//! A file of records: length, checksums and JSON, each on the disk before the next
//! is begun. So a crash can damage the last one only, which then was not told to
//! anybody; it is cut off. Damage before that is none of a crash: it is named, and
//! nothing is begun on top of it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::state::{Record, State};

/// How a journal begins.
const MAGIC: &[u8; 8] = b"FLNVLJ1\n";
/// Length, its CRC-32, and the record's, little-endian.
const HEAD: usize = 12;
/// No record comes near: a snapshot has at most some hundred partitions and requests.
const LONGEST: usize = 4 << 20;
/// Records after which the file is written anew, as one.
const MANY: usize = 4096;

/// Why there is no journal, or no more of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// Of which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Another daemon has it.
    #[error("{} is in use: another daemon runs on it", path.display())]
    Locked {
        /// The journal.
        path: PathBuf,
    },
    /// It says what cannot have been written.
    #[error(
        "{} is damaged at byte {at}: {what}; no crash does that. Move it away and reconcile with the list of tenants that run: \
         the fabric manager is not asked before", path.display()
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Where.
        at: usize,
        /// What is wrong there.
        what: String,
    },
    /// A record that is too long to be read again.
    #[error("a record of {bytes} bytes is too long for {}", path.display())]
    TooLong {
        /// The journal.
        path: PathBuf,
        /// How long it is.
        bytes: usize,
    },
}

/// The open journal; nobody else's as long as it is.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    end: u64,
    records: usize,
    /// After so many it is written anew.
    many: usize,
    /// An append failed half way: what is behind `end` is cut off before the next.
    ragged: bool,
}

/// What a journal's bytes say.
#[derive(Debug, PartialEq, Eq)]
pub struct Replayed {
    /// What came of all records.
    pub state: State,
    /// Where the last whole record ends.
    pub end: usize,
    /// How many there are.
    pub records: usize,
}

/// Reads a journal's bytes.
///
/// # Errors
/// Where something is wrong that no crash leaves, and what.
pub fn replay(bytes: &[u8]) -> Result<Replayed, (usize, String)> {
    let written = bytes.len() - bytes.iter().rev().take_while(|byte| **byte == 0).count();
    if MAGIC.starts_with(bytes.get(..written).unwrap_or_default()) {
        // It was made, and no more than that, if so much, reached the disk.
        return Ok(Replayed { state: State::default(), end: 0, records: 0 });
    }
    let mut rest = bytes.strip_prefix(MAGIC).ok_or((0, "it does not begin as a journal does".to_owned()))?;
    let mut replayed = Replayed { state: State::default(), end: MAGIC.len(), records: 0 };
    while !rest.is_empty() {
        let at = replayed.end;
        let Some(record) = record(rest).map_err(|what| (at, what))? else { break };
        let length = HEAD + record.len();
        let parsed: Record = serde_json::from_slice(record).map_err(|error| (at, error.to_string()))?;
        replayed.state.apply(parsed).map_err(|what| (at, what))?;
        replayed.end += length;
        replayed.records += 1;
        rest = rest.get(length..).unwrap_or_default();
    }
    Ok(replayed)
}

/// The record with which `bytes` begin; none if it is the last and a crash has cut it.
fn record(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let word = |at: usize| {
        let word = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(word))
    };
    let (Some(length), Some(of_length), Some(of_record)) = (word(0), word(4), word(8)) else { return Ok(None) };
    // A file can grow before what it is to hold is on the disk.
    let is_torn = bytes.iter().skip(HEAD).all(|byte| *byte == 0);
    if crc32fast::hash(&length.to_le_bytes()) != of_length {
        return if is_torn { Ok(None) } else { Err("its length's checksum is another".to_owned()) };
    }
    let length = usize::try_from(length).ok().filter(|length| *length <= LONGEST);
    let end = HEAD + length.ok_or("a record is too long")?;
    match bytes.get(HEAD..end) {
        Some(record) if crc32fast::hash(record) == of_record => Ok(Some(record)),
        _ if bytes.iter().skip(end).all(|byte| *byte == 0) => Ok(None),
        _ => Err("its checksum is another".to_owned()),
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
        Ok(length) if text.len() <= LONGEST => {
            let mut bytes = Vec::with_capacity(HEAD + text.len());
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

/// The directory's own entry is on the disk only when the directory is.
fn sync_directory(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl Journal {
    /// Opens the journal, or makes it, and says what came of it so far.
    ///
    /// # Errors
    /// It cannot be read or written, another daemon has it, or it is damaged.
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
        let mut journal =
            Self { path: path.to_owned(), file, end: end as u64, records, many: MANY, ragged: end < bytes.len() };
        if end == 0 {
            journal.ragged = true;
            journal.write(MAGIC)?;
            sync_directory(path).map_err(failed("write to the disk the directory of", path))?;
        } else {
            journal.cut()?;
        }
        Ok((journal, state))
    }

    /// Puts a record on the disk. `state` is what came of all before and of it:
    /// now and then the journal is written anew, as that.
    ///
    /// # Errors
    /// It is not known to be on the disk, and nobody may rely on it.
    pub fn append(&mut self, record: &Record, state: &State) -> Result<(), Error> {
        if self.records >= self.many {
            match self.prepared(state) {
                Ok((file, new, end)) => return self.replace(file, &new, end),
                // A long journal is better than none.
                Err(_) => self.records = self.many / 2,
            }
        }
        let bytes = framed(&self.path, record)?;
        self.write(&bytes)?;
        self.records += 1;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.cut()?;
        self.ragged = true;
        let written = self.file.write_all_at(bytes, self.end).and_then(|()| self.file.sync_data());
        written.map_err(failed("write", &self.path))?;
        self.end += bytes.len() as u64;
        self.ragged = false;
        Ok(())
    }

    /// Cuts off what is behind the last whole record.
    fn cut(&mut self) -> Result<(), Error> {
        if self.ragged {
            let cut = self.file.set_len(self.end).and_then(|()| self.file.sync_all());
            cut.map_err(failed("cut", &self.path))?;
            self.ragged = false;
        }
        Ok(())
    }

    /// The whole file as one record, beside this one.
    fn prepared(&self, state: &State) -> Result<(File, PathBuf, u64), Error> {
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

    /// Puts it in this one's place.
    fn replace(&mut self, file: File, new: &Path, end: u64) -> Result<(), Error> {
        fs::rename(new, &self.path).map_err(failed("replace", &self.path))?;
        (self.file, self.end, self.records, self.ragged) = (file, end, 1, false);
        sync_directory(&self.path).map_err(failed("write to the disk the directory of", &self.path))
    }

    /// Where the last record ends, in bytes.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }
}

#[cfg(test)]
pub(crate) mod tests;
