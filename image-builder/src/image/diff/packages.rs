//! Compares the packages of two images.

use std::collections::BTreeMap;

use firstlight_image::{ImageRecord, PackageRecord};

use super::Change;

/// Returns the packages and the supplied archives of an image.
pub(super) fn all(contents: &ImageRecord) -> Vec<PackageRecord> {
    let archives = contents.archives.iter().map(|archive| PackageRecord {
        name: archive.name.clone(),
        version: archive.version.clone(),
        suite: "archive".to_owned(),
        architecture: None,
        source: None,
        sha256: archive.sha256.clone(),
    });
    contents.packages.iter().cloned().chain(archives).collect()
}

/// Returns the packages that are only in one image, or in both with different
/// versions or suites. Packages are compared by name; an image may have a package from several
/// suites.
pub(super) fn changes(a: &[PackageRecord], b: &[PackageRecord]) -> Vec<Change<PackageRecord>> {
    let mut names: BTreeMap<&str, [Vec<&PackageRecord>; 2]> = BTreeMap::new();
    for (side, packages) in [a, b].into_iter().enumerate() {
        for package in packages {
            names.entry(&package.name).or_default()[side].push(package);
        }
    }
    names.into_iter().flat_map(|(name, [a, b])| pairs(name, a, b)).collect()
}

/// Pairs packages of one name: identical ones are no change; then those of the same
/// suite are paired, then the remaining ones.
fn pairs<'a>(name: &str, mut a: Vec<&'a PackageRecord>, mut b: Vec<&'a PackageRecord>) -> Vec<Change<PackageRecord>> {
    let file = |one: &PackageRecord| (one.suite.clone(), one.version.clone(), one.sha256.clone());
    take_pairs(&mut a, &mut b, |a, b| file(a) == file(b));
    let mut pairs = take_pairs(&mut a, &mut b, |a, b| a.suite == b.suite);
    pairs.extend(take_pairs(&mut a, &mut b, |_, _| true));
    let change = |a: Option<&PackageRecord>, b: Option<&PackageRecord>| Change {
        what: name.to_owned(),
        a: a.cloned(),
        b: b.cloned(),
    };
    let both = pairs.into_iter().map(|(a, b)| change(Some(a), Some(b)));
    let left = a.into_iter().map(|a| change(Some(a), None));
    both.chain(left).chain(b.into_iter().map(|b| change(None, Some(b)))).collect()
}

/// Removes pairs from both lists, in order, and returns them.
fn take_pairs<'a>(
    a: &mut Vec<&'a PackageRecord>,
    b: &mut Vec<&'a PackageRecord>,
    is_pair: impl Fn(&PackageRecord, &PackageRecord) -> bool,
) -> Vec<(&'a PackageRecord, &'a PackageRecord)> {
    let mut pairs = Vec::new();
    a.retain(|one| match b.iter().position(|other| is_pair(one, other)) {
        Some(at) => {
            pairs.push((*one, b.remove(at)));
            false
        }
        None => true,
    });
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(text: &str) -> PackageRecord {
        let (suite, rest) = text.split_once('/').unwrap();
        let (name, version) = rest.split_once('=').unwrap();
        let (version, sha256) = version.split_once('#').unwrap_or((version, version));
        let [name, version, suite, sha256] = [name, version, suite, sha256].map(str::to_owned);
        PackageRecord { name, version, suite, architecture: None, source: None, sha256 }
    }

    fn changed(a: &[&str], b: &[&str]) -> Vec<String> {
        let packages = |texts: &[&str]| texts.iter().map(|text| package(text)).collect::<Vec<_>>();
        let id = |side: &Option<PackageRecord>| side.as_ref().map_or_else(|| "-".to_owned(), PackageRecord::id);
        changes(&packages(a), &packages(b)).iter().map(|one| format!("{} {}", id(&one.a), id(&one.b))).collect()
    }

    #[test]
    fn packages_are_paired_by_name_and_suite() {
        assert_eq!(changed(&["s/a=1", "s/b=1"], &["s/b=1", "s/a=1"]), [""; 0], "the order is ignored");
        assert_eq!(changed(&["s/a=1", "s/b=1"], &["s/b=2", "s/c=1"]), ["s/a=1 -", "s/b=1 s/b=2", "- s/c=1"]);
        assert_eq!(changed(&["s/a=1#x"], &["s/a=1#y"]), ["s/a=1 s/a=1"], "another file of the same version");
        assert_eq!(changed(&["s/a=1"], &["t/a=1"]), ["s/a=1 t/a=1"]);
        // In two suites: the changed package is paired with the one of its suite.
        assert_eq!(changed(&["s/a=1", "t/a=1"], &["t/a=2", "s/a=1"]), ["t/a=1 t/a=2"]);
        assert_eq!(changed(&["s/a=1", "t/a=1"], &["t/a=1"]), ["s/a=1 -"]);
        assert_eq!(changed(&["s/a=1"], &["s/a=1", "s/a=2"]), ["- s/a=2"]);
    }
}
