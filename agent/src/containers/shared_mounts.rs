//! Shared mounts: bind mounts of one container's directory in another container.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use firstlight_agent_api::agent::SharedMount;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::time::Instant;
use ttrpc::Code;

use super::first_process::FirstProcesses;
use super::names::ContainerNames;
use crate::background;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::sandbox::Sandbox;
use crate::storage::safe_path;

/// Timeout for the source container to provide the shared path.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Upper bound on shared mounts per container (untrusted input).
const MAX_MOUNTS: usize = 64;

/// Validates the shared mounts of a request before anything is created.
///
/// # Errors
/// A path is not absolute or contains `..`, or there are too many.
pub(super) fn check(mounts: &[SharedMount]) -> Result<()> {
    if mounts.len() > MAX_MOUNTS {
        return Err(Error::invalid(format!("{} shared mounts; at most {MAX_MOUNTS}", mounts.len())));
    }
    for mount in mounts {
        for path in [&mount.src_path, &mount.dst_path] {
            let parts = inside(path);
            if parts.is_none_or(|parts| parts.is_empty()) {
                let path: String = path.chars().take(200).collect();
                let message = format!("shared mount {:?}: {path:?} is not a path in a container", mount.name);
                return Err(Error::invalid(message));
            }
        }
    }
    Ok(())
}

/// Splits a path in a container into components.
fn inside(path: &str) -> Option<Vec<&std::ffi::OsStr>> {
    let parts = Path::new(path).strip_prefix("/").ok()?.components();
    parts.map(|part| if let Component::Normal(name) = part { Some(name) } else { None }).collect()
}

/// Creates shared mounts.
#[derive(Debug)]
pub(super) struct SharedMounts {
    sandbox: Arc<Sandbox>,
    names: Arc<ContainerNames>,
    first_processes: FirstProcesses,
}

impl SharedMounts {
    pub(super) fn new(sandbox: &Arc<Sandbox>, names: &Arc<ContainerNames>, first_processes: FirstProcesses) -> Self {
        Self { sandbox: Arc::clone(sandbox), names: Arc::clone(names), first_processes }
    }

    /// Creates the shared mounts of a container.
    ///
    /// # Errors
    /// The source container or its directory does not appear in time, or the kernel refuses.
    pub(super) async fn create(&self, mounts: &[SharedMount], to: &Arc<Container>) -> Result<()> {
        for mount in mounts {
            let share = || {
                let from = self.sandbox.container(&self.names.find(&mount.src_ctr)?).ok()?;
                Some(self.share(mount, from, to))
            };
            make(mount, share).await?;
        }
        Ok(())
    }

    async fn share(&self, mount: &SharedMount, from: Arc<Container>, to: &Arc<Container>) -> Result<()> {
        let from = self.first_processes.open_by_pid(&from, Inside::of).await?;
        let to = self.first_processes.open_by_pid(to, Inside::of).await?;
        once(mount.clone(), from, to).await
    }
}

/// Creates a shared mount. `share` is retried until the source container exists.
///
/// # Errors
/// The source container or its directory does not appear in time, or the kernel refuses.
async fn make<F: Future<Output = Result<()>>>(mount: &SharedMount, share: impl Fn() -> Option<F>) -> Result<()> {
    let begin = Instant::now();
    let mut last = format!("no container {:?}", mount.src_ctr);
    while begin.elapsed() < TIMEOUT {
        if let Some(shared) = share() {
            match shared.await {
                Err(error) if error.code == Code::NOT_FOUND => last = error.message,
                done => return done.map_err(|error| error.during(&describe(mount))),
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let seconds = TIMEOUT.as_secs();
    Err(Error::internal(format!(
        "{}: {last}, after {seconds} s; check that the source container starts first and has this path",
        describe(mount)
    )))
}

fn describe(mount: &SharedMount) -> String {
    let SharedMount { name, src_ctr, src_path, dst_ctr, dst_path, .. } = mount;
    format!("shared mount {name:?} ({src_ctr}:{src_path} at {dst_ctr}:{dst_path})")
}

/// A container's root and mount namespace.
struct Inside {
    root: OwnedFd,
    mounts: OwnedFd,
}

impl Inside {
    fn of(pid: i32) -> Result<Self> {
        let open = |what: &str, flags: OFlags| {
            let path = PathBuf::from(format!("/proc/{pid}/{what}"));
            rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
                Error::new(Code::NOT_FOUND, format!("the container has exited ({}: {error})", path.display()))
            })
        };
        Ok(Self { root: open("root", OFlags::PATH | OFlags::DIRECTORY)?, mounts: open("ns/mnt", OFlags::RDONLY)? })
    }

    fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.mounts.as_fd(), Some(LinkNameSpaceType::Mount))
            .map_err(|error| Error::internal(format!("failed to enter the container's mount namespace: {error}")))
    }
}

async fn once(mount: SharedMount, from: Inside, to: Inside) -> Result<()> {
    background::blocking(move || {
        // A dedicated thread: after setns it cannot be reused for other work.
        let thread = std::thread::Builder::new().name("shared-mount".to_owned()).spawn(move || {
            firstlight_sys::mount::unshare_fs().map_err(|error| Error::internal(error.to_string()))?;
            from.enter()?;
            let tree = tree(&from, &mount.src_path)?;
            to.enter()?;
            attach(&to, &tree, &mount.dst_path)
        });
        let thread = thread.map_err(|error| Error::internal(format!("failed to start a thread: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(Error::internal("a thread of the agent panicked")))
    })
    .await
}

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// Clones the mount of the shared path. Links are followed within the container's root only.
fn tree(from: &Inside, path: &str) -> Result<OwnedFd> {
    let found = rustix::fs::openat2(&from.root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), IN_ROOT);
    let found = found.map_err(|error| match error {
        Errno::NOENT => Error::new(Code::NOT_FOUND, format!("{path} does not exist")),
        error => Error::internal(format!("{path}: {error}")),
    })?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    rustix::mount::open_tree(&found, "", flags)
        .map_err(|error| Error::internal(format!("failed to clone the mount of {path}: {error}")))
}

/// Attaches it in the other container; missing directories are created, links are not followed.
fn attach(to: &Inside, tree: &OwnedFd, path: &str) -> Result<()> {
    let failed = |error: Errno| Error::internal(format!("failed to mount at {path}: {error}"));
    let step = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let open = |at: &OwnedFd, part: &std::ffi::OsStr| {
        rustix::fs::openat2(at, part, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), step)
    };
    let dir = safe_path::kind(tree)? == FileType::Directory;
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
    fn invalid_paths_are_rejected() {
        check(&[shared("/a", "/b/c")]).unwrap();
        for wrong in [shared("a", "/b"), shared("/a", "/b/../../c"), shared("/", "/b"), shared("/a", "")] {
            assert!(check(&[wrong]).unwrap_err().message.contains("not a path in a container"));
        }
        assert!(check(&vec![shared("/a", "/b"); 65]).unwrap_err().message.contains("65"));
    }

    #[test]
    fn missing_source_container_is_reported_after_the_timeout() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let mount = SharedMount { src_ctr: "web".into(), ..shared("/a", "/b") };
        let error = runtime.block_on(make(&mount, || None::<std::future::Ready<Result<()>>>)).unwrap_err();
        assert!(error.message.contains("no container \"web\", after 10 s"), "{error}");
    }
}
