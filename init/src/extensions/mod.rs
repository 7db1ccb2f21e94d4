//! Extensions: verified disks that are mounted beside the root, Kata's
//! composable images. A guest without a driver and a disk with one are a guest
//! with a driver.
//!
//! * [`asked`]: what the kernel command line asks for; [`crate::disks`]: what is plugged in;
//!   [`unit`]: what the boot plan's units do
//! * here: from one to the other. Nothing is mounted that was not checked, and
//!   nothing that does not fit is passed over.

pub mod asked;
pub mod unit;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use firstlight_verity::extension;
use rustix::mount::{MountFlags, mount};

use self::asked::{Asked, Wanted};
use crate::clock::now_us;
use crate::disks::{self, Disk};
use crate::root::Root;
use crate::verified::{self, Verity};

/// How long a disk may take to come, µs: it is plugged in before the start.
const PATIENCE_US: u64 = 10_000_000;

/// How long its partitions may take after it, µs. The kernel reads them before
/// it tells of the disk.
const PARTITIONS_US: u64 = 1_000_000;

/// The one kind of file system that they have.
const KIND: &str = "erofs";

/// The partitions of a disk.
const DATA: u32 = 1;
const HASHES: u32 = 2;

/// Why an extension is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its disk did not come.
    #[error(
        "extension {name}: no disk with the serial number {serial} came in {seconds} s; disks are: {there}; have the \
         host plug it in before the guest starts (virtio-blk), or leave its kernel parameter out"
    )]
    NoDisk {
        /// The extension.
        name: String,
        /// The serial number.
        serial: String,
        /// How long it was waited for.
        seconds: u64,
        /// The kernel's names of those that are there.
        there: String,
    },
    /// Several disks say that they are it.
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
        /// What is in it.
        what: &'static str,
    },
    /// No verified device can be made of it.
    #[error("extension {name}: dm-verity over disk {disk}: {source}")]
    Verity {
        /// The extension.
        name: String,
        /// The disk.
        disk: String,
        /// What is wrong.
        source: verified::Error,
    },
    /// The verified device has no node.
    #[error("extension {name}: {device} did not come after dm-verity was set up; is /dev a devtmpfs?")]
    NoDevice {
        /// The extension.
        name: String,
        /// The device.
        device: String,
    },
    /// The directory that it is mounted on cannot be made.
    #[error("extension {name}: cannot make {dir}: {source}; is /run a tmpfs with room?")]
    Directory {
        /// The extension.
        name: String,
        /// The directory.
        dir: String,
        /// The system's answer.
        source: io::Error,
    },
    /// It cannot be mounted.
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
        /// The system's answer.
        source: io::Error,
    },
    /// A disk that nobody asked for.
    #[error(
        "disk {disk} says that it is extension {name:?}, and the kernel command line has no good \
         kata.extension.NAME.verity_params for it: it is not used; add the parameter (verity.params in its \
         image.json), or take the disk away"
    )]
    NotAsked {
        /// What the disk says.
        name: String,
        /// The disk.
        disk: String,
    },
}

fn mount_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENODEV) => "; the kernel has no EROFS: add the module erofs to the image",
        Some(libc::EINVAL) => "; what is in the first partition is no EROFS, or packed in a way that this kernel lacks",
        _ => verified::hint(source),
    }
}

/// Mounts all that are wanted; what there is to say, or all that is wrong.
/// `news` was opened before the disks' drivers were loaded.
///
/// # Errors
/// One of them is not there, or not what it should be.
pub fn mount_all(root: &Root, asked: &Asked, news: &OwnedFd) -> Result<Vec<String>, Vec<String>> {
    let begin = now_us();
    let mut errors: Vec<String> = asked.refused.iter().map(ToString::to_string).collect();
    let mut said = Vec::new();
    for wanted in &asked.wanted {
        match mount_one(root, wanted, news, begin) {
            Ok(text) => said.push(text),
            Err(error) => errors.push(error.to_string()),
        }
    }
    if errors.is_empty() { Ok(said) } else { Err(errors) }
}

fn mount_one(root: &Root, wanted: &Wanted, news: &OwnedFd, begin_us: u64) -> Result<String, Error> {
    let name = &wanted.name;
    let disk = find(root, name, news, begin_us.saturating_add(PATIENCE_US))?;
    let [data, hashes] = partitions(root, name, &disk, news, now_us().saturating_add(PARTITIONS_US))?;
    let parameters = wanted.params.target(&data, &hashes);
    let serial = extension::serial(name);
    let verity = Verity { name: &serial, uuid: "", sectors: wanted.params.sectors(), parameters: &parameters };
    let made = verified::make(&verity);
    let number = made.map_err(|source| Error::Verity { name: name.clone(), disk: disk.clone(), source })?;
    let device = format!("/dev/dm-{number}");
    let there = || Path::new(&device).exists().then_some(());
    verified::wait(news, now_us().saturating_add(PARTITIONS_US), there)
        .ok_or_else(|| Error::NoDevice { name: name.clone(), device: device.clone() })?;
    let dir = format!("{}/{name}", extension::DIRECTORY);
    fs::create_dir_all(&dir).map_err(|source| Error::Directory { name: name.clone(), dir: dir.clone(), source })?;
    // Programs of it are run: not NOEXEC.
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    if let Err(source) = mount(device.as_str(), dir.as_str(), KIND, flags, None) {
        return Err(Error::Mount { name: name.clone(), device, disk, dir, source: source.into() });
    }
    let root_hash = firstlight_verity::hex(&wanted.params.root_hash);
    Ok(format!("{name}: disk {disk}, verified by {root_hash}, on {dir}"))
}

/// The disk of an extension.
fn find(root: &Root, name: &str, news: &OwnedFd, until_us: u64) -> Result<String, Error> {
    let found = verified::wait(news, until_us, || {
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
            seconds: PATIENCE_US / 1_000_000,
            there: listed(disks::all(root)),
        }),
    }
}

/// The nodes of data and hash tree.
fn partitions(root: &Root, name: &str, disk: &str, news: &OwnedFd, until_us: u64) -> Result<[String; 2], Error> {
    let node = |number, what| {
        let found = verified::wait(news, until_us, || disks::partition(root, disk, number));
        found.ok_or_else(|| Error::NoPartition { name: name.to_owned(), disk: disk.to_owned(), number, what })
    };
    Ok([node(DATA, "the file system")?, node(HASHES, "the hash tree")?])
}

/// Disks that say they are extensions, and that nobody asked for.
#[must_use]
pub fn strangers(root: &Root, asked: &Asked) -> Vec<Error> {
    let mut disks = disks::extensions(root);
    disks.retain(|disk| !asked.has(&disk.extension));
    let error = |Disk { name, extension }: Disk| Error::NotAsked { name: extension, disk: name };
    disks.into_iter().map(error).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_verity::Params;

    fn wanted(name: &str) -> Wanted {
        let params = Params { root_hash: [1; 32], salt: vec![2], data_blocks: 3 };
        Wanted { name: name.to_owned(), params }
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
    fn a_disk_is_named_with_all_that_is_wrong_with_it() {
        let news = firstlight_uevent::open().unwrap();
        let find = |root: &Root| find(root, "gpu", &news, 0).map_err(|error| error.to_string());
        let (_directory, root) = guest(&[("vda/serial", "x")]);
        let text = find(&root).unwrap_err();
        for words in ["extension gpu", "serial number extension-gpu came in 10 s", "disks are: vda;", "plug it in"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let (_directory, root) = guest(&[("vdb/serial", "extension-gpu"), ("vdc/serial", "extension-gpu2")]);
        assert_eq!(find(&root), Ok("vdb".to_owned()), "a longer name is another");
        let (_directory, root) = guest(&[("vdb/serial", "extension-gpu"), ("vdc/serial", "extension-gpu")]);
        assert!(find(&root).unwrap_err().contains("disks vdb, vdc all have"));
    }

    #[test]
    fn a_missing_partition_is_named() {
        let news = firstlight_uevent::open().unwrap();
        let find = |root: &Root| partitions(root, "gpu", "vda", &news, 0).map_err(|error| error.to_string());
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
    fn a_disk_that_nobody_asked_for_is_told() {
        let (_directory, root) =
            guest(&[("vda/serial", "extension-gpu"), ("vdb/serial", "extension-\u{1b}"), ("vdc/serial", "x")]);
        let asked = Asked { wanted: vec![wanted("gpu")], ..Asked::default() };
        let errors: Vec<String> = strangers(&root, &asked).iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("disk vdb says that it is extension \"\\u{1b}\""), "{errors:?}");
        assert_eq!(strangers(&root, &Asked::default()).len(), 2);
    }

    #[test]
    fn whatever_is_refused_fails_the_whole() {
        let news = firstlight_uevent::open().unwrap();
        let (_directory, root) = guest(&[]);
        let asked = Asked { refused: vec![asked::Refused::Twice("gpu".to_owned())], ..Asked::default() };
        assert_eq!(mount_all(&root, &asked, &news).unwrap_err().len(), 1);
        assert_eq!(mount_all(&root, &Asked::default(), &news).unwrap(), [""; 0]);
    }

    #[test]
    fn errors_of_a_mount_say_what_they_mean() {
        let hint = |errno| mount_hint(&io::Error::from_raw_os_error(errno));
        assert!(hint(libc::EIO).contains("root hash") && hint(libc::ENODEV).contains("erofs"));
        assert!(hint(libc::EINVAL).contains("no EROFS") && hint(libc::EPERM).is_empty());
    }
}
