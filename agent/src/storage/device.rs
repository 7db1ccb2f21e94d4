//! The device of a storage, as shims name it.

use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::{Source, place};
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;

/// A node that is there: `/dev/...`, a block device, and no link.
pub(super) fn node(path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if !path.starts_with("/dev") {
        return Err(Error::invalid(format!("{} is not below /dev", path.display())));
    }
    let found = place::existing(path)?;
    if place::kind(&found)? != FileType::BlockDevice {
        return Err(Error::invalid(format!("{} is no block device", path.display())));
    }
    Ok(path.to_owned())
}

/// Whether a source names a node rather than a place on a bus.
pub(super) fn is_node(source: &str) -> bool {
    source.starts_with('/')
}

/// The device that `source` means to a driver, also if it is still on its way;
/// `None` where there is none.
///
/// # Errors
/// It is no block device, or did not come in time.
pub(super) async fn find(hotplug: &Hotplug, kind: Source, source: &str) -> Result<Option<PathBuf>> {
    let found = match kind {
        Source::Given => return Ok(None),
        Source::Pci if !is_node(source) => hotplug.block_by_pci(source).await?,
        Source::Scsi if !is_node(source) => hotplug.block_by_scsi(source).await?,
        _ if place::existing(Path::new(source)).is_ok() => return node(source).map(Some),
        _ => hotplug.block_by_node(source).await?,
    };
    let path = found.to_str().ok_or_else(|| Error::internal("the device's path is no text"))?;
    node(path).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_block_devices_below_dev() {
        for (path, part) in [
            ("/etc/passwd", "not below /dev"),
            ("/dev/null", "no block device"),
            ("/dev/nothere", "nothere"),
            ("/dev/../etc/passwd", "'..'"),
        ] {
            let error = node(path).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
