//! Every format in every packing.

use std::fs;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use firstlight_image_builder::format::list;
use firstlight_image_builder::format::{Compression, Format, Plan, build_image, disk, unpack};
use firstlight_image_builder::packages::tools::Kit;

use crate::trees::{files, made, packages, plan, says, tree};

/// The same from another order, at another time, with other files: the image's path.
fn same_twice(plan: &Plan, dir: &Path) -> PathBuf {
    let first = made(plan, &tree(dir, false), &dir.join("one"));
    // Programs that write the time of day do so in seconds.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let second = made(plan, &tree(dir, true), &dir.join("two"));
    assert_eq!(first.root, second.root);
    assert_eq!(first.files, second.files);
    let path = |which: &str| dir.join(which).join(&first.root.file);
    let same = fs::read(path("one")).unwrap() == fs::read(path("two")).unwrap();
    assert!(same, "{}: other bytes from another order", plan.summary());
    assert_eq!(fs::read_dir(dir.join("one")).unwrap().count(), 1, "only the image is left");
    path("one")
}

/// The file system by itself, without the disk around it.
fn content(image: &Path) -> PathBuf {
    let file = fs::File::open(image).unwrap();
    let parts = disk::read_partitions(&file).unwrap();
    let path = image.with_extension("content");
    let mut inside = disk::partition_reader(&file, parts[0]);
    std::io::copy(&mut inside, &mut fs::File::create(&path).unwrap()).unwrap();
    path
}

/// Files that a program has taken out of an image hold what was put in.
fn assert_contents(dir: &Path) {
    for (path, (_, data)) in files() {
        let found = fs::read(dir.join(&path)).unwrap();
        assert!(found == data, "{path} holds something else");
    }
    assert_eq!(fs::read_link(dir.join("var/run")).unwrap(), Path::new("../run"));
    assert_eq!(fs::read_link(dir.join("var/long")).unwrap(), PathBuf::from("x/".repeat(80)));
}

fn listed(image: &Path) -> Vec<list::Entry> {
    let mut entries = Vec::new();
    list::list(image, |entry| {
        entries.push(entry);
        Ok::<_, list::Error>(())
    })
    .unwrap();
    entries
}

/// What `ls` shows of an image is the tree.
fn assert_listed(image: &Path) {
    let entries = listed(image);
    let entry = |path: &str| entries.iter().find(|entry| entry.path == path).unwrap();
    for (path, (mode, data)) in files() {
        let entry = entry(&format!("/{path}"));
        assert_eq!((entry.kind, entry.mode, entry.size), ("file", mode, data.len() as u64), "{path}");
    }
    assert_eq!(entry("/tmp").mode, 0o1777);
    assert_eq!(entry("/dev/nvidia255").device, Some((195, 255)));
    assert_eq!(entry("/var/run").target.as_deref(), Some("../run"));
    assert_eq!(entry("/var/long").target.as_deref().map(str::len), Some(160));
    let below = |dir: &str| entries.iter().filter(|entry| entry.path.starts_with(dir)).count();
    assert_eq!(below("/usr/share/many/"), 300);
}

fn root_owns(image: &Path) {
    let file = fs::File::open(image).unwrap();
    let length = file.metadata().unwrap().len();
    let mut image = firstlight_image_builder::format::erofs::Image::open(file, 0, length).unwrap().unwrap();
    assert!(image.entries().unwrap().iter().all(|entry| entry.owner == (0, 0)));
}

#[test]
fn erofs() {
    for (compression, level) in [
        (None, None),
        (Some(Compression::Lz4), None),
        (Some(Compression::Zstd), Some(3)),
        (Some(Compression::None), None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let image = same_twice(&plan(Format::Erofs, compression, level), dir.path());
        assert_listed(&image);
        let content = content(&image);
        root_owns(&content);
        let out = dir.path().join("out");
        says(Kit::Erofs, "fsck.erofs", |command| {
            command.arg(format!("--extract={}", out.display())).arg("--no-preserve").arg(&content);
        });
        assert_contents(&out);
        // Four fifths of the tree pack well.
        let size = fs::metadata(&content).unwrap().len();
        assert_eq!(size < 1_000_000, compression != Some(Compression::None), "{compression:?}: {size}");
    }
}

#[test]
fn squashfs() {
    for compression in
        [None, Some(Compression::Lz4), Some(Compression::Lz4hc), Some(Compression::Xz), Some(Compression::None)]
    {
        let dir = tempfile::tempdir().unwrap();
        let image = same_twice(&plan(Format::Squashfs, compression, None), dir.path());
        let content = content(&image);
        let lines = says(Kit::Squashfs, "unsquashfs", |command| {
            // As this machine's clock has it, if one does not say.
            command.env("TZ", "UTC0").arg("-lln").arg(&content);
        });
        let entries: Vec<&str> = lines.lines().filter(|line| line.contains("squashfs-root")).collect();
        assert!(entries.len() > 310 && entries.iter().all(|line| line.contains(" 0/0 ")), "{lines}");
        assert!(entries.iter().all(|line| line.contains("1970-01-01 00:00")), "{lines}");
        assert!(lines.contains("-rwsr-xr-x") && lines.contains("195,255"), "{lines}");
        let out = dir.path().join("out");
        says(Kit::Squashfs, "unsquashfs", |command| {
            command.args(["-quiet", "-no-progress", "-ignore-errors", "-excludes", "-dest"]).arg(&out).arg(&content);
            command.arg("dev");
        });
        assert_contents(&out);
    }
}

#[test]
fn ext4() {
    let dir = tempfile::tempdir().unwrap();
    let image = same_twice(&plan(Format::Ext4, None, None), dir.path());
    let content = content(&image);
    says(Kit::Ext4, "e2fsck", |command| {
        command.args(["-f", "-n"]).arg(&content);
    });
    let debug = |request: &str| {
        says(Kit::Ext4, "debugfs", |command| {
            command.args(["-R", request]).arg(&content);
        })
    };
    let stat = |path: &str| debug(&format!("stat {path}"));
    for (path, words) in [
        ("/usr/bin/tool", vec!["Mode:  04755", "Size: 3000000"]),
        ("/dev/nvidia255", vec!["Type: character special", "195:255"]),
        ("/var/run", vec!["../run"]),
        ("/tmp", vec!["Mode:  01777"]),
    ] {
        let text = stat(path);
        assert!(text.contains("User:     0   Group:     0"), "{text}");
        assert!(text.contains("mtime: 0x00000000"), "{text}");
        for word in words {
            assert!(text.contains(word), "{path}: {word}: {text}");
        }
    }
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    debug(&format!("rdump /init /usr /etc /var {}", out.display()));
    assert_contents(&out);
    // Unused space: less than a tenth and a few megabytes.
    let (size, used) =
        (fs::metadata(&content).unwrap().len(), files().values().map(|(_, data)| data.len() as u64).sum::<u64>());
    assert!(size < used + used / 10 + (5 << 20), "{size} for {used}");
}

#[test]
fn ext4_has_room_for_a_large_tree() {
    use firstlight_image_builder::tree::{Content, Node, Tree};
    let dir = tempfile::tempdir().unwrap();
    let large = dir.path().join("large");
    fs::File::create(&large).and_then(|file| file.set_len(400 << 20)).unwrap();
    let mut tree = Tree::default();
    // Sparse here, and nothing but room there.
    tree.add("large", Node::File { mode: 0o644, content: Content::File(large) }).unwrap();
    for number in 0..5000 {
        let content = Content::Bytes(vec![b'x'; number % 9000]);
        tree.add(&format!("{}/{number:0>200}", number % 7), Node::File { mode: 0o644, content }).unwrap();
    }
    let image = made(&plan(Format::Ext4, None, None), &tree, &dir.path().join("out"));
    let content = content(&dir.path().join("out").join(image.root.file));
    says(Kit::Ext4, "e2fsck", |command| {
        command.args(["-f", "-n"]).arg(&content);
    });
}

#[test]
fn initramfs() {
    let dir = tempfile::tempdir().unwrap();
    let plain = same_twice(&plan(Format::Initramfs, None, None), &dir.path().join("plain"));
    let archive = fs::read(&plain).unwrap();
    assert_listed(&plain);
    for compression in [Compression::Lz4, Compression::Zstd] {
        let image = same_twice(&plan(Format::Initramfs, Some(compression), None), &dir.path().join(compression.name()));
        let packed = fs::read(&image).unwrap();
        assert!(packed.len().is_multiple_of(4096) && packed.len() < archive.len() / 4, "{}", packed.len());
        let mut bytes = Vec::new();
        unpack::decompress(BufReader::new(&packed[..])).unwrap().read_to_end(&mut bytes).unwrap();
        assert!(bytes == archive, "{compression:?} holds something else");
        assert_listed(&image);
    }
}

#[test]
fn programs_are_named_with_their_packages() {
    let dir = tempfile::tempdir().unwrap();
    let image = made(&plan(Format::Erofs, None, None), &tree(dir.path(), false), &dir.path().join("out"));
    let package = |name: &str| image.tools.iter().find(|package| package.name == name);
    let utils = package("erofs-utils").unwrap();
    assert!(utils.version.starts_with("1.8.") && utils.sha256.len() == 64, "{utils:?}");
    assert!(package("liblz4-1").is_some() && package("libc6").is_some(), "{:?}", image.tools);
}

#[test]
fn a_missing_file_leaves_a_message_and_no_image() {
    use firstlight_image_builder::tree::{Content, Node, Tree};
    let dir = tempfile::tempdir().unwrap();
    let mut tree = Tree::default();
    let content = Content::File(dir.path().join("never-there"));
    tree.add("etc/gone", Node::File { mode: 0o644, content }).unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let plan = plan(Format::Erofs, None, None);
    let error = build_image(&plan, &tree, &mut packages(), &out, &out.join("none")).unwrap_err();
    assert!(error.to_string().contains("never-there"), "{error}");
    assert!(!out.join("rootfs.img").exists());
}
