//! Finds devices without a driver, and their modaliases.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use super::alias::LONGEST;
use crate::root::Root;

/// The buses to scan, in this order: a driver of one may create devices on a later one.
pub const BUSES: &[&str] = &["pci", "virtio", "auxiliary"];

/// Maximum number of different modaliases per bus.
const MOST: usize = 256;

/// GPU drivers: these are loaded by the guest mode's units, not by modalias.
#[must_use]
pub fn is_gpu_driver(module: &str) -> bool {
    module.starts_with("nvidia") || ["nouveau", "nova_core", "nova-core", "nova_drm", "nova-drm"].contains(&module)
}

/// Returns the modaliases of the bus's devices without a driver, sorted and without duplicates, so
/// that equal guests load modules in the same order. Modaliases that the kernel would not generate
/// are skipped.
#[must_use]
pub fn modaliases_without_driver(root: &Root, bus: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(root.path("/sys/bus").join(bus).join("devices")) else { return Vec::new() };
    let mut found: Vec<String> = Vec::new();
    for entry in entries.flatten() {
        let dir = entry.path();
        if fs::symlink_metadata(dir.join("driver")).is_ok() {
            continue;
        }
        let Some(text) = modalias(&dir.join("modalias")) else { continue };
        if let Err(at) = found.binary_search(&text) {
            found.insert(at, text);
        }
        if found.len() == MOST {
            break;
        }
    }
    found
}

fn modalias(path: &Path) -> Option<String> {
    let mut text = String::new();
    let most = u64::try_from(LONGEST).ok()? + 2;
    File::open(path).ok()?.take(most).read_to_string(&mut text).ok()?;
    let text = text.trim_end_matches('\n');
    let good = !text.is_empty() && text.len() <= LONGEST && text.bytes().all(|byte| byte.is_ascii_graphic());
    good.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_without_driver_are_found_and_invalid_modaliases_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let plant = |device: &str, text: &[u8]| {
            let dir = root.path("/sys/bus/pci/devices").join(device);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("modalias"), text).unwrap();
            dir
        };
        plant("0000:00:02.0", b"pci:v2\n");
        plant("0000:00:01.0", b"pci:v1\n");
        plant("0000:00:03.0", b"pci:v1\n");
        fs::create_dir(plant("0000:00:04.0", b"pci:driven\n").join("driver")).unwrap();
        plant("0000:00:05.0", &b"x".repeat(LONGEST + 1));
        plant("0000:00:06.0", b"pci:\xff\n");
        plant("0000:00:07.0", b"pci:a b\n");
        plant("0000:00:08.0", b"\n");
        fs::create_dir_all(root.path("/sys/bus/pci/devices/0000:00:09.0")).unwrap();
        assert_eq!(modaliases_without_driver(&root, "pci"), ["pci:v1", "pci:v2"]);
        assert_eq!(modaliases_without_driver(&root, "virtio"), [""; 0]);
        for at in 0..MOST * 2 {
            plant(&format!("0001:00:{at:x}"), format!("pci:many{at}").as_bytes());
        }
        assert_eq!(modaliases_without_driver(&root, "pci").len(), MOST);
        assert!(is_gpu_driver("nvidia_drm") && is_gpu_driver("nouveau") && !is_gpu_driver("nvme"));
    }
}
