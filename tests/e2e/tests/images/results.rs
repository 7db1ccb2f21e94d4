//! Results of `build`, checked with `verify`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use firstlight_image_builder::cache;
use firstlight_image_builder::format::list;
use firstlight_image_builder::format::verity::Params;
use firstlight_image_builder::image::locked::{self, Task, Verdict};
use firstlight_image_builder::image::manifest::Variables;
use firstlight_image_builder::image::verify::{verify, verify_disk};
use firstlight_image_builder::image::{Image, build};
use firstlight_progress::Progress;

const KERNEL: &str = r#"
[kernel]
package = "linux-image-cloud-amd64"
suite = "bookworm-backports"
series = "6.12"
modules = ["overlay", "erofs", "dm-verity", "virtio_blk"]
[[file]]
path = "/etc/hello"
content = "hello"
[[symlink]]
path = "/var/run"
target = "/run"
"#;

pub(super) fn written(dir: &Path, image: &str, more: &str) -> std::path::PathBuf {
    let manifest = dir.join("m.toml");
    fs::write(&manifest, format!("[image]\nname = \"results\"\n{image}\n{KERNEL}{more}")).unwrap();
    manifest
}

fn built(dir: &Path, image: &str, more: &str, out: &str) -> Image {
    let manifest = written(dir, image, more);
    let cache = cache::root().unwrap();
    build(&manifest, &Variables::new(), &dir.join(out), &cache, Progress::stderr("images")).unwrap()
}

#[test]
fn disk_image_is_reproducible_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let (format, more) = ("format = \"erofs\"", "[verity]\n[output]\ndirectory = \"/srv/images\"\n");
    let first = built(dir.path(), format, more, "one");
    std::thread::sleep(Duration::from_millis(1100));
    let second = built(dir.path(), format, more, "two");
    for name in ["rootfs.img", "vmlinux", "kata.toml", "image.json"] {
        let read = |out: &str| fs::read(dir.path().join(out).join(name)).unwrap();
        assert!(read("one") == read("two"), "{name}");
    }
    let names = fs::read_dir(dir.path().join("one")).unwrap().count();
    assert_eq!((names, first.contents.outputs.len()), (4, 3), "the results and their record");
    assert_eq!((second.disk, second.initrd), (Some(dir.path().join("two/rootfs.img")), "".into()));

    let record = first.contents.verity.as_ref().unwrap();
    let params: Params = record.params.parse().unwrap();
    let drop_in = fs::read_to_string(dir.path().join("one/kata.toml")).unwrap();
    assert!(drop_in.contains(&record.params) && drop_in.contains("\"/srv/images/rootfs.img\""), "{drop_in}");
    let line = first.contents.command_line.as_deref().unwrap();
    assert!(line.starts_with("dm-mod.create=") && line.contains(&record.root_hash), "{line}");
    assert!(first.contents.tools.iter().any(|package| package.name == "erofs-utils"));

    let out = dir.path().join("one");
    let report = verify(&out).unwrap();
    assert!(report.problems.is_empty() && report.verified_blocks == params.data_blocks, "{report:?}");
    // A flipped bit anywhere in data or hash tree is found, with the record and with the root hash alone.
    let disk = out.join("rootfs.img");
    let whole = fs::read(&disk).unwrap();
    let hashes = record.hash_offset..record.hash_offset + record.hash_size;
    let data = record.data_offset..record.data_offset + params.data_bytes();
    for at in [data.start, data.end - 1, hashes.start, hashes.end - 1, (data.start + data.end) / 2] {
        let mut broken = whole.clone();
        broken[usize::try_from(at).unwrap()] ^= 4;
        fs::write(&disk, broken).unwrap();
        let (report, alone) = (verify(&out).unwrap(), verify_disk(&disk, &params).unwrap());
        assert!(report.problems.iter().any(|problem| problem.bad_block.is_some()), "{at}: {report:?}");
        assert!(alone.problems[0].bad_block.is_some(), "{at}: {alone:?}");
    }
}

#[test]
fn unchanged_image_is_not_repacked() {
    let dir = tempfile::tempdir().unwrap();
    let (format, verity) = ("format = \"erofs\"", "[verity]\n");
    let first = built(dir.path(), format, verity, "out");
    let disk = dir.path().join("out/rootfs.img");
    let made = || fs::metadata(&disk).unwrap().modified().unwrap();
    let then = made();
    let again = built(dir.path(), format, verity, "out");
    assert_eq!((made(), &again.contents), (then, &first.contents));
    assert!(verify(&dir.path().join("out")).unwrap().problems.is_empty());

    // A modified disk is rebuilt.
    let mut bytes = fs::read(&disk).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&disk, &bytes).unwrap();
    assert_eq!(built(dir.path(), format, verity, "out").contents, first.contents);
    assert!(verify(&dir.path().join("out")).unwrap().problems.is_empty());

    // Another salt gives another hash tree.
    let other = built(dir.path(), format, "[verity]\nsalt = \"00ff\"\n", "out");
    assert_ne!(other.contents.outputs["rootfs.img"], first.contents.outputs["rootfs.img"]);
    assert_ne!(other.contents.verity, first.contents.verity);
}

#[test]
fn new_format_replaces_results_of_the_old_format() {
    let dir = tempfile::tempdir().unwrap();
    let image = built(dir.path(), "format = \"erofs\"\nextension = \"gpu\"", "[verity]\n", "out");
    let out = dir.path().join("out");
    assert_eq!(image.disk.as_deref(), Some(out.join("extension-gpu.img").as_path()));
    let parameter = image.contents.command_line.as_deref().unwrap();
    assert!(parameter.starts_with("kata.extension.gpu.verity_params=root_hash="), "{parameter}");
    assert!(fs::read_to_string(out.join("kata.toml")).unwrap().contains("guest_extension_images"));
    let image = built(dir.path(), "format = \"initramfs\"\ncompression = \"lz4\"", "", "out");
    assert_eq!(image.initrd, out.join("initrd.cpio.lz4"));
    assert!(!out.join("extension-gpu.img").exists(), "stale results are removed");
    let mut found = false;
    list::list(&image.initrd, |entry| {
        found |= entry.path == "/etc/hello" && entry.size == 5;
        Ok::<_, list::Error>(())
    })
    .unwrap();
    assert!(found && verify(&out).unwrap().problems.is_empty());
}

#[test]
fn lock_pins_the_packaging_tools() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = written(dir.path(), "format = \"erofs\"", "[verity]\n");
    let (cache, lock) = (cache::root().unwrap(), dir.path().join("m.lock"));
    let (variables, progress) = (Variables::new(), Progress::stderr("images"));
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let task = |out| Task { manifest: &manifest, variables: &variables, out, cache: &cache, lock: &lock, progress };
    let (image, written) = locked::lock(&task(&one)).unwrap();
    assert_eq!(written.root_hash, image.contents.verity.map(|verity| verity.root_hash));
    assert!(written.tools.iter().any(|one| one.name == "erofs-utils"));
    let (_, verdict) = locked::build_locked(&task(&two)).unwrap();
    assert_eq!(verdict, Verdict::Same);
}
