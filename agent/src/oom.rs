//! Processes killed for want of memory.
//!
//! The kernel counts them in each resource group's `memory.events` and changes
//! the file's notification at every count, so every kill is told, also the
//! second one of a container and those of its further processes.
//!
//! An event that was given to a caller whose connection ends before it asks
//! again may never have reached it, and is told once more to the next one.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::fs::inotify;
use tokio::net::unix::pipe;
use tokio::sync::Notify;

/// How often the connections of former callers are looked at while another
/// one waits. Nothing tells of their end.
const LOOK: Duration = Duration::from_millis(500);

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
    /// Containers with how often one of their processes was killed, oldest
    /// first, each once: that bounds it.
    events: VecDeque<(String, u64)>,
    given: Vec<Given>,
}

#[derive(Debug)]
struct Watched {
    file: PathBuf,
    kills: u64,
}

/// An event that its caller has not confirmed by asking again.
#[derive(Debug)]
struct Given {
    container: String,
    /// The caller's connection.
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
            // Others have their turn in between.
            self.events.push_back((container.clone(), count - 1));
        }
        Some(container)
    }

    /// Takes back what was given to connections that have ended since.
    fn take_back(&mut self) {
        let lost: Vec<Given> = self.given.extract_if(.., |given| given.to.strong_count() == 0).collect();
        for given in lost {
            self.push(&given.container, 1);
        }
    }
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at every file again; which one changed does not matter.
    fn look(&self) {
        let mut inner = self.inner();
        let mut news = Vec::new();
        for (container, watched) in &mut inner.watched {
            // A file that has gone with its group has been looked at before.
            let kills = kills(&std::fs::read_to_string(&watched.file).unwrap_or_default());
            if kills > watched.kills {
                news.push((container.clone(), kills - watched.kills));
                watched.kills = kills;
            }
        }
        for (container, kills) in &news {
            inner.push(container, *kills);
        }
        if !inner.events.is_empty() {
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

    /// Looks at every container now, for one that is about to go.
    pub fn look(&self) {
        self.0.look();
    }

    /// The next container in which a process was killed, once for each kill,
    /// for the caller at the other end of `connection`. Dropping the future
    /// loses nothing.
    pub async fn next<C: Send + Sync + 'static>(&self, connection: &Arc<C>) -> String {
        let caller: Weak<C> = Arc::downgrade(connection);
        let caller: Weak<dyn Any + Send + Sync> = caller;
        // Who asks again has got what was given before.
        self.0.inner().given.retain(|given| !Weak::ptr_eq(&given.to, &caller));
        loop {
            let news = self.0.news.notified();
            tokio::pin!(news);
            // From here on news count, also those that come before the wait.
            news.as_mut().enable();
            let anything_given = {
                let mut inner = self.0.inner();
                inner.take_back();
                if let Some(container) = inner.pop() {
                    inner.given.push(Given { container: container.clone(), to: caller });
                    return container;
                }
                !inner.given.is_empty()
            };
            if anything_given {
                let _ = tokio::time::timeout(LOOK, news).await;
            } else {
                news.await;
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
    fn every_kill_is_told_once() {
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
    fn what_a_lost_caller_was_given_is_told_again_and_nothing_is_dropped() {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let oom = Oom::default();
            oom.0.inner().push("c1", 1000);
            oom.0.inner().push("c2", 1);
            let (lost, stays) = (Arc::new(1), Arc::new(2));
            assert_eq!(oom.next(&lost).await, "c1");
            assert_eq!(oom.next(&stays).await, "c2", "each has its turn");
            // It asks again, so it has got the first; then it goes away with the second.
            assert_eq!(oom.next(&lost).await, "c1");
            drop(lost);
            let mut told = 0;
            while tokio::time::timeout(Duration::from_millis(50), oom.next(&stays)).await.is_ok() {
                told += 1;
            }
            assert_eq!(told, 999, "1000, less the two that were given to the lost one, and one of these again");
            // A caller that waits already hears of a connection that ends.
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
    fn rubbish_counts_as_nothing() {
        assert_eq!(kills(""), 0);
        assert_eq!(kills("oom_kill x\n"), 0);
        assert_eq!(kills("oom_group_kill 4\noom_kill 2\n"), 2);
    }
}
