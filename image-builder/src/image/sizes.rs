//! Sums the file sizes of an image by origin.

use std::collections::BTreeMap;

use firstlight_image::{ImageRecord, Origin};
use serde::Serialize;

/// The files of one origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Share {
    /// The origin: `SUITE/NAME=VERSION` of a package, or a description.
    pub from: String,
    /// Total size in bytes, uncompressed.
    pub bytes: u64,
    /// Number of files.
    pub files: u64,
    /// Total size in bytes of those libraries that no program of the image needs.
    pub unused: u64,
    /// Path of the largest file, with leading slash.
    pub largest: String,
    /// Size of the largest file in bytes.
    pub largest_bytes: u64,
}

fn describe(origin: Option<&Origin>) -> String {
    match origin {
        Some(Origin::Own) => "the manifest's own files".to_owned(),
        Some(Origin::Builder) => "written by the builder".to_owned(),
        Some(Origin::Package(id)) => id.clone(),
        Some(Origin::Source(id)) => format!("compiled from {id}"),
        Some(Origin::Archive(id)) => format!("archive {id}"),
        None => "unknown: not recorded by the builder's version".to_owned(),
    }
}

/// Returns the share of every origin, the largest first.
#[must_use]
pub fn shares(contents: &ImageRecord) -> Vec<Share> {
    let mut shares: BTreeMap<String, Share> = BTreeMap::new();
    for (path, file) in &contents.files {
        let from = describe(file.origin.as_ref());
        let share = shares.entry(from.clone()).or_insert_with(|| Share {
            from,
            bytes: 0,
            files: 0,
            unused: 0,
            largest: String::new(),
            largest_bytes: 0,
        });
        // The record is untrusted input: sums saturate instead of overflowing.
        share.bytes = share.bytes.saturating_add(file.size);
        share.files += 1;
        if contents.unused.contains_key(path) {
            share.unused = share.unused.saturating_add(file.size);
        }
        if file.size > share.largest_bytes || share.largest.is_empty() {
            (share.largest, share.largest_bytes) = (format!("/{path}"), file.size);
        }
    }
    let mut shares: Vec<Share> = shares.into_values().collect();
    shares.sort_by(|a, b| (b.bytes, &a.from).cmp(&(a.bytes, &b.from)));
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image::FileRecord;

    #[test]
    fn every_file_is_in_one_share() {
        let file = |size, origin| FileRecord { size, origin, ..FileRecord::default() };
        let package = |name: &str| Some(Origin::Package(format!("trixie/{name}=1")));
        let contents = ImageRecord {
            files: BTreeMap::from([
                ("init".into(), file(5, Some(Origin::Own))),
                ("lib/a.so".into(), file(30, package("liba"))),
                ("lib/b.so".into(), file(40, package("liba"))),
                ("lib/c.so".into(), file(1, package("libc"))),
                ("lib/m.ko".into(), file(u64::MAX, Some(Origin::Source("trixie/dkms=1".into())))),
                ("lib/n.ko".into(), file(1, Some(Origin::Source("trixie/dkms=1".into())))),
                ("old".into(), file(0, None)),
            ]),
            unused: BTreeMap::from([("lib/b.so".into(), 40)]),
            ..ImageRecord::default()
        };
        let shares = shares(&contents);
        let named: Vec<(&str, u64, u64)> = shares.iter().map(|one| (one.from.as_str(), one.bytes, one.files)).collect();
        assert_eq!(
            named,
            [
                ("compiled from trixie/dkms=1", u64::MAX, 2),
                ("trixie/liba=1", 70, 2),
                ("the manifest's own files", 5, 1),
                ("trixie/libc=1", 1, 1),
                ("unknown: not recorded by the builder's version", 0, 1),
            ]
        );
        assert_eq!((shares[1].largest.as_str(), shares[1].largest_bytes, shares[1].unused), ("/lib/b.so", 40, 40));
    }
}
