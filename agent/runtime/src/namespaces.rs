//! The namespaces that all containers of a sandbox share.

use std::fs::{self, File};
use std::path::Path;

use firstlight_sys::fork::{Side, fork, new_ipc_and_uts};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::Failure;
use crate::helper_log::{HelperLog, errors};

/// Which namespaces are kept.
const SHARED: &[&str] = &["ipc", "uts"];

/// Makes the namespaces in a child, because a process can only make its own,
/// and binds them to files, which keeps them when the child has ended.
pub(crate) fn create(dir: &Path, hostname: &str, log: &HelperLog) -> Result<(), Failure> {
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        Failure::internal(format!("sandbox namespaces in {}: {what}: {error}", dir.display()))
    };
    fs::create_dir_all(dir).map_err(|error| failed("cannot make the directory", &error))?;
    for kind in SHARED {
        let file = dir.join(kind);
        // An agent that died left its sandbox's namespaces here; a file that is
        // no mount point says EINVAL, one that is not there ENOENT.
        let _ = unmount(&file, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        File::create(&file).map_err(|error| failed("cannot make a file", &error))?;
    }
    match fork().map_err(|error| failed("cannot fork", &error))? {
        Side::Child => std::process::exit(i32::from(create_in_child(dir, hostname).is_err())),
        Side::Parent(pid) => {
            let status = Pid::from_raw(pid).map(|pid| waitpid(Some(pid), WaitOptions::empty()));
            match status {
                Some(Ok(Some((_, status)))) if status.exit_status() == Some(0) => Ok(()),
                _ => Err(failed("failed", &errors(&log.take()))),
            }
        }
    }
}

fn create_in_child(dir: &Path, hostname: &str) -> std::io::Result<()> {
    let logged = |what: &str, error: std::io::Error| {
        log::error!("{what}: {error}");
        error
    };
    new_ipc_and_uts().map_err(|error| logged("unshare", error))?;
    if !hostname.is_empty() {
        rustix::system::sethostname(hostname.as_bytes()).map_err(|error| logged("sethostname", error.into()))?;
    }
    for kind in SHARED {
        let from = format!("/proc/self/ns/{kind}");
        rustix::mount::mount_bind(from.as_str(), dir.join(kind)).map_err(|error| logged("bind", error.into()))?;
    }
    Ok(())
}
