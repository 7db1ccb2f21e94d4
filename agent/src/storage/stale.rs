//! RemoveStaleVirtiofsShareMounts: a look at every mount in the host's share
//! makes the guest's kernel forget what the host has taken away.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD};

use super::mountinfo;
use crate::error::{Error, Result};
use crate::work;

/// A host that answers does so at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether a look has not come back. More of them would pile up threads.
static STUCK: AtomicBool = AtomicBool::new(false);

fn in_share(table: &[u8], share: &Path) -> Vec<PathBuf> {
    let inside = |point: &PathBuf| point.starts_with(share) && point != share;
    mountinfo::parse(table).into_iter().map(|mount| mount.point).filter(inside).collect()
}

/// Looks at every mount below the share in `run`. That the host does not answer
/// is logged and no error: a container is stopped with this call, and would
/// otherwise not stop.
///
/// # Errors
/// The table of mounts cannot be read.
pub async fn look(run: &Path) -> Result<()> {
    let table = std::fs::read("/proc/self/mountinfo")
        .map_err(|error| Error::internal(format!("cannot read /proc/self/mountinfo: {error}")))?;
    let points = in_share(&table, &run.join("shared/containers"));
    if points.is_empty() || STUCK.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    let all = work::blocking(move || {
        for point in &points {
            // Gone is what it may be.
            let _ = rustix::fs::statat(CWD, point, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT);
        }
        STUCK.store(false, Ordering::Release);
        Ok(())
    });
    if tokio::time::timeout(PATIENCE, all).await.is_err() {
        log::warn!("the host's share does not answer for {} s: is virtiofsd alive?", PATIENCE.as_secs());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_below_the_share_is_looked_at() {
        let table = b"1 2 0:1 / /run/k/shared/containers rw - virtiofs kataShared rw\n\
            2 1 0:2 / /run/k/shared/containers/c1/rootfs rw - overlay overlay rw\n\
            3 1 0:3 / /run/k/shared/containers2 rw - tmpfs tmpfs rw\n";
        let points = in_share(table, Path::new("/run/k/shared/containers"));
        assert_eq!(points, [PathBuf::from("/run/k/shared/containers/c1/rootfs")]);
    }
}
