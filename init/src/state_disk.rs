//! The state disk of a service VM: an ext4 file system that the host creates (`firstlight
//! service-vm define`) and that survives restarts.
//!
//! The disk has the only record of the tenants' partitions and of the GPUs that are excluded from
//! allocation. It does not preserve the fabric: tenants lose the fabric when this VM stops.

use std::fs;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount as mount_there};

use crate::disks;
use crate::root::Root;

/// The disk's serial number.
pub const SERIAL: &str = "firstlight-state";

/// The mount point.
pub const DIRECTORY: &str = "/var/lib/firstlight";

/// Errors of mounting the state disk.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("disks {0} all have the serial number {SERIAL}; have the host plug in one")]
    Several(String),
    #[error("{DIRECTORY}: {0}; add the directory to the image")]
    Directory(std::io::Error),
    #[error("cannot mount {disk} on {DIRECTORY}: {error}{hint}")]
    Mount { disk: String, error: Errno, hint: &'static str },
}

fn hint(error: Errno) -> &'static str {
    match error {
        Errno::NODEV => "; the kernel lacks ext4: add the module to the image",
        Errno::INVAL | Errno::UCLEAN | Errno::IO => {
            "; it has no ext4 file system, or a damaged one: check its file with e2fsck on the host, or save a copy and create it again"
        }
        _ => "",
    }
}

/// Returns the device node of the state disk, if the disk exists.
fn find(root: &Root) -> Result<Option<String>, Error> {
    let mut found = disks::with_serial(root, SERIAL);
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => Err(Error::Several(found.join(", "))),
    }
}

fn mounted(root: &Root) -> Result<String, Error> {
    let disk = find(root)?;
    let there = root.path(DIRECTORY);
    // The image has the directory if its root is read-only.
    if !Path::new(&there).is_dir() {
        fs::create_dir_all(&there).map_err(Error::Directory)?;
    }
    let flags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
    let (kind, data) = match disk {
        // Remounted read-only on a file system error, so that writers get EROFS.
        Some(_) => (c"ext4", c"errors=remount-ro"),
        None => (c"tmpfs", c"mode=0700,size=16m"),
    };
    let source = disk.as_deref().unwrap_or("tmpfs");
    match mount_there(source, &there, kind, flags, Some(data)) {
        Ok(()) | Err(Errno::BUSY) => {}
        Err(error) => return Err(Error::Mount { disk: source.to_owned(), error, hint: hint(error) }),
    }
    Ok(match disk {
        Some(disk) => format!("{disk} at {DIRECTORY}"),
        None => format!(
            "no disk has the serial number {SERIAL}: when this machine ends it is forgotten who had which partition; have the \
             host plug one in (ext4, virtio-blk)"
        ),
    })
}

/// Mounts the state disk, or a tmpfs if the disk does not exist; returns a description of the
/// mount.
///
/// # Errors
/// Several disks have the serial number, or the disk has no file system that can be mounted.
pub fn mount(root: &Root) -> Result<String, String> {
    mounted(root).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(root: &Root, disk: &str, serial: &str) {
        let path = root.path(&format!("/sys/block/{disk}/serial"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, serial).unwrap();
    }

    #[test]
    fn one_state_disk_is_used_and_two_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert_eq!(find(&root).unwrap(), None);
        plant(&root, "vda", "extension-gpu");
        plant(&root, "vdb", "firstlight-state-2");
        assert_eq!(find(&root).unwrap(), None);
        plant(&root, "vdc", SERIAL);
        assert_eq!(find(&root).unwrap().as_deref(), Some("/dev/vdc"));
        plant(&root, "vdd", SERIAL);
        let error = mount(&root).unwrap_err();
        assert!(error.contains("disks /dev/vdc, /dev/vdd all have"), "{error}");
        assert!(!root.path(DIRECTORY).exists(), "the directory is not created without a disk");
    }

    #[test]
    fn failed_mount_has_a_hint() {
        assert!(hint(Errno::INVAL).contains("e2fsck") && hint(Errno::NODEV).contains("ext4"));
        assert_eq!(hint(Errno::PERM), "");
    }
}
