//! Blobs: content addressed by digest.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use firstlight_image::digest::{self, Hashing};
use oci_spec::image::Descriptor;

use crate::OciError;

/// Maximum size of a JSON document, bytes; typical ones have a few kilobytes.
const MAX_DOCUMENT: u64 = 4 << 20;

fn path_of(layout: &Path, descriptor: &Descriptor) -> Result<PathBuf, OciError> {
    // oci-spec accepts 64 hexadecimal digits for SHA-256 only, so this is a plain file name.
    let hex = descriptor.as_digest_sha256().ok_or_else(|| OciError::Blob {
        digest: descriptor.digest().to_string(),
        reason: "only sha256 is supported".to_owned(),
    })?;
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
    let mut hashing = Hashing::new(&mut file);
    io::copy(&mut hashing, &mut io::sink()).map_err(OciError::file(&path))?;
    compare(descriptor, hashing.finish().0)?;
    io::Seek::rewind(&mut file).map_err(OciError::file(&path))?;
    Ok(file)
}

/// Compares the SHA-256 of bytes that were read with a descriptor.
pub(crate) fn compare(descriptor: &Descriptor, sha256: String) -> Result<(), OciError> {
    let (digest, actual) = (descriptor.digest().to_string(), format!("sha256:{sha256}"));
    if actual == digest {
        return Ok(());
    }
    Err(OciError::Blob { digest, reason: format!("digest mismatch: content is {actual}") })
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
    // Again, because the file may have changed since it was opened.
    compare(descriptor, digest::of_bytes(&bytes))?;
    Ok((path, bytes))
}
