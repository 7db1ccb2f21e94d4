//! The place in which the agent lives: its own mounts, its own `/run`, the CDI
//! file, and the containers' roots.

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
pub(crate) const CONTAINERS: &[&str] = &["gpu-test-cuda", "gpu-test-narrow"];

const CGROUPS: &str = "/sys/fs/cgroup";

/// `CGROUP2_SUPER_MAGIC`
const CGROUP2: u64 = 0x6367_7270;

/// The agent's socket in the directory of a run.
pub(crate) fn socket(dir: &Path) -> PathBuf {
    dir.join("agent.sock")
}

/// Where the agent's CDI files are also readable from outside.
pub(crate) fn cdi_copy(dir: &Path) -> PathBuf {
    dir.join("cdi")
}

/// Becomes the agent; returns only if that fails.
pub(crate) fn become_agent(bundle: &Path, dir: &Path) -> anyhow::Error {
    if let Err(error) = prepare(bundle, dir) {
        return error.context("prepare the agent's namespace");
    }
    let agent = bundle.join("firstlight-agent");
    let mut command = Command::new(&agent);
    // Nothing of this machine's environment: a guest has none either.
    command.env_clear().env("AGENT_ADDR", format!("unix://{}", socket(dir).display()));
    anyhow!(command.exec()).context(format!("start {}", agent.display()))
}

fn prepare(bundle: &Path, dir: &Path) -> anyhow::Result<()> {
    let image = Image::open(&bundle.join("image"))?;
    firstlight_sys::fork::unshare_mounts().context("make a mount namespace (needs CAP_SYS_ADMIN)")?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).context("make the mounts private")?;
    if dir.starts_with("/run") || bundle.starts_with("/run") {
        bail!("{} and {} must not be below /run, which the agent gets a fresh one of", bundle.display(), dir.display());
    }
    // Containers' roots and the agent's notes go here, and away with the namespace.
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("firstlight", "/run", "tmpfs", flags, Some(c"mode=0755")).context("mount a tmpfs on /run")?;
    if fs::canonicalize("/var/run").context("/var/run")? != Path::new("/run") {
        mount_bind("/run", "/var/run").context("make /var/run the same as /run")?;
    }
    let kind = rustix::fs::statfs(CGROUPS).context(CGROUPS)?.f_type;
    if u64::from_ne_bytes(kind.to_ne_bytes()) != CGROUP2 {
        mount("cgroup2", CGROUPS, "cgroup2", MountFlags::empty(), None).context("mount cgroup v2 over v1")?;
    }
    let root = Root::real();
    // Here nobody has written down which files there are, so they are looked for.
    let _ = cdi::publish_driver(&root)?;
    let file = cdi::publish(&root, &machine::gpus(&root)?)?;
    let copy = cdi_copy(dir);
    fs::create_dir_all(&copy).with_context(|| copy.display().to_string())?;
    for entry in fs::read_dir(file.parent().unwrap_or(Path::new("/")))? {
        let entry = entry?;
        fs::copy(entry.path(), copy.join(entry.file_name())).context("copy the CDI files")?;
    }
    for container in CONTAINERS {
        let target = Path::new(SHARED).join(container).join("rootfs");
        fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
        image.unpack(&target)?;
    }
    Ok(())
}
