//! The agent's mount namespace: its own mounts and `/run`, the CDI file, and the containers' roots.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};
use firstlight::agent::SHARED;
use firstlight_init::cdi;
use firstlight_init::root::Root;
use firstlight_oci::Image;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};

use crate::machine;

/// The containers of the test.
pub(crate) const CONTAINERS: &[&str] = &["gpu-test-cuda", "gpu-test-select"];

const CGROUPS: &str = "/sys/fs/cgroup";

/// `CGROUP2_SUPER_MAGIC`
const CGROUP2: u64 = 0x6367_7270;

/// Returns the path of the agent's socket.
pub(crate) fn socket(dir: &Path) -> PathBuf {
    dir.join("agent.sock")
}

/// Returns the directory of the copied CDI files, readable outside the namespace.
pub(crate) fn cdi_copy(dir: &Path) -> PathBuf {
    dir.join("cdi")
}

/// Execs the agent; returns only the error.
pub(crate) fn exec_agent(bundle: &Path, dir: &Path) -> anyhow::Error {
    if let Err(error) = prepare(bundle, dir) {
        return error.context("failed to prepare the agent's namespace");
    }
    let agent = bundle.join("firstlight-agent");
    let mut command = Command::new(&agent);
    // No variables of this machine, as in a guest.
    command.env_clear().env("AGENT_ADDR", format!("unix://{}", socket(dir).display()));
    anyhow!(command.exec()).context(format!("failed to start {}", agent.display()))
}

fn prepare(bundle: &Path, dir: &Path) -> anyhow::Result<()> {
    let image = Image::open(&bundle.join("image"))?;
    firstlight_sys::fork::unshare_mounts().context("failed to create a mount namespace (needs CAP_SYS_ADMIN)")?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).context("failed to make the mounts private")?;
    if dir.starts_with("/run") || bundle.starts_with("/run") {
        bail!("{} and {} must not be below /run, which is replaced for the agent", bundle.display(), dir.display());
    }
    // For the containers' roots and the agent's state; removed with the namespace.
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("firstlight", "/run", "tmpfs", flags, Some(c"mode=0755")).context("failed to mount a tmpfs on /run")?;
    if fs::canonicalize("/var/run").context("/var/run")? != Path::new("/run") {
        mount_bind("/run", "/var/run").context("failed to bind-mount /run on /var/run")?;
    }
    let kind = rustix::fs::statfs(CGROUPS).context(CGROUPS)?.f_type;
    if u64::from_ne_bytes(kind.to_ne_bytes()) != CGROUP2 {
        mount("cgroup2", CGROUPS, "cgroup2", MountFlags::empty(), None).context("failed to mount cgroup v2 over v1")?;
    }
    let root = Root::real();
    // This machine has no list of the driver's files, so they are searched for.
    let _ = cdi::publish_driver(&root)?;
    let file = cdi::publish(&root, &machine::gpus(&root)?)?;
    let copy = cdi_copy(dir);
    fs::create_dir_all(&copy).with_context(|| copy.display().to_string())?;
    for entry in fs::read_dir(file.parent().unwrap_or(Path::new("/")))? {
        let entry = entry?;
        fs::copy(entry.path(), copy.join(entry.file_name())).context("failed to copy the CDI files")?;
    }
    for container in CONTAINERS {
        let target = Path::new(SHARED).join(container).join("rootfs");
        fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
        image.unpack(&target)?;
    }
    Ok(())
}
