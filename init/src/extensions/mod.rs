//! Extensions: verified disks that are mounted in addition to the root, Kata's composable images. A
//! guest image without a driver and an extension with one are a guest with a driver.
//!
//! * [`request`]: the extensions that the kernel command line requests; [`crate::disks`]: the present disks
//! * this module mounts the requested ones. No disk is mounted without verification, and an extension disk that was not requested is an error.

pub mod request;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use firstlight_verity::extension;
use rustix::mount::{MountFlags, mount};

use self::request::{ExtensionRequest, ExtensionRequests};
use crate::clock::now_us;
use crate::disks::{self, Disk};
use crate::root::Root;
use crate::verified::{self, Verity};

/// Maximum time for a disk to appear, µs: disks are attached before boot.
const DISK_TIMEOUT_US: u64 = 10_000_000;

/// Maximum time for its partitions to appear, µs. The kernel reads the partition table before it
/// sends the disk's uevent.
const PARTITION_TIMEOUT_US: u64 = 1_000_000;

/// The file system type of all extensions.
const KIND: &str = "erofs";

/// Partition numbers.
const DATA: u32 = 1;
const HASHES: u32 = 2;

/// An error of an extension.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its disk did not appear.
    #[error(
        "extension {name}: no disk with the serial number {serial} appeared within {seconds} s; disks are: {there}; have the \
         host plug it in before the guest starts (virtio-blk), or leave its kernel parameter out"
    )]
    NoDisk {
        /// The extension.
        name: String,
        /// The serial number.
        serial: String,
        /// How long PID 1 waited, in seconds.
        seconds: u64,
        /// The kernel's names of the present extension disks.
        there: String,
    },
    /// Several disks have its serial number.
    #[error("extension {name}: disks {disks} all have its serial number; have the host plug in one")]
    Several {
        /// The extension.
        name: String,
        /// The disks.
        disks: String,
    },
    /// A partition is missing.
    #[error(
        "extension {name}: disk {disk} has no partition {number} ({what}); build its image with [verity], and give \
         the whole disk to the guest"
    )]
    NoPartition {
        /// The extension.
        name: String,
        /// The disk.
        disk: String,
        /// The partition.
        number: u32,
        /// The expected content of the partition.
        what: &'static str,
    },
    /// The dm-verity device could not be created.
    #[error("extension {name}: dm-verity over disk {disk}: {source}")]
    Verity {
        /// The extension.
        name: String,
        /// The disk.
        disk: String,
        /// The cause.
        source: verified::Error,
    },
    /// The dm-verity device has no device node.
    #[error("extension {name}: {device} did not appear after dm-verity was set up; is /dev a devtmpfs?")]
    NoDevice {
        /// The extension.
        name: String,
        /// The device.
        device: String,
    },
    /// The mount point could not be created.
    #[error("extension {name}: cannot make {dir}: {source}; is /run a tmpfs with room?")]
    Directory {
        /// The extension.
        name: String,
        /// The directory.
        dir: String,
        /// The system's error.
        source: io::Error,
    },
    /// The mount failed.
    #[error("extension {name}: cannot mount {device} (disk {disk}) on {dir} as {KIND}: {source}{}", mount_hint(.source))]
    Mount {
        /// The extension.
        name: String,
        /// The verified device.
        device: String,
        /// The disk.
        disk: String,
        /// The directory.
        dir: String,
        /// The system's error.
        source: io::Error,
    },
    /// A disk that was not requested.
    #[error(
        "disk {disk} says that it is extension {name:?}, and the kernel command line has no good \
         kata.extension.NAME.verity_params for it: it is not used; add the parameter (verity.params in its \
         image.json), or take the disk away"
    )]
    NotRequested {
        /// The extension's name in the disk's serial number.
        name: String,
        /// The disk.
        disk: String,
    },
}

fn mount_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENODEV) => "; the kernel has no EROFS: add the module erofs to the image",
        Some(libc::EINVAL) => "; the first partition is not EROFS, or uses a compression that this kernel lacks",
        _ => verified::hint(source),
    }
}

/// Mounts all requested extensions; returns a description of each. `uevents` was opened before the
/// disks' drivers were loaded.
///
/// # Errors
/// The errors of all extensions that could not be mounted.
pub fn mount_all(root: &Root, requests: &ExtensionRequests, uevents: &OwnedFd) -> Result<Vec<String>, Vec<String>> {
    let begin = now_us();
    let mut errors: Vec<String> = requests.rejected.iter().map(ToString::to_string).collect();
    let mut mounted = Vec::new();
    for requested in &requests.requested {
        match mount_one(root, requested, uevents, begin) {
            Ok(text) => mounted.push(text),
            Err(error) => errors.push(error.to_string()),
        }
    }
    if errors.is_empty() { Ok(mounted) } else { Err(errors) }
}

fn mount_one(root: &Root, requested: &ExtensionRequest, uevents: &OwnedFd, begin_us: u64) -> Result<String, Error> {
    let name = &requested.name;
    let disk = find(root, name, uevents, begin_us.saturating_add(DISK_TIMEOUT_US))?;
    let [data, hashes] = partitions(root, name, &disk, uevents, now_us().saturating_add(PARTITION_TIMEOUT_US))?;
    let parameters = requested.params.target(&data, &hashes);
    let serial = extension::serial(name);
    let verity = Verity { name: &serial, uuid: "", sectors: requested.params.sectors(), parameters: &parameters };
    let made = verified::make(&verity);
    let number = made.map_err(|source| Error::Verity { name: name.clone(), disk: disk.clone(), source })?;
    let device = format!("/dev/dm-{number}");
    let there = || Path::new(&device).exists().then_some(());
    verified::wait(uevents, now_us().saturating_add(PARTITION_TIMEOUT_US), there)
        .ok_or_else(|| Error::NoDevice { name: name.clone(), device: device.clone() })?;
    let dir = format!("{}/{name}", extension::DIRECTORY);
    fs::create_dir_all(&dir).map_err(|source| Error::Directory { name: name.clone(), dir: dir.clone(), source })?;
    // Without NOEXEC: programs of the extension are executed.
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    if let Err(source) = mount(device.as_str(), dir.as_str(), KIND, flags, None) {
        return Err(Error::Mount { name: name.clone(), device, disk, dir, source: source.into() });
    }
    let root_hash = hex::encode(requested.params.root_hash);
    Ok(format!("{name}: disk {disk}, verified by {root_hash}, on {dir}"))
}

/// Returns the disk of an extension.
fn find(root: &Root, name: &str, uevents: &OwnedFd, until_us: u64) -> Result<String, Error> {
    let found = verified::wait(uevents, until_us, || {
        let mut disks = disks::extensions(root);
        disks.retain(|disk| disk.extension == name);
        (!disks.is_empty()).then_some(disks)
    });
    let listed = |names: Vec<String>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    match found.as_deref() {
        Some([disk]) => Ok(disk.name.clone()),
        Some(disks) => {
            let disks = listed(disks.iter().map(|disk| disk.name.clone()).collect());
            Err(Error::Several { name: name.to_owned(), disks })
        }
        None => Err(Error::NoDisk {
            name: name.to_owned(),
            serial: extension::serial(name),
            seconds: DISK_TIMEOUT_US / 1_000_000,
            there: listed(disks::all(root)),
        }),
    }
}

/// Returns the device nodes of the data partition and of the hash tree.
fn partitions(root: &Root, name: &str, disk: &str, uevents: &OwnedFd, until_us: u64) -> Result<[String; 2], Error> {
    let node = |number, what| {
        let found = verified::wait(uevents, until_us, || disks::partition(root, disk, number));
        found.ok_or_else(|| Error::NoPartition { name: name.to_owned(), disk: disk.to_owned(), number, what })
    };
    Ok([node(DATA, "the file system")?, node(HASHES, "the hash tree")?])
}

/// Returns errors for extension disks that were not requested.
#[must_use]
pub fn unrequested_disks(root: &Root, requests: &ExtensionRequests) -> Vec<Error> {
    let mut disks = disks::extensions(root);
    disks.retain(|disk| !requests.has(&disk.extension));
    let error = |Disk { name, extension }: Disk| Error::NotRequested { name: extension, disk: name };
    disks.into_iter().map(error).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_verity::Params;

    fn requested(name: &str) -> ExtensionRequest {
        let params = Params { root_hash: [1; 32], salt: vec![2], data_blocks: 3 };
        ExtensionRequest { name: name.to_owned(), params }
    }

    fn guest(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in files {
            let path = root.path(&format!("/sys/block/{path}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, root)
    }

    #[test]
    fn missing_or_ambiguous_disk_is_reported() {
        let uevents = firstlight_uevent::open().unwrap();
        let find = |root: &Root| find(root, "gpu", &uevents, 0).map_err(|error| error.to_string());
        let (_directory, root) = guest(&[("vda/serial", "x")]);
        let text = find(&root).unwrap_err();
        for words in
            ["extension gpu", "serial number extension-gpu appeared within 10 s", "disks are: vda;", "plug it in"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        let (_directory, root) = guest(&[("vdb/serial", "extension-gpu"), ("vdc/serial", "extension-gpu2")]);
        assert_eq!(find(&root), Ok("vdb".to_owned()), "a longer name is another");
        let (_directory, root) = guest(&[("vdb/serial", "extension-gpu"), ("vdc/serial", "extension-gpu")]);
        assert!(find(&root).unwrap_err().contains("disks vdb, vdc all have"));
    }

    #[test]
    fn missing_partition_is_reported() {
        let uevents = firstlight_uevent::open().unwrap();
        let find = |root: &Root| partitions(root, "gpu", "vda", &uevents, 0).map_err(|error| error.to_string());
        let one = [("vda/vda1/partition", "1\n")];
        let (_directory, root) = guest(&one);
        let text = find(&root).unwrap_err();
        assert!(text.contains("extension gpu: disk vda has no partition 2 (the hash tree); build"), "{text}");
        let (_directory, root) = guest(&[one[0], ("vda/vda2/partition", "2\n")]);
        assert_eq!(find(&root), Ok(["/dev/vda1".to_owned(), "/dev/vda2".to_owned()]));
        let (_directory, root) = guest(&[("vda/vda2/partition", "2\n")]);
        assert!(find(&root).unwrap_err().contains("no partition 1 (the file system)"));
    }

    #[test]
    fn unrequested_disk_is_reported() {
        let (_directory, root) =
            guest(&[("vda/serial", "extension-gpu"), ("vdb/serial", "extension-\u{1b}"), ("vdc/serial", "x")]);
        let requests = ExtensionRequests { requested: vec![requested("gpu")], ..ExtensionRequests::default() };
        let errors: Vec<String> = unrequested_disks(&root, &requests).iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("disk vdb says that it is extension \"\\u{1b}\""), "{errors:?}");
        assert_eq!(unrequested_disks(&root, &ExtensionRequests::default()).len(), 2);
    }

    #[test]
    fn rejected_parameter_fails_all_extensions() {
        let uevents = firstlight_uevent::open().unwrap();
        let (_directory, root) = guest(&[]);
        let requests = ExtensionRequests {
            rejected: vec![request::InvalidRequest::Twice("gpu".to_owned())],
            ..ExtensionRequests::default()
        };
        assert_eq!(mount_all(&root, &requests, &uevents).unwrap_err().len(), 1);
        assert_eq!(mount_all(&root, &ExtensionRequests::default(), &uevents).unwrap(), [""; 0]);
    }

    #[test]
    fn mount_errors_have_hints() {
        let hint = |errno| mount_hint(&io::Error::from_raw_os_error(errno));
        assert!(hint(libc::EIO).contains("root hash") && hint(libc::ENODEV).contains("erofs"));
        assert!(hint(libc::EINVAL).contains("not EROFS") && hint(libc::EPERM).is_empty());
    }
}
