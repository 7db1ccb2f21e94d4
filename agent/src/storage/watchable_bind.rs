//! Driver `watchable-bind`: small host files whose changes must appear in the guest, although
//! virtio-fs delivers no inotify events. They are copied to a tmpfs and polled every two seconds;
//! larger sources are bind-mounted instead.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, OFlags, StatxAttributes, StatxFlags};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::mount::{Detached, Mounted};
use super::options::Options;
use super::safe_path::{self, Kind, MountPoint};
use super::tree_sync::{self, MAX_BYTES, MAX_ENTRIES, Tree};
use super::{Job, Resource, Resources};
use crate::background;
use crate::error::{Error, Result};

/// Poll interval of the source.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The directory of the copies, on which the agent mounts a tmpfs.
const DIRECTORY: &str = "watchable";

/// A copy that is synchronised with its source; removed on drop.
#[derive(Debug)]
pub struct Watcher {
    task: JoinHandle<()>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The copy is removed with its last reference, which may be a poll that waits for the host.
        self.task.abort();
    }
}

/// A source and its copy.
#[derive(Debug)]
struct SyncedCopy {
    run: PathBuf,
    source: PathBuf,
    target: PathBuf,
    kind: Kind,
    /// Root of the copy.
    root: OwnedFd,
    tree: Tree,
    /// Replaces the copy once the source is too large.
    bound: Option<Mounted>,
}

impl SyncedCopy {
    /// Polls the source and updates the copy.
    fn refresh(&mut self) -> Result<()> {
        if self.bound.is_some() {
            return Ok(());
        }
        let source = safe_path::existing(&self.source)?;
        let dir = safe_path::kind(&source)? == FileType::Directory;
        if dir != (self.kind == Kind::Directory) {
            return Err(Error::internal(format!("{} changed its type", self.source.display())));
        }
        let Some(new) = tree_sync::snapshot(&source)? else {
            log::warn!(
                "{}: more than {MAX_ENTRIES} entries or {MAX_BYTES} bytes; bind-mounted instead of copied",
                self.source.display()
            );
            self.bound = Some(bind(&self.run, &source, &self.target, self.kind)?);
            return Ok(());
        };
        if new == self.tree {
            return Ok(());
        }
        match self.kind {
            Kind::Directory => tree_sync::refresh(&source, &self.root, &self.tree, &new)?,
            Kind::File => tree_sync::refresh_file(&source, &self.root, &new)?,
        }
        self.tree = new;
        Ok(())
    }
}

impl Drop for SyncedCopy {
    fn drop(&mut self) {
        self.bound = None;
        // Unless it has been replaced in the meantime.
        let same = |found: OwnedFd| {
            let (ours, there) = (rustix::fs::fstat(&self.root).ok()?, rustix::fs::fstat(&found).ok()?);
            Some((ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino))
        };
        // By parent descriptor: the host may replace any directory above by a link at any time.
        let Ok((above, name)) = safe_path::above(&self.run, &self.target) else { return };
        if !safe_path::in_directory(&above, name).ok().and_then(same).unwrap_or(false) {
            return;
        }
        if let Err(error) = tree_sync::remove_tree(&above, name) {
            log::warn!("failed to remove {}: {error}", self.target.display());
        }
    }
}

fn bind(run: &Path, source: &impl AsFd, target: &Path, kind: Kind) -> Result<Mounted> {
    let options = Options::of(&[])?;
    Detached::bind(source, &options)?.attach(run, MountPoint::create(run, target, kind)?, &options)
}

/// Mounts a tmpfs on the directory of the copies, once: nothing is written to the host's share.
fn memory(run: &Path, target: &Path) -> Result<()> {
    static ONE: Mutex<()> = Mutex::new(());
    let dir = target.parent().filter(|dir| dir.file_name().is_some_and(|name| name == DIRECTORY));
    let dir = dir.ok_or_else(|| {
        Error::invalid(format!("the mount point of a watchable-bind must be directly below a directory {DIRECTORY}"))
    })?;
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let place = MountPoint::create(run, dir, Kind::Directory)?;
    let data = rustix::fs::statx(&place, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE)
        .map_err(|error| Error::internal(format!("{}: {error}", dir.display())))?;
    if data.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(());
    }
    let options = Options::of(&["mode=0755,nosuid,nodev".to_owned()])?;
    Detached::filesystem("tmpfs", Some(DIRECTORY), &options)?.attach(run, place, &options)?.leave();
    Ok(())
}

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let (run, target) = (job.paths.run.clone(), PathBuf::from(&job.storage.mount_point));
    memory(&run, &target)?;
    let source = PathBuf::from(&job.storage.source);
    let opened = safe_path::existing(&source).map_err(|error| error.during("source"))?;
    let kind = if safe_path::kind(&opened)? == FileType::Directory { Kind::Directory } else { Kind::File };
    drop(MountPoint::create(&run, &target, kind)?);
    let flags = if kind == Kind::Directory { OFlags::RDONLY | OFlags::DIRECTORY } else { OFlags::RDONLY };
    let root = safe_path::open_below(&run, &target, flags)?;
    let mut copy = SyncedCopy { run, source, target, kind, root, tree: Tree::new(), bound: None };
    copy.refresh()?;
    let runtime = Handle::try_current().map_err(|error| Error::internal(error.to_string()))?;
    let mut made = Resources::default();
    made.add(Resource::Watch(Watcher { task: runtime.spawn(sync_loop(Arc::new(Mutex::new(copy)))) }));
    Ok(made)
}

/// Synchronises until aborted. A host that does not reply blocks only this copy.
async fn sync_loop(copy: Arc<Mutex<SyncedCopy>>) {
    let mut last = String::new();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let copy = Arc::clone(&copy);
        let polled = background::blocking(move || copy.lock().unwrap_or_else(PoisonError::into_inner).refresh()).await;
        let error = polled.err().map(|error| error.message).unwrap_or_default();
        if !error.is_empty() && error != last {
            log::warn!("watchable-bind: {error}");
        }
        last = error;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{CWD, RenameFlags, renameat_with};

    fn copy(run: &Path, target: &Path, kind: Kind) -> SyncedCopy {
        let root = fs::File::open(target).unwrap().into();
        let (run, target, source) = (run.to_owned(), target.to_owned(), "/nonexistent".into());
        SyncedCopy { run, source, target, kind, root, tree: Tree::new(), bound: None }
    }

    #[test]
    fn copy_removes_only_itself() {
        let run = tempfile::tempdir().unwrap();
        let (dir, file) = (run.path().join("w/directory"), run.path().join("w/file"));
        fs::create_dir_all(dir.join("deep")).unwrap();
        fs::write(&file, "x").unwrap();
        let copies = [copy(run.path(), &dir, Kind::Directory), copy(run.path(), &file, Kind::File)];
        drop(copies);
        assert_eq!(fs::read_dir(run.path().join("w")).unwrap().count(), 0);
        // Replaced in the meantime.
        fs::write(&file, "x").unwrap();
        let old = copy(run.path(), &file, Kind::File);
        fs::rename(&file, run.path().join("w/moved")).unwrap();
        fs::write(&file, "other").unwrap();
        drop(old);
        assert_eq!(fs::read_to_string(&file).unwrap(), "other");
    }

    /// The host swaps a directory of its share for a link, and back, in a loop.
    #[test]
    fn symlink_race_during_removal_does_not_reach_guest_files() {
        let (run, guest) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (real, link) = (run.path().join("w"), run.path().join("link"));
        let (precious, file) = (guest.path().join("directory/precious"), guest.path().join("file"));
        fs::create_dir(&real).unwrap();
        fs::create_dir_all(precious.parent().unwrap()).unwrap();
        fs::write(&precious, "x").unwrap();
        fs::write(&file, "x").unwrap();
        symlink(guest.path(), &link).unwrap();
        let (over, at_it) = (AtomicBool::new(false), AtomicBool::new(false));
        let exchange = || renameat_with(CWD, &real, CWD, &link, RenameFlags::EXCHANGE).unwrap();
        std::thread::scope(|scope| {
            for round in 0..400 {
                // The directory is at one of the two names.
                let dir = if real.is_symlink() { &link } else { &real };
                fs::create_dir_all(dir.join("directory")).unwrap();
                fs::write(dir.join("file"), "x").unwrap();
                let mut copies = [
                    copy(run.path(), &dir.join("directory"), Kind::Directory),
                    copy(run.path(), &dir.join("file"), Kind::File),
                ];
                for (copy, name) in copies.iter_mut().zip(["directory", "file"]) {
                    copy.target = real.join(name);
                }
                over.store(false, Ordering::Relaxed);
                at_it.store(false, Ordering::Relaxed);
                let host = scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        exchange();
                        at_it.store(true, Ordering::Relaxed);
                    }
                });
                while !at_it.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                drop(copies);
                over.store(true, Ordering::Relaxed);
                host.join().unwrap();
                assert!(precious.exists() && file.exists(), "round {round}");
            }
        });
    }
}
