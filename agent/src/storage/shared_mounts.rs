//! Shared mounts: a directory of one container at a place in another.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firstlight_agent_api::agent::SharedMount;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::time::Instant;
use ttrpc::Code;

use super::place;
use crate::agent::Agent;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::work;

/// How long a container may take to make what it shares.
const PATIENCE: Duration = Duration::from_secs(10);

/// Between two looks for it.
const PERIOD: Duration = Duration::from_millis(100);

/// More of them are somebody's trick.
const MOST: usize = 64;

/// Annotations with the name that a container has in its pod.
const NAMES: &[&str] =
    &["io.kubernetes.cri.container-name", "io.kubernetes.container.name", "io.kubernetes.cri-o.ContainerName"];

/// Names that containers have in their pod, by the agent's.
#[derive(Debug, Default)]
pub struct Names(Mutex<BTreeMap<String, String>>);

impl Names {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a container's name: its annotations', or the agent's own.
    pub fn add(&self, container: &str, annotations: &HashMap<String, String>) {
        let name = NAMES.iter().find_map(|name| annotations.get(*name));
        self.all().insert(container.to_owned(), name.map_or(container, String::as_str).to_owned());
    }

    /// Forgets a container.
    pub fn forget(&self, container: &str) {
        self.all().remove(container);
    }

    /// The container of that name, or of that number.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<String> {
        let all = self.all();
        let found = all.iter().find(|(_, known)| *known == name).map(|(container, _)| container.clone());
        found.or_else(|| all.contains_key(name).then(|| name.to_owned()))
    }
}

/// Checks what a request asks for, before anything is made.
///
/// # Errors
/// A path is not absolute or has `..` in it, or there are too many.
pub fn check(mounts: &[SharedMount]) -> Result<()> {
    if mounts.len() > MOST {
        return Err(Error::invalid(format!("{} shared mounts; at most {MOST}", mounts.len())));
    }
    for mount in mounts {
        for path in [&mount.src_path, &mount.dst_path] {
            let parts = inside(path);
            if parts.is_none_or(|parts| parts.is_empty()) {
                let path: String = path.chars().take(200).collect();
                let message = format!("shared mount {:?}: {path:?} is no path in a container", mount.name);
                return Err(Error::invalid(message));
            }
        }
    }
    Ok(())
}

/// A container's path as parts of its root.
fn inside(path: &str) -> Option<Vec<&std::ffi::OsStr>> {
    let parts = Path::new(path).strip_prefix("/").ok()?.components();
    parts.map(|part| if let Component::Normal(name) = part { Some(name) } else { None }).collect()
}

impl Agent {
    /// Makes the shared mounts of a container.
    ///
    /// # Errors
    /// The other container or its directory is not there in time, or the kernel refuses.
    pub(crate) async fn share_mounts(&self, mounts: &[SharedMount], to: &Arc<Container>) -> Result<()> {
        for mount in mounts {
            let share = || {
                let from = self.container(&self.names.find(&mount.src_ctr)?).ok()?;
                Some(self.share(mount, from, to))
            };
            make(mount, share).await?;
        }
        Ok(())
    }

    async fn share(&self, mount: &SharedMount, from: Arc<Container>, to: &Arc<Container>) -> Result<()> {
        let (from, to) = (self.of_first(&from, Inside::of).await?, self.of_first(to, Inside::of).await?);
        once(mount.clone(), from, to).await
    }
}

/// Makes a shared mount. `share` is asked to, until the other container is there.
///
/// # Errors
/// The other container or its directory is not there in time, or the kernel refuses.
async fn make<F: Future<Output = Result<()>>>(mount: &SharedMount, share: impl Fn() -> Option<F>) -> Result<()> {
    let begin = Instant::now();
    let mut last = format!("there is no container {:?}", mount.src_ctr);
    while begin.elapsed() < PATIENCE {
        if let Some(shared) = share() {
            match shared.await {
                Err(error) if error.code == Code::NOT_FOUND => last = error.message,
                done => return done.map_err(|error| error.during(&called(mount))),
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
    let seconds = PATIENCE.as_secs();
    Err(Error::internal(format!(
        "{}: {last}, after {seconds} s; does that container start first, and share this path?",
        called(mount)
    )))
}

fn called(mount: &SharedMount) -> String {
    let SharedMount { name, src_ctr, src_path, dst_ctr, dst_path, .. } = mount;
    format!("shared mount {name:?} ({src_ctr}:{src_path} at {dst_ctr}:{dst_path})")
}

/// A container as seen from outside: its root and its namespace of mounts.
struct Inside {
    root: OwnedFd,
    mounts: OwnedFd,
}

impl Inside {
    fn of(pid: i32) -> Result<Self> {
        let open = |what: &str, flags: OFlags| {
            let path = PathBuf::from(format!("/proc/{pid}/{what}"));
            rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
                Error::new(Code::NOT_FOUND, format!("the container has ended ({}: {error})", path.display()))
            })
        };
        Ok(Self { root: open("root", OFlags::PATH | OFlags::DIRECTORY)?, mounts: open("ns/mnt", OFlags::RDONLY)? })
    }

    fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.mounts.as_fd(), Some(LinkNameSpaceType::Mount))
            .map_err(|error| Error::internal(format!("cannot enter the container: {error}")))
    }
}

async fn once(mount: SharedMount, from: Inside, to: Inside) -> Result<()> {
    work::blocking(move || {
        // A thread of its own: one that has been in a container is no place for other work.
        let thread = std::thread::Builder::new().name("shared-mount".to_owned()).spawn(move || {
            firstlight_sys::mount::unshare_fs().map_err(|error| Error::internal(error.to_string()))?;
            from.enter()?;
            let tree = tree(&from, &mount.src_path)?;
            to.enter()?;
            put(&to, &tree, &mount.dst_path)
        });
        let thread = thread.map_err(|error| Error::internal(format!("no thread: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(Error::internal("a thread of the agent ended")))
    })
    .await
}

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// What the one container shares. Its links are its own business, but lead nowhere else.
fn tree(from: &Inside, path: &str) -> Result<OwnedFd> {
    let found = rustix::fs::openat2(&from.root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), IN_ROOT);
    let found = found.map_err(|error| match error {
        Errno::NOENT => Error::new(Code::NOT_FOUND, format!("there is no {path}")),
        error => Error::internal(format!("{path}: {error}")),
    })?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    rustix::mount::open_tree(&found, "", flags).map_err(|error| Error::internal(format!("cannot take {path}: {error}")))
}

/// Puts it into the other container; missing directories are made, links are not followed.
fn put(to: &Inside, tree: &OwnedFd, path: &str) -> Result<()> {
    let failed = |error: Errno| Error::internal(format!("cannot put it at {path}: {error}"));
    let step = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let open = |at: &OwnedFd, part: &std::ffi::OsStr| {
        rustix::fs::openat2(at, part, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), step)
    };
    let dir = place::kind(tree)? == FileType::Directory;
    let parts = inside(path).unwrap_or_default();
    let mut at = to.root.try_clone().map_err(|error| Error::internal(error.to_string()))?;
    for (number, part) in parts.iter().enumerate() {
        let next = match open(&at, part) {
            Err(Errno::NOENT) => {
                if dir || number + 1 < parts.len() {
                    rustix::fs::mkdirat(&at, *part, Mode::from_raw_mode(0o755)).map_err(failed)?;
                } else {
                    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                    drop(rustix::fs::openat2(&at, *part, flags, Mode::from_raw_mode(0o644), step).map_err(failed)?);
                }
                open(&at, part)
            }
            found => found,
        };
        at = next.map_err(failed)?;
    }
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(tree, "", &at, "", both).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(from: &str, to: &str) -> SharedMount {
        SharedMount { name: "m".into(), src_path: from.into(), dst_path: to.into(), ..Default::default() }
    }

    #[test]
    fn paths_are_checked_before_anything_is_made() {
        check(&[shared("/a", "/b/c")]).unwrap();
        for wrong in [shared("a", "/b"), shared("/a", "/b/../../c"), shared("/", "/b"), shared("/a", "")] {
            assert!(check(&[wrong]).unwrap_err().message.contains("no path in a container"));
        }
        assert!(check(&vec![shared("/a", "/b"); 65]).unwrap_err().message.contains("65"));
    }

    #[test]
    fn containers_are_found_by_their_names() {
        let names = Names::default();
        names.add("c1", &HashMap::from([(NAMES[0].to_owned(), "web".to_owned())]));
        names.add("c2", &HashMap::new());
        assert_eq!((names.find("web"), names.find("c2")), (Some("c1".into()), Some("c2".into())));
        assert_eq!(names.find("c1"), Some("c1".into()));
        names.forget("c1");
        assert_eq!(names.find("web"), None);
    }

    #[test]
    fn a_container_that_never_comes_is_named_after_the_time_is_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let mount = SharedMount { src_ctr: "web".into(), ..shared("/a", "/b") };
        let error = runtime.block_on(make(&mount, || None::<std::future::Ready<Result<()>>>)).unwrap_err();
        assert!(error.message.contains("no container \"web\", after 10 s"), "{error}");
    }
}
