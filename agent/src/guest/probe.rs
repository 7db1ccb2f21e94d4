//! MemHotplugByProbe: writes the addresses of plugged memory to the kernel's probe file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use crate::error::{Error, Result};

/// Writes each address to the probe file, in the kernel's format.
///
/// # Errors
/// The kernel has no probe file (memory is then announced by ACPI), or rejects an address.
pub fn probe(sysfs: &Path, addresses: &[u64]) -> Result<()> {
    let path = sysfs.join("devices/system/memory/probe");
    for address in addresses {
        // Opened each time: the kernel takes one address per open. Not created if missing.
        let written =
            OpenOptions::new().write(true).open(&path).and_then(|mut file| file.write_all(text(*address).as_bytes()));
        written.map_err(|error| {
            let hint = match error.kind() {
                std::io::ErrorKind::NotFound => {
                    "; this kernel detects memory by itself (see support_mem_hotplug_probe of GetGuestDetails)"
                }
                _ => "; check that memory is plugged in there and the address is a block's",
            };
            Error::internal(format!("MemHotplugByProbe: {} to {}: {error}{hint}", text(*address), path.display()))
        })?;
    }
    Ok(())
}

fn text(address: u64) -> String {
    format!("{address:#X}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_in_the_kernels_format() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("devices/system/memory");
        std::fs::create_dir_all(&dir).unwrap();
        let error = probe(root.path(), &[0x4000_0000]).unwrap_err().message;
        assert!(error.contains("0x40000000") && error.contains("by itself"), "{error}");
        assert!(!dir.join("probe").exists());
        std::fs::write(dir.join("probe"), "").unwrap();
        probe(root.path(), &[0xABC0_0000]).unwrap();
        assert_eq!(std::fs::read_to_string(dir.join("probe")).unwrap(), "0xABC00000");
        probe(Path::new("/nonexistent"), &[]).unwrap();
    }
}
