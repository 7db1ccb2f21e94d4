//! Resolves the device of a storage.

use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::{Source, safe_path};
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;

/// Checks that a path is a block device node below `/dev` and not a link.
pub(super) fn node(path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if !path.starts_with("/dev") {
        return Err(Error::invalid(format!("{} is not below /dev", path.display())));
    }
    let found = safe_path::existing(path)?;
    if safe_path::kind(&found)? != FileType::BlockDevice {
        return Err(Error::invalid(format!("{} is not a block device", path.display())));
    }
    Ok(path.to_owned())
}

/// Returns whether a source is a node and not a bus address.
pub(super) fn is_node(source: &str) -> bool {
    source.starts_with('/')
}

/// Waits for the device that `source` means to a driver; `None` if the driver has no device.
///
/// # Errors
/// It is not a block device, or did not appear in time.
pub(super) async fn find(hotplug: &Hotplug, kind: Source, source: &str) -> Result<Option<PathBuf>> {
    let found = match kind {
        Source::Given => return Ok(None),
        Source::Pci if !is_node(source) => hotplug.block_by_pci(source).await?,
        Source::Scsi if !is_node(source) => hotplug.block_by_scsi(source).await?,
        _ if safe_path::existing(Path::new(source)).is_ok() => return node(source).map(Some),
        _ => hotplug.block_by_node(source).await?,
    };
    let path = found.to_str().ok_or_else(|| Error::internal("the device's path is not UTF-8"))?;
    node(path).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_is_not_a_block_device_below_dev_is_rejected() {
        for (path, part) in [
            ("/etc/passwd", "not below /dev"),
            ("/dev/null", "not a block device"),
            ("/dev/nothere", "nothere"),
            ("/dev/../etc/passwd", "'..'"),
        ] {
            let error = node(path).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
