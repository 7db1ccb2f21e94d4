//! Block devices: file systems on them, or the device itself.

use std::path::Path;

use ttrpc::Code;

use super::mount::{Detached, Mounted};
use super::options::Options;
use super::place::{self, Kind, Place};
use super::{Job, Made, group};
use crate::error::{Error, Result};

/// File systems that live on block devices. A shim that asks for `proc` here is up to something.
const FILE_SYSTEMS: &[&str] = &["ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "erofs", "squashfs", "iso9660", "vfat"];

/// Driver options that ask for what is not there: parts of their text, and what to do.
/// To ignore one of them would be worse than to fail.
const ABSENT: &[(&str, &str)] = &[
    ("encryption_key=", "encrypted volumes are not implemented: use a plain block volume, or a memory-backed emptyDir"),
    (
        "create_filesystem",
        "file systems are not made in the guest: let the host make it (mkfs) before it attaches the disk",
    ),
    ("verity", "the guest does not verify volumes: verify the image on the host, or bake it into the guest's image"),
];

pub(super) fn check(driver_options: &[String]) -> Result<()> {
    for option in driver_options {
        if let Some((_, way)) = ABSENT.iter().find(|(part, _)| option.contains(part)) {
            // Options hold keys.
            let name = option.split_once('=').map_or(option.as_str(), |(name, _)| name);
            let name: String = name.chars().take(80).collect();
            return Err(Error::new(Code::UNIMPLEMENTED, format!("driver option {name}: {way}")));
        }
    }
    Ok(())
}

/// A file system on a device, attached nowhere.
pub(super) fn filesystem(kind: &str, device: &Path, options: &Options) -> Result<Detached> {
    if !FILE_SYSTEMS.contains(&kind) {
        let all = FILE_SYSTEMS.join(", ");
        return Err(Error::invalid(format!("file system {kind:?} on a block device is none of {all}, bind")));
    }
    let device = device.to_str().ok_or_else(|| Error::invalid("the device's path is no text"))?;
    Detached::filesystem(kind, Some(device), options).map_err(|error| error.during(device))
}

pub(super) fn make(job: &Job<'_>) -> Result<Made> {
    check(&job.storage.driver_options)?;
    let device = job.device.as_deref().ok_or_else(|| Error::internal("the device was not looked for"))?;
    Ok(attach(job, device)?.into())
}

fn attach(job: &Job<'_>, device: &Path) -> Result<Mounted> {
    let (run, target) = (&job.paths.run, Path::new(&job.storage.mount_point));
    if job.storage.fstype == "bind" {
        // The device itself, for a container that wants a raw volume.
        let node = Detached::bind(place::existing(device)?, &job.options)?;
        return node.attach(run, Place::make(run, target, Kind::File)?, &job.options);
    }
    let mount = filesystem(&job.storage.fstype, device, &job.options)?;
    group::give(&mount, job)?;
    mount.attach(run, Place::make(run, target, Kind::Directory)?, &job.options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_done_is_refused_with_the_way_out_and_no_keys() {
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
    fn only_file_systems_of_disks() {
        for kind in ["proc", "tmpfs", "", "overlay"] {
            let options = Options::of(&[]).unwrap();
            let error = filesystem(kind, Path::new("/dev/null"), &options).unwrap_err().to_string();
            assert!(error.contains("erofs") && error.contains(&format!("{kind:?}")), "{error}");
        }
    }
}
