//! Splits a daemon's output into lines for the log: bounded and non-blocking, so that neither PID 1
//! nor the daemon is ever blocked.

use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use firstlight_boot_record::sanitize;

/// Maximum length of a line, bytes; the rest of a longer line is dropped.
const MOST_LINE: usize = 512;

/// Maximum number of bytes read per loop iteration.
const TURN: usize = 16 << 10;

/// Splits bytes into lines.
#[derive(Debug, Default)]
pub struct Lines {
    line: Vec<u8>,
    cut: bool,
    last: String,
}

impl Lines {
    /// Parses bytes and appends the complete lines to `out`.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<String>) {
        for byte in bytes {
            if matches!(byte, b'\n' | b'\r') {
                self.end(out);
            } else if self.line.len() < MOST_LINE {
                self.line.push(*byte);
            } else {
                self.cut = true;
            }
        }
    }

    /// Parses the bytes after the last newline as a line.
    pub fn end(&mut self, out: &mut Vec<String>) {
        let line = self.line.trim_ascii_end();
        // A line must stay one line in the log, without control characters.
        let mut text = sanitize(line);
        self.line.clear();
        if std::mem::take(&mut self.cut) {
            text.push_str(" [...]");
        }
        if text.is_empty() {
            return;
        }
        self.last.clone_from(&text);
        out.push(text);
    }

    /// Returns the last line; empty if there was none.
    #[must_use]
    pub fn last(&self) -> &str {
        &self.last
    }
}

/// A source of lines: a pipe or a file.
#[derive(Debug)]
pub struct Source<R> {
    reader: R,
    lines: Lines,
}

/// A daemon's standard output and error.
pub type Pipe = Source<PipeReader>;

/// A file that a daemon appends to.
pub type Tail = Source<File>;

impl<R: Read> Source<R> {
    fn new(reader: R) -> Self {
        Self { reader, lines: Lines::default() }
    }

    /// Reads the available bytes, at most `TURN`; returns `false` when all writers have closed the pipe.
    pub fn read(&mut self, out: &mut Vec<String>) -> bool {
        let mut buffer = [0; 4096];
        let mut left = TURN;
        while left > 0 {
            match self.reader.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => {
                    self.lines.feed(&buffer[..count], out);
                    left = left.saturating_sub(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }

    /// See [`Lines::end`].
    pub fn end(&mut self, out: &mut Vec<String>) {
        self.lines.end(out);
    }

    /// See [`Lines::last`].
    #[must_use]
    pub fn last(&self) -> &str {
        self.lines.last()
    }
}

impl Pipe {
    /// Creates a pipe; returns the source and the daemon's end.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn make() -> io::Result<(Self, io::PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        // Only our end is non-blocking; the daemon's end stays blocking.
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK)?;
        Ok((Self::new(reader), writer))
    }
}

impl Tail {
    /// Opens a file, to be read from its start.
    ///
    /// # Errors
    /// The file does not exist, or it is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        // The directory may belong to the daemon's user, who could replace the file by a FIFO:
        // opening it must not block.
        let flags = rustix::fs::OFlags::RDONLY
            | rustix::fs::OFlags::CLOEXEC
            | rustix::fs::OFlags::NONBLOCK
            | rustix::fs::OFlags::NOFOLLOW;
        let file = File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
        if file.metadata()?.is_file() { Ok(Self::new(file)) } else { Err(io::Error::from(io::ErrorKind::InvalidInput)) }
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write as _;

    #[test]
    fn lines_split_across_reads_are_reassembled() {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        for piece in ["on", "e\ntwo\r\n\n \n", "thr\x1b[31mee\0"] {
            lines.feed(piece.as_bytes(), &mut out);
        }
        assert_eq!(out, ["one", "two"]);
        lines.end(&mut out);
        assert_eq!(out[2], "thr\\x1b[31mee\\x00");
        assert_eq!(lines.last(), "thr\\x1b[31mee\\x00");
    }

    #[test]
    fn pipe_is_read_without_blocking_until_eof() {
        let (mut pipe, mut writer) = Pipe::make().unwrap();
        let mut out = Vec::new();
        assert!(pipe.read(&mut out));
        writer.write_all(b"a\nb").unwrap();
        assert!(pipe.read(&mut out));
        drop(writer);
        assert!(!pipe.read(&mut out));
        assert_eq!(out, ["a"]);
    }

    #[test]
    fn only_regular_files_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "one\n").unwrap();
        let (mut tail, mut out) = (Tail::open(&path).unwrap(), Vec::new());
        tail.read(&mut out);
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"two\n").unwrap();
        tail.read(&mut out);
        assert_eq!(out, ["one", "two"]);
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(Tail::open(&dir.path().join("link")).is_err());
        assert!(Tail::open(dir.path()).is_err());
    }

    proptest! {
        #[test]
        fn lines_are_bounded_and_have_no_control_characters(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let (mut lines, mut out) = (Lines::default(), Vec::new());
            lines.feed(&bytes, &mut out);
            lines.end(&mut out);
            // An invalid byte is written as four.
            prop_assert!(out.iter().all(|line| line.len() <= 4 * MOST_LINE + 6 && !line.chars().any(char::is_control)));
        }
    }
}
