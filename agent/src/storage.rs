//! Storages: what has to be mounted before a container can use it.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use firstlight_agent_api::agent::Storage;
use rustix::fs::{Gid, Mode, Uid};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::error::{Error, Result};

/// How a driver makes a storage.
type Driver = fn(&Storage, &Options) -> Result<()>;

/// The drivers by the names that shims send.
const DRIVERS: &[(&str, Driver)] = &[("virtio-fs", share), ("ephemeral", memory), ("local", folder), ("bind", bind)];

/// The names that [`Drivers`](DRIVERS) know, as the guest's details list them.
pub fn drivers() -> impl Iterator<Item = &'static str> {
    DRIVERS.iter().map(|(name, _)| *name)
}

/// Mount options that are flags, and whether they set or clear theirs.
const FLAGS: &[(&str, MountFlags, bool)] = &[
    ("ro", MountFlags::RDONLY, true),
    ("rw", MountFlags::RDONLY, false),
    ("nosuid", MountFlags::NOSUID, true),
    ("suid", MountFlags::NOSUID, false),
    ("nodev", MountFlags::NODEV, true),
    ("dev", MountFlags::NODEV, false),
    ("noexec", MountFlags::NOEXEC, true),
    ("exec", MountFlags::NOEXEC, false),
    ("sync", MountFlags::SYNCHRONOUS, true),
    ("async", MountFlags::SYNCHRONOUS, false),
    ("dirsync", MountFlags::DIRSYNC, true),
    ("noatime", MountFlags::NOATIME, true),
    ("atime", MountFlags::NOATIME, false),
    ("nodiratime", MountFlags::NODIRATIME, true),
    ("diratime", MountFlags::NODIRATIME, false),
    ("relatime", MountFlags::RELATIME, true),
    ("strictatime", MountFlags::STRICTATIME, true),
    ("bind", MountFlags::BIND, true),
];

/// Options as mount(2) takes them, and those that are ours.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Options {
    flags: MountFlags,
    recursive: bool,
    /// For the file system itself, e.g. `size=67108864,mode=1777`.
    data: String,
    /// `fsgid=N`: the group that shall own the root.
    group: Option<u32>,
    /// `mode=N`, for folders; a file system gets it as data as well.
    mode: Option<u32>,
}

impl Options {
    fn parse(storage: &Storage) -> Result<Self> {
        let mut options =
            Self { flags: MountFlags::empty(), recursive: false, data: String::new(), group: None, mode: None };
        // One entry may hold several options.
        for option in storage.options.iter().flat_map(|entry| entry.split(',')).filter(|option| !option.is_empty()) {
            if let Some((_, flag, set)) = FLAGS.iter().find(|(name, ..)| *name == option) {
                options.flags.set(*flag, *set);
                continue;
            }
            let wrong = || Error::invalid(format!("storage {}: option {option:?}", storage.mount_point));
            match option.split_once('=') {
                Some(("fsgid", id)) => options.group = Some(id.parse().map_err(|_| wrong())?),
                Some(("mode", mode)) => {
                    options.mode = Some(u32::from_str_radix(mode, 8).map_err(|_| wrong())?);
                    options.add(option);
                }
                _ if option == "rbind" => {
                    options.flags |= MountFlags::BIND;
                    options.recursive = true;
                }
                _ if option == "defaults" => {}
                _ => options.add(option),
            }
        }
        if let Some(group) = storage.fs_group.as_ref() {
            options.group = Some(group.group_id);
        }
        Ok(options)
    }

    fn add(&mut self, option: &str) {
        if !self.data.is_empty() {
            self.data.push(',');
        }
        self.data.push_str(option);
    }
}

/// Makes a storage. The caller keeps count of who uses it.
///
/// # Errors
/// The driver is not known, an option makes no sense, or the kernel refuses;
/// each with the driver, the source and the mount point.
pub fn add(storage: &Storage) -> Result<()> {
    let (_, driver) = DRIVERS.iter().find(|(name, _)| *name == storage.driver).ok_or_else(|| {
        let known: Vec<&str> = drivers().collect();
        let message =
            format!("Failed to find the storage handler {}: this agent has {}", storage.driver, known.join(", "));
        Error::internal(message)
    })?;
    if !Path::new(&storage.mount_point).is_absolute() {
        return Err(Error::invalid(format!("storage {}: the mount point is not absolute", storage.mount_point)));
    }
    driver(storage, &Options::parse(storage)?).map_err(|error| {
        error.during(&format!("storage {} ({} {})", storage.mount_point, storage.driver, storage.source))
    })
}

/// Whether the options of a storage make sense; nothing is mounted.
///
/// # Errors
/// The first one that does not.
pub fn understood(storage: &Storage) -> Result<()> {
    Options::parse(storage).map(drop)
}

/// Unmounts a storage if it is a mount. A folder stays: it may be the host's.
pub fn remove(mount_point: &str) {
    match rustix::mount::unmount(mount_point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
        Err(error) => log::warn!("storage {mount_point}: cannot unmount: {error}"),
    }
}

fn io(what: &str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::internal(format!("{what}: {error}"))
}

fn mount(storage: &Storage, kind: &str, options: &Options) -> Result<()> {
    fs::create_dir_all(&storage.mount_point).map_err(io("cannot make the mount point"))?;
    let data = CString::new(options.data.as_str()).map_err(|_| Error::invalid("an option has a NUL in it"))?;
    let source = if storage.source.is_empty() { kind } else { &storage.source };
    let data = Some(data.as_c_str()).filter(|data| !data.is_empty());
    rustix::mount::mount(source, storage.mount_point.as_str(), kind, options.flags, data).map_err(|error| {
        Error::internal(format!("cannot mount {kind} with options {:?}: {error}", storage.options.join(",")))
    })
}

/// A folder of the host; the source is its tag.
fn share(storage: &Storage, options: &Options) -> Result<()> {
    mount(storage, "virtiofs", options)
}

/// Memory: a tmpfs or huge pages, with all the options it came with.
fn memory(storage: &Storage, options: &Options) -> Result<()> {
    let kind = if storage.fstype.is_empty() { "tmpfs" } else { &storage.fstype };
    if !matches!(kind, "tmpfs" | "hugetlbfs") {
        return Err(Error::invalid(format!("file system {kind:?} is none of tmpfs, hugetlbfs")));
    }
    mount(storage, kind, options)?;
    own(storage, options)
}

/// A folder on a file system that is there already.
fn folder(storage: &Storage, options: &Options) -> Result<()> {
    fs::create_dir_all(&storage.mount_point).map_err(io("cannot make the folder"))?;
    if let Some(mode) = options.mode {
        // Not the mode of mkdir, which the umask would narrow.
        fs::set_permissions(&storage.mount_point, fs::Permissions::from_mode(mode))
            .map_err(io("cannot set the mode"))?;
    }
    own(storage, options)
}

/// Something of the guest at a second place.
fn bind(storage: &Storage, options: &Options) -> Result<()> {
    let source = Path::new(&storage.source);
    let found = source.metadata().map_err(io("cannot look at the source"))?;
    let target = Path::new(&storage.mount_point);
    if found.is_dir() {
        fs::create_dir_all(target).map_err(io("cannot make the mount point"))?;
    } else {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(io("cannot make the mount point"))?;
        }
        fs::OpenOptions::new().append(true).create(true).open(target).map_err(io("cannot make the mount point"))?;
    }
    let bound = if options.recursive {
        rustix::mount::mount_bind_recursive(source, target)
    } else {
        rustix::mount::mount_bind(source, target)
    };
    bound.map_err(|error| Error::internal(format!("cannot bind: {error}")))?;
    // A bind takes its flags only in a second step.
    let flags = options.flags - MountFlags::BIND;
    if !flags.is_empty() {
        rustix::mount::mount_remount(target, MountFlags::BIND | flags, "")
            .map_err(|error| Error::internal(format!("cannot set the options of a bind: {error}")))?;
    }
    Ok(())
}

/// Gives the root to the group, and everything made in it as well.
fn own(storage: &Storage, options: &Options) -> Result<()> {
    let Some(group) = options.group else { return Ok(()) };
    let failed = |error: rustix::io::Errno| Error::internal(format!("cannot give it to group {group}: {error}"));
    let path = storage.mount_point.as_str();
    rustix::fs::chown(path, None::<Uid>, Some(Gid::from_raw(group))).map_err(failed)?;
    let mode = Mode::from_raw_mode(rustix::fs::stat(path).map_err(failed)?.st_mode & 0o7777);
    rustix::fs::chmod(path, mode | Mode::SGID | Mode::RWXG).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn storage(driver: &str, options: &[&str]) -> Storage {
        let mut storage = Storage::new();
        storage.driver = driver.into();
        storage.mount_point = "/nowhere".into();
        storage.options = options.iter().map(|option| (*option).to_owned()).collect();
        storage
    }

    #[test]
    fn all_options_of_the_sandboxs_shared_memory_are_kept() {
        let given = storage("ephemeral", &["noexec", "nosuid", "nodev", "mode=1777", "size=67108864"]);
        let options = Options::parse(&given).unwrap();
        assert_eq!(options.flags, MountFlags::NOEXEC | MountFlags::NOSUID | MountFlags::NODEV);
        assert_eq!(options.data, "mode=1777,size=67108864");
        let options = Options::parse(&storage("ephemeral", &["pagesize=2M,size=8M", "fsgid=7", "ro,rw"])).unwrap();
        assert_eq!(
            (options.data.as_str(), options.group, options.flags),
            ("pagesize=2M,size=8M", Some(7), MountFlags::empty())
        );
    }

    #[test]
    fn what_is_not_known_is_named() {
        let error = add(&storage("nvdimm", &[])).unwrap_err().to_string();
        assert!(error.contains("Failed to find the storage handler nvdimm") && error.contains("virtio-fs"), "{error}");
        assert!(add(&storage("local", &["fsgid=x"])).unwrap_err().to_string().contains("fsgid=x"));
        let mut given = storage("ephemeral", &[]);
        given.fstype = "ext4".into();
        assert!(add(&given).unwrap_err().to_string().contains("ext4"));
        given.mount_point = "relative".into();
        assert!(add(&given).unwrap_err().to_string().contains("absolute"));
    }

    #[test]
    fn a_local_folder_gets_its_mode_whatever_the_umask() {
        let root = tempfile::tempdir().unwrap();
        let mut given = storage("local", &["mode=0777"]);
        given.mount_point = root.path().join("a/b").display().to_string();
        add(&given).unwrap();
        assert_eq!(fs::metadata(&given.mount_point).unwrap().permissions().mode() & 0o777, 0o777);
        add(&given).unwrap();
        remove(&given.mount_point);
        assert!(Path::new(&given.mount_point).exists());
    }

    proptest! {
        #[test]
        fn any_options_are_taken_or_refused(options in proptest::collection::vec("\\PC{0,20}", 0..4)) {
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let _ = Options::parse(&storage("ephemeral", &options));
        }
    }
}
