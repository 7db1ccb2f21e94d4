//! The mount table, with the reasons for the options.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_remount};

const NOSUID: MountFlags = MountFlags::NOSUID;
const NODEV: MountFlags = MountFlags::NODEV;
const NOEXEC: MountFlags = MountFlags::NOEXEC;

/// The time of a mount, and whether it is required.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Before all other units; the boot fails without the mount.
    First,
    /// In parallel with other units; the kernel may lack the file system.
    Later,
    /// In parallel with other units, if the image has the directory: writable directories of a
    /// read-only root.
    Scratch,
}

/// A row of the mount table.
#[derive(Debug, Clone, Copy)]
pub struct MountSpec {
    /// File system type.
    pub kind: &'static str,
    /// Mount point; created if it is missing.
    pub target: &'static str,
    /// Mount flags.
    pub flags: MountFlags,
    /// Options of the file system.
    pub data: &'static CStr,
    /// Time of the mount.
    pub when: When,
}

const fn row(
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: &'static CStr,
    when: When,
) -> MountSpec {
    MountSpec { kind, target, flags, data, when }
}

/// The mount table, in mount order.
pub const MOUNTS: &[MountSpec] = &[
    row("proc", "/proc", NOSUID.union(NODEV).union(NOEXEC), c"", When::First),
    row("sysfs", "/sys", NOSUID.union(NODEV).union(NOEXEC), c"", When::First),
    // Device nodes are allowed; programs are not executed from here.
    row("devtmpfs", "/dev", NOSUID.union(NOEXEC), c"mode=0755", When::First),
    // ptmxmode: processes other than root can open terminals too.
    row("devpts", "/dev/pts", NOSUID.union(NOEXEC), c"gid=5,mode=0620,ptmxmode=0666", When::First),
    row("tmpfs", "/dev/shm", NOSUID.union(NODEV).union(NOEXEC), c"mode=1777", When::First),
    row("tmpfs", "/run", NOSUID.union(NODEV).union(NOEXEC), c"mode=0755", When::First),
    // Without NOEXEC: files of containers are created here, and programs in an emptyDir must run.
    row("tmpfs", "/run/kata-containers", NOSUID.union(NODEV), c"mode=0755", When::First),
    row("tmpfs", "/tmp", NOSUID.union(NODEV).union(NOEXEC), c"mode=1777", When::First),
    // nsdelegate: a container cannot change its own limits from inside its cgroup namespace.
    row("cgroup2", "/sys/fs/cgroup", NOSUID.union(NODEV).union(NOEXEC), c"nsdelegate", When::First),
    row("securityfs", "/sys/kernel/security", NOSUID.union(NODEV).union(NOEXEC), c"", When::Later),
    row("bpf", "/sys/fs/bpf", NOSUID.union(NODEV).union(NOEXEC), c"mode=0700", When::Later),
    row("mqueue", "/dev/mqueue", NOSUID.union(NODEV).union(NOEXEC), c"", When::Later),
    row("hugetlbfs", "/dev/hugepages", NOSUID.union(NODEV), c"", When::Later),
    row("tmpfs", "/var/log", NOSUID.union(NODEV).union(NOEXEC), c"mode=0755,size=32m", When::Scratch),
    row("tmpfs", "/var/cache", NOSUID.union(NODEV).union(NOEXEC), c"mode=0755,size=32m", When::Scratch),
    row("tmpfs", "/var/tmp", NOSUID.union(NODEV).union(NOEXEC), c"mode=1777,size=32m", When::Scratch),
];

/// A failed mount.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount {kind} on {target}: {source}{}", hint(source))]
pub struct MountError {
    kind: &'static str,
    target: &'static str,
    source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENODEV) => "; the kernel is built without it",
        Some(libc::ENOENT) => "; the mount point is missing and the image is read-only: add the directory to the image",
        _ => "",
    }
}

fn mount_one(spec: &MountSpec) -> Result<(), MountError> {
    let mut done = mount(spec.kind, spec.target, spec.kind, spec.flags, Some(spec.data));
    if done == Err(Errno::NOENT) {
        // If the directory cannot be created, the mount fails and reports it.
        let _ = std::fs::create_dir_all(spec.target);
        done = mount(spec.kind, spec.target, spec.kind, spec.flags, Some(spec.data));
    }
    match done {
        // Already mounted, by the kernel or by the process that started PID 1.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(source) => Err(MountError { kind: spec.kind, target: spec.target, source: source.into() }),
    }
}

/// Mounts all rows of one time; continues after failures. Returns the number of mounts.
///
/// # Errors
/// All mounts that failed.
pub fn mount_all(when: When) -> Result<usize, Vec<MountError>> {
    let mut errors = Vec::new();
    let mut count = 0;
    let absent = |spec: &MountSpec| when == When::Scratch && !Path::new(spec.target).is_dir();
    for spec in MOUNTS.iter().filter(|spec| spec.when == when && !absent(spec)) {
        match mount_one(spec) {
            Ok(()) => count += 1,
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(count) } else { Err(errors) }
}

/// Remounts the root file system read-only. Mounts on it are not changed.
///
/// # Errors
/// A file on it is open for writing, or the kernel rejected the remount.
pub fn remount_root_read_only() -> io::Result<()> {
    // With BIND the flag is set on the mount instead of the file system, which the kernel may
    // reject.
    let flags = MountFlags::BIND.union(MountFlags::RDONLY).union(NOSUID).union(NODEV);
    Ok(mount_remount("/", flags, c"")?)
}

/// Links that programs expect in `/dev`, and `/var/run`, where CDI files are searched.
const LINKS: &[(&str, &str)] = &[
    ("/var/run", "/run"),
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// Creates the missing links of [`LINKS`]; a read-only image contains them.
pub fn make_links() {
    for (path, target) in LINKS {
        let made = rustix::fs::symlink(*target, *path);
        if made == Err(Errno::NOENT) && Path::new(path).parent().is_some_and(|up| std::fs::create_dir_all(up).is_ok()) {
            let _ = rustix::fs::symlink(*target, *path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_mounted_before_their_children() {
        for (at, spec) in MOUNTS.iter().enumerate() {
            let later = &MOUNTS[at + 1..];
            assert!(
                later.iter().all(|other| !Path::new(spec.target).starts_with(other.target)),
                "{} is hidden by a later mount",
                spec.target
            );
        }
    }

    #[test]
    fn only_container_directories_permit_execution() {
        let runs = |spec: &&MountSpec| !spec.flags.contains(NOEXEC);
        let places: Vec<_> = MOUNTS.iter().filter(runs).map(|spec| spec.target).collect();
        assert_eq!(places, ["/run/kata-containers", "/dev/hugepages"]);
    }

    #[test]
    fn only_dev_has_devices_and_nothing_has_setuid() {
        for spec in MOUNTS {
            assert!(spec.flags.contains(NOSUID), "{}", spec.target);
            assert!(spec.flags.contains(NODEV) || matches!(spec.target, "/dev" | "/dev/pts"), "{}", spec.target);
        }
    }
}
