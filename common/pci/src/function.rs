//! The functions that sysfs lists.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{Address, Kind, kind_of};

/// One PCI function as sysfs shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, sub-class and programming interface: 24 bits.
    pub class: u32,
    /// The bound driver's name, if there is one.
    pub driver: Option<String>,
}

impl Function {
    /// What this function is to Firstlight.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        kind_of(self.vendor, self.class)
    }
}

/// Why the PCI bus could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The folder or a file in it could not be read.
    #[error("PCI scan: cannot read {path}: {source}; is sysfs mounted?")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file holds something other than a hexadecimal number.
    #[error("PCI scan: {path} holds {text:?}, not a hexadecimal number")]
    Number {
        /// What was read.
        path: PathBuf,
        /// What it held.
        text: String,
    },
}

fn number(path: PathBuf) -> Result<u32, ScanError> {
    let text = fs::read_to_string(&path).map_err(|source| ScanError::Read { path: path.clone(), source })?;
    let digits = text.trim().trim_start_matches("0x");
    u32::from_str_radix(digits, 16)
        .map_err(|_| ScanError::Number { path, text: text.trim().chars().take(40).collect() })
}

fn id(path: PathBuf) -> Result<u16, ScanError> {
    let value = number(path.clone())?;
    u16::try_from(value).map_err(|_| ScanError::Number { path, text: format!("{value:#x}") })
}

fn read(folder: &Path, address: Address) -> Result<Function, ScanError> {
    let driver = fs::read_link(folder.join("driver"))
        .ok()
        .and_then(|target| target.file_name().map(|name| name.to_string_lossy().into_owned()));
    Ok(Function {
        address,
        vendor: id(folder.join("vendor"))?,
        device: id(folder.join("device"))?,
        class: number(folder.join("class"))?,
        driver,
    })
}

/// All PCI functions below `sysfs` (normally `/sys`), sorted by address.
///
/// A guest without a PCI bus has none: an empty list, not an error. A function
/// that disappears while it is read (hot-unplug) is left out.
///
/// # Errors
/// The bus folder cannot be read, or a file in it holds no number.
pub fn scan(sysfs: &Path) -> Result<Vec<Function>, ScanError> {
    let bus = sysfs.join("bus/pci/devices");
    let entries = match fs::read_dir(&bus) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ScanError::Read { path: bus, source }),
    };
    let mut functions = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| ScanError::Read { path: bus.clone(), source })?;
        let Ok(address) = entry.file_name().to_string_lossy().parse::<Address>() else { continue };
        match read(&entry.path(), address) {
            Ok(function) => functions.push(function),
            Err(ScanError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    functions.sort_by_key(|function| function.address);
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(root: &Path, address: &str, files: &[(&str, &str)]) {
        let folder = root.join("bus/pci/devices").join(address);
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn lists_functions_in_bus_order_with_their_kind() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:0a:00.0", &[("vendor", "0x10de\n"), ("device", "0x2330\n"), ("class", "0x030200\n")]);
        plant(root.path(), "0000:02:00.0", &[("vendor", "0x10de\n"), ("device", "0x22a3\n"), ("class", "0x068000\n")]);
        std::os::unix::fs::symlink("../../drivers/nvidia", root.path().join("bus/pci/devices/0000:0a:00.0/driver"))
            .unwrap();
        let functions = scan(root.path()).unwrap();
        let kinds: Vec<_> = functions.iter().map(|f| (f.address.to_string(), f.kind(), f.driver.clone())).collect();
        assert_eq!(
            kinds,
            [
                ("0000:02:00.0".to_owned(), Some(Kind::NvSwitch), None),
                ("0000:0a:00.0".to_owned(), Some(Kind::Gpu), Some("nvidia".to_owned())),
            ]
        );
    }

    #[test]
    fn no_bus_is_no_function() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(scan(root.path()).unwrap(), []);
    }

    #[test]
    fn half_removed_function_is_left_out_and_rubbish_is_named() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:01:00.0", &[("vendor", "0x10de\n")]);
        assert_eq!(scan(root.path()).unwrap(), []);
        plant(root.path(), "0000:01:00.0", &[("device", "rubbish\n"), ("class", "0x030200\n")]);
        let error = scan(root.path()).unwrap_err().to_string();
        assert!(error.contains("0000:01:00.0/device") && error.contains("rubbish"), "{error}");
    }
}
