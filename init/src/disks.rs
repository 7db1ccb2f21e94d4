//! Finds disks by their serial number, and their partitions, in sysfs.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use firstlight_verity::extension;

use crate::root::Root;

/// The directory of block devices.
const BLOCK: &str = "/sys/block";

/// Maximum number of bytes read of a file: a serial number has 20 on virtio-blk.
const MOST: u64 = 64;

/// A disk whose serial number marks it as an extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name, such as `vda`.
    pub name: String,
    /// The name of the extension as set by the host (not validated).
    pub extension: String,
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\0']).to_owned())
}

/// Returns the kernel's names of all disks.
#[must_use]
pub fn all(root: &Root) -> Vec<String> {
    names(&root.path(BLOCK))
}

/// Returns whether any disk has a serial number. Unlike [`extensions`] it does no request to a
/// disk: it checks only whether the files exist.
#[must_use]
pub fn any_serial(root: &Root) -> bool {
    all(root).iter().any(|disk| root.path(BLOCK).join(disk).join("serial").exists())
}

/// Returns the disks that are marked as extensions.
#[must_use]
pub fn extensions(root: &Root) -> Vec<Disk> {
    let of = |name: String| {
        let serial = text(&root.path(BLOCK).join(&name).join("serial"))?;
        let extension = extension::name_from_serial(&serial)?.to_owned();
        Some(Disk { name, extension })
    };
    all(root).into_iter().filter_map(of).collect()
}

/// Returns the device nodes of disks with exactly this serial number.
#[must_use]
pub fn with_serial(root: &Root, serial: &str) -> Vec<String> {
    let is = |name: &String| text(&root.path(BLOCK).join(name).join("serial")).is_some_and(|it| it == serial);
    all(root).into_iter().filter(is).map(|name| format!("/dev/{name}")).collect()
}

/// Returns the device node of a disk's partition.
#[must_use]
pub fn partition(root: &Root, disk: &str, number: u32) -> Option<String> {
    let dir = root.path(BLOCK).join(disk);
    let is = |name: &String| text(&dir.join(name).join("partition")).is_some_and(|it| it == number.to_string());
    names(&dir).into_iter().find(is).map(|name| format!("/dev/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(root: &Root, path: &str, text: &[u8]) {
        let path = root.path(&format!("{BLOCK}/{path}"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn disks_are_found_by_serial_number_and_partitions_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert!(extensions(&root).is_empty() && !any_serial(&root));
        fs::create_dir_all(root.path("/sys/block/sda")).unwrap();
        assert!(!any_serial(&root));
        plant(&root, "vda/serial", b"some-disk");
        plant(&root, "vdb/serial", b"extension-gpu");
        plant(&root, "vdb/vdb1/partition", b"1\n");
        plant(&root, "vdb/vdb2/partition", b"2\n");
        plant(&root, "vdc/serial", b"extension-\xff\n");
        plant(&root, "vdd/serial", &b"x".repeat(1 << 12));
        assert!(any_serial(&root));
        let disk = |name: &str, extension: &str| Disk { name: name.to_owned(), extension: extension.to_owned() };
        assert_eq!(extensions(&root), [disk("vdb", "gpu"), disk("vdc", "\u{fffd}")]);
        assert_eq!(partition(&root, "vdb", 2).as_deref(), Some("/dev/vdb2"));
        assert_eq!((partition(&root, "vdb", 3), partition(&root, "vda", 1)), (None, None));
        assert_eq!(with_serial(&root, "some-disk"), ["/dev/vda"]);
        assert!(with_serial(&root, "some").is_empty());
        assert_eq!(all(&root), ["sda", "vda", "vdb", "vdc", "vdd"]);
    }
}
