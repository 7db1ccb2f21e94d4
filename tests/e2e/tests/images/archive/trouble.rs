//! Disks that are full, builds that are killed, builds at once, users without rights.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::deb::{hello, kernel};
use super::place::{Edition, Outcome, Place, contents, is_root, ran};

/// Moments at which a build is killed.
const KILLS: u32 = 12;

fn place() -> Place {
    let place = Place::new();
    place.publish(&[kernel(), hello("1.0-1")], &Edition::new());
    place
}

/// What a build on a small disk left behind, and the next one made of it.
struct Full {
    outcome: Outcome,
    /// Names in the directory of results after the first build.
    left: String,
}

impl Place {
    /// Builds with `disk` being a file system of so many bytes, and once more
    /// when it has become larger. `first` is run on it before.
    fn on_a_small_disk(&self, bytes: u64, first: &str, cache: &str, out: &str) -> Full {
        let _ = fs::create_dir(self.at("disk"));
        let script = format!(
            "set -e\nmount -t tmpfs -o size=256m none disk\n{first}\nmount -t tmpfs -o remount,size={bytes} none disk\n\
             code=0\n\"$@\" build m.toml --out {out} 2>said || code=$?\nls -A {out} >left 2>/dev/null || true\n\
             mount -t tmpfs -o remount,size=256m none disk\n\"$@\" build m.toml --out {out} 2>again\n\
             rm -rf after\ncp -r {out} after\nrm -rf store\ncp -r {cache}/store store\nexit $code\n"
        );
        // Nobody else sees what is mounted, and it is gone with the last process there.
        let mut command = Command::new("unshare");
        let namespaces: &[&str] = if is_root() { &["--mount"] } else { &["--mount", "--user", "--map-root-user"] };
        command.args(namespaces).args(["sh", "-c", &script, "sh"]).arg(self.builder(cache).get_program());
        let output = self.with_archive(command, cache).output().unwrap();
        let read = |name: &str| fs::read_to_string(self.at(name)).unwrap_or_default();
        let said = format!("{}{}", read("said"), String::from_utf8_lossy(&output.stderr));
        assert!(!said.contains("unshare:") && !said.contains("mount:"), "{said}");
        let code = output.status.code();
        Full { outcome: Outcome { code, said }, left: read("left") }
    }
}

#[test]
fn a_disk_that_is_full_of_results_is_named() {
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
        let full = place.on_a_small_disk(bytes, "", "cache", "disk/out");
        full.outcome.says(&["disk/out", file, "No space left on device"]);
        assert_eq!(full.left, "", "{file}: {}", full.outcome.said);
        assert_eq!(place.sound("cache", "after"), reference, "{file}");
    }
    // Results of the build before stay.
    place.publish(&[kernel(), hello("1.0-2")], &Edition::new());
    place.age("cache");
    let (some, copy) = (initrd + vmlinux + initrd / 2, "mkdir disk/out && cp out/* disk/out/");
    let full = place.on_a_small_disk(some, copy, "cache", "disk/out");
    full.outcome.says(&["disk/out", "initrd.cpio", "No space left on device"]);
    assert_eq!(full.left, "image.json\ninitrd.cpio\nkata.toml\nvmlinux\n");
    assert_ne!(place.sound("cache", "after"), reference);
}

#[test]
fn a_disk_that_is_full_of_the_cache_is_named() {
    let place = place();
    let reference = place.built("cache", "out");
    for kib in [4, 64, 2500, 4000, 5000, 6000] {
        let _ = fs::remove_dir_all(place.at("out"));
        let full = place.on_a_small_disk(kib << 10, "", "disk/cache", "out");
        println!("{kib} KiB");
        full.outcome.says(&["disk/cache", "No space left on device"]);
        assert_eq!(full.left, "", "{}", full.outcome.said);
        place.sound_store("store");
        assert_eq!(place.sound("cache", "after"), reference);
    }
}

#[test]
fn a_killed_build_leaves_nothing_that_the_next_one_trips_over() {
    let place = place();
    let started = Instant::now();
    place.build("reference", "out");
    let whole = started.elapsed();
    let reference = place.sound("reference", "out");
    for number in 1..=KILLS {
        let (cache, out) = (format!("cache-{number}"), format!("out-{number}"));
        let mut command = place.builder(&cache);
        command.args(["build", "m.toml", "--out", &out]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(whole * number / (KILLS + 1));
        child.kill().unwrap();
        child.wait().unwrap();
        place.store_is_sound(&cache);
        for (path, sha256) in contents(&place.at(&out)) {
            let name = path.strip_prefix(place.at(&out)).unwrap().to_owned();
            assert!(name.starts_with(".building") || reference[&name] == sha256, "{name:?} is not whole");
        }
        // At once: what the killed one had started may still be at work.
        assert_eq!(place.built(&cache, &out), reference, "killed at {number}/{}", KILLS + 1);
        let half = |name: &str| name.contains(".half") || name.contains(".download");
        let left: Vec<_> =
            contents(&place.at(&cache)).into_keys().filter(|path| half(&path.to_string_lossy())).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn builds_at_once_share_a_cache_and_a_directory() {
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
            assert_eq!(place.sound(cache, out), reference);
        }
    }
}

#[test]
fn a_user_without_rights_builds_the_same() {
    let place = place();
    let reference = place.built("cache", "out");
    place.for_anybody("anybody");
    let outcome = place.as_anybody("anybody/cache", "anybody/out");
    assert_eq!(outcome.code, Some(0), "{}", outcome.said);
    assert_eq!(place.sound("anybody/cache", "anybody/out"), reference);
    // Where it may not write, it says so.
    if is_root() {
        ran(Command::new("chmod").arg("0755").arg(place.at("cache")));
        place.as_anybody("cache", "anybody/out").says(&["cache", "Permission denied"]);
        place.as_anybody("anybody/cache", "mine").says(&["mine", "Permission denied"]);
    }
    assert_eq!(place.sound("anybody/cache", "anybody/out"), reference);
}
