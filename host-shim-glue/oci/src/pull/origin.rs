//! What an image is read from, whatever that is.

use std::io::{self, Read, Write};

use super::document::Descriptor;
use super::error::{COPY_AGAIN, Error, input, io_error};
use super::limits;
use super::staging::{Blob, Staging};

/// An index or manifest with which all begins.
pub(crate) struct Root {
    /// For messages.
    pub(crate) object: String,
    pub(crate) bytes: Vec<u8>,
    /// As which it came.
    pub(crate) media_type: Option<String>,
    /// Which of its images is meant, where a name was given.
    pub(crate) reference: Option<String>,
}

/// A place that has blobs.
pub(crate) trait Origin {
    /// The first document.
    fn root(&mut self) -> Result<Root, Error>;

    /// What a blob is called in messages.
    fn object(&self, blob: &Descriptor) -> String;

    /// Brings a blob into the staging directory, verified.
    fn fetch(&mut self, blob: &Descriptor, staging: &mut Staging) -> Result<(), Error>;

    /// An index or manifest that another one names, verified.
    fn document(&mut self, named: &Descriptor) -> Result<Vec<u8>, Error>;
}

/// What ended a copy too early.
#[derive(Debug)]
pub(crate) enum Interrupted {
    /// The source.
    Source(io::Error),
    /// The disk, or more bytes than there should be.
    Disk(io::Error),
}

/// Copies all of a reader into a blob.
pub(crate) fn copy(reader: &mut dyn Read, blob: &mut Blob) -> Result<(), Interrupted> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => blob.write_all(&buffer[..count]).map_err(Interrupted::Disk)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Interrupted::Source(error)),
        }
    }
}

/// Brings a blob from a file of this machine.
pub(crate) fn copy_local(
    reader: &mut dyn Read,
    wanted: &Descriptor,
    object: &str,
    staging: &mut Staging,
) -> Result<(), Error> {
    let mut blob = staging.blob(wanted.size)?;
    copy(reader, &mut blob).map_err(|interrupted| match interrupted {
        Interrupted::Disk(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            input(format!("{object}: {}", wanted.digest), "verify the blob", format!("it has {error}"), COPY_AGAIN)
        }
        Interrupted::Disk(error) => io_error("write", &staging.parts())(error),
        Interrupted::Source(error) => {
            input(format!("{object}: {}", wanted.digest), "read the blob", error.to_string(), COPY_AGAIN)
        }
    })?;
    staging.finish_blob(blob, wanted, object)
}

/// Refuses a document that is too large before any of it is read.
pub(crate) fn check_document(named: &Descriptor, object: &str) -> Result<(), Error> {
    if named.size > limits::DOCUMENT {
        let why = super::document::too_large(named.size);
        return Err(input(object, "read the manifest", why, super::error::OTHER_TOOL));
    }
    Ok(())
}

/// Judges a document that was read.
pub(crate) fn verified(bytes: Vec<u8>, named: &Descriptor, object: &str) -> Result<Vec<u8>, Error> {
    let hash = firstlight_image::digest::of_bytes(&bytes);
    if bytes.len() as u64 == named.size && hash == named.digest.hex() {
        return Ok(bytes);
    }
    let why = format!(
        "it has {} bytes and sha256:{hash}; expected were {} bytes and {}",
        bytes.len(),
        named.size,
        named.digest
    );
    Err(input(object, "verify the manifest", why, COPY_AGAIN))
}
