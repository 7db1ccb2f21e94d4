//! Full disks, killed builds, parallel builds, unprivileged users.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::deb::{hello, kernel};
use super::place::{Edition, Outcome, Place, contents, is_root, run_checked};

/// Number of points in time at which a build is killed.
const KILL_POINTS: u32 = 12;

fn place() -> Place {
    let place = Place::new();
    place.publish(&[kernel(), hello("1.0-1")], &Edition::new());
    place
}

/// Outcome and output directory of a build on a full disk.
struct FullDiskBuild {
    outcome: Outcome,
    /// File names in the output directory after the failed build.
    left: String,
}

impl Place {
    /// Builds with `disk` mounted as a file system of `bytes` bytes, then again
    /// after enlarging it. The shell commands in `first` run before the first build.
    fn build_on_small_disk(&self, bytes: u64, first: &str, cache: &str, out: &str) -> FullDiskBuild {
        let _ = fs::create_dir(self.at("disk"));
        let script = format!(
            "set -e\nmount -t tmpfs -o size=256m none disk\n{first}\nmount -t tmpfs -o remount,size={bytes} none disk\n\
             code=0\n\"$@\" build m.toml --out {out} 2>stderr || code=$?\nls -A {out} >left 2>/dev/null || true\n\
             mount -t tmpfs -o remount,size=256m none disk\n\"$@\" build m.toml --out {out} 2>again\n\
             rm -rf after\ncp -r {out} after\nrm -rf store\ncp -r {cache}/store store\nexit $code\n"
        );
        // A private mount namespace: the mounts disappear with its last process.
        let mut command = Command::new("unshare");
        let namespaces: &[&str] = if is_root() { &["--mount"] } else { &["--mount", "--user", "--map-root-user"] };
        command.args(namespaces).args(["sh", "-c", &script, "sh"]).arg(self.builder(cache).get_program());
        let output = self.with_archive(command, cache).output().unwrap();
        let read = |name: &str| fs::read_to_string(self.at(name)).unwrap_or_default();
        let stderr = format!("{}{}", read("stderr"), String::from_utf8_lossy(&output.stderr));
        assert!(!stderr.contains("unshare:") && !stderr.contains("mount:"), "{stderr}");
        let code = output.status.code();
        FullDiskBuild { outcome: Outcome { code, stderr }, left: read("left") }
    }
}

#[test]
fn full_output_disk_error_names_the_file() {
    let place = place();
    let reference = place.built("cache", "out");
    let pages = |name: &str| fs::metadata(place.at("out").join(name)).unwrap().len().next_multiple_of(4096);
    let (initrd, vmlinux) = (pages("initrd.cpio"), pages("vmlinux"));
    for (bytes, file) in [
        (4096, "initrd.cpio"),
        (initrd / 2, "initrd.cpio"),
        (initrd + vmlinux / 2, "vmlinux"),
        (initrd + vmlinux, "kata.toml"),
        (initrd + vmlinux + 4096, "image.json"),
    ] {
        let full = place.build_on_small_disk(bytes, "", "cache", "disk/out");
        full.outcome.assert_error_contains(&["disk/out", file, "No space left on device"]);
        assert_eq!(full.left, "", "{file}: {}", full.outcome.stderr);
        assert_eq!(place.assert_complete("cache", "after"), reference, "{file}");
    }
    // Results of the previous build stay.
    place.publish(&[kernel(), hello("1.0-2")], &Edition::new());
    place.age("cache");
    let (some, copy) = (initrd + vmlinux + initrd / 2, "mkdir disk/out && cp out/* disk/out/");
    let full = place.build_on_small_disk(some, copy, "cache", "disk/out");
    full.outcome.assert_error_contains(&["disk/out", "initrd.cpio", "No space left on device"]);
    assert_eq!(full.left, "image.json\ninitrd.cpio\nkata.toml\nvmlinux\n");
    assert_ne!(place.assert_complete("cache", "after"), reference);
}

#[test]
fn full_cache_disk_error_names_the_cache() {
    let place = place();
    let reference = place.built("cache", "out");
    for kib in [4, 64, 2500, 4000, 5000, 6000] {
        let _ = fs::remove_dir_all(place.at("out"));
        let full = place.build_on_small_disk(kib << 10, "", "disk/cache", "out");
        println!("{kib} KiB");
        full.outcome.assert_error_contains(&["disk/cache", "No space left on device"]);
        assert_eq!(full.left, "", "{}", full.outcome.stderr);
        place.assert_store_hashes("store");
        assert_eq!(place.assert_complete("cache", "after"), reference);
    }
}

#[test]
fn build_after_a_killed_build_gives_the_same_image() {
    let place = place();
    let started = Instant::now();
    place.build("reference", "out");
    let whole = started.elapsed();
    let reference = place.assert_complete("reference", "out");
    for number in 1..=KILL_POINTS {
        let (cache, out) = (format!("cache-{number}"), format!("out-{number}"));
        let mut command = place.builder(&cache);
        command.args(["build", "m.toml", "--out", &out]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(whole * number / (KILL_POINTS + 1));
        child.kill().unwrap();
        child.wait().unwrap();
        place.assert_cache_store(&cache);
        for (path, sha256) in contents(&place.at(&out)) {
            let name = path.strip_prefix(place.at(&out)).unwrap().to_owned();
            assert!(name.starts_with(".building") || reference[&name] == sha256, "{name:?} is not whole");
        }
        // Without a pause: child processes of the killed build may still be running.
        assert_eq!(place.built(&cache, &out), reference, "killed at {number}/{}", KILL_POINTS + 1);
        let half = |name: &str| name.contains(".half") || name.contains(".download");
        let left: Vec<_> =
            contents(&place.at(&cache)).into_keys().filter(|path| half(&path.to_string_lossy())).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn parallel_builds_share_a_cache_and_an_output_directory() {
    let place = place();
    let reference = place.built("reference", "out");
    for (cache, dirs) in [("one", ["a", "b"]), ("two", ["c", "c"]), ("two", ["c", "c"])] {
        let children = dirs.map(|out| {
            let mut command = place.builder(cache);
            command
                .args(["build", "m.toml", "--out", out])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        });
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        for out in dirs {
            assert_eq!(place.assert_complete(cache, out), reference);
        }
    }
}

#[test]
fn unprivileged_user_builds_the_same_image() {
    let place = place();
    let reference = place.built("cache", "out");
    place.make_unprivileged_dir("unprivileged");
    let outcome = place.build_unprivileged("unprivileged/cache", "unprivileged/out");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(place.assert_complete("unprivileged/cache", "unprivileged/out"), reference);
    // An unwritable directory is named in the error.
    if is_root() {
        run_checked(Command::new("chmod").arg("0755").arg(place.at("cache")));
        place.build_unprivileged("cache", "unprivileged/out").assert_error_contains(&["cache", "Permission denied"]);
        place.build_unprivileged("unprivileged/cache", "mine").assert_error_contains(&["mine", "Permission denied"]);
    }
    assert_eq!(place.assert_complete("unprivileged/cache", "unprivileged/out"), reference);
}

/// A build uses a file of the cache as it was cached, or not at all.
#[test]
fn overwritten_cache_file_is_refused_by_name() {
    let place = place();
    let reference = place.built("cache", "out");
    let mut refused = Vec::new();
    for dir in ["unpacked", "kernels"] {
        for file in contents(&place.at("cache").join(dir)).into_keys() {
            if file.is_symlink() {
                continue;
            }
            let good = fs::read(&file).unwrap();
            let Some(last) = good.len().checked_sub(1) else { continue };
            let mut bad = good.clone();
            bad[last] ^= 1;
            fs::write(&file, bad).unwrap();
            let outcome = place.build("cache", "out");
            if outcome.code == Some(0) {
                assert_eq!(place.assert_complete("cache", "out"), reference, "{} was used", file.display());
            } else {
                outcome.assert_error_contains(&["cache/"]);
                refused.push(file.strip_prefix(place.at("cache")).unwrap().display().to_string());
            }
            fs::write(&file, good).unwrap();
        }
    }
    for expected in ["/files/usr/bin/hello", "/vmlinux", "/digests.json", "/facts.json"] {
        assert!(refused.iter().any(|file| file.ends_with(expected)), "{expected} among {refused:?}");
    }
    // The advice of the error helps.
    let file = place.at("cache").join(refused.iter().find(|file| file.ends_with("/hello")).unwrap());
    fs::write(&file, "evil").unwrap();
    let outcome = place.build("cache", "out");
    let entry = file.ancestors().nth(4).unwrap();
    let advice = format!("remove {} and build again", entry.display());
    outcome.assert_error_contains(&["has SHA-256", "was recorded", &advice]);
    fs::remove_dir_all(entry).unwrap();
    assert_eq!(place.built("cache", "out"), reference);
}
