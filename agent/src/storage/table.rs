//! Reference counts of storages. A storage is mounted for its first user and unmounted after its
//! last, and is never visible half mounted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use firstlight_agent_api::agent::Storage;
use futures::future::try_join_all;
use tokio::sync::Notify;
use ttrpc::Code;

use super::layers::Group;
use super::options::Options;
use super::{Job, Resources, describe, device, find, layers};
use crate::background;
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;
use crate::paths::Paths;

/// Upper bound on storages per request (untrusted input).
const MAX_STORAGES: usize = 1024;

/// All storages of the guest, by mount point.
#[derive(Debug)]
pub struct Table {
    paths: Paths,
    hotplug: Hotplug,
    entries: Mutex<BTreeMap<PathBuf, Entry>>,
    changed: Notify,
}

/// One storage and its reference count.
#[derive(Debug)]
struct Entry {
    /// Driver, source and type: the same mount point cannot be another storage for another user.
    what: String,
    users: usize,
    /// Stays mounted until the guest ends.
    persistent: bool,
    /// `None` while it is being mounted or unmounted.
    made: Option<Resources>,
}

/// A unit of mounting.
#[derive(Debug)]
enum PlannedStorage {
    Single(Box<Storage>),
    Layers(Box<Group>),
}

/// The next step of a new user.
#[derive(Debug, PartialEq, Eq)]
enum NextStep {
    Make,
    Wait,
    Use,
}

/// Normalises a mount point.
fn key(mount_point: &str) -> PathBuf {
    Path::new(mount_point).components().collect()
}

/// Orders a request's storages for mounting: the layers of one root together, at the position of
/// the first.
///
/// # Errors
/// The layers do not form one root.
fn plan(storages: Vec<Storage>) -> Result<Vec<PlannedStorage>> {
    if storages.len() > MAX_STORAGES {
        return Err(Error::invalid(format!("{} storages; at most {MAX_STORAGES}", storages.len())));
    }
    let first = storages.iter().position(layers::is_layer);
    let (layered, alone): (Vec<_>, Vec<_>) = storages.into_iter().partition(layers::is_layer);
    let mut planned: Vec<PlannedStorage> =
        alone.into_iter().map(|storage| PlannedStorage::Single(Box::new(storage))).collect();
    if let Some(first) = first {
        planned.insert(first, PlannedStorage::Layers(Box::new(Group::of(layered)?)));
    }
    Ok(planned)
}

impl PlannedStorage {
    fn storage(&self) -> &Storage {
        match self {
            PlannedStorage::Single(storage) => storage,
            PlannedStorage::Layers(group) => &group.upper,
        }
    }

    /// Returns its mount point.
    fn mount_point(&self) -> &str {
        &self.storage().mount_point
    }

    fn what(&self) -> String {
        let Storage { driver, source, fstype, .. } = self.storage();
        format!("{driver} {source} {fstype}")
    }
}

/// Removes an entry if its setup is cancelled or fails.
struct SetupGuard<'a> {
    table: &'a Table,
    key: &'a Path,
    done: bool,
}

impl Drop for SetupGuard<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.table.entries().remove(self.key);
        }
        self.table.changed.notify_waiters();
    }
}

impl Table {
    /// Creates an empty table.
    #[must_use]
    pub fn new(paths: Paths, hotplug: Hotplug) -> Self {
        Self { paths, hotplug, entries: Mutex::default(), changed: Notify::new() }
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a user to a storage, and mounts it for the first one. Returns when it is mounted.
    ///
    /// # Errors
    /// It cannot be mounted, or the mount point belongs to another storage. Then no user is added.
    async fn add(&self, planned: PlannedStorage) -> Result<()> {
        let (key, what, persistent) = (key(planned.mount_point()), planned.what(), planned.storage().shared);
        let name = describe(planned.storage());
        self.acquire(&key, &what, persistent, self.make(planned)).await.map_err(|error| error.during(&name))
    }

    async fn acquire(
        &self,
        key: &Path,
        what: &str,
        persistent: bool,
        make: impl Future<Output = Result<Resources>>,
    ) -> Result<()> {
        loop {
            // Subscribes before the check, so no change in between is missed.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            match self.next(key, what, persistent)? {
                NextStep::Use => return Ok(()),
                NextStep::Wait => changed.await,
                NextStep::Make => break,
            }
        }
        let mut guard = SetupGuard { table: self, key, done: false };
        let made = make.await?;
        if let Some(entry) = self.entries().get_mut(key) {
            entry.made = Some(made);
        }
        guard.done = true;
        Ok(())
    }

    /// Adds a user to each storage of a request; returns the mount points, for
    /// [`remove_all`](Self::remove_all).
    ///
    /// # Errors
    /// As [`add`](Self::add). Then no user is added to any of them.
    pub async fn add_all(&self, storages: Vec<Storage>) -> Result<Vec<String>> {
        let mut added = Vec::new();
        for planned in plan(storages)? {
            let mount_point = planned.mount_point().to_owned();
            if let Err(error) = self.add(planned).await {
                self.remove_all(added).await;
                return Err(error);
            }
            added.push(mount_point);
        }
        Ok(added)
    }

    /// Removes a user from each storage, in reverse order.
    pub async fn remove_all(&self, mount_points: Vec<String>) {
        for mount_point in mount_points.into_iter().rev() {
            self.remove(&mount_point).await;
        }
    }

    fn next(&self, key: &Path, what: &str, persistent: bool) -> Result<NextStep> {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(key) else {
            let entry = Entry { what: what.to_owned(), users: 1, persistent, made: None };
            entries.insert(key.to_owned(), entry);
            return Ok(NextStep::Make);
        };
        if entry.made.is_none() {
            return Ok(NextStep::Wait);
        }
        if entry.what != what {
            let there: String = entry.what.chars().take(200).collect();
            return Err(Error::new(
                Code::ALREADY_EXISTS,
                format!("the mount point is used by another storage ({there})"),
            ));
        }
        entry.users += 1;
        entry.persistent |= persistent;
        Ok(NextStep::Use)
    }

    async fn make(&self, planned: PlannedStorage) -> Result<Resources> {
        let paths = self.paths.clone();
        match planned {
            PlannedStorage::Single(storage) => {
                let driver = find(&storage.driver)?;
                let options = Options::of(&storage.options)?;
                let device = device::find(&self.hotplug, driver.source, &storage.source).await?;
                background::blocking(move || (driver.make)(&Job { storage: &storage, options, device, paths: &paths }))
                    .await
            }
            PlannedStorage::Layers(group) => {
                let source = find(layers::NAME)?.source;
                let devices =
                    try_join_all(group.all().map(|layer| device::find(&self.hotplug, source, &layer.source))).await?;
                let devices: Vec<PathBuf> = devices.into_iter().flatten().collect();
                background::blocking(move || layers::make(&group, &devices, &paths)).await
            }
        }
    }

    /// Removes a user from a storage; the last one unmounts it, unless it is persistent.
    async fn remove(&self, mount_point: &str) {
        let key = key(mount_point);
        let made = {
            let mut entries = self.entries();
            let Some(entry) = entries.get_mut(&key) else { return };
            if entry.made.is_none() {
                // A new storage is being mounted here: this one is released already.
                return;
            }
            entry.users = entry.users.saturating_sub(1);
            if entry.users > 0 || entry.persistent {
                return;
            }
            entry.made.take()
        };
        let _gone = SetupGuard { table: self, key: &key, done: false };
        let _ = background::blocking(move || {
            drop(made);
            Ok(())
        })
        .await;
    }

    /// Inspects a mounted storage: its driver's name and resources.
    ///
    /// # Errors
    /// It does not exist, or errors of the function.
    pub(crate) fn inspect<T>(
        &self,
        mount_point: &str,
        inspect: impl FnOnce(&str, &Resources) -> Result<T>,
    ) -> Result<T> {
        let entries = self.entries();
        let found = entries.get(&key(mount_point)).and_then(|entry| Some((entry, entry.made.as_ref()?)));
        let (entry, made) = found.ok_or_else(|| {
            let message =
                format!("{mount_point} is not a storage of this sandbox: it was never added, or it was removed");
            Error::new(Code::NOT_FOUND, message)
        })?;
        inspect(entry.what.split(' ').next().unwrap_or_default(), made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn table() -> Arc<Table> {
        let paths = Paths::below(Path::new("/nowhere"));
        Arc::new(Table::new(paths.clone(), Hotplug::new(&paths, Duration::from_secs(1))))
    }

    fn users(table: &Table) -> Vec<usize> {
        table.entries().values().map(|entry| entry.users).collect()
    }

    #[test]
    fn second_user_waits_for_the_mount_of_the_first() {
        run(async {
            let (table, done) = (table(), Arc::new(AtomicUsize::new(0)));
            let slow = {
                let done = Arc::clone(&done);
                async move {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    done.store(1, Ordering::SeqCst);
                    Ok(Resources::default())
                }
            };
            let never = async { Err(Error::internal("made twice")) };
            let key = Path::new("/m");
            let first = table.acquire(key, "a", false, slow);
            let second = async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let result = table.acquire(key, "a", false, never).await;
                (result, done.load(Ordering::SeqCst))
            };
            let (first, (second, seen)) = tokio::join!(first, second);
            assert_eq!((first, second, seen), (Ok(()), Ok(()), 1));
            assert_eq!(users(&table), [2]);
        });
    }

    #[test]
    fn waiting_user_retries_after_a_failure() {
        run(async {
            let table = table();
            let failing = async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(Error::internal("no disk"))
            };
            let key = Path::new("/m");
            let first = table.acquire(key, "a", false, failing);
            let second = async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                table.acquire(key, "a", false, async { Ok(Resources::default()) }).await
            };
            let (first, second) = tokio::join!(first, second);
            assert_eq!(first.unwrap_err().message, "no disk");
            second.unwrap();
            assert_eq!(users(&table), [1]);
        });
    }

    #[test]
    fn cancelled_setup_does_not_block_others() {
        run(async {
            let table = table();
            let key = Path::new("/m");
            let stuck = table.acquire(key, "a", false, std::future::pending());
            assert!(tokio::time::timeout(Duration::from_millis(50), stuck).await.is_err());
            let next = table.acquire(key, "a", false, async { Ok(Resources::default()) });
            tokio::time::timeout(Duration::from_secs(5), next).await.unwrap().unwrap();
        });
    }

    #[test]
    fn last_user_unmounts_unless_persistent() {
        run(async {
            let table = table();
            let ok = || async { Ok(Resources::default()) };
            for persistent in [false, true] {
                let at = PathBuf::from(format!("/m/{persistent}"));
                table.acquire(&at, "a", false, ok()).await.unwrap();
                table.acquire(&at, "a", persistent, ok()).await.unwrap();
                table.remove(&format!("/m/{persistent}")).await;
                assert_eq!(users(&table), [1]);
                table.remove(&format!("/m//{persistent}/")).await;
                assert_eq!(users(&table).len(), usize::from(persistent));
            }
            table.remove("/m/true").await;
            let error = table.acquire(Path::new("/m/true"), "b", false, ok()).await.unwrap_err();
            assert_eq!(error.code, Code::ALREADY_EXISTS);
            assert!(
                table.inspect("/m/false", |_, _| Ok(())).unwrap_err().message.contains("not a storage of this sandbox")
            );
            assert_eq!(table.inspect("/m/true", |what, _| Ok(what.to_owned())).unwrap(), "a");
        });
    }

    #[test]
    fn layers_are_mounted_at_the_position_of_the_first() {
        let storage = |mount_point: &str, options: &[&str], fstype: &str| Storage {
            mount_point: mount_point.into(),
            fstype: fstype.into(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Default::default()
        };
        let layer = "X-kata.multi-layer=true";
        let all = vec![
            storage("/a", &[], "tmpfs"),
            storage("/r", &[layer], "ext4"),
            storage("/b", &[], "tmpfs"),
            storage("/r", &[layer], "erofs"),
        ];
        let planned = plan(all.clone()).unwrap();
        assert_eq!(planned.iter().map(PlannedStorage::mount_point).collect::<Vec<_>>(), ["/a", "/r", "/b"]);
        assert!(plan(all[..2].to_vec()).is_err());
        assert!(plan(vec![all[0].clone(); 1025]).unwrap_err().message.contains("1025"));
    }
}
