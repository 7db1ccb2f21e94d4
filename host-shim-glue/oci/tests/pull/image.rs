//! Test images, built blob by blob.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use firstlight_image::digest::of_bytes;
use serde_json::{Value, json};

pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Blobs by digest, and the index of their images.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blobs {
    pub(crate) all: BTreeMap<String, Vec<u8>>,
    pub(crate) index: Value,
}

/// Returns a tar archive of regular files.
pub(crate) fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Compresses `bytes` with gzip.
pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", of_bytes(bytes))
}

/// Returns the configuration of an image with these uncompressed layers.
pub(crate) fn config(architecture: &str, contents: &[&[u8]]) -> Vec<u8> {
    let ids: Vec<String> = contents.iter().map(|bytes| digest(bytes)).collect();
    json!({ "os": "linux", "architecture": architecture, "rootfs": { "type": "layers", "diff_ids": ids } })
        .to_string()
        .into_bytes()
}

impl Blobs {
    /// Adds a blob; returns its descriptor.
    pub(crate) fn put(&mut self, media_type: &str, bytes: &[u8]) -> Value {
        self.all.insert(digest(bytes), bytes.to_vec());
        json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
    }

    /// Adds an image of these layers; returns its descriptor.
    pub(crate) fn image(&mut self, architecture: &str, layers: &[&[u8]]) -> Value {
        let config = config(architecture, layers);
        let config = self.put(CONFIG, &config);
        let layers: Vec<Value> = layers
            .iter()
            .map(|layer| match architecture {
                // Layers of one platform are compressed, so that both forms are tested.
                "arm64" => self.put(&format!("{LAYER}+gzip"), &gzip(layer)),
                _ => self.put(LAYER, layer),
            })
            .collect();
        let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
        let mut descriptor = self.put(MANIFEST, manifest.to_string().as_bytes());
        descriptor["platform"] = json!({ "os": "linux", "architecture": architecture });
        descriptor
    }

    /// Returns an image for two platforms; the second layer of the first one is large.
    pub(crate) fn sample() -> Self {
        let mut blobs = Self::default();
        let large: Vec<u8> = (0..300_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        let (low, high) = (tar(&[("bin/low", b"low")]), tar(&[("bin/high", &large)]));
        let all = vec![blobs.image("amd64", &[&low, &high]), blobs.image("arm64", &[&low])];
        blobs.index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": all });
        blobs
    }

    /// Returns the digest of the manifest at this position of the index.
    pub(crate) fn manifest(&self, at: usize) -> String {
        self.index["manifests"][at]["digest"].as_str().unwrap().to_owned()
    }

    /// Returns the digests of an image's layers.
    pub(crate) fn layers(&self, at: usize) -> Vec<String> {
        let manifest: Value = serde_json::from_slice(&self.all[&self.manifest(at)]).unwrap();
        manifest["layers"].as_array().unwrap().iter().map(|l| l["digest"].as_str().unwrap().to_owned()).collect()
    }

    /// Writes the layout to a directory.
    pub(crate) fn write(&self, dir: &Path) {
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        for (digest, bytes) in &self.all {
            fs::write(blobs.join(digest.strip_prefix("sha256:").unwrap()), bytes).unwrap();
        }
        fs::write(dir.join("index.json"), self.index.to_string()).unwrap();
        fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }

    /// Returns the layout as a tar archive.
    pub(crate) fn archive(&self) -> Vec<u8> {
        let index = self.index.to_string();
        let mut files: Vec<(String, &[u8])> =
            vec![("oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#), ("index.json".into(), index.as_bytes())];
        files
            .extend(self.all.iter().map(|(digest, bytes)| (format!("blobs/{}", digest.replace(':', "/")), &bytes[..])));
        let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        tar(&files)
    }

    /// Asserts that the layout in `out` has exactly the blobs of the image at this position.
    pub(crate) fn assert_pulled(&self, at: usize, out: &Path) {
        let index: Value = serde_json::from_slice(&fs::read(out.join("index.json")).unwrap()).unwrap();
        let manifest = &index["manifests"][0]["digest"];
        assert_eq!(manifest, &self.index["manifests"][at]["digest"]);
        let manifest = manifest.as_str().unwrap();
        let document: Value = serde_json::from_slice(&self.all[manifest]).unwrap();
        let mut expected = vec![manifest.to_owned(), document["config"]["digest"].as_str().unwrap().to_owned()];
        expected.extend(self.layers(at));
        let mut expected: Vec<&str> = expected.iter().map(|digest| digest.strip_prefix("sha256:").unwrap()).collect();
        expected.sort_unstable();
        assert_eq!(crate::names(&out.join("blobs/sha256")), expected);
        for name in expected {
            let bytes = fs::read(out.join("blobs/sha256").join(name)).unwrap();
            assert_eq!(bytes, self.all[&format!("sha256:{name}")]);
        }
    }
}
