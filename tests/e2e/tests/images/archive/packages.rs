//! Packages that differ from the package lists, or that are malicious.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tar::EntryType;

use super::deb::{Entry, HELLO, RELEASE, crafted, dir, file, hello, kernel, link};
use super::place::{Edition, Place, SUITE, contents};

#[test]
fn package_with_wrong_bytes_is_refused() {
    let place = Place::new();
    let (old, new) = (hello("1.0-1"), hello("1.0-2"));
    let good = Edition::new();
    place.publish(&[kernel(), new.clone()], &good);
    let reference = place.built("reference", "out");
    // Results of the previous version exist.
    let before = Edition { date: good.date - Duration::from_hours(1), ..good.clone() };
    place.publish(&[kernel(), old], &before);
    place.built("cache", "out");
    place.publish(&[kernel(), new.clone()], &good);

    let pool = place.at("debian/pool").join(new.file_name());
    let middle = new.bytes.len() / 2;
    let flipped = {
        let mut bytes = new.bytes.clone();
        bytes[middle] ^= 1;
        bytes
    };
    let longer = [&new.bytes[..], b"more"].concat();
    let cut = new.bytes[..middle].to_vec();
    for (what, bytes) in [("flipped", Some(flipped)), ("longer", Some(longer)), ("cut", Some(cut)), ("gone", None)] {
        println!("{what}");
        match bytes {
            Some(bytes) => fs::write(&pool, bytes).unwrap(),
            None => fs::remove_file(&pool).unwrap(),
        }
        place.age("cache");
        let cause = if what == "gone" { "No such file" } else { "Hash Sum mismatch" };
        place.assert_refused("cache", "out", &["suite ", SUITE, &new.file_name(), cause, "retry"]);
    }
    fs::write(&pool, &new.bytes).unwrap();
    assert_eq!(place.built("cache", "out"), reference);
    // Packages in the store are not downloaded again.
    fs::remove_file(&pool).unwrap();
    assert_eq!(place.built("cache", "out"), reference);
}

/// Correctly signed packages with malicious entries; the expected message of each.
fn malicious_packages() -> Vec<(&'static str, Vec<Entry>)> {
    let device = |kind| Entry { path: "./usr/bin/device", kind, mode: 0o666, what: "" };
    vec![
        ("../../escaped escapes the directory", vec![file("./../../escaped", 0o644)]),
        ("escaped escapes the directory", vec![dir("./usr/bin/", 0o755), file("./usr/bin/../../../../escaped", 0o644)]),
        ("/escaped begins with /", vec![file("/escaped", 0o644)]),
        ("usr/out/escaped", vec![link("./usr/out", EntryType::Symlink, "../../.."), file("./usr/out/escaped", 0o644)]),
        ("usr/out/escaped", vec![link("./usr/out", EntryType::Symlink, "/tmp"), file("./usr/out/escaped", 0o644)]),
        ("usr/bin/hello", vec![link("./usr/bin/hello", EntryType::Link, "../../../m.toml")]),
        ("usr/bin/hello", vec![link("./usr/bin/hello", EntryType::Link, "/etc/passwd")]),
        ("usr/bin/device is a device node or FIFO", vec![device(EntryType::Char)]),
        ("usr/bin/device is a device node or FIFO", vec![device(EntryType::Block)]),
        ("usr/bin/device is a device node or FIFO", vec![device(EntryType::Fifo)]),
    ]
}

#[test]
fn malicious_package_writes_nothing_outside_and_is_refused() {
    let place = Place::new();
    let edition = |minutes: u64| {
        let now = Edition::new();
        Edition { date: now.date - Duration::from_mins(60 - minutes), ..now }
    };
    let good = edition(59);
    place.publish(&[kernel(), hello("3.0-1")], &good);
    let reference = place.built("reference", "out");
    place.publish(&[kernel(), hello("1.0-1")], &edition(0));
    place.built("cache", "out");
    for (number, (what, entries)) in (1..).zip(malicious_packages()) {
        println!("{what}");
        let deb = crafted(HELLO, &format!("2.0-{number}"), &entries);
        place.publish(&[kernel(), deb.clone()], &edition(number));
        place.age("cache");
        place.assert_refused(
            "cache",
            "out",
            &["failed to unpack", &deb.file_name(), what, "none of its files is used"],
        );
        let all = contents(place.at("").as_path());
        assert!(!all.keys().any(|path| path.ends_with("escaped")), "{all:?}");
        let half = all.keys().find(|path| path.to_string_lossy().contains(".half"));
        assert_eq!(half, None, "partial files are removed");
    }
    assert!(!Path::new("/tmp/escaped").exists());
    place.publish(&[kernel(), hello("3.0-1")], &good);
    place.age("cache");
    assert_eq!(place.built("cache", "out"), reference);
}

#[test]
fn kernel_package_links_do_not_read_host_files() {
    let place = Place::new();
    let machine = place.at("machine");
    for dir in ["boot", "modules/9.9.9-test/kernel"] {
        fs::create_dir_all(machine.join(dir)).unwrap();
    }
    for name in ["boot/vmlinuz-9.9.9-test", "boot/config-9.9.9-test", "modules/9.9.9-test/modules.builtin"] {
        fs::write(machine.join(name), "this machine's own").unwrap();
    }
    let before = contents(&machine);
    let out = |path: &'static str, target: &'static str| link(path, EntryType::Symlink, target);
    // Below cache/kernels/HASH.half/package, the directory `machine` is four above.
    let cases = [
        ("lib/modules", vec![dir("./lib/", 0o755), out("./lib/modules", "../../../../../machine/modules")]),
        (
            "modules.builtin",
            vec![
                file("./boot/vmlinuz-9.9.9-test", 0o644),
                file("./boot/config-9.9.9-test", 0o644),
                dir("./lib/modules/9.9.9-test/kernel/", 0o755),
                out(
                    "./lib/modules/9.9.9-test/modules.builtin",
                    "../../../../../../../machine/modules/9.9.9-test/modules.builtin",
                ),
            ],
        ),
        (
            "boot/vmlinuz",
            vec![
                dir("./boot/", 0o755),
                out("./boot/vmlinuz-9.9.9-test", "../../../../../machine/boot/vmlinuz-9.9.9-test"),
                file("./boot/config-9.9.9-test", 0o644),
                file("./lib/modules/9.9.9-test/modules.builtin", 0o644),
            ],
        ),
    ];
    for (number, (what, entries)) in cases.into_iter().enumerate() {
        let kernel = crafted(&format!("linux-image-{RELEASE}"), "9.9.9-1", &entries);
        place.publish(&[kernel, hello("1.0-1")], &Edition::new());
        let cache = format!("cache-{number}");
        place.assert_refused(&cache, "out", &["linux-image-9.9.9-test_9.9.9-1_amd64.deb has no ", what]);
        assert_eq!(contents(&machine), before);
    }
}

#[test]
fn setuid_setgid_and_unusual_modes_are_normalized() {
    let place = Place::new();
    let entries = [
        dir("./usr/", 0o555),
        dir("./usr/bin/", 0o2500),
        file("./usr/bin/as-root", 0o4755),
        file("./usr/bin/as-group", 0o2711),
        file("./usr/bin/hello", 0o111),
        dir("./usr/share/", 0o1777),
        dir("./usr/share/hello/", 0o000),
        file("./usr/share/hello/secret", 0o000),
        file("./usr/share/hello/open", 0o666),
        // The builder does not follow an image's links on the host.
        link("./usr/share/hello/up", EntryType::Symlink, "../../../../../../../../etc/hostname"),
    ];
    place.publish(&[kernel(), crafted(HELLO, "1.0-1", &entries)], &Edition::new());
    let reference = place.built("cache", "out");
    let record = fs::read_to_string(place.at("out/image.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    let mode = |path: &str| record["files"][path]["mode"].as_u64().unwrap();
    for (path, expected) in [
        ("usr/bin/as-root", 0o755),
        ("usr/bin/as-group", 0o755),
        ("usr/bin/hello", 0o755),
        ("usr/share/hello/secret", 0o644),
        ("usr/share/hello/open", 0o644),
    ] {
        assert_eq!(mode(path), expected, "{path}");
    }
    assert_eq!(record["others"]["usr/bin"], "directory 755");
    assert_eq!(record["others"]["usr/share/hello/up"], "link ../../../../../../../../etc/hostname");
    // Without root, file modes restrict the builder too.
    place.make_unprivileged_dir("unprivileged");
    let outcome = place.build_unprivileged("unprivileged/cache", "unprivileged/out");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(place.assert_complete("unprivileged/cache", "unprivileged/out"), reference);
}
