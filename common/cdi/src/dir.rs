//! The specifications of a directory, and device lookup by name.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::{Device, DeviceName, Spec, SpecError};

/// Why a directory of specifications could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory or a file in it could not be read.
    #[error("CDI directory: failed to read {path}: {source}")]
    Read {
        /// The directory or file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A file is not a valid specification.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The device is in no specification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown CDI device {name}: {dir} has {known}")]
pub struct UnknownDevice {
    name: DeviceName,
    dir: PathBuf,
    known: String,
}

/// A snapshot of the specifications in a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directory {
    path: PathBuf,
    specs: Vec<Spec>,
}

impl Directory {
    /// Reads every `*.json` in `path` in name order. A missing directory counts as
    /// empty.
    ///
    /// # Errors
    /// The directory or a file cannot be read, or a file is not a valid specification.
    pub fn read(path: &Path) -> Result<Self, DirectoryError> {
        let wrong = |path: &Path, source| DirectoryError::Read { path: path.to_owned(), source };
        let mut files = match fs::read_dir(path) {
            Ok(entries) => entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<Result<Vec<_>, _>>()
                .map_err(|source| wrong(path, source))?,
            Err(source) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(wrong(path, source)),
        };
        files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
        files.sort();
        let mut specs = Vec::with_capacity(files.len());
        for file in files {
            let text = fs::read_to_string(&file).map_err(|source| wrong(&file, source))?;
            specs.push(Spec::from_json(&text, &file)?);
        }
        Ok(Self { path: path.to_owned(), specs })
    }

    /// Finds the device of that name and its specification. If several files have
    /// it, the last one wins.
    ///
    /// # Errors
    /// No specification has the device.
    pub fn find(&self, name: &DeviceName) -> Result<(&Spec, &Device), UnknownDevice> {
        let mut kind = self.specs.iter().rev().filter(|spec| spec.kind == name.kind);
        kind.find_map(|spec| spec.device(&name.device).map(|device| (spec, device))).ok_or_else(|| UnknownDevice {
            name: name.clone(),
            dir: self.path.clone(),
            known: self.known(),
        })
    }

    /// Returns whether a device of that name exists.
    #[must_use]
    pub fn has(&self, name: &DeviceName) -> bool {
        self.find(name).is_ok()
    }

    fn known(&self) -> String {
        let mut names: Vec<String> = self
            .specs
            .iter()
            .flat_map(|spec| spec.devices.iter().map(move |device| format!("{}={}", spec.kind, device.name)))
            .collect();
        if names.is_empty() {
            return "no devices".to_owned();
        }
        let more = names.len().saturating_sub(16);
        names.truncate(16);
        let list = names.join(", ");
        if more == 0 { list } else { format!("{list} and {more} more") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(dir: &Path, file: &str, kind: &str, devices: &[&str]) {
        let spec = Spec {
            cdi_version: crate::SPEC_VERSION.to_owned(),
            kind: kind.to_owned(),
            devices: devices.iter().map(|name| Device { name: (*name).to_owned(), ..Device::default() }).collect(),
            ..Spec::default()
        };
        fs::write(dir.join(file), serde_json::to_string(&spec).unwrap()).unwrap();
    }

    #[test]
    fn unknown_device_error_lists_existing_devices() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "a.json", "nvidia.com/gpu", &["0", "0000:01:00.0"]);
        plant(root.path(), "b.json", "x.y/z", &["q"]);
        fs::write(root.path().join("c.yaml"), "not ours").unwrap();
        let dir = Directory::read(root.path()).unwrap();
        assert!(dir.has(&"nvidia.com/gpu=0000:01:00.0".parse().unwrap()));
        let error = dir.find(&"nvidia.com/gpu=1".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("nvidia.com/gpu=1") && error.contains("x.y/z=q"), "{error}");
    }

    #[test]
    fn missing_directory_is_empty_and_malformed_file_is_named() {
        let root = tempfile::tempdir().unwrap();
        let dir = Directory::read(&root.path().join("none")).unwrap();
        assert!(dir.find(&"a.b/c=0".parse().unwrap()).unwrap_err().to_string().contains("no devices"));
        fs::write(root.path().join("a.json"), "{").unwrap();
        assert!(Directory::read(root.path()).unwrap_err().to_string().contains("a.json"));
    }
}
