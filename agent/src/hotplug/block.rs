//! Finds disks in sysfs.

use std::fs;
use std::path::Path;

use super::node::Number;

/// A disk or partition in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Disk {
    /// Kernel name, also that of its node.
    pub(super) name: String,
    /// Device number.
    pub(super) number: Number,
}

/// Returns the names in a directory with this prefix, sorted; none if the directory does not exist.
pub(super) fn names(dir: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(prefix)).collect();
    names.sort();
    names
}

/// Returns the disk with this name.
pub(super) fn named(sysfs: &Path, name: &str) -> Option<Disk> {
    let number = Number::of(&sysfs.join("class/block").join(name))?;
    Some(Disk { name: name.to_owned(), number })
}

/// Returns the disks of a PCI function with the driver virtio-blk or NVMe.
pub(super) fn behind(sysfs: &Path, function: &Path) -> Vec<Disk> {
    let mut found: Vec<String> = Vec::new();
    for virtio in names(function, "virtio") {
        found.extend(names(&function.join(virtio).join("block"), ""));
    }
    for controller in names(&function.join("nvme"), "nvme") {
        let spaces = names(&function.join("nvme").join(&controller), "nvme");
        found.extend(spaces.iter().filter_map(|space| namespace(space)));
    }
    found.dedup();
    found.iter().filter_map(|name| named(sysfs, name)).collect()
}

/// Returns the disk of an NVMe namespace, such as `nvme0n1`, also for an entry of a multipath path
/// (`nvme0c0n1`), which has no node.
fn namespace(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (controller, space) = rest.split_once('n')?;
    let (subsystem, _) = controller.split_once('c').unwrap_or((controller, ""));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(subsystem) && is_number(space)).then(|| format!("nvme{subsystem}n{space}"))
}

/// Describes the driver and ids of a function, for error messages.
pub(super) fn driver(function: &Path) -> String {
    let id = |name: &str| fs::read_to_string(function.join(name)).unwrap_or_default();
    let id = |name: &str| id(name).trim().trim_start_matches("0x").to_owned();
    let link = |dir: &Path| {
        let target = fs::read_link(dir.join("driver")).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    };
    let virtio = names(function, "virtio").first().map(|name| link(&function.join(name)));
    let below = match virtio {
        Some(Some(driver)) => format!(", its virtio device by {driver}"),
        Some(None) => ", its virtio device by no driver".to_owned(),
        None => String::new(),
    };
    let driver = link(function).unwrap_or_else(|| "no driver".to_owned());
    format!("{}:{} driven by {driver}{below}", id("vendor"), id("device"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvme_namespaces_are_mapped_to_disk_names() {
        for (name, disk) in [
            ("nvme0n1", Some("nvme0n1")),
            ("nvme10c3n12", Some("nvme10n12")),
            ("nvme0", None),
            ("nvme0n1p1", None),
            ("nvmen1", None),
        ] {
            assert_eq!(namespace(name).as_deref(), disk, "{name}");
        }
    }
}
