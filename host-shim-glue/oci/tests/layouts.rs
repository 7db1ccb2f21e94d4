//! Valid, damaged and hostile layouts.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use firstlight_oci::{File, Image, NewImage};

fn image() -> NewImage {
    NewImage {
        files: vec![
            File::Directory { path: "bin".into(), mode: 0o755 },
            File::Text { path: "bin/hello".into(), text: "hello".into() },
            File::Link { path: "bin/sh".into(), target: "hello".into() },
            File::Directory { path: "tmp".into(), mode: 0o1777 },
        ],
        env: vec!["A=b".into()],
        command: vec!["/bin/hello".into()],
    }
}

#[test]
fn created_image_opens_and_unpacks() {
    let layout = tempfile::tempdir().unwrap();
    image().write(layout.path()).unwrap();
    let image = Image::open(layout.path()).unwrap();
    assert_eq!(image.default_command(), ["/bin/hello"]);
    assert_eq!(image.environment(), ["A=b"]);
    let root = tempfile::tempdir().unwrap();
    image.unpack(root.path()).unwrap();
    assert_eq!(fs::read_to_string(root.path().join("bin/sh")).unwrap(), "hello");
    assert_eq!(fs::metadata(root.path().join("tmp")).unwrap().permissions().mode() & 0o7777, 0o1777);
}

#[test]
fn rewritten_layout_does_not_change_files_that_are_being_read() {
    use std::os::unix::fs::MetadataExt;
    let layout = tempfile::tempdir().unwrap();
    image().write(layout.path()).unwrap();
    let inodes = || {
        let blobs = fs::read_dir(layout.path().join("blobs/sha256")).unwrap().map(|entry| entry.unwrap().path());
        let mut paths: Vec<_> = blobs.chain([layout.path().join("index.json")]).collect();
        paths.sort();
        paths.into_iter().map(|path| fs::metadata(&path).map(|it| (path, it.ino())).unwrap()).collect::<Vec<_>>()
    };
    let before = inodes();
    image().write(layout.path()).unwrap();
    for (old, new) in before.iter().zip(inodes()) {
        assert!(old.0 == new.0 && old.1 != new.1, "{old:?} {new:?}");
    }
    assert_eq!(before.len(), 4, "no temporary file remains");
}

#[test]
fn equal_input_gives_equal_bytes() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image().write(a.path()).unwrap();
    image().write(b.path()).unwrap();
    let index = |p: &Path| fs::read(p.join("index.json")).unwrap();
    assert_eq!(index(a.path()), index(b.path()));
}

#[test]
fn missing_layout_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Image::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no oci-layout") && error.contains("skopeo"), "{error}");
}

#[test]
fn damaged_blob_is_refused_by_digest_and_size() {
    let layout = tempfile::tempdir().unwrap();
    image().write(layout.path()).unwrap();
    let largest = fs::read_dir(layout.path().join("blobs/sha256"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .max_by_key(|p| fs::metadata(p).unwrap().len())
        .unwrap();
    let mut bytes = fs::read(&largest).unwrap();
    bytes[600] ^= 1;
    fs::write(&largest, &bytes).unwrap();
    let root = tempfile::tempdir().unwrap();
    let error = Image::open(layout.path()).unwrap().unpack(root.path()).unwrap_err().to_string();
    assert!(error.contains(largest.file_name().unwrap().to_str().unwrap()), "{error}");
    bytes.pop();
    fs::write(&largest, &bytes).unwrap();
    let error = Image::open(layout.path()).unwrap().unpack(root.path()).unwrap_err().to_string();
    assert!(error.contains("bytes"), "{error}");
}

#[test]
fn image_of_another_platform_is_refused() {
    let layout = tempfile::tempdir().unwrap();
    image().write(layout.path()).unwrap();
    let path = layout.path().join("index.json");
    let text = fs::read_to_string(&path).unwrap().replace("amd64", "arm64");
    fs::write(&path, text).unwrap();
    let error = Image::open(layout.path()).unwrap_err().to_string();
    assert!(error.contains("linux/arm64"), "{error}");
}

/// Creates an image with these tar layers and unpacks it.
fn unpack_layers(layers: &[Vec<u8>], target: &Path) -> Result<(), String> {
    let layout = tempfile::tempdir().unwrap();
    let blobs = layout.path().join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8], media: &str| {
        let hex = firstlight_image::digest::of_bytes(bytes);
        fs::write(blobs.join(&hex), bytes).unwrap();
        serde_json::json!({"mediaType": media, "digest": format!("sha256:{hex}"), "size": bytes.len()})
    };
    let layers: Vec<_> = layers.iter().map(|l| put(l, "application/vnd.oci.image.layer.v1.tar")).collect();
    let config = put(
        br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#,
        "application/vnd.oci.image.config.v1+json",
    );
    let manifest = serde_json::json!({"schemaVersion":2,"config":config,"layers":layers}).to_string();
    let manifest = put(manifest.as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    let index = serde_json::json!({"schemaVersion":2,"manifests":[manifest]}).to_string();
    fs::write(layout.path().join("index.json"), index).unwrap();
    fs::write(layout.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    Image::open(layout.path()).unwrap().unpack(target).map_err(|e| e.to_string())
}

/// Appends a tar entry with any path, including those that the tar crate refuses to write.
fn entry(out: &mut Vec<u8>, kind: u8, path: &str, link: &str, data: &[u8]) {
    let mut header = tar::Header::new_ustar();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_size(data.len() as u64);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
}

#[test]
fn whiteouts_remove_entries_of_lower_layers() {
    let (mut low, mut high) = (Vec::new(), Vec::new());
    entry(&mut low, b'5', "d/", "", b"");
    entry(&mut low, b'0', "d/a", "", b"a");
    entry(&mut low, b'0', "d/b", "", b"b");
    entry(&mut low, b'0', "e/c", "", b"c");
    entry(&mut high, b'0', "d/.wh.a", "", b"");
    entry(&mut high, b'0', "e/.wh..wh..opq", "", b"");
    entry(&mut high, b'0', "e/new", "", b"n");
    let root = tempfile::tempdir().unwrap();
    unpack_layers(&[low, high], root.path()).unwrap();
    assert!(!root.path().join("d/a").exists() && root.path().join("d/b").exists());
    assert!(!root.path().join("e/c").exists() && root.path().join("e/new").exists());
}

#[test]
fn hostile_layers_do_not_escape_the_target() {
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "untouched").unwrap();
    let root = outside.path().join("root");
    let up = "../".repeat(12);
    let absolute = victim.to_str().unwrap();
    type Make<'a> = Box<dyn Fn(&mut Vec<u8>) + 'a>;
    let cases: Vec<(&str, Make<'_>)> = vec![
        ("dot dot", Box::new(|t| entry(t, b'0', "../victim", "", b"evil"))),
        (
            "through a link",
            Box::new(|t| {
                entry(t, b'2', "link", outside.path().to_str().unwrap(), b"");
                entry(t, b'0', "link/victim", "", b"evil");
            }),
        ),
        (
            "over a link",
            Box::new(|t| {
                entry(t, b'2', "file", absolute, b"");
                entry(t, b'0', "file", "", b"evil");
            }),
        ),
        (
            "hard link out",
            Box::new(|t| {
                entry(t, b'1', "hard", &format!("{}{}", up, &absolute[1..]), b"");
                entry(t, b'0', "hard", "", b"evil");
            }),
        ),
        (
            "whiteout out",
            Box::new(|t| {
                entry(t, b'2', "link", "..", b"");
                entry(t, b'0', "link/.wh.victim", "", b"");
            }),
        ),
        ("whiteout of ..", Box::new(|t| entry(t, b'0', "a/.wh...", "", b""))),
    ];
    for (name, make) in cases {
        fs::create_dir(&root).unwrap();
        let mut layer = Vec::new();
        make(&mut layer);
        let _ = unpack_layers(&[layer], &root);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched", "{name}");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 2, "{name}: created an entry outside");
        fs::remove_dir_all(&root).unwrap();
    }
}
