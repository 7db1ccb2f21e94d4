//! What `docker save` writes, in its old and its new shape.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::image::{config, digest, gzip, tar};
use crate::{names, pulled, pulled_as};

/// An archive of one image with these layers under these names.
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
fn archives_become_layouts_packed_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let (low, high) = (tar(&[("low", b"low")]), tar(&[("high", &[7; 100_000])]));
    let plain = saved(&[("a/layer.tar", &low), ("blobs/sha256/b", &high)], &[&low, &high]);
    let packed = saved(&[("a.tar.gz", &gzip(&low)), ("b.tar.gz", &gzip(&high))], &[&low, &high]);
    let sources = [
        write(dir.path(), "plain.tar", &plain),
        write(dir.path(), "plain.tar.gz", &gzip(&plain)),
        write(dir.path(), "packed.tar", &packed),
    ];
    for (number, source) in sources.iter().enumerate() {
        let out = dir.path().join("results").join(number.to_string());
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        let image = pulled(&format!("{source}:busybox:1.36"), &out).unwrap();
        assert_eq!(image.platform.to_string(), "linux/amd64");
        let first = &image.layers[0];
        let expected = if number < 2 { low.clone() } else { gzip(&low) };
        assert_eq!(first.digest.to_string(), digest(&expected));
        assert_eq!(first.media_type.ends_with("+gzip"), number == 2);
        assert_eq!(fs::read(out.join("blobs/sha256").join(first.digest.hex())).unwrap(), expected);
        let index = fs::read_to_string(out.join("index.json")).unwrap();
        assert!(index.contains(r#""org.opencontainers.image.ref.name":"busybox:1.36""#), "{index}");
        // What was made is a layout like any other.
        let copy = dir.path().join("copy");
        assert_eq!(pulled(&format!("oci:{}", out.display()), &copy).unwrap().digest, image.digest);
        // The same archive gives the same image.
        assert_eq!(pulled(source, &out).unwrap().digest, image.digest);
    }
    assert_eq!(names(&dir.path().join("results")), ["0", "1", "2"]);
}

#[test]
fn wrong_layers_platforms_and_names_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (layer, other) = (tar(&[("x", b"x")]), tar(&[("x", b"y")]));
    let out = dir.path().join("out");
    for (name, bytes, said) in [
        ("other", saved(&[("l.tar", &other)], &[&layer]), "cannot verify the blob"),
        ("other-gz", saved(&[("l.tar", &gzip(&other))], &[&layer]), "it unpacks to sha256:"),
        ("broken-gz", saved(&[("l.tar", &gzip(&layer)[..30])], &[&layer]), "cannot unpack the layer"),
        ("fewer", saved(&[("l.tar", &layer)], &[]), "0 layers, the manifest of 1"),
        ("missing", tar(&[("manifest.json", br#"[{"Config":"none","Layers":[]}]"#)]), "no file \"none\""),
        ("escape", tar(&[("manifest.json", br#"[{"Config":"../c","Layers":[]}]"#)]), "no name of an entry"),
        ("no-list", tar(&[("index.json", b"{}")]), "an OCI image layout is oci:PATH"),
        ("cut", saved(&[("l.tar", &layer)], &[&layer])[..700].to_vec(), "not all there"),
    ] {
        let source = write(dir.path(), &format!("{name}.tar"), &bytes);
        let error = pulled(&source, &out).unwrap_err();
        assert!(error.contains(said) && error.contains(name), "{name}: {error}");
        assert!(!out.exists(), "{name}");
    }
    let source = write(dir.path(), "good.tar", &saved(&[("l.tar", &layer)], &[&layer]));
    let error = pulled(&format!("{source}:nginx"), &out).unwrap_err();
    assert!(error.contains("\"nginx\"") && error.contains("\"busybox:1.36\""), "{error}");
    let error = pulled_as(&source, &out, &Default::default(), "linux/arm64").unwrap_err();
    assert!(error.contains("linux/arm64; there is linux/amd64"), "{error}");
    pulled(&source, &out).unwrap();
}
