//! The interface to the places from which images are read.

use std::io::{self, Read, Write};

use oci_spec::image::Descriptor;

use super::error::{COPY_AGAIN, PullError, RECREATE, file_error, invalid, too_large};
use super::limits;
use super::staging::{PartialBlob, Staging};

/// The index or manifest from which the selection of an image starts.
pub(crate) struct RootDocument {
    /// Its name in messages.
    pub(crate) object: String,
    pub(crate) bytes: Vec<u8>,
    /// The media type with which it was transferred.
    pub(crate) media_type: Option<String>,
    /// The name or digest of the image to select from it.
    pub(crate) reference: Option<String>,
}

/// A registry or an image layout.
pub(crate) trait BlobSource {
    /// Returns the name of the source for messages.
    fn name(&self) -> String;

    /// Reads the first document.
    fn root_document(&mut self) -> Result<RootDocument, PullError>;

    /// Reads and verifies an index or a manifest.
    fn read_document(&mut self, descriptor: &Descriptor) -> Result<Vec<u8>, PullError>;

    /// Copies a blob to the staging directory and verifies it.
    fn fetch_blob(&mut self, descriptor: &Descriptor, staging: &mut Staging) -> Result<(), PullError>;
}

/// Why [`copy`] ended early.
#[derive(Debug)]
pub(crate) enum CopyError {
    /// The source failed.
    Read(io::Error),
    /// The destination failed, or the source has more bytes than it should.
    Write(io::Error),
}

/// Copies all bytes of a reader to a blob.
pub(crate) fn copy(reader: &mut dyn Read, blob: &mut PartialBlob) -> Result<(), CopyError> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => blob.write_all(&buffer[..count]).map_err(CopyError::Write)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CopyError::Read(error)),
        }
    }
}

/// Copies a blob from a local file to the staging directory and verifies it.
pub(crate) fn copy_local(
    reader: &mut dyn Read,
    descriptor: &Descriptor,
    object: &str,
    staging: &mut Staging,
) -> Result<(), PullError> {
    let mut blob = staging.new_blob(descriptor.size())?;
    let object_of_blob = || format!("{object}: {}", descriptor.digest());
    copy(reader, &mut blob).map_err(|error| match error {
        CopyError::Write(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            invalid(object_of_blob(), "verify the blob", format!("it has {error}"), COPY_AGAIN)
        }
        CopyError::Write(error) => file_error("write", &staging.parts())(error),
        CopyError::Read(error) => invalid(object_of_blob(), "read the blob", error.to_string(), COPY_AGAIN),
    })?;
    staging.finish_blob(blob, descriptor, object)
}

/// Refuses an index or a manifest above the size limit, before it is read.
pub(crate) fn check_document_size(descriptor: &Descriptor, object: &str) -> Result<(), PullError> {
    if descriptor.size() > limits::DOCUMENT {
        return Err(invalid(object, "read the manifest", too_large(descriptor.size()), RECREATE));
    }
    Ok(())
}

/// Compares size and digest of an index or a manifest with its descriptor.
pub(crate) fn verify_document(bytes: Vec<u8>, descriptor: &Descriptor, object: &str) -> Result<Vec<u8>, PullError> {
    let digest = format!("sha256:{}", firstlight_image::digest::of_bytes(&bytes));
    if bytes.len() as u64 == descriptor.size() && digest == descriptor.digest().as_ref() {
        return Ok(bytes);
    }
    let reason = format!(
        "it has {} bytes and {digest}; expected {} bytes and {}",
        bytes.len(),
        descriptor.size(),
        descriptor.digest()
    );
    Err(invalid(object, "verify the manifest", reason, COPY_AGAIN))
}
