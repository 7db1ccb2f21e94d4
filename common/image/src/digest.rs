//! SHA-256 of files and bytes, as lower-case hexadecimal text.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Size and hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// In bytes.
    pub size: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// Returns the SHA-256 of `bytes`.
#[must_use]
pub fn of_bytes(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
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

impl<T, D: Digest> Hashing<T, D> {
    /// Hashes the data written to or read from `inner` with another algorithm, such as SHA-1.
    pub fn with_algorithm(inner: T) -> Self {
        Self { inner, state: D::new() }
    }

    /// Returns the hash of all data and the inner value.
    pub fn finish(self) -> (String, T) {
        (hex::encode(self.state.finalize()), self.inner)
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
        let mut writing = Hashing::<_, Sha256>::with_algorithm(Vec::new());
        writing.write_all(b"abc").unwrap();
        assert_eq!(writing.finish(), (ABC.to_owned(), b"abc".to_vec()));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(of_file(&path).unwrap(), (ABC.to_owned(), 3));
    }
}
