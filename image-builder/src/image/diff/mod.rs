//! Compares two images by their records.
//!
//! Only `image.json` is read, which lists every package, file and hash. Whether the
//! files match their record is checked by [`crate::image::verify`].

mod packages;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use firstlight_image::{FileDigest, FileRecord, ImageRecord, Origin, PackageRecord};
use serde::Serialize;

/// An item that differs between the images, or is only in one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change<T> {
    /// The item: a path, the name of a package or of a property.
    pub what: String,
    /// Its value in the first image; `None` if it was added.
    pub a: Option<T>,
    /// Its value in the second image; `None` if it was removed.
    pub b: Option<T>,
}

/// Total file size of one origin.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    /// `SUITE/NAME` of a package, `compiled from SUITE/NAME`, `archive NAME`, `own`, or `builder`.
    pub origin: String,
    /// Bytes of its files in the first image.
    pub a: u64,
    /// Bytes of its files in the second image.
    pub b: u64,
}

/// The differences between two images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// Name of the first image.
    pub a: String,
    /// Name of the second image.
    pub b: String,
    /// Whether the images are the same; build tools and dates of suites are ignored.
    pub same: bool,
    /// Name, format, kernel, driver, command line, root hash.
    pub facts: Vec<Change<String>>,
    /// The output files.
    pub outputs: Vec<Change<FileDigest>>,
    /// Packages of files or of compiled sources in the image, and supplied archives
    /// as packages of the suite `archive`.
    pub packages: Vec<Change<PackageRecord>>,
    /// Files in the image, ordered by the change of size, the largest first.
    pub files: Vec<Change<FileRecord>>,
    /// Directories, links and devices in the image.
    pub others: Vec<Change<String>>,
    /// Total file sizes by origin, the largest change first; empty if a record
    /// has no origins.
    pub totals: Vec<Total>,
    /// Packages of build tools.
    pub tools: Vec<Change<PackageRecord>>,
    /// Dates of the suites.
    pub suites: Vec<Change<String>>,
}

impl Diff {
    /// Compares two records.
    #[must_use]
    pub fn new(a: &ImageRecord, b: &ImageRecord) -> Self {
        let mut files = changes(&a.files, &b.files, same_file);
        files.sort_by_key(|file| std::cmp::Reverse(growth(file).unsigned_abs()));
        // Records of earlier versions lack this list.
        let others = match a.others.is_empty() || b.others.is_empty() {
            true => Vec::new(),
            false => changes(&a.others, &b.others, |a, b| a == b),
        };
        // Records of earlier versions lack the origin of the kernel and the driver.
        let have_driver = a.kernel.is_some() && b.kernel.is_some();
        let suites = |of: &ImageRecord| of.suites.iter().map(|one| (one.name.clone(), one.date.clone())).collect();
        let mut diff = Self {
            a: a.name.clone(),
            b: b.name.clone(),
            same: false,
            facts: changes(&facts(a, have_driver), &facts(b, have_driver), |a, b| a == b),
            outputs: changes(&a.outputs, &b.outputs, |a, b| a == b),
            packages: packages::changes(&packages::all(a), &packages::all(b)),
            files,
            others,
            totals: totals(a, b),
            tools: packages::changes(&a.tools, &b.tools),
            suites: changes(&suites(a), &suites(b), |a, b| a == b),
        };
        diff.same = diff.facts.is_empty()
            && diff.outputs.is_empty()
            && diff.packages.is_empty()
            && diff.files.is_empty()
            && diff.others.is_empty();
        diff
    }
}

/// A record with a size in bytes.
trait HasSize {
    fn size(&self) -> u64;
}

impl HasSize for FileDigest {
    fn size(&self) -> u64 {
        self.size
    }
}

impl HasSize for FileRecord {
    fn size(&self) -> u64 {
        self.size
    }
}

/// Returns the change of size in bytes.
fn growth<T: HasSize>(change: &Change<T>) -> i128 {
    let size = |side: &Option<T>| i128::from(side.as_ref().map_or(0, HasSize::size));
    size(&change.b) - size(&change.a)
}

/// Returns the differences between two maps, by key.
fn changes<T: Clone>(
    a: &BTreeMap<String, T>,
    b: &BTreeMap<String, T>,
    same: impl Fn(&T, &T) -> bool,
) -> Vec<Change<T>> {
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let pairs = keys.into_iter().map(|key| (key, a.get(key), b.get(key)));
    let changed = pairs.filter(|(_, a, b)| !matches!((a, b), (Some(a), Some(b)) if same(a, b)));
    changed.map(|(key, a, b)| Change { what: key.clone(), a: a.cloned(), b: b.cloned() }).collect()
}

/// Compares two file records; fields that a record lacks are ignored.
fn same_file(a: &FileRecord, b: &FileRecord) -> bool {
    let mode = a.mode == b.mode || a.mode.is_none() || b.mode.is_none();
    (a.size, &a.sha256) == (b.size, &b.sha256) && mode
}

/// Returns the properties of an image; without those of the kernel and the driver unless `have_driver`.
fn facts(of: &ImageRecord, have_driver: bool) -> BTreeMap<String, String> {
    let kernel = |origin: &Origin| match origin {
        Origin::Package(id) => id.clone(),
        other => label(other),
    };
    let driver = of.driver.as_ref().filter(|_| have_driver);
    let patches = driver.map(|driver| driver.patches.join(", ")).filter(|patches| !patches.is_empty());
    [
        ("name", Some(of.name.clone())),
        ("format", Some(of.format.clone())),
        ("compression", Some(of.packing.clone())),
        ("extension", of.extension.clone()),
        ("kernel release", Some(of.kernel_release.clone())),
        ("kernel", of.kernel.as_ref().filter(|_| have_driver).map(kernel)),
        ("driver", driver.map(|driver| driver.version.clone())),
        ("driver's compiler", driver.map(|driver| driver.compiler.clone())),
        ("driver's patches", patches),
        ("command line", of.command_line.clone()),
        ("root hash", of.verity.as_ref().map(|verity| verity.root_hash.clone())),
        ("built-in modules", Some(of.built_in_modules.join(" "))),
    ]
    .into_iter()
    .filter_map(|(what, value)| Some((what.to_owned(), value.filter(|value| !value.is_empty())?)))
    .collect()
}

/// Returns the name of an origin without version.
fn label(origin: &Origin) -> String {
    let package = |id: &String| id.split_once('=').map_or(id.as_str(), |(name, _)| name).to_owned();
    match origin {
        Origin::Own => "own".to_owned(),
        Origin::Builder => "builder".to_owned(),
        Origin::Package(id) => package(id),
        Origin::Source(id) => format!("compiled from {}", package(id)),
        Origin::Archive(id) => format!("archive {}", package(id)),
    }
}

fn totals(a: &ImageRecord, b: &ImageRecord) -> Vec<Total> {
    let mut totals: BTreeMap<String, Total> = BTreeMap::new();
    for (side, contents) in [(0, a), (1, b)] {
        for file in contents.files.values() {
            let Some(origin) = &file.origin else { return Vec::new() };
            let origin = label(origin);
            let total = totals.entry(origin.clone()).or_insert_with(|| Total { origin, ..Total::default() });
            let bytes = if side == 0 { &mut total.a } else { &mut total.b };
            *bytes = bytes.saturating_add(file.size);
        }
    }
    let mut totals: Vec<Total> = totals.into_values().collect();
    totals.sort_by_key(|total| std::cmp::Reverse(total.a.abs_diff(total.b)));
    totals
}

#[cfg(test)]
mod tests;
