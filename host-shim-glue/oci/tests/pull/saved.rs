//! Pulls from archives of `docker save`, in the old and the new form.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::image::{config, digest, gzip, tar};
use crate::{names, pulled, pulled_as};

/// Returns an archive of one image with these layers; `contents` are the uncompressed layers.
fn saved(layers: &[(&str, &[u8])], contents: &[&[u8]]) -> Vec<u8> {
    let config = config("amd64", contents);
    let names: Vec<&str> = layers.iter().map(|(name, _)| *name).collect();
    let list = json!([{ "Config": "c.json", "RepoTags": ["busybox:1.36"], "Layers": names }]).to_string();
    let mut files: Vec<(&str, &[u8])> = layers.to_vec();
    files.push(("c.json", &config));
    files.push(("manifest.json", list.as_bytes()));
    tar(&files)
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> String {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    format!("docker-archive:{}", path.display())
}

#[test]
fn archive_becomes_a_layout() {
    let dir = tempfile::tempdir().unwrap();
    let (low, high) = (tar(&[("low", b"low")]), tar(&[("high", &[7; 100_000])]));
    let plain = saved(&[("a/layer.tar", &low), ("blobs/sha256/b", &high)], &[&low, &high]);
    let compressed = saved(&[("a.tar.gz", &gzip(&low)), ("b.tar.gz", &gzip(&high))], &[&low, &high]);
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
    let with_zstd = saved(&[("a.tar.zst", &zstd(&low)), ("b.tar.zst", &zstd(&high))], &[&low, &high]);
    let sources = [
        write(dir.path(), "plain.tar", &plain),
        write(dir.path(), "plain.tar.gz", &gzip(&plain)),
        write(dir.path(), "compressed.tar", &compressed),
        write(dir.path(), "zstd.tar", &with_zstd),
    ];
    for (number, source) in sources.iter().enumerate() {
        let out = dir.path().join("results").join(number.to_string());
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        let image = pulled(&format!("{source}:busybox:1.36"), &out).unwrap();
        assert_eq!(image.platform.to_string(), "linux/amd64");
        let first = &image.layers[0];
        let (expected, suffix) = match number {
            0 | 1 => (low.clone(), ".tar"),
            2 => (gzip(&low), ".tar+gzip"),
            _ => (zstd(&low), ".tar+zstd"),
        };
        assert_eq!(first.digest().to_string(), digest(&expected));
        assert!(first.media_type().as_ref().ends_with(suffix), "{suffix}");
        assert_eq!(fs::read(out.join("blobs/sha256").join(first.digest().digest())).unwrap(), expected);
        let index = fs::read_to_string(out.join("index.json")).unwrap();
        assert!(index.contains(r#""org.opencontainers.image.ref.name":"busybox:1.36""#), "{index}");
        // The result can be pulled in turn.
        let copy = dir.path().join("copy");
        assert_eq!(pulled(&format!("oci:{}", out.display()), &copy).unwrap().digest, image.digest);
        // The same archive gives the same image.
        assert_eq!(pulled(source, &out).unwrap().digest, image.digest);
    }
    assert_eq!(names(&dir.path().join("results")), ["0", "1", "2", "3"]);
}

#[test]
fn unusable_archive_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (layer, other) = (tar(&[("x", b"x")]), tar(&[("x", b"y")]));
    let out = dir.path().join("out");
    for (name, bytes, expected) in [
        ("other", saved(&[("l.tar", &other)], &[&layer]), "failed to verify the blob"),
        ("other-gz", saved(&[("l.tar", &gzip(&other))], &[&layer]), "its decompressed content is sha256:"),
        ("broken-gz", saved(&[("l.tar", &gzip(&layer)[..30])], &[&layer]), "failed to decompress the layer"),
        ("fewer", saved(&[("l.tar", &layer)], &[]), "0 layers, the manifest 1"),
        ("missing", tar(&[("manifest.json", br#"[{"Config":"none","Layers":[]}]"#)]), "no file \"none\""),
        ("escape", tar(&[("manifest.json", br#"[{"Config":"../c","Layers":[]}]"#)]), "invalid entry name"),
        ("no-list", tar(&[("index.json", b"{}")]), "an OCI image layout is oci:PATH"),
        ("cut", saved(&[("l.tar", &layer)], &[&layer])[..700].to_vec(), "truncated"),
    ] {
        let source = write(dir.path(), &format!("{name}.tar"), &bytes);
        let error = pulled(&source, &out).unwrap_err();
        assert!(error.contains(expected) && error.contains(name), "{name}: {error}");
        assert!(!out.exists(), "{name}");
    }
    let source = write(dir.path(), "good.tar", &saved(&[("l.tar", &layer)], &[&layer]));
    let error = pulled(&format!("{source}:nginx"), &out).unwrap_err();
    assert!(error.contains("\"nginx\"") && error.contains("\"busybox:1.36\""), "{error}");
    let error = pulled_as(&source, &out, &Default::default(), "linux/arm64").unwrap_err();
    assert!(error.contains("linux/arm64; available: linux/amd64"), "{error}");
    pulled(&source, &out).unwrap();
}
