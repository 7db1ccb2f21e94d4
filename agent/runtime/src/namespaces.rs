//! The namespaces that all containers of a sandbox share.

use std::fs::{self, File};
use std::path::Path;

use firstlight_sys::fork::{Side, fork, unshare_ipc_and_uts};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::Failure;
use crate::helper_log::{HelperLog, errors};

/// The shared namespaces.
const SHARED: &[&str] = &["ipc", "uts"];

/// Creates the namespaces in a child, because a process can only create its own, and bind-mounts them to files,
/// which keeps them alive after the child exits.
pub(crate) fn create(dir: &Path, hostname: &str, log: &HelperLog) -> Result<(), Failure> {
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        Failure::internal(format!("sandbox namespaces in {}: {what}: {error}", dir.display()))
    };
    fs::create_dir_all(dir).map_err(|error| failed("failed to create the directory", &error))?;
    for kind in SHARED {
        let file = dir.join(kind);
        // Unmount the namespaces of an agent that died. EINVAL: the file is not a mount point; ENOENT: it does
        // not exist.
        let _ = unmount(&file, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        File::create(&file).map_err(|error| failed("failed to create a file", &error))?;
    }
    match fork().map_err(|error| failed("failed to fork", &error))? {
        Side::Child => std::process::exit(i32::from(create_in_child(dir, hostname).is_err())),
        Side::Parent(pid) => {
            let status = Pid::from_raw(pid).map(|pid| waitpid(Some(pid), WaitOptions::empty()));
            match status {
                Some(Ok(Some((_, status)))) if status.exit_status() == Some(0) => Ok(()),
                _ => Err(failed("the child failed", &errors(&log.take()))),
            }
        }
    }
}

fn create_in_child(dir: &Path, hostname: &str) -> std::io::Result<()> {
    let logged = |what: &str, error: std::io::Error| {
        log::error!("{what}: {error}");
        error
    };
    unshare_ipc_and_uts().map_err(|error| logged("unshare", error))?;
    if !hostname.is_empty() {
        rustix::system::sethostname(hostname.as_bytes()).map_err(|error| logged("sethostname", error.into()))?;
    }
    for kind in SHARED {
        let from = format!("/proc/self/ns/{kind}");
        rustix::mount::mount_bind(from.as_str(), dir.join(kind)).map_err(|error| logged("bind", error.into()))?;
    }
    Ok(())
}
