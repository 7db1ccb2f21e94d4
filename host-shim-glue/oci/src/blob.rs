//! Blobs: content addressed by digest.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use oci_spec::image::Descriptor;
use sha2::{Digest as _, Sha256};

use crate::OciError;

/// Maximum size of a JSON document, bytes; typical ones have a few kilobytes.
const MAX_DOCUMENT: u64 = 4 << 20;

/// Returns the SHA-256 of `bytes` as 64 hexadecimal digits.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn path_of(layout: &Path, descriptor: &Descriptor) -> Result<PathBuf, OciError> {
    let digest = descriptor.digest().to_string();
    let wrong = |reason: &str| OciError::Blob { digest: digest.clone(), reason: reason.to_owned() };
    let hex = digest.strip_prefix("sha256:").ok_or_else(|| wrong("only sha256 is supported"))?;
    // The digest becomes a file name, so it must be a valid one.
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(wrong("not 64 hexadecimal digits"));
    }
    Ok(layout.join("blobs/sha256").join(hex))
}

/// Verifies the size and digest of a blob and opens it.
pub(crate) fn open(layout: &Path, descriptor: &Descriptor) -> Result<File, OciError> {
    let path = path_of(layout, descriptor)?;
    let digest = descriptor.digest().to_string();
    let mut file = File::open(&path).map_err(OciError::file(&path))?;
    let size = file.metadata().map_err(OciError::file(&path))?.len();
    if size != descriptor.size() {
        let reason = format!("size is {size} bytes, expected {}", descriptor.size());
        return Err(OciError::Blob { digest, reason });
    }
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = file.read(&mut buffer).map_err(OciError::file(&path))?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
    }
    let actual = format!("sha256:{}", hex::encode(hasher.finalize()));
    if actual != digest {
        return Err(OciError::Blob { digest, reason: format!("digest mismatch: content is {actual}") });
    }
    io::Seek::rewind(&mut file).map_err(OciError::file(&path))?;
    Ok(file)
}

/// Reads and verifies a JSON blob.
pub(crate) fn document(layout: &Path, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>), OciError> {
    let path = path_of(layout, descriptor)?;
    if descriptor.size() > MAX_DOCUMENT {
        let reason = format!("JSON document of {} bytes exceeds the limit of {MAX_DOCUMENT}", descriptor.size());
        return Err(OciError::Blob { digest: descriptor.digest().to_string(), reason });
    }
    let mut bytes = Vec::new();
    open(layout, descriptor)?.read_to_end(&mut bytes).map_err(OciError::file(&path))?;
    Ok((path, bytes))
}
