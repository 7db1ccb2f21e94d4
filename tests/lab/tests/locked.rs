//! Builds images of real packages from a lock file. Needs the cache, or a network.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::path::Path;

use firstlight_image_builder::image::locked::{self, Task, Verdict};
use firstlight_image_builder::image::manifest::Variables;
use firstlight_image_builder::image::{self, Image};
use firstlight_image_builder::packages::lock::Lock;
use firstlight_image_builder::packages::store::Store;
use firstlight_image_builder::{cache, packages, packages::debian};
use firstlight_progress::Progress;

const KERNEL: &str = r#"
[image]
name = "locked"
format = "initramfs"
[kernel]
package = "linux-image-cloud-amd64"
suite = "bookworm-backports"
series = "6.12"
[[file]]
path = "/etc/own"
content = "ours"
[[package]]
name = "libc-bin"
suite = "bookworm"
files = ["usr/bin/getent"]
"#;

const LIBRARIES: &str = r#"
[[package]]
name = "libc6"
suite = "bookworm"
files = ["lib/x86_64-linux-gnu/libc.so.6", "lib/x86_64-linux-gnu/ld-linux-x86-64.so.?", "lib64/ld-linux-*"]
"#;

fn progress() -> Progress {
    Progress::stderr("image")
}

fn by(dir: &Path, cache: &Path, lock: &Path) -> Result<(Image, Verdict), locked::Error> {
    locked::build_locked(&Task {
        manifest: &dir.join("m.toml"),
        variables: &Variables::new(),
        out: &dir.join("by"),
        cache,
        lock,
        progress: progress(),
    })
}

/// Creates a cache with only the packages of `lock`, without the package `but`.
fn fresh(dir: &Path, lock: &Lock, but: &str) -> std::path::PathBuf {
    let cache = tempfile::tempdir_in(dir).unwrap().keep();
    let (from, to) = (Store::of(&cache::root().unwrap()), Store::of(&cache));
    for package in lock.packages.iter().filter(|package| package.name != but) {
        let name = package.candidate().file_name();
        let copy = dir.join("copy");
        fs::copy(from.get(&package.sha256).unwrap(), &copy).unwrap();
        to.put(&copy, &package.sha256, &name).unwrap();
    }
    cache
}

#[test]
fn complete_image_is_locked_and_rebuilt_without_the_archive() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, manifest) = (dir.path(), dir.path().join("m.toml"));
    let (out, lock_file, shared) = (dir.join("out"), dir.join("m.lock"), cache::root().unwrap());

    fs::write(&manifest, KERNEL).unwrap();
    let error = image::build(&manifest, &Variables::new(), &out, &shared, progress()).unwrap_err().to_string();
    assert!(error.contains("/usr/bin/getent needs libc.so.6 (DT_NEEDED)"), "{error}");
    assert!(error.contains("/usr/bin/getent needs /lib64/ld-linux-x86-64.so.2 (interpreter)"), "{error}");
    assert!(!out.exists(), "a failed build leaves no output");

    fs::write(&manifest, KERNEL.replace("usr/bin/getent", "usr/bin/getant")).unwrap();
    let error = image::build(&manifest, &Variables::new(), &out, &shared, progress()).unwrap_err().to_string();
    assert!(error.contains("libc-bin") && error.contains("getant") && error.contains("usr/bin/getent"), "{error}");

    fs::write(&manifest, format!("{KERNEL}{LIBRARIES}")).unwrap();
    let (image, lock) = locked::lock(&Task {
        manifest: &manifest,
        variables: &Variables::new(),
        out: &out,
        cache: &shared,
        lock: &lock_file,
        progress: progress(),
    })
    .unwrap();
    assert_eq!(Lock::read(&lock_file).unwrap(), lock);
    let names: Vec<&str> = lock.packages.iter().map(|package| package.name.as_str()).collect();
    assert!(names.iter().any(|name| name.starts_with("linux-image-6.12")), "{names:?}");
    assert!(names.contains(&"libc6") && names.contains(&"libc-bin") && names.len() == 3, "{names:?}");
    let suites: Vec<&str> = lock.suites.iter().map(|suite| suite.name.as_str()).collect();
    assert_eq!(suites, ["bookworm", "bookworm-backports"]);
    assert!(lock.suites.iter().all(|suite| !suite.signed_by.is_empty() && suite.date.contains("20")), "{lock:?}");
    assert_eq!(image.contents.packages.len(), 3);

    // With only the packages in another cache: no archive is accessed.
    let cache = fresh(dir, &lock, "");
    let (again, verdict) = by(dir, &cache, &lock_file).unwrap();
    assert_eq!((verdict, &again.contents), (Verdict::Same, &image.contents));
    assert!(!cache.join("apt").exists());
    assert_eq!(fs::read(&again.initrd).unwrap(), fs::read(&image.initrd).unwrap());

    // A changed file of the manifest is no error, but is reported.
    fs::write(&manifest, format!("{KERNEL}{LIBRARIES}").replace("ours", "theirs")).unwrap();
    assert!(matches!(by(dir, &cache, &lock_file).unwrap().1, Verdict::DifferentInputs("the manifest")));
    // A package that is not in the lock file is an error.
    fs::write(&manifest, format!("{KERNEL}{LIBRARIES}").replace("libc-bin", "bash")).unwrap();
    let error = by(dir, &cache, &lock_file).unwrap_err().to_string();
    assert!(error.contains("no package bash of bookworm") && error.contains("image-builder lock"), "{error}");
    fs::write(&manifest, format!("{KERNEL}{LIBRARIES}")).unwrap();

    // A package that is not in the store is downloaded, and its hash must match.
    let cache = fresh(dir, &lock, "libc-bin");
    assert_eq!(by(dir, &cache, &lock_file).unwrap().1, Verdict::Same);
    let mut other = lock.clone();
    let at = other.packages.iter().position(|package| package.name == "libc-bin").unwrap();
    other.packages[at].sha256 = "ab".repeat(32);
    other.write(&dir.join("other.lock")).unwrap();
    let error = by(dir, &cache, &dir.join("other.lock")).unwrap_err();
    let text = format!("{error}");
    assert!(text.contains("abababab") && text.contains("libc-bin"), "{text}");
    // The error of a version that the archive no longer has contains the remedy.
    other.packages[at].version = "2.36-1".into();
    other.write(&dir.join("other.lock")).unwrap();
    let text = by(dir, &cache, &dir.join("other.lock")).unwrap_err().to_string();
    assert!(text.contains("libc-bin 2.36-1") && text.contains("image-builder store add"), "{text}");

    // A copy of the package under any name can be added to the store; then the archive is not needed.
    let cache = fresh(dir, &lock, "libc-bin");
    let original = Store::of(&shared).get(&lock.packages[at].sha256).unwrap();
    fs::copy(original, dir.join("found-on-an-old-disk.deb")).unwrap();
    let (sha256, _) = packages::add(&cache, &dir.join("found-on-an-old-disk.deb")).unwrap();
    assert_eq!(sha256, lock.packages[at].sha256);
    assert_eq!(by(dir, &cache, &lock_file).unwrap().1, Verdict::Same);
    assert!(!cache.join("apt").exists());
}

#[test]
fn release_file_older_than_the_newest_seen_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let suite = "bookworm-updates";
    let apt = debian::Apt::open(dir.path(), suite, progress()).unwrap();
    let release = apt.release().unwrap();
    assert!(release.signed_by.iter().all(|print| print.len() == 40) && release.sha256.len() == 64, "{release:?}");
    drop(apt);
    // Simulates that a newer release file has been seen before.
    let tree = dir.path().join("apt").join(suite);
    fs::write(tree.join("newest-release"), "Fri, 01 Jan 2100 00:00:00 UTC\n").unwrap();
    fs::remove_file(tree.join("refreshed")).unwrap();
    for _ in 0..2 {
        let error = debian::Apt::open(dir.path(), suite, progress()).unwrap_err().to_string();
        assert!(error.contains(suite) && error.contains("2100") && error.contains("newest-release"), "{error}");
    }
    fs::remove_file(tree.join("newest-release")).unwrap();
    assert_eq!(debian::Apt::open(dir.path(), suite, progress()).unwrap().release().unwrap(), release);
}
