//! Finds disks on SCSI hosts.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use super::block::{self, Disk, names};
use crate::error::Error;

/// Limits of virtio-scsi.
const MAX_TARGET: u32 = 255;
const MAX_LUN: u32 = 16383;

/// `ID:LUN` on channel 0 of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScsiAddress {
    target: u32,
    lun: u32,
}

impl fmt::Display for ScsiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

impl FromStr for ScsiAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let number = |text: &str, most: u32| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|number| digits && *number <= most)
        };
        let parsed = text
            .split_once(':')
            .and_then(|(target, lun)| Some(Self { target: number(target, MAX_TARGET)?, lun: number(lun, MAX_LUN)? }));
        parsed.ok_or_else(|| {
            let text: String = text.chars().take(40).collect();
            Error::invalid(format!("{text:?} is not a SCSI address ID:LUN, decimal, at most {MAX_TARGET}:{MAX_LUN}"))
        })
    }
}

/// Returns the SCSI hosts.
pub(super) fn hosts(sysfs: &Path) -> Vec<String> {
    names(&sysfs.join("class/scsi_host"), "host")
}

/// Asks a host to scan for the disk. Blocks until it has scanned.
pub(super) fn scan(sysfs: &Path, host: &str, scsi: ScsiAddress) -> std::io::Result<()> {
    let ScsiAddress { target, lun } = scsi;
    fs::write(sysfs.join("class/scsi_host").join(host).join("scan"), format!("0 {target} {lun}"))
}

/// Returns the disks at an address, at most one per host.
pub(super) fn at(sysfs: &Path, scsi: ScsiAddress) -> Vec<Disk> {
    let devices = sysfs.join("class/scsi_device");
    let end = format!(":0:{scsi}");
    let here =
        names(&devices, "").into_iter().filter(|name| name.strip_suffix(&end).is_some_and(|host| !host.contains(':')));
    here.flat_map(|name| names(&devices.join(name).join("device/block"), ""))
        .filter_map(|name| block::named(sysfs, &name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn invalid_scsi_addresses_are_rejected() {
        assert_eq!("0:1".parse::<ScsiAddress>().unwrap(), ScsiAddress { target: 0, lun: 1 });
        for text in ["", "0", "0:", ":1", "0:1:2", "256:0", "0:16384", "a:1", "+1:0", " 1:0"] {
            assert!(text.parse::<ScsiAddress>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_an_address_or_an_error(text in "[0-9:]{0,12}|\\PC{0,12}") {
            if let Ok(scsi) = text.parse::<ScsiAddress>() {
                prop_assert_eq!(scsi.to_string().parse::<ScsiAddress>().unwrap(), scsi);
            }
        }
    }
}
