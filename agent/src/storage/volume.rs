//! GetVolumeStats: usage of a volume.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_agent_api::csi::volume_usage::Unit;
use firstlight_agent_api::csi::{VolumeCondition, VolumeStatsResponse, VolumeUsage};
use rustix::fs::{OFlags, StatFs};
use ttrpc::Code;

use super::safe_path;
use crate::background;
use crate::error::{Error, Result};

/// A responsive file server or host replies at once.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a volume's usage; it must be below `run`.
///
/// # Errors
/// The path is outside `run`, contains a link or does not exist, or the file system does not reply.
pub async fn stats(run: PathBuf, path: &str) -> Result<VolumeStatsResponse> {
    let volume = PathBuf::from(path);
    let read = background::blocking(move || statfs(&run, &volume).map(|found| reply(&found)));
    match tokio::time::timeout(TIMEOUT, read).await {
        Ok(result) => result.map_err(|error| error.during("volume")),
        Err(_) => Err(Error::new(
            Code::DEADLINE_EXCEEDED,
            format!("volume {path}: no reply for {} s; check the host's share or the file server", TIMEOUT.as_secs()),
        )),
    }
}

fn statfs(run: &Path, volume: &Path) -> Result<StatFs> {
    let found = safe_path::open_below(run, volume, OFlags::PATH)?;
    rustix::fs::fstatfs(&found).map_err(|error| Error::internal(format!("{}: {error}", volume.display())))
}

fn usage(unit: Unit, total: u64, free: u64, available: u64) -> VolumeUsage {
    let used = total.saturating_sub(free);
    VolumeUsage { available, total, used, unit: unit.into(), ..Default::default() }
}

fn reply(found: &StatFs) -> VolumeStatsResponse {
    let size = u64::try_from(found.f_bsize).unwrap_or(0);
    let bytes = |blocks: u64| blocks.saturating_mul(size);
    let usage = vec![
        usage(Unit::BYTES, bytes(found.f_blocks), bytes(found.f_bfree), bytes(found.f_bavail)),
        usage(Unit::INODES, found.f_files, found.f_ffree, found.f_ffree),
    ];
    let condition = VolumeCondition { abnormal: false, message: "OK".to_owned(), ..Default::default() };
    VolumeStatsResponse { usage, volume_condition: Some(condition).into(), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn usage_is_consistent_and_invalid_paths_are_rejected() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("v")).unwrap();
        symlink("/", root.path().join("link")).unwrap();
        let found = reply(&statfs(root.path(), &root.path().join("v")).unwrap());
        assert_eq!(found.usage.len(), 2);
        let bytes = &found.usage[0];
        assert!(bytes.total > 0 && bytes.used + bytes.available <= bytes.total && bytes.unit == Unit::BYTES.into());
        assert_eq!(found.volume_condition.message, "OK");
        for (path, part) in
            [("link", "symbolic link"), ("link/etc", "symbolic link"), ("nothere", "\"nothere\" does not exist")]
        {
            let error = statfs(root.path(), &root.path().join(path)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(statfs(root.path(), Path::new("/etc")).unwrap_err().message.contains("not below"));
    }
}
