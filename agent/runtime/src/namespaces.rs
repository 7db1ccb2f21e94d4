//! The namespaces that all containers of a sandbox share.

use std::fs::{self, File};
use std::path::Path;

use firstlight_sys::fork::{Side, fork, unshare_ipc_and_uts};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::Failure;
use crate::words::{LastWords, errors};

/// Which namespaces are kept.
const KEPT: &[&str] = &["ipc", "uts"];

/// Makes the namespaces in a child, because a process can only make its own,
/// and binds them to files, which keeps them when the child has ended.
pub(crate) fn keep(dir: &Path, hostname: &str, words: &LastWords) -> Result<(), Failure> {
    let wrong = |what: &str, error: &dyn std::fmt::Display| {
        Failure::internal(format!("sandbox namespaces in {}: {what}: {error}", dir.display()))
    };
    fs::create_dir_all(dir).map_err(|error| wrong("cannot make the directory", &error))?;
    for kind in KEPT {
        let file = dir.join(kind);
        // An agent that died left its sandbox's namespaces here; a file that is
        // no mount point says EINVAL, one that is not there ENOENT.
        let _ = unmount(&file, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        File::create(&file).map_err(|error| wrong("cannot make a file", &error))?;
    }
    match fork().map_err(|error| wrong("cannot fork", &error))? {
        Side::Child => std::process::exit(i32::from(make(dir, hostname).is_err())),
        Side::Parent(pid) => {
            let status = Pid::from_raw(pid).map(|pid| waitpid(Some(pid), WaitOptions::empty()));
            match status {
                Some(Ok(Some((_, status)))) if status.exit_status() == Some(0) => Ok(()),
                _ => Err(wrong("failed", &errors(&words.take()))),
            }
        }
    }
}

fn make(dir: &Path, hostname: &str) -> std::io::Result<()> {
    let told = |what: &str, error: std::io::Error| {
        log::error!("{what}: {error}");
        error
    };
    unshare_ipc_and_uts().map_err(|error| told("unshare", error))?;
    if !hostname.is_empty() {
        rustix::system::sethostname(hostname.as_bytes()).map_err(|error| told("sethostname", error.into()))?;
    }
    for kind in KEPT {
        let from = format!("/proc/self/ns/{kind}");
        rustix::mount::mount_bind(from.as_str(), dir.join(kind)).map_err(|error| told("bind", error.into()))?;
    }
    Ok(())
}
