//! Checks block device nodes below `/dev`.

use std::fs;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// Major and minor number of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number {
    /// Major number: the driver.
    pub major: u32,
    /// Minor number: the device.
    pub minor: u32,
}

impl Number {
    /// Reads the number from the file `dev` of a device's directory, e.g. `254:0`.
    #[must_use]
    pub fn of(device: &Path) -> Option<Self> {
        let text = fs::read_to_string(device.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

/// Returns an error that says why a block device node is not usable yet.
pub(super) type Check = fn(&Path, Number) -> Result<(), String>;

/// Opens the node once: the kernel creates node and sysfs directory shortly before the device can
/// be opened, and sends a uevent after that. Blocks while the kernel reads the partition table.
pub(super) fn check_usable(node: &Path, number: Number) -> Result<(), String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let Number { major, minor } = number;
    match rustix::fs::openat(CWD, node, flags, Mode::empty()).and_then(|file| rustix::fs::fstat(&file)) {
        Ok(found) if FileType::from_raw_mode(found.st_mode) != FileType::BlockDevice => {
            Err(format!("{} is not a block device", node.display()))
        }
        Ok(found) if found.st_rdev != rustix::fs::makedev(major, minor) => {
            Err(format!("{} is not device {major}:{minor}", node.display()))
        }
        Err(error @ (Errno::NOENT | Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM)) => {
            Err(format!("{} cannot be opened yet: {error}", node.display()))
        }
        // Present; other open errors do not change by waiting.
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_device_number_is_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Number::of(dir.path()), None);
        fs::write(dir.path().join("dev"), "254:16\n").unwrap();
        assert_eq!(Number::of(dir.path()), Some(Number { major: 254, minor: 16 }));
        fs::write(dir.path().join("dev"), "254\n").unwrap();
        assert_eq!(Number::of(dir.path()), None);
    }

    #[test]
    fn missing_node_or_other_file_type_is_not_usable() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("vda");
        let number = Number { major: 254, minor: 0 };
        assert!(check_usable(&node, number).unwrap_err().contains("cannot be opened"));
        fs::write(&node, "").unwrap();
        assert!(check_usable(&node, number).unwrap_err().contains("not a block device"));
    }
}
