//! What changed between two images, by their records.
//!
//! Nothing is unpacked: `image.json` has every package, file and hash. Whether
//! a directory still is what its record says is for [`crate::verify`] to tell.

mod packages;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use firstlight_image::{FileDigest, FileRecord, ImageRecord, Origin, PackageRecord};
use serde::Serialize;

/// Something that one image has otherwise than the other, or alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change<T> {
    /// What it is: a path, a package's name, a fact.
    pub what: String,
    /// In the first image; nothing where it was added.
    pub a: Option<T>,
    /// In the second image; nothing where it was removed.
    pub b: Option<T>,
}

/// How many bytes are from one place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    /// `SUITE/NAME` of a package, `compiled of SUITE/NAME`, `archive NAME`, `own`, or `builder`.
    pub origin: String,
    /// Bytes of its files in the first image.
    pub a: u64,
    /// Bytes of its files in the second image.
    pub b: u64,
}

/// What changed from one image to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// Name of the first image.
    pub a: String,
    /// Name of the second image.
    pub b: String,
    /// Whether nothing changed; programs that made the images and dates of
    /// suites do not count.
    pub same: bool,
    /// Name, format, kernel, driver, command line, root hash.
    pub facts: Vec<Change<String>>,
    /// The files of the results.
    pub outputs: Vec<Change<FileDigest>>,
    /// Packages of which something is in the image or was compiled, and
    /// archives that were supplied, as packages of the suite `archive`.
    pub packages: Vec<Change<PackageRecord>>,
    /// Files in the image, those whose size changed most first.
    pub files: Vec<Change<FileRecord>>,
    /// Directories, links and devices in the image.
    pub others: Vec<Change<String>>,
    /// Bytes by where files are from, those that changed most first; nothing
    /// where a record is too old to say it.
    pub totals: Vec<Total>,
    /// Packages of the programs that made the image.
    pub tools: Vec<Change<PackageRecord>>,
    /// Dates of the suites that packages were chosen from.
    pub suites: Vec<Change<String>>,
}

impl Diff {
    /// Compares two records.
    #[must_use]
    pub fn new(a: &ImageRecord, b: &ImageRecord) -> Self {
        let mut files = changes(&a.files, &b.files, same_file);
        files.sort_by_key(|file| std::cmp::Reverse(growth(file).unsigned_abs()));
        // A record that has no such list says nothing about it.
        let others = match a.others.is_empty() || b.others.is_empty() {
            true => Vec::new(),
            false => changes(&a.others, &b.others, |a, b| a == b),
        };
        // Nor does one without a kernel's origin say of which driver it has that it has none.
        let later = a.kernel.is_some() && b.kernel.is_some();
        let suites = |of: &ImageRecord| of.suites.iter().map(|one| (one.name.clone(), one.date.clone())).collect();
        let mut diff = Self {
            a: a.name.clone(),
            b: b.name.clone(),
            same: false,
            facts: changes(&facts(a, later), &facts(b, later), |a, b| a == b),
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

/// Something with a size in bytes.
trait Measured {
    fn size(&self) -> u64;
}

impl Measured for FileDigest {
    fn size(&self) -> u64 {
        self.size
    }
}

impl Measured for FileRecord {
    fn size(&self) -> u64 {
        self.size
    }
}

/// By how many bytes something has grown.
fn growth<T: Measured>(change: &Change<T>) -> i128 {
    let size = |side: &Option<T>| i128::from(side.as_ref().map_or(0, Measured::size));
    size(&change.b) - size(&change.a)
}

/// What two maps do not have in common, by key.
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

/// What a record does not say is no difference.
fn same_file(a: &FileRecord, b: &FileRecord) -> bool {
    let mode = a.mode == b.mode || a.mode.is_none() || b.mode.is_none();
    (a.size, &a.sha256) == (b.size, &b.sha256) && mode
}

/// What there is one of; `later` has what earlier records do not say.
fn facts(of: &ImageRecord, later: bool) -> BTreeMap<String, String> {
    let kernel = |origin: &Origin| match origin {
        Origin::Package(id) => id.clone(),
        other => label(other),
    };
    let driver = of.driver.as_ref().filter(|_| later);
    let patches = driver.map(|driver| driver.patches.join(", ")).filter(|patches| !patches.is_empty());
    [
        ("name", Some(of.name.clone())),
        ("format", Some(of.format.clone())),
        ("packing", Some(of.packing.clone())),
        ("extension", of.extension.clone()),
        ("kernel release", Some(of.kernel_release.clone())),
        ("kernel", of.kernel.as_ref().filter(|_| later).map(kernel)),
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

/// What an origin is called where its version does not matter.
fn label(origin: &Origin) -> String {
    let package = |id: &String| id.split_once('=').map_or(id.as_str(), |(name, _)| name).to_owned();
    match origin {
        Origin::Own => "own".to_owned(),
        Origin::Builder => "builder".to_owned(),
        Origin::Package(id) => package(id),
        Origin::Source(id) => format!("compiled of {}", package(id)),
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
