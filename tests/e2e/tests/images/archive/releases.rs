//! Release files and package lists that are unsigned, expired, outdated or altered.

use std::fs;
use std::time::Duration;

use super::deb::{hello, kernel};
use super::place::{Edition, Place, SUITE, UNTRUSTED_KEY};

const DAY: Duration = Duration::from_hours(24);

/// Modifies a file of the suite.
fn change(place: &Place, name: &str, change: impl FnOnce(String) -> String) {
    let file = place.dists(name);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, change(text)).unwrap();
}

/// Returns the signed text without its signature.
fn unsigned(text: &str) -> String {
    let signed = text.split("\n\n").nth(1).unwrap();
    signed.split("-----BEGIN PGP SIGNATURE").next().unwrap().to_owned()
}

#[test]
fn unsigned_expired_or_altered_release_is_refused() {
    let place = Place::new();
    let debs = [kernel(), hello("1.0-1")];
    let good = Edition::new();
    place.publish(&debs, &good);
    let reference = place.built("cache", "out");

    type Corrupt = fn(&Place);
    let cases: &[(&str, Edition, Corrupt, &[&str])] = &[
        (
            "no signature",
            good.clone(),
            |place| {
                let text = fs::read_to_string(place.dists("InRelease")).unwrap();
                fs::write(place.dists("Release"), unsigned(&text)).unwrap();
                fs::remove_file(place.dists("InRelease")).unwrap();
            },
            &["is not signed"],
        ),
        ("signature removed", good.clone(), |place| change(place, "InRelease", |text| unsigned(&text)), &["InRelease"]),
        (
            "altered after signing",
            good.clone(),
            |place| change(place, "InRelease", |text| text.replace("Label: Test", "Label: Tost")),
            &["is not signed"],
        ),
        (
            "signed by another key",
            Edition { signed_by: UNTRUSTED_KEY, ..good.clone() },
            |_| {},
            &["signing key is not in", "keys.gpg", "FIRSTLIGHT_DEBIAN_KEYRING"],
        ),
        (
            "expired",
            Edition { date: good.date - 9 * DAY, valid_until: good.date - 2 * DAY, ..good.clone() },
            |_| {},
            &["expired"],
        ),
        ("dated in the future", Edition { date: good.date + DAY, ..good.clone() }, |_| {}, &["not valid yet"]),
        (
            "altered package lists",
            good.clone(),
            |place| {
                let file = place.dists("main/binary-amd64/Packages.gz");
                let mut bytes = fs::read(&file).unwrap();
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                fs::write(&file, bytes).unwrap();
            },
            &["Packages", "Hash Sum mismatch"],
        ),
        (
            "missing package lists",
            good.clone(),
            |place| fs::remove_file(place.dists("main/binary-amd64/Packages.gz")).unwrap(),
            &["Packages"],
        ),
    ];
    for (number, (what, edition, corrupt, words)) in cases.iter().enumerate() {
        println!("{what}");
        let cache = format!("cache-{number}");
        place.publish(&debs, edition);
        corrupt(&place);
        place.assert_refused(&cache, "out", &[words, &["suite ", SUITE, "another mirror"][..]].concat());
        place.publish(&debs, &good);
        assert_eq!(place.built(&cache, "out"), reference, "{what}");
    }

    // With older package lists in the cache the build continues and logs the reason.
    place.publish(&debs, &Edition { signed_by: UNTRUSTED_KEY, ..good.clone() });
    place.age("cache");
    let outcome = place.build("cache", "out");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let line = outcome.stderr.lines().find(|line| line.contains("using package lists that are 48 hours old"));
    assert!(line.is_some_and(|line| line.contains("signing key is not in")), "{}", outcome.stderr);
    assert_eq!(place.assert_complete("cache", "out"), reference);
}

#[test]
fn older_release_file_is_refused() {
    let place = Place::new();
    let good = Edition::new();
    let before = Edition { date: good.date - DAY, ..good.clone() };
    place.publish(&[kernel(), hello("1.0-2")], &good);
    let reference = place.built("cache", "out");

    place.publish(&[kernel(), hello("1.0-1")], &before);
    // A cache with newer lists keeps them.
    place.age("cache");
    assert_eq!(place.built("cache", "out"), reference);
    // Without cached lists the older release file is an error.
    for tree in fs::read_dir(place.at("cache/apt")).unwrap() {
        let lists = tree.unwrap().path().join("lists");
        if lists.is_dir() {
            fs::remove_dir_all(lists).unwrap();
        }
    }
    place.age("cache");
    place.assert_refused("cache", "out", &[SUITE, "was seen before", "another mirror", "newest-release"]);
    place.publish(&[kernel(), hello("1.0-2")], &good);
    assert_eq!(place.built("cache", "out"), reference);
}

#[test]
fn release_dates_are_tracked_per_archive() {
    let (ours, theirs) = (Place::new(), Place::new());
    let good = Edition::new();
    let debs = [kernel(), hello("1.0-1")];
    ours.publish(&debs, &good);
    theirs.publish(&debs, &Edition { date: good.date - DAY, ..good.clone() });
    let reference = ours.built("cache", "out");
    // The second archive is older, has other keys, and uses the cache of the first.
    let mut command = theirs.builder("cache");
    command.env("FIRSTLIGHT_CACHE", ours.at("cache")).args(["build", "m.toml", "--out", "out"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let built = theirs.assert_complete("cache", "out");
    for name in ["initrd.cpio", "vmlinux"] {
        let name = std::path::Path::new(name);
        assert_eq!(built[name], reference[name]);
    }
    ours.age("cache");
    assert_eq!(ours.built("cache", "out"), reference, "and back again");
}
