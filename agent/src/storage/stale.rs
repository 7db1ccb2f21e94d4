//! RemoveStaleVirtiofsShareMounts: a stat of every mount in the host's share makes the guest's
//! kernel drop those that the host has removed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD};

use super::mountinfo;
use crate::background;
use crate::error::{Error, Result};

/// A responsive host replies at once.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Whether a previous call is still blocked; further calls would accumulate threads.
static STUCK: AtomicBool = AtomicBool::new(false);

fn in_share(table: &[u8], share: &Path) -> Vec<PathBuf> {
    let inside = |point: &PathBuf| point.starts_with(share) && point != share;
    mountinfo::parse(table).into_iter().map(|mount| mount.point).filter(inside).collect()
}

/// Calls stat on every mount below the share in `run`. A host that does not reply is logged and no
/// error: a container is stopped with this call, and would otherwise not stop.
///
/// # Errors
/// `/proc/self/mountinfo` cannot be read.
pub async fn refresh(run: &Path) -> Result<()> {
    let table = std::fs::read("/proc/self/mountinfo")
        .map_err(|error| Error::internal(format!("failed to read /proc/self/mountinfo: {error}")))?;
    let points = in_share(&table, &run.join("shared/containers"));
    if points.is_empty() || STUCK.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    let all = background::blocking(move || {
        for point in &points {
            // ENOENT is expected.
            let _ = rustix::fs::statat(CWD, point, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT);
        }
        STUCK.store(false, Ordering::Release);
        Ok(())
    });
    if tokio::time::timeout(TIMEOUT, all).await.is_err() {
        log::warn!("the host's share has not replied for {} s; check that virtiofsd runs", TIMEOUT.as_secs());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_below_the_share_are_checked() {
        let table = b"1 2 0:1 / /run/k/shared/containers rw - virtiofs kataShared rw\n\
            2 1 0:2 / /run/k/shared/containers/c1/rootfs rw - overlay overlay rw\n\
            3 1 0:3 / /run/k/shared/containers2 rw - tmpfs tmpfs rw\n";
        let points = in_share(table, Path::new("/run/k/shared/containers"));
        assert_eq!(points, [PathBuf::from("/run/k/shared/containers/c1/rootfs")]);
    }
}
