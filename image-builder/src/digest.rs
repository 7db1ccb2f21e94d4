//! SHA-256 (and SHA-1, where a format requires it) of files and bytes, as lower-case hexadecimal text.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Size and hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// In bytes.
    pub size: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// Returns the SHA-256 of `bytes`.
#[must_use]
pub fn of_bytes(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes).as_slice())
}

/// Returns the SHA-256 and the length of the file at `path`.
///
/// # Errors
/// The file cannot be opened or read.
pub fn of_file(path: &Path) -> io::Result<(String, u64)> {
    let mut hashing = Hashing::new(io::sink());
    let size = io::copy(&mut File::open(path)?, &mut hashing)?;
    Ok((hashing.finish().0, size))
}

/// A writer or reader that hashes the data passing through it.
pub struct Hashing<T, D = Sha256> {
    inner: T,
    state: D,
}

impl<T> Hashing<T> {
    /// Hashes the data written to or read from `inner` with SHA-256.
    pub fn new(inner: T) -> Self {
        Self { inner, state: Sha256::new() }
    }
}

impl<T> Hashing<T, Sha1> {
    /// Hashes with SHA-1: not secure, but SPDX requires it for files.
    pub fn sha1(inner: T) -> Self {
        Self { inner, state: Sha1::new() }
    }
}

impl<T, D: Digest> Hashing<T, D> {
    /// Returns the hash of all data and the inner value.
    pub fn finish(self) -> (String, T) {
        (hex(self.state.finalize().as_slice()), self.inner)
    }
}

impl<T: Write, D: Digest> Write for Hashing<T, D> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.state.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read, D: Digest> Read for Hashing<T, D> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.state.update(&bytes[..read]);
        Ok(read)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|nibble| char::from(b"0123456789abcdef"[usize::from(nibble)]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The one-block example of FIPS 180-2.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn known_vector_matches_for_all_interfaces() {
        assert_eq!(of_bytes(b"abc"), ABC);
        let mut reading = Hashing::new(&b"abc"[..]);
        io::copy(&mut reading, &mut io::sink()).unwrap();
        assert_eq!(reading.finish().0, ABC);
        // The same example in FIPS 180-1; one pass gives both.
        let mut both = Hashing::new(Hashing::sha1(&b"abc"[..]));
        io::copy(&mut both, &mut io::sink()).unwrap();
        let (sha256, inner) = both.finish();
        assert_eq!((sha256.as_str(), inner.finish().0.as_str()), (ABC, "a9993e364706816aba3e25717850c26c9cd0d89d"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(of_file(&path).unwrap(), (ABC.to_owned(), 3));
    }
}
