//! Swap on a disk of the host's.

use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};

use crate::agent::Agent;
use crate::error::{Error, Result};
use crate::{hotplug, work};

/// As many as the kernel takes, by far.
const MAX_SLOTS: usize = 32;

impl Agent {
    /// Swaps to the disk at a PCI path of slots.
    ///
    /// # Errors
    /// There is no such disk, or the kernel does not take it for swap.
    pub async fn add_swap(&self, slots: &[u32]) -> Result<()> {
        if slots.is_empty() || slots.len() > MAX_SLOTS {
            return Err(Error::invalid(format!("swap: a PCI path of {} slots", slots.len())));
        }
        let path: Vec<String> = slots.iter().map(|slot| format!("{slot:02x}")).collect();
        let disk = self.hotplug.block_by_pci(&path.join("/")).await.map_err(|error| error.during("swap"))?;
        work::blocking(move || swap_to(&disk)).await
    }

    /// Swaps to a disk `/dev/NAME`, or to a file among the sandbox's.
    ///
    /// # Errors
    /// It is something else or somewhere else, or the kernel does not take it for swap.
    pub async fn add_swap_path(&self, path: &str) -> Result<()> {
        if hotplug::is_node(Path::new(path)) {
            let disk = self.hotplug.block_by_node(path).await.map_err(|error| error.during("swap"))?;
            return work::blocking(move || swap_to(&disk)).await;
        }
        let dir = self.paths.run.join("sandbox");
        let below = Path::new(path).strip_prefix(&dir).map(Path::to_owned);
        let shown: String = path.chars().take(200).collect();
        let below = below.map_err(|_| {
            Error::invalid(format!("swap: {shown:?} is neither a disk /dev/NAME nor a file below {}", dir.display()))
        })?;
        work::blocking(move || swap_to_file(&dir, &below)).await
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

/// Swaps to what was opened: nobody can put another thing in its place meanwhile.
fn swap_on(opened: rustix::io::Result<std::os::fd::OwnedFd>, kind: FileType, shown: &str) -> Result<()> {
    let file = opened.map_err(|error| Error::internal(format!("swap: cannot open {shown}: {error}")))?;
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
        Error::internal(format!("swap: the kernel does not swap to {shown}: {error}{hint}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_it_says_it_is_becomes_swap() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("file"), [0; 8192]).unwrap();
        std::os::unix::fs::symlink("file", root.path().join("link")).unwrap();
        let refused = |error: Error, part: &str| assert!(error.message.contains(part), "{part} in {error}");
        refused(swap_to(&root.path().join("file")).unwrap_err(), "RegularFile and not BlockDevice");
        refused(swap_to(Path::new("/dev/null")).unwrap_err(), "CharacterDevice and not BlockDevice");
        refused(swap_to(&root.path().join("gone")).unwrap_err(), "gone");
        refused(swap_to_file(root.path(), "link".as_ref()).unwrap_err(), "cannot open");
        refused(swap_to_file(root.path(), "../etc".as_ref()).unwrap_err(), "cannot open");
        // A file without a swap area, or a test without the right to swap.
        refused(swap_to_file(root.path(), "file".as_ref()).unwrap_err(), "does not swap to");
    }
}
