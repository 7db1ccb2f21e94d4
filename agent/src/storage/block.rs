//! Drivers of block devices: mounts their file system, or binds the device node itself.

use std::path::Path;

use ttrpc::Code;

use super::mount::{Detached, Mounted};
use super::options::Options;
use super::safe_path::{self, Kind, MountPoint};
use super::{Job, Resources, fs_group};
use crate::error::{Error, Result};

/// File systems on block devices. Others, such as `proc`, are rejected (untrusted input).
const FILE_SYSTEMS: &[&str] = &["ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "erofs", "squashfs", "iso9660", "vfat"];

/// Unsupported driver options: part of their text, and the alternative. Ignoring one would be
/// unsafe.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("encryption_key=", "encrypted volumes are not implemented: use a plain block volume, or a memory-backed emptyDir"),
    (
        "create_filesystem",
        "file systems are not created in the guest: create it on the host (mkfs) before it attaches the disk",
    ),
    ("verity", "the guest does not verify volumes: verify the image on the host, or bake it into the guest's image"),
];

pub(super) fn check(driver_options: &[String]) -> Result<()> {
    for option in driver_options {
        if let Some((_, alternative)) = UNSUPPORTED.iter().find(|(part, _)| option.contains(part)) {
            // The value may be a key: not logged.
            let name = option.split_once('=').map_or(option.as_str(), |(name, _)| name);
            let name: String = name.chars().take(80).collect();
            return Err(Error::new(Code::UNIMPLEMENTED, format!("driver option {name}: {alternative}")));
        }
    }
    Ok(())
}

/// Creates a detached mount of a device's file system.
pub(super) fn filesystem(kind: &str, device: &Path, options: &Options) -> Result<Detached> {
    if !FILE_SYSTEMS.contains(&kind) {
        let all = FILE_SYSTEMS.join(", ");
        return Err(Error::invalid(format!(
            "file system {kind:?} is not supported on a block device; use one of {all}, bind"
        )));
    }
    let device = device.to_str().ok_or_else(|| Error::invalid("the device's path is not UTF-8"))?;
    Detached::filesystem(kind, Some(device), options).map_err(|error| Error::from(error).during(device))
}

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    check(&job.storage.driver_options)?;
    let device = job.device.as_deref().ok_or_else(|| Error::internal("the device was not resolved"))?;
    Ok(attach(job, device)?.into())
}

fn attach(job: &Job<'_>, device: &Path) -> Result<Mounted> {
    let (run, target) = (&job.paths.run, Path::new(&job.storage.mount_point));
    if job.storage.fstype == "bind" {
        // The device node, for a raw block volume.
        let node = Detached::bind(safe_path::existing(device)?, &job.options)?;
        return node.attach(run, MountPoint::create(run, target, Kind::File)?, &job.options);
    }
    let mount = filesystem(&job.storage.fstype, device, &job.options)?;
    fs_group::apply(&mount, job)?;
    mount.attach(run, MountPoint::create(run, target, Kind::Directory)?, &job.options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_option_is_rejected_with_an_alternative_and_without_its_value() {
        for (option, part) in [
            ("encryption_key=ephemeral", "plain block volume"),
            ("create_filesystem", "mkfs"),
            ("io.katacontainers.volume.dmverity={}", "verify"),
        ] {
            let error = check(&[option.to_owned()]).unwrap_err();
            assert_eq!(error.code, Code::UNIMPLEMENTED);
            assert!(error.message.contains(part) && !error.message.contains("ephemeral"), "{error}");
        }
        check(&["something=else".to_owned()]).unwrap();
    }

    #[test]
    fn file_system_that_is_not_for_block_devices_is_rejected() {
        for kind in ["proc", "tmpfs", "", "overlay"] {
            let options = Options::of(&[]).unwrap();
            let error = filesystem(kind, Path::new("/dev/null"), &options).unwrap_err().to_string();
            assert!(error.contains("erofs") && error.contains(&format!("{kind:?}")), "{error}");
        }
    }
}
