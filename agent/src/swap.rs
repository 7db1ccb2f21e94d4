//! AddSwap and AddSwapPath: swap on a host disk.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};

use crate::background;
use crate::error::{Error, Result};
use crate::hotplug::{self, Hotplug};
use crate::paths::Paths;

/// Upper bound on the depth of a PCI path.
const MAX_SLOTS: usize = 32;

/// Enables swap.
#[derive(Debug)]
pub struct Swap {
    hotplug: Hotplug,
    /// The sandbox's directory, which may contain swap files.
    dir: PathBuf,
}

impl Swap {
    /// Creates the component.
    #[must_use]
    pub fn new(paths: &Paths, hotplug: &Hotplug) -> Self {
        Self { hotplug: hotplug.clone(), dir: paths.run.join("sandbox") }
    }

    /// Enables swap on the disk at a PCI path.
    ///
    /// # Errors
    /// The disk does not exist, or the kernel rejects it for swap.
    pub async fn add_disk(&self, slots: &[u32]) -> Result<()> {
        if slots.is_empty() || slots.len() > MAX_SLOTS {
            return Err(Error::invalid(format!("swap: a PCI path of {} slots", slots.len())));
        }
        let path: Vec<String> = slots.iter().map(|slot| format!("{slot:02x}")).collect();
        let disk = self.hotplug.block_by_pci(&path.join("/")).await.map_err(|error| error.during("swap"))?;
        background::blocking(move || swap_to(&disk)).await
    }

    /// Enables swap on a disk `/dev/NAME`, or on a file in the sandbox's directory.
    ///
    /// # Errors
    /// The path has another type or location, or the kernel rejects it for swap.
    pub async fn add_path(&self, path: &str) -> Result<()> {
        if hotplug::is_node(Path::new(path)) {
            let disk = self.hotplug.block_by_node(path).await.map_err(|error| error.during("swap"))?;
            return background::blocking(move || swap_to(&disk)).await;
        }
        let dir = self.dir.clone();
        let below = Path::new(path).strip_prefix(&dir).map(Path::to_owned);
        let shown: String = path.chars().take(200).collect();
        let below = below.map_err(|_| {
            Error::invalid(format!("swap: {shown:?} is neither a disk /dev/NAME nor a file below {}", dir.display()))
        })?;
        background::blocking(move || swap_to_file(&dir, &below)).await
    }
}

fn swap_to(disk: &Path) -> Result<()> {
    let shown = disk.display().to_string();
    let opened = rustix::fs::openat(CWD, disk, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    swap_on(opened, FileType::BlockDevice, &shown)
}

fn swap_to_file(dir: &Path, below: &Path) -> Result<()> {
    let shown = dir.join(below).display().to_string();
    let root = rustix::fs::openat(CWD, dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let flags = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let opened =
        root.and_then(|root| rustix::fs::openat2(root, below, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), flags));
    swap_on(opened, FileType::RegularFile, &shown)
}

/// Enables swap on the opened descriptor, so that the path cannot be replaced in between.
fn swap_on(opened: rustix::io::Result<std::os::fd::OwnedFd>, kind: FileType, shown: &str) -> Result<()> {
    let file = opened.map_err(|error| Error::internal(format!("swap: failed to open {shown}: {error}")))?;
    let found = rustix::fs::fstat(&file).map_err(|error| Error::internal(format!("swap: {shown}: {error}")))?;
    let is = FileType::from_raw_mode(found.st_mode);
    if is != kind {
        return Err(Error::invalid(format!("swap: {shown} is {is:?} and not {kind:?}")));
    }
    firstlight_sys::swap::enable(&file).map_err(|error| {
        let hint = match rustix::io::Errno::from_io_error(&error) {
            Some(rustix::io::Errno::INVAL) => "; it has no swap area: run mkswap on it on the host",
            Some(rustix::io::Errno::BUSY) => "; it is in use, perhaps as swap",
            _ => "",
        };
        Error::internal(format!("swap: failed to enable swap on {shown}: {error}{hint}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_runtime::run;
    use std::time::Duration;

    #[test]
    fn path_of_another_type_is_rejected_for_swap() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("file"), [0; 8192]).unwrap();
        std::os::unix::fs::symlink("file", root.path().join("link")).unwrap();
        let refused = |error: Error, part: &str| assert!(error.message.contains(part), "{part} in {error}");
        refused(swap_to(&root.path().join("file")).unwrap_err(), "RegularFile and not BlockDevice");
        refused(swap_to(Path::new("/dev/null")).unwrap_err(), "CharacterDevice and not BlockDevice");
        refused(swap_to(&root.path().join("gone")).unwrap_err(), "gone");
        refused(swap_to_file(root.path(), "link".as_ref()).unwrap_err(), "failed to open");
        refused(swap_to_file(root.path(), "../etc".as_ref()).unwrap_err(), "failed to open");
        // A file without a swap area, or a test without the right to swap.
        refused(swap_to_file(root.path(), "file".as_ref()).unwrap_err(), "failed to enable swap on");
    }

    #[test]
    fn only_disks_and_files_of_the_sandbox_are_accepted() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            let swap = Swap::new(&paths, &Hotplug::new(&paths, Duration::ZERO));
            let error = swap.add_path("/etc/passwd").await.unwrap_err();
            assert_eq!(error.code, ttrpc::Code::INVALID_ARGUMENT);
            assert!(error.message.contains("neither a disk"), "{error}");
            let file = paths.run.join("sandbox/swap").display().to_string();
            assert!(swap.add_path(&file).await.unwrap_err().message.contains("failed to open"));
            for slots in [&[][..], &[1; 33]] {
                assert!(swap.add_disk(slots).await.unwrap_err().message.contains("a PCI path of"));
            }
        });
    }
}
