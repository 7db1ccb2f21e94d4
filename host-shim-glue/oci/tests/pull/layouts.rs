//! Pulls from OCI image layouts: directories and archives.

use std::fs;
use std::path::PathBuf;

use serde_json::json;
use tempfile::TempDir;

use crate::image::{Blobs, INDEX, LAYER, gzip, tar};
use crate::{names, pulled, pulled_as};

/// Writes the layout as a directory, a tar archive and a compressed one; returns the output path
/// and the sources.
fn write_sources(blobs: &Blobs) -> (TempDir, PathBuf, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    blobs.write(&layout);
    let (archive, compressed) = (dir.path().join("layout.tar"), dir.path().join("layout.tar.gz"));
    fs::write(&archive, blobs.archive()).unwrap();
    fs::write(&compressed, gzip(&blobs.archive())).unwrap();
    let sources = [layout, archive, compressed].iter().map(|path| format!("oci:{}", path.display())).collect();
    let out = dir.path().join("results/out");
    fs::create_dir(dir.path().join("results")).unwrap();
    (dir, out, sources)
}

#[test]
fn layout_is_copied_unmodified() {
    let blobs = Blobs::sample();
    let (dir, out, sources) = write_sources(&blobs);
    for source in &sources {
        let image = pulled(source, &out).unwrap();
        blobs.assert_pulled(0, &out);
        assert_eq!((image.digest.to_string(), image.layers.len()), (blobs.manifest(0), 2), "{source}");
        let image = pulled_as(source, &out, &Default::default(), "linux/arm64").unwrap();
        assert_eq!(image.platform.to_string(), "linux/arm64");
        blobs.assert_pulled(1, &out);
    }
    assert_eq!(names(&dir.path().join("results")), ["out"]);
    // The second pull copies nothing.
    assert_eq!(pulled(&sources[0], &out).unwrap().fetched, 3);
    assert_eq!(pulled(&sources[1], &out).unwrap().fetched, 0);
}

#[test]
fn missing_platform_is_refused_with_the_available_ones() {
    let blobs = Blobs::sample();
    let (_dir, out, sources) = write_sources(&blobs);
    let error = pulled_as(&sources[0], &out, &Default::default(), "linux/s390x").unwrap_err();
    assert!(error.contains("linux/s390x") && error.contains("linux/amd64, linux/arm64"), "{error}");
    assert!(!out.exists());
}

#[test]
fn image_whose_configuration_has_another_platform_is_refused() {
    let mut blobs = Blobs::default();
    let mut arm = blobs.image("arm64", &[]);
    arm.as_object_mut().unwrap().remove("platform");
    blobs.index = json!({ "schemaVersion": 2, "manifests": [arm] });
    let (_dir, out, sources) = write_sources(&blobs);
    let error = pulled(&sources[0], &out).unwrap_err();
    assert!(error.contains("no image for linux/amd64; available: linux/arm64"), "{error}");
}

#[test]
fn new_index_has_only_name_and_platform_of_the_source() {
    let mut blobs = Blobs::sample();
    let image = &mut blobs.index["manifests"][0];
    image["urls"] = json!(["https://example.org/untrusted"]);
    image["data"] = json!("dW50cnVzdGVk");
    image["artifactType"] = json!("text/untrusted");
    image["annotations"] = json!({ "untrusted": "x", "org.opencontainers.image.ref.name": "v1" });
    image["platform"]["os.version"] = json!("untrusted");
    let (_dir, out, sources) = write_sources(&blobs);
    pulled(&format!("{}:v1", sources[0]), &out).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&fs::read(out.join("index.json")).unwrap()).unwrap();
    let image = index["manifests"][0].as_object().unwrap();
    let properties: Vec<&str> = image.keys().map(String::as_str).collect();
    assert_eq!(properties, ["annotations", "digest", "mediaType", "platform", "size"]);
    assert_eq!(image["annotations"], json!({ "org.opencontainers.image.ref.name": "v1" }));
    assert_eq!(image["platform"], json!({ "os": "linux", "architecture": "amd64" }));
}

#[test]
fn nested_indexes_are_followed_to_the_limit() {
    let mut blobs = Blobs::sample();
    let mut nested = blobs.index.to_string();
    for depth in 1..=5 {
        let mut inner = blobs.put(INDEX, nested.as_bytes());
        inner["annotations"] = json!({ "org.opencontainers.image.ref.name": "v1" });
        blobs.index = json!({ "schemaVersion": 2, "manifests": [inner] });
        nested = blobs.index.to_string();
        let (_dir, out, sources) = write_sources(&blobs);
        let result = pulled(&format!("{}:v1", sources[0]), &out);
        if depth <= 4 {
            assert!(result.is_ok(), "{depth}: {result:?}");
            let index = fs::read_to_string(out.join("index.json")).unwrap();
            assert!(index.contains(r#""org.opencontainers.image.ref.name":"v1""#), "{index}");
        } else {
            assert!(result.unwrap_err().contains("nested too deeply"));
        }
    }
}

#[test]
fn damaged_layout_is_refused_with_the_blob() {
    let whole = Blobs::sample();
    let layer = whole.layers(0)[1].clone();
    let change = |change: &dyn Fn(&mut Blobs)| {
        let mut blobs = whole.clone();
        change(&mut blobs);
        blobs
    };
    let flipped = change(&|blobs| blobs.all.get_mut(&layer).unwrap()[1000] ^= 1);
    let shorter = change(&|blobs| blobs.all.get_mut(&layer).unwrap().truncate(1000));
    let longer = change(&|blobs| blobs.all.get_mut(&layer).unwrap().push(0));
    let missing = change(&|blobs| drop(blobs.all.remove(&layer)));
    let manifest = whole.manifest(0);
    let no_manifest = change(&|blobs| blobs.all.get_mut(&manifest).unwrap()[3] ^= 1);
    let sizes = change(&|blobs| blobs.index["manifests"][0]["size"] = json!(5 << 20));
    let schema1 = change(&|blobs| blobs.index = json!({ "schemaVersion": 1, "fsLayers": [] }));
    let short = layer.strip_prefix("sha256:").unwrap();
    for (blobs, expected) in [
        (flipped, layer.as_str()),
        (shorter, layer.as_str()),
        (longer, layer.as_str()),
        (missing, short),
        (no_manifest, "failed to verify the manifest"),
        (sizes, "the limit is 4194304"),
        (schema1, "schema 1"),
    ] {
        let (dir, out, sources) = write_sources(&blobs);
        for source in sources {
            let error = pulled(&source, &out).unwrap_err();
            assert!(error.contains(expected) && error.contains("layout"), "{expected}: {error}");
            assert!(!out.exists(), "{expected}");
        }
        // Complete blobs may remain; the next pull succeeds.
        whole.write(&dir.path().join("layout"));
        pulled(&format!("oci:{}", dir.path().join("layout").display()), &out).unwrap();
        whole.assert_pulled(0, &out);
        assert_eq!(names(&dir.path().join("results")), ["out"]);
    }
}

#[test]
fn incomplete_layout_is_refused_with_the_missing_part() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    fs::write(dir.path().join("other.tar"), tar(&[("manifest.json", b"[]")])).unwrap();
    fs::write(dir.path().join("escape.tar"), {
        let mut bytes = tar(&[("aa/x", b"")]);
        bytes[..4].copy_from_slice(b"../x");
        let mut header = tar::Header::new_gnu();
        header.as_mut_bytes().copy_from_slice(&bytes[..512]);
        header.set_cksum();
        bytes[..512].copy_from_slice(header.as_bytes());
        bytes
    })
    .unwrap();
    for (name, expected) in [
        ("empty", "no oci-layout"),
        ("other.tar", "docker-archive:PATH"),
        ("escape.tar", "escapes the archive"),
        ("none", "none"),
    ] {
        let error = pulled(&format!("oci:{}", dir.path().join(name).display()), &out).unwrap_err();
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
    let mut blobs = Blobs::sample();
    let odd = blobs.put("application/vnd.oci.image.layer.nondistributable.v1.tar", b"x");
    let config = blobs.put("application/vnd.oci.image.config.v1+json", &crate::image::config("amd64", &[b"x"]));
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [odd] }).to_string();
    let manifest = blobs.put(crate::image::MANIFEST, manifest.as_bytes());
    blobs.index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    let (_dir, out, sources) = write_sources(&blobs);
    let error = pulled(&sources[0], &out).unwrap_err();
    assert!(error.contains("nondistributable") && error.contains(&format!("supported are {LAYER},")), "{error}");
}
