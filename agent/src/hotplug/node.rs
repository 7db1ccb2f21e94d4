//! Nodes of block devices below `/dev`.

use std::fs;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// Major and minor number of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number {
    /// The driver's.
    pub major: u32,
    /// The driver's number for the device.
    pub minor: u32,
}

impl Number {
    /// The number in the file `dev` of a device's directory, e.g. `254:0`.
    #[must_use]
    pub fn of(device: &Path) -> Option<Self> {
        let text = fs::read_to_string(device.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

/// Says what keeps a block device's node from being used; nothing if it can be.
pub(super) type Check = fn(&Path, Number) -> Result<(), String>;

/// The kernel makes the node and the directory in sysfs shortly before the device
/// can be opened, and tells of it after that: so it is opened once. Blocks
/// while the kernel reads the partition table.
pub(super) fn can_be_used(node: &Path, number: Number) -> Result<(), String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let Number { major, minor } = number;
    match rustix::fs::openat(CWD, node, flags, Mode::empty()).and_then(|file| rustix::fs::fstat(&file)) {
        Ok(found) if FileType::from_raw_mode(found.st_mode) != FileType::BlockDevice => {
            Err(format!("{} is no block device", node.display()))
        }
        Ok(found) if found.st_rdev != rustix::fs::makedev(major, minor) => {
            Err(format!("{} is not device {major}:{minor}", node.display()))
        }
        Err(error @ (Errno::NOENT | Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM)) => {
            Err(format!("{} cannot be opened yet: {error}", node.display()))
        }
        // It is there; what else keeps somebody from opening it is not a matter of waiting.
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_and_nonsense_is_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Number::of(dir.path()), None);
        fs::write(dir.path().join("dev"), "254:16\n").unwrap();
        assert_eq!(Number::of(dir.path()), Some(Number { major: 254, minor: 16 }));
        fs::write(dir.path().join("dev"), "254\n").unwrap();
        assert_eq!(Number::of(dir.path()), None);
    }

    #[test]
    fn what_is_no_block_device_or_not_there_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("vda");
        let number = Number { major: 254, minor: 0 };
        assert!(can_be_used(&node, number).unwrap_err().contains("cannot be opened"));
        fs::write(&node, "").unwrap();
        assert!(can_be_used(&node, number).unwrap_err().contains("no block device"));
    }
}
