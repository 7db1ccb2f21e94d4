//! Mounts the root file system and executes its PID 1.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use std::os::unix::process::CommandExt as _;

use firstlight_cmdline::CommandLine;
use firstlight_init::clock::now_us;
use firstlight_init::modules::{LoadOrder, Modules};
use firstlight_init::root::Root;
use firstlight_init::verified::{self, Verity};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};
use rustix::process::{chdir, chroot};

use crate::root_params::{self, INITS, RootParams};

/// Timeout for a disk to appear, µs: it appears when its driver starts, or never.
const DEVICE_TIMEOUT_US: u64 = 10_000_000;

/// Mount point of the root before it is moved to `/`.
const NEW_ROOT: &str = "/root";

/// Mounts of this initial RAM file system: source, directory, type.
const MOUNTS: &[(&str, &str, &str)] =
    &[("proc", "/proc", "proc"), ("sysfs", "/sys", "sysfs"), ("dev", "/dev", "devtmpfs")];

/// Failure to mount the root or to start its PID 1.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call or a file access failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was to be done.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The kernel command line is invalid.
    #[error(transparent)]
    Parameters(#[from] root_params::Error),
    /// The kernel rejected a module of this image.
    #[error("module not loaded: {0}")]
    Module(String),
    /// A disk did not appear before the timeout.
    #[error(
        "{device} did not appear within {seconds} s; block devices are: {there}; is the disk attached, and its driver in this image?"
    )]
    NoDevice {
        /// The device.
        device: String,
        /// The timeout, seconds.
        seconds: u64,
        /// The kernel's names of the block devices present.
        there: String,
    },
    /// The device mapper rejected `dm-mod.create=`.
    #[error("dm-mod.create=: {0}")]
    Mapping(#[from] verified::Error),
    /// The root cannot be mounted.
    #[error("cannot mount {device} as {kind}: {source}{hint}")]
    Mount {
        /// The device.
        device: String,
        /// The file system.
        kind: String,
        /// The system's answer.
        source: io::Error,
        /// What that means for a verified device.
        hint: &'static str,
    },
    /// The root's PID 1 could not be started.
    #[error("cannot start {program} of the root: {source}{hint}")]
    Start {
        /// The program.
        program: String,
        /// The system's answer.
        source: io::Error,
        /// What that means for a verified device.
        hint: &'static str,
    },
}

fn verity_hint(params: &RootParams, source: &io::Error) -> &'static str {
    if params.mapping.is_some() { verified::hint(source) } else { "" }
}

fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    let what = what.into();
    move |source| Error::System { what, source: source.into() }
}

/// Opens the root and becomes its PID 1; `log` receives a one-line summary.
///
/// # Errors
/// What failed; on success it does not return.
pub fn run(log: impl FnOnce(&str)) -> Result<std::convert::Infallible, Error> {
    let begin = now_us();
    for (source, dir, kind) in MOUNTS {
        fs::create_dir_all(dir).map_err(system(format!("make {dir}")))?;
        mount(*source, *dir, *kind, MountFlags::NOSUID | MountFlags::NOEXEC, None)
            .map_err(system(format!("mount {dir}")))?;
    }
    let text = fs::read_to_string("/proc/cmdline").map_err(system("read /proc/cmdline"))?;
    let params = RootParams::of(&CommandLine::parse(&text))?;
    // Subscribe before loading modules, so that no uevent of theirs is missed.
    let uevents = firstlight_uevent::open().map_err(system("open the uevent socket"))?;
    load_modules()?;
    for device in params.devices() {
        wait_for(device, &uevents)?;
    }
    if let Some(mapping) = &params.mapping {
        verified::make(&Verity {
            name: &mapping.name,
            uuid: &mapping.uuid,
            sectors: mapping.sectors,
            parameters: &mapping.parameters,
        })?;
        wait_for(&params.root, &uevents)?;
    }
    mount_root(&params)?;
    log(&format!(
        "root {} ({}, {}) after {} ms",
        params.root,
        params.kind,
        params
            .mapping
            .as_ref()
            .map_or("not verified".to_owned(), |mapping| format!("verified by {}", mapping.root_hash)),
        now_us().saturating_sub(begin) / 1000
    ));
    switch_root(&params)
}

/// Loads all modules of this image; it holds only those that the root needs.
fn load_modules() -> Result<(), Error> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let root = Root::real();
    if !Modules::any(&root, &release) {
        return Ok(());
    }
    let index = root.path(&format!("/lib/modules/{release}/modules.dep"));
    let text = fs::read_to_string(&index).map_err(system(format!("read {}", index.display())))?;
    let names = module_names(&text);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let outcome = Modules::read(&root, &release).load(&names, LoadOrder::Free, &|_| String::new());
    match outcome.errors.first() {
        Some(error) => Err(Error::Module(error.to_string())),
        None => Ok(()),
    }
}

/// Returns the names of the modules that a `modules.dep` lists.
fn module_names(index: &str) -> Vec<String> {
    let files = index.lines().filter_map(|line| Some(line.split_once(':')?.0));
    files.filter_map(|file| Some(file.rsplit('/').next()?.split_once(".ko")?.0.to_owned())).collect()
}

/// Waits for a device node to appear, driven by uevents.
fn wait_for(device: &str, uevents: &OwnedFd) -> Result<(), Error> {
    let until = now_us().saturating_add(DEVICE_TIMEOUT_US);
    verified::wait(uevents, until, || Path::new(device).exists().then_some(())).ok_or_else(|| {
        let seconds = DEVICE_TIMEOUT_US / 1_000_000;
        Error::NoDevice { device: device.to_owned(), seconds, there: block_devices() }
    })
}

fn block_devices() -> String {
    let entries = fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn mount_root(params: &RootParams) -> Result<(), Error> {
    fs::create_dir_all(NEW_ROOT).map_err(system(format!("make {NEW_ROOT}")))?;
    let options = std::ffi::CString::new(params.options.as_str()).unwrap_or_default();
    let options = (!params.options.is_empty()).then_some(options.as_c_str());
    mount(params.root.as_str(), NEW_ROOT, params.kind.as_str(), MountFlags::RDONLY, options).map_err(|source| {
        let source = io::Error::from(source);
        let hint = verity_hint(params, &source);
        Error::Mount { device: params.root.clone(), kind: params.kind.clone(), source, hint }
    })
}

/// Frees this file system's memory, moves the root to `/` and executes its PID 1.
fn switch_root(params: &RootParams) -> Result<std::convert::Infallible, Error> {
    for (_, dir, _) in MOUNTS.iter().rev() {
        unmount(*dir, UnmountFlags::DETACH).map_err(system(format!("unmount {dir}")))?;
    }
    // The running program's own file stays until it has been replaced.
    for path in ["/lib", "/init"].map(PathBuf::from) {
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        if let Err(error) = removed
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(system(format!("remove {}", path.display()))(error));
        }
    }
    chdir(NEW_ROOT).map_err(system("enter the root"))?;
    mount_move(".", "/").map_err(system("move the root over this one"))?;
    chroot(".").map_err(system("make it the root"))?;
    chdir("/").map_err(system("enter the root"))?;
    let inits = params.init.as_deref().map_or_else(|| INITS.to_vec(), |init| vec![init]);
    let mut missing = None;
    for program in inits {
        let source = Command::new(program).args(std::env::args_os().skip(1)).exec();
        let absent = source.kind() == io::ErrorKind::NotFound;
        let hint = verity_hint(params, &source);
        let error = Error::Start { program: program.to_owned(), source, hint };
        if !absent {
            return Err(error);
        }
        missing.get_or_insert(error);
    }
    Err(missing.unwrap_or_else(|| system("start PID 1")(io::Error::from(io::ErrorKind::NotFound))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_dep_yields_module_names() {
        let text =
            "kernel/drivers/md/dm-verity.ko: kernel/drivers/md/dm-mod.ko\nkernel/fs/erofs/erofs.ko.xz:\nrubbish\n";
        assert_eq!(module_names(text), ["dm-verity", "erofs"]);
    }

    #[test]
    fn io_error_of_verity_device_has_root_hash_hint() {
        let line = "dm-mod.create=\"a,,,ro,0 8 verity 1 /dev/a /dev/b 4096 4096 1 0 sha256 ab -\" root=/dev/dm-0 rootfstype=erofs";
        let params = RootParams::of(&CommandLine::parse(line)).unwrap();
        let broken = io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error());
        assert!(verity_hint(&params, &broken).contains("root hash"));
        assert_eq!(verity_hint(&params, &io::Error::from(io::ErrorKind::NotFound)), "");
        let open = RootParams { mapping: None, ..params };
        assert_eq!(verity_hint(&open, &broken), "");
    }

    #[test]
    fn present_device_is_not_waited_for() {
        let uevents = firstlight_uevent::open().unwrap();
        wait_for("/dev/null", &uevents).unwrap();
        assert!(!block_devices().is_empty());
    }
}
