//! Metrics of the guest's file systems.

use std::collections::BTreeSet;
use std::path::Path;

use firstlight_metrics_text::{Kind, Text};

use super::{MAX_SERIES, read};

/// File system types that can fill up; pseudo file systems cannot, and shares belong to the host.
const KINDS: &[&str] = &["ext4", "xfs", "btrfs", "vfat", "overlay"];

/// A mounted file system.
#[derive(Debug, PartialEq, Eq)]
struct Mounted {
    device: String,
    mount: String,
}

/// Returns the writable ones of `/proc/mounts`, each device once.
fn mounted(table: &str) -> Vec<Mounted> {
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    for line in table.lines() {
        let mut words = line.split(' ');
        let (Some(device), Some(mount), Some(kind), Some(options)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let writable = !options.split(',').any(|option| option == "ro");
        if KINDS.contains(&kind) && writable && seen.insert(device) {
            all.push(Mounted { device: unescape(device), mount: unescape(mount) });
        }
    }
    all
}

/// Decodes the kernel's octal escapes, as for blanks.
fn unescape(word: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = word.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let code = rest.get(1..4).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = rest.get(4..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Blocks for as long as a disk does.
pub(super) fn write(text: &mut Text, proc: &Path, root: &Path) {
    let all: Vec<_> = mounted(&read(proc, "mounts"))
        .into_iter()
        .take(MAX_SERIES)
        .filter_map(|one| {
            let path = root.join(one.mount.trim_start_matches('/'));
            rustix::fs::statvfs(&path).ok().map(|figures| (one, figures))
        })
        .collect();
    let mut family = text.family("kata_guest_filesystem_bytes", Kind::Gauge, "Guest file systems, bytes");
    for (Mounted { device, mount }, figures) in &all {
        let bytes = |blocks: u64| blocks.saturating_mul(figures.f_frsize);
        for (item, value) in [
            ("total", bytes(figures.f_blocks)),
            ("used", bytes(figures.f_blocks.saturating_sub(figures.f_bfree))),
            ("available", bytes(figures.f_bavail)),
        ] {
            family.sample(&[("mount", mount), ("device", device), ("item", item)], value);
        }
    }
    let mut family = text.family("kata_guest_filesystem_inodes", Kind::Gauge, "Guest file systems, files");
    for (Mounted { device, mount }, figures) in &all {
        for (item, value) in [
            ("total", figures.f_files),
            ("used", figures.f_files.saturating_sub(figures.f_ffree)),
            ("available", figures.f_favail),
        ] {
            family.sample(&[("mount", mount), ("device", device), ("item", item)], value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_writable_device_is_listed_once() {
        let table = "proc /proc proc rw 0 0\n/dev/vda / ext4 ro,relatime 0 0\n/dev/vdb /a\\040b xfs rw 0 0\n\
                     /dev/vdb /c xfs rw 0 0\nshare /run/s virtiofs rw 0 0\noverlay /o overlay rw,errors=ro 0 0\nrubbish\n";
        let of = |device: &str, mount: &str| Mounted { device: device.into(), mount: mount.into() };
        assert_eq!(mounted(table), [of("/dev/vdb", "/a b"), of("overlay", "/o")]);
    }

    #[test]
    fn invalid_escapes_are_unchanged() {
        assert_eq!(unescape("a\\134b\\"), "a\\b\\");
        assert_eq!(unescape("\\9\\777\\04"), "\\9\\777\\04");
    }
}
