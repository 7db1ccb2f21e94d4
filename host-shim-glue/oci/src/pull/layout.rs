//! OCI image layouts: directories, and tar archives of them.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::archive::Archive;
use super::document::{Descriptor, too_large};
use super::error::{COPY_AGAIN, Error, OTHER_TOOL, input, io_error};
use super::limits;
use super::origin::{Origin, Root, check_document, copy_local, verified};
use super::staging::{MARK, Staging};

/// A layout and which of its images is wanted.
#[derive(Debug)]
pub(crate) struct Layout {
    place: Place,
    path: PathBuf,
    reference: Option<String>,
}

#[derive(Debug)]
enum Place {
    Directory,
    Archive(Archive),
}

impl Layout {
    /// Opens a directory or an archive; `parts` is for one that is packed.
    pub(crate) fn open(path: &Path, reference: Option<&str>, parts: &Path) -> Result<Self, Error> {
        let data = fs::metadata(path).map_err(io_error("open", path))?;
        let place = if data.is_dir() { Place::Directory } else { Place::Archive(Archive::open(path, parts)?) };
        let layout = Self { place, path: path.to_owned(), reference: reference.map(str::to_owned) };
        for name in [MARK, "index.json"] {
            let there = match &layout.place {
                Place::Directory => path.join(name).is_file(),
                Place::Archive(archive) => archive.has(name),
            };
            if !there {
                let why = format!("it has no {name}");
                let next = "an OCI image layout has oci-layout, index.json and blobs/; what `docker save` writes is docker-archive:PATH";
                return Err(input(path.display().to_string(), "read the image layout", why, next));
            }
        }
        Ok(layout)
    }

    fn name(blob: &Descriptor) -> String {
        format!("blobs/sha256/{}", blob.digest.hex())
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        match &self.place {
            Place::Archive(archive) => archive.document(name),
            Place::Directory => {
                let mut bytes = Vec::new();
                let path = self.path.join(name);
                let size = self.file(name)?.take(limits::DOCUMENT + 1).read_to_end(&mut bytes);
                let size = size.map_err(io_error("read", &path))? as u64;
                if size > limits::DOCUMENT {
                    return Err(input(
                        path.display().to_string(),
                        "read the image layout",
                        too_large(size),
                        OTHER_TOOL,
                    ));
                }
                Ok(bytes)
            }
        }
    }

    /// A file of the directory. A pipe would be waited for, so it is looked at first.
    fn file(&self, name: &str) -> Result<File, Error> {
        let path = self.path.join(name);
        let missing = |why: String| input(path.display().to_string(), "read the image layout", why, COPY_AGAIN);
        let data = fs::metadata(&path).map_err(|error| missing(error.to_string()))?;
        if !data.is_file() {
            return Err(missing("it is no file".to_owned()));
        }
        File::open(&path).map_err(|error| missing(error.to_string()))
    }
}

impl Origin for Layout {
    fn root(&mut self) -> Result<Root, Error> {
        let mark = self.read(MARK)?;
        let version: Option<serde_json::Value> = serde_json::from_slice(&mark).ok();
        let version =
            version.as_ref().and_then(|mark| mark.get("imageLayoutVersion")).and_then(|version| version.as_str());
        if !version.is_some_and(|version| version.starts_with("1.")) {
            let why = "its oci-layout names no version 1 of image layouts";
            return Err(input(self.path.display().to_string(), "read the image layout", why, OTHER_TOOL));
        }
        Ok(Root {
            object: format!("{}: index.json", self.path.display()),
            bytes: self.read("index.json")?,
            media_type: None,
            reference: self.reference.clone(),
        })
    }

    fn object(&self, _: &Descriptor) -> String {
        self.path.display().to_string()
    }

    fn fetch(&mut self, blob: &Descriptor, staging: &mut Staging) -> Result<(), Error> {
        let (name, object) = (Self::name(blob), self.object(blob));
        match &self.place {
            Place::Directory => copy_local(&mut self.file(&name)?, blob, &object, staging),
            Place::Archive(archive) => copy_local(&mut archive.open_entry(&name)?.0, blob, &object, staging),
        }
    }

    fn document(&mut self, named: &Descriptor) -> Result<Vec<u8>, Error> {
        let name = Self::name(named);
        let object = format!("{}: {name}", self.path.display());
        check_document(named, &object)?;
        verified(self.read(&name)?, named, &object)
    }
}
