//! OOM kills (GetOOMEvent).
//!
//! The kernel counts kills in each cgroup's `memory.events` and notifies at every change, so every
//! kill is reported, including repeated ones and those of exec processes.
//!
//! An event whose client disconnects before its next call may not have been received, and is
//! delivered again to the next client.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::fs::inotify;
use tokio::net::unix::pipe;
use tokio::sync::Notify;

/// Poll interval for disconnects of former clients while another one waits; disconnects are not
/// notified.
const DISCONNECT_POLL: Duration = Duration::from_millis(500);

/// OOM events of all containers.
#[derive(Debug, Default)]
pub struct Oom(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    inner: Mutex<Inner>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    notifier: Option<Arc<OwnedFd>>,
    watched: BTreeMap<String, Watched>,
    /// Undelivered kills per container, oldest first; one entry per container bounds the queue.
    events: VecDeque<(String, u64)>,
    delivered: Vec<Delivered>,
}

#[derive(Debug)]
struct Watched {
    file: PathBuf,
    kills: u64,
}

/// A delivered event that its client has not confirmed by another call.
#[derive(Debug)]
struct Delivered {
    container: String,
    /// The client's connection.
    to: Weak<dyn Any + Send + Sync>,
}

impl Inner {
    fn push(&mut self, container: &str, kills: u64) {
        match self.events.iter_mut().find(|(known, _)| known == container) {
            Some((_, count)) => *count += kills,
            None => self.events.push_back((container.to_owned(), kills)),
        }
    }

    fn pop(&mut self) -> Option<String> {
        let (container, count) = self.events.pop_front()?;
        if count > 1 {
            // Round robin between containers.
            self.events.push_back((container.clone(), count - 1));
        }
        Some(container)
    }

    /// Requeues events delivered to connections that have closed since.
    fn requeue_lost(&mut self) {
        let lost: Vec<Delivered> =
            self.delivered.extract_if(.., |delivered| delivered.to.strong_count() == 0).collect();
        for delivered in lost {
            self.push(&delivered.container, 1);
        }
    }
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads every file; which one changed is not needed.
    fn scan(&self) {
        let mut inner = self.inner();
        let mut new = Vec::new();
        for (container, watched) in &mut inner.watched {
            // A file removed with its cgroup was read before.
            let kills = kills(&std::fs::read_to_string(&watched.file).unwrap_or_default());
            if kills > watched.kills {
                new.push((container.clone(), kills - watched.kills));
                watched.kills = kills;
            }
        }
        for (container, kills) in &new {
            inner.push(container, *kills);
        }
        if !inner.events.is_empty() {
            self.added.notify_waiters();
        }
    }
}

/// Returns the kill count of a `memory.events` file.
fn kills(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

impl Oom {
    /// Watches a container's cgroup. No-op without memory accounting.
    pub fn watch(&self, container: &str, cgroup: &Path) {
        let file = cgroup.join("memory.events");
        let Ok(text) = std::fs::read_to_string(&file) else { return };
        let watched = Watched { file: file.clone(), kills: kills(&text) };
        let notifier = {
            let mut inner = self.0.inner();
            inner.watched.insert(container.to_owned(), watched);
            inner.notifier.clone()
        };
        let notifier = notifier.map_or_else(|| self.start(), Ok);
        let added = notifier.and_then(|notifier| {
            inotify::add_watch(notifier.as_ref(), &file, inotify::WatchFlags::MODIFY).map_err(std::io::Error::from)
        });
        if let Err(error) = added {
            log::warn!("OOM events of container {container}: {error}");
        }
    }

    fn start(&self) -> std::io::Result<Arc<OwnedFd>> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let notifier = inotify::init(flags)?;
        // An inotify descriptor is readable like a pipe.
        let reader = pipe::Receiver::from_owned_fd_unchecked(notifier.try_clone()?)?;
        let notifier = Arc::new(notifier);
        self.0.inner().notifier = Some(Arc::clone(&notifier));
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            while reader.readable().await.is_ok() {
                while matches!(reader.try_read(&mut buffer), Ok(1..)) {}
                shared.scan();
            }
        });
        Ok(notifier)
    }

    /// Stops watching; the kernel removes its watch with the file.
    pub fn forget(&self, container: &str) {
        let mut inner = self.0.inner();
        inner.watched.remove(container);
    }

    /// Reads all counts now, before a container is removed.
    pub fn scan(&self) {
        self.0.scan();
    }

    /// Waits for the next container with an OOM kill, once for each kill, for the client of
    /// `connection`. Cancel-safe.
    pub async fn next<C: Send + Sync + 'static>(&self, connection: &Arc<C>) -> String {
        let caller: Weak<C> = Arc::downgrade(connection);
        let caller: Weak<dyn Any + Send + Sync> = caller;
        // Another call confirms the events delivered before.
        self.0.inner().delivered.retain(|delivered| !Weak::ptr_eq(&delivered.to, &caller));
        loop {
            let added = self.0.added.notified();
            tokio::pin!(added);
            // Subscribes before the check, so no event is missed.
            added.as_mut().enable();
            let has_unconfirmed = {
                let mut inner = self.0.inner();
                inner.requeue_lost();
                if let Some(container) = inner.pop() {
                    inner.delivered.push(Delivered { container: container.clone(), to: caller });
                    return container;
                }
                !inner.delivered.is_empty()
            };
            if has_unconfirmed {
                let _ = tokio::time::timeout(DISCONNECT_POLL, added).await;
            } else {
                added.await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;

    #[test]
    fn every_kill_is_reported_once() {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let root = tempfile::tempdir().unwrap();
            let file = root.path().join("memory.events");
            let count = |kills: u64| fs::write(&file, format!("low 0\noom 9\noom_kill {kills}\noom_group_kill 7\n"));
            count(1).unwrap();
            let oom = Oom::default();
            let caller = Arc::new(());
            oom.watch("none", Path::new("/nonexistent"));
            oom.watch("c1", root.path());
            count(3).unwrap();
            assert_eq!(oom.next(&caller).await, "c1");
            assert_eq!(oom.next(&caller).await, "c1");
            let third = tokio::time::timeout(Duration::from_millis(50), oom.next(&caller)).await;
            assert!(third.is_err(), "the first kill was before the watch");
            count(4).unwrap();
            assert_eq!(oom.next(&caller).await, "c1");
            oom.forget("c1");
            count(9).unwrap();
            assert!(tokio::time::timeout(Duration::from_millis(50), oom.next(&caller)).await.is_err());
        });
    }

    #[test]
    fn events_of_a_lost_client_are_delivered_again() {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let oom = Oom::default();
            oom.0.inner().push("c1", 1000);
            oom.0.inner().push("c2", 1);
            let (lost, stays) = (Arc::new(1), Arc::new(2));
            assert_eq!(oom.next(&lost).await, "c1");
            assert_eq!(oom.next(&stays).await, "c2", "round robin");
            // Its call confirms the first event; then it disconnects with the second.
            assert_eq!(oom.next(&lost).await, "c1");
            drop(lost);
            let mut received = 0;
            while tokio::time::timeout(Duration::from_millis(50), oom.next(&stays)).await.is_ok() {
                received += 1;
            }
            assert_eq!(received, 999, "1000, less the two that were delivered to the lost one, and one of these again");
            // A waiting client gets the event of a connection that closes.
            let lost = Arc::new(3);
            oom.0.inner().push("c3", 1);
            assert_eq!(oom.next(&lost).await, "c3");
            let later = async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                drop(lost);
            };
            let (event, ()) = tokio::join!(oom.next(&stays), later);
            assert_eq!(event, "c3");
        });
    }

    #[test]
    fn invalid_lines_count_as_zero() {
        assert_eq!(kills(""), 0);
        assert_eq!(kills("oom_kill x\n"), 0);
        assert_eq!(kills("oom_group_kill 4\noom_kill 2\n"), 2);
    }
}
