//! Storages with real file systems.

mod attacks;
mod directories;
mod disks;
mod erofs;
mod memory;
mod overlays;
mod sharing;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use firstlight_agent_api::agent::{CreateContainerRequest, Storage};
use ttrpc::{Code, Error};

use crate::support::{Agent, not_runnable, require_file_system, short, spec, with_containers};

/// The directory below which storages may be mounted.
const RUN: &str = "/run/kata-containers";

fn with_agent<F: AsyncFnOnce(Agent)>(test: F) {
    with_containers(async || test(Agent::start().await).await);
}

fn storage(driver: &str, source: impl AsRef<Path>, fstype: &str, at: &str, options: &[&str]) -> Storage {
    Storage {
        driver: driver.into(),
        source: source.as_ref().display().to_string(),
        fstype: fstype.into(),
        mount_point: format!("{RUN}/{at}"),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..Default::default()
    }
}

/// Creates a container with storages, without starting it.
async fn create(agent: &Agent, container: &str, storages: Vec<Storage>) -> ttrpc::Result<()> {
    let root = fresh_root(agent, container);
    let mut request = CreateContainerRequest::new();
    request.container_id = container.into();
    request.exec_id = container.into();
    request.OCI = Some(spec(&root, "sleep 1000")).into();
    request.storages = storages;
    agent.calls.create_container(short(), &request).await.map(|_| ())
}

/// Creates a root that no earlier container used.
fn fresh_root(agent: &Agent, container: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    agent.root(&format!("{container}-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Expects the creation with these storages to fail without leftover mounts; returns the error.
async fn refused(agent: &Agent, storages: Vec<Storage>) -> String {
    let before = mounts(agent);
    let (_, message) = code(create(agent, "refused", storages).await);
    assert_eq!(mounts(agent), before, "mounts left after: {message}");
    message
}

fn code<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> (Code, String) {
    match result.unwrap_err() {
        Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("{other:?}"),
    }
}

/// Returns the agent's mounts below [`RUN`].
fn mounts(agent: &Agent) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/{}/mountinfo", agent.pids()[0])).unwrap();
    // Without the directory itself, a mount of PID 1.
    let own = format!(" {RUN} ");
    table.lines().filter(|line| line.contains(RUN) && !line.contains(&own)).map(str::to_owned).collect()
}

/// Returns the mountinfo line of a mount point.
fn mounted(agent: &Agent, at: &str) -> Option<String> {
    let place = format!(" {RUN}/{at} ");
    mounts(agent).into_iter().find(|line| line.contains(&place))
}

fn inside(agent: &Agent, at: &str) -> PathBuf {
    agent.inside(&format!("{RUN}/{at}"))
}

fn read(agent: &Agent, at: &str) -> String {
    fs::read_to_string(inside(agent, at)).unwrap()
}

/// Runs a busybox applet and returns its output.
fn busybox(arguments: &[&str]) -> String {
    let output = Command::new("/bin/busybox").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A loop device of an image, detached on drop.
struct Loop(String);

impl Loop {
    fn of(image: &Path) -> Self {
        let free = Command::new("/bin/busybox").args(["losetup", "-f"]).output().unwrap();
        let node = String::from_utf8_lossy(&free.stdout).trim().to_owned();
        if !Path::new(&node).exists() {
            not_runnable(format_args!(
                "no free loop device (modprobe loop): {}",
                String::from_utf8_lossy(&free.stderr)
            ));
        }
        busybox(&["losetup", &node, &image.display().to_string()]);
        Self(node)
    }

    /// Creates a disk with an ext4 file system that contains a file `name`.
    fn ext4(dir: &Path, name: &str, text: &str) -> Self {
        require_file_system("ext4");
        let image = dir.join(format!("{name}.img"));
        fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let disk = Self::of(&image);
        busybox(&["mke2fs", "-F", &disk.0]);
        let at = dir.join(format!("{name}.mnt"));
        fs::create_dir(&at).unwrap();
        busybox(&["mount", "-t", "ext4", &disk.0, &at.display().to_string()]);
        fs::write(at.join(name), text).unwrap();
        busybox(&["umount", &at.display().to_string()]);
        disk
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("/bin/busybox").args(["losetup", "-d", &self.0]).status();
    }
}
