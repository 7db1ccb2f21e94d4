//! Processes killed for want of memory.
//!
//! The kernel counts them in each resource group's `memory.events` and changes
//! the file's notification at every count, so every kill is told, also the
//! second one of a container and those of its further processes.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify;
use tokio::net::unix::pipe;
use tokio::sync::Notify;

/// Kills that nobody has asked for are kept up to this number.
const KEPT: usize = 256;

/// The kills of all containers.
#[derive(Debug, Default)]
pub struct Oom(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    inner: Mutex<Inner>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    notifier: Option<Arc<OwnedFd>>,
    watched: BTreeMap<String, Watched>,
    events: VecDeque<String>,
}

#[derive(Debug)]
struct Watched {
    file: PathBuf,
    kills: u64,
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at every file again; which one changed does not matter.
    fn look(&self) {
        let mut inner = self.inner();
        let Inner { watched, events, .. } = &mut *inner;
        for (container, watched) in watched {
            let kills = kills(&std::fs::read_to_string(&watched.file).unwrap_or_default());
            for _ in watched.kills..kills {
                events.push_back(container.clone());
            }
            watched.kills = watched.kills.max(kills);
        }
        let over = events.len().saturating_sub(KEPT);
        events.drain(..over);
        if !events.is_empty() {
            self.news.notify_waiters();
        }
    }
}

/// The count of kills in a `memory.events` file.
fn kills(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

impl Oom {
    /// Watches a container's resource group. Without memory accounting there is nothing to watch.
    pub fn watch(&self, container: &str, cgroup: &Path) {
        let file = cgroup.join("memory.events");
        let Ok(text) = std::fs::read_to_string(&file) else { return };
        let watched = Watched { file: file.clone(), kills: kills(&text) };
        let notifier = {
            let mut inner = self.0.inner();
            inner.watched.insert(container.to_owned(), watched);
            inner.notifier.clone()
        };
        let notifier = notifier.map_or_else(|| self.begin(), Ok);
        let added = notifier.and_then(|notifier| {
            inotify::add_watch(notifier.as_ref(), &file, inotify::WatchFlags::MODIFY).map_err(std::io::Error::from)
        });
        if let Err(error) = added {
            log::warn!("OOM events of container {container}: {error}");
        }
    }

    fn begin(&self) -> std::io::Result<Arc<OwnedFd>> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let notifier = inotify::init(flags)?;
        // Readable like a pipe, which is all that is asked of it.
        let reader = pipe::Receiver::from_owned_fd_unchecked(notifier.try_clone()?)?;
        let notifier = Arc::new(notifier);
        self.0.inner().notifier = Some(Arc::clone(&notifier));
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            while reader.readable().await.is_ok() {
                while matches!(reader.try_read(&mut buffer), Ok(1..)) {}
                shared.look();
            }
        });
        Ok(notifier)
    }

    /// Stops watching; the kernel drops its part with the file.
    pub fn forget(&self, container: &str) {
        let mut inner = self.0.inner();
        inner.watched.remove(container);
    }

    /// The next container in which a process was killed. Dropping the future loses nothing.
    pub async fn next(&self) -> String {
        loop {
            let news = self.0.news.notified();
            tokio::pin!(news);
            // From here on news count, also those that come before the wait.
            news.as_mut().enable();
            if let Some(container) = self.0.inner().events.pop_front() {
                return container;
            }
            news.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;

    #[test]
    fn every_kill_is_told_once() {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let root = tempfile::tempdir().unwrap();
            let file = root.path().join("memory.events");
            let count = |kills: u64| fs::write(&file, format!("low 0\noom 9\noom_kill {kills}\noom_group_kill 7\n"));
            count(1).unwrap();
            let oom = Oom::default();
            oom.watch("none", Path::new("/nonexistent"));
            oom.watch("c1", root.path());
            count(3).unwrap();
            assert_eq!(oom.next().await, "c1");
            assert_eq!(oom.next().await, "c1");
            let third = tokio::time::timeout(Duration::from_millis(50), oom.next()).await;
            assert!(third.is_err(), "the first kill was before the watch");
            count(4).unwrap();
            assert_eq!(oom.next().await, "c1");
            oom.forget("c1");
            count(9).unwrap();
            assert!(tokio::time::timeout(Duration::from_millis(50), oom.next()).await.is_err());
        });
    }

    #[test]
    fn rubbish_counts_as_nothing() {
        assert_eq!(kills(""), 0);
        assert_eq!(kills("oom_kill x\n"), 0);
        assert_eq!(kills("oom_group_kill 4\noom_kill 2\n"), 2);
    }
}
