//! OCI image layouts: directories, and tar archives of them.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use oci_spec::image::{Descriptor, OciLayout};

use super::archive::Archive;
use super::blob_source::{BlobSource, RootDocument, check_document_size, copy_local, verify_document};
use super::error::{COPY_AGAIN, PullError, RECREATE, file_error, invalid, too_large};
use super::limits;
use super::staging::{LAYOUT_FILE, Staging};

const READ_LAYOUT: &str = "read the image layout";

/// A layout, and the name or digest of the image to select from it.
#[derive(Debug)]
pub(crate) struct Layout {
    storage: Storage,
    path: PathBuf,
    reference: Option<String>,
}

#[derive(Debug)]
enum Storage {
    Directory,
    Archive(Archive),
}

impl Layout {
    /// Opens a directory or an archive; a compressed archive is decompressed to a
    /// temporary file in `parts`.
    pub(crate) fn open(path: &Path, reference: Option<&str>, parts: &Path) -> Result<Self, PullError> {
        let metadata = fs::metadata(path).map_err(file_error("open", path))?;
        let storage =
            if metadata.is_dir() { Storage::Directory } else { Storage::Archive(Archive::open(path, parts)?) };
        let layout = Self { storage, path: path.to_owned(), reference: reference.map(str::to_owned) };
        for name in [LAYOUT_FILE, "index.json"] {
            if !layout.has(name) {
                let advice = "an OCI image layout has oci-layout, index.json and blobs/; an archive of `docker save` is docker-archive:PATH";
                return Err(invalid(layout.name(), READ_LAYOUT, format!("it has no {name}"), advice));
            }
        }
        Ok(layout)
    }

    fn has(&self, name: &str) -> bool {
        match &self.storage {
            Storage::Directory => self.path.join(name).is_file(),
            Storage::Archive(archive) => archive.has(name),
        }
    }

    fn blob_path(descriptor: &Descriptor) -> String {
        format!("blobs/sha256/{}", descriptor.digest().digest())
    }

    /// Reads a JSON document.
    fn read(&self, name: &str) -> Result<Vec<u8>, PullError> {
        if let Storage::Archive(archive) = &self.storage {
            return archive.read_document(name);
        }
        let path = self.path.join(name);
        let mut bytes = Vec::new();
        self.open_file(name)?.take(limits::DOCUMENT + 1).read_to_end(&mut bytes).map_err(file_error("read", &path))?;
        if bytes.len() as u64 > limits::DOCUMENT {
            let reason = too_large(bytes.len() as u64);
            return Err(invalid(path.display().to_string(), READ_LAYOUT, reason, RECREATE));
        }
        Ok(bytes)
    }

    /// Opens a file of the directory. Its type is checked first, because opening a pipe
    /// blocks.
    fn open_file(&self, name: &str) -> Result<File, PullError> {
        let path = self.path.join(name);
        let missing = |reason: String| invalid(path.display().to_string(), READ_LAYOUT, reason, COPY_AGAIN);
        let metadata = fs::metadata(&path).map_err(|error| missing(error.to_string()))?;
        if !metadata.is_file() {
            return Err(missing("it is not a regular file".to_owned()));
        }
        File::open(&path).map_err(|error| missing(error.to_string()))
    }
}

impl BlobSource for Layout {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn root_document(&mut self) -> Result<RootDocument, PullError> {
        let layout: Option<OciLayout> = serde_json::from_slice(&self.read(LAYOUT_FILE)?).ok();
        if !layout.is_some_and(|layout| layout.image_layout_version().starts_with("1.")) {
            let reason = "its oci-layout does not state version 1 of image layouts";
            return Err(invalid(self.name(), READ_LAYOUT, reason, RECREATE));
        }
        Ok(RootDocument {
            object: format!("{}: index.json", self.name()),
            bytes: self.read("index.json")?,
            media_type: None,
            reference: self.reference.clone(),
        })
    }

    fn read_document(&mut self, descriptor: &Descriptor) -> Result<Vec<u8>, PullError> {
        let path = Self::blob_path(descriptor);
        let object = format!("{}: {path}", self.name());
        check_document_size(descriptor, &object)?;
        verify_document(self.read(&path)?, descriptor, &object)
    }

    fn fetch_blob(&mut self, descriptor: &Descriptor, staging: &mut Staging) -> Result<(), PullError> {
        let path = Self::blob_path(descriptor);
        match &self.storage {
            Storage::Directory => copy_local(&mut self.open_file(&path)?, descriptor, &self.name(), staging),
            Storage::Archive(archive) => {
                copy_local(&mut archive.open_entry(&path)?.0, descriptor, &self.name(), staging)
            }
        }
    }
}
