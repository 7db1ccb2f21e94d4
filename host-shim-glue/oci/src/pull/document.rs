//! Indexes, manifests and configurations: read, bounded, believed in parts.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::error::{Error, OTHER_TOOL, input};
use super::limits;
use super::platform::Platform;

/// A SHA-256: `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// Of 64 digits that this crate made itself.
    pub(crate) fn of_hex(hex: String) -> Self {
        Self(hex)
    }

    /// The digits alone: a plain file name.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.0
    }

    /// Enough for people to tell blobs apart.
    pub(crate) fn short(&self) -> &str {
        self.0.get(..12).unwrap_or(&self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("sha256:") {
            Some(hex) if is_hash(hex) => Ok(Self(hex.to_owned())),
            _ => Err(format!("{:?} is no digest; only sha256: and 64 digits are supported", clipped(text))),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// Returns whether this is a SHA-256 in lower-case hexadecimal.
fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// What somebody else wrote, for a message.
pub(crate) fn clipped(text: &str) -> String {
    text.chars().take(200).collect()
}

/// A blob as others name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// Its content's hash.
    pub digest: Digest,
    /// In bytes.
    pub size: u64,
    /// For which machine, in an index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Names, in an index.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// By which images of an index are told apart.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The same, with the repository, as containerd and docker write it.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

impl Descriptor {
    /// What it is called in an index.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        [REF_NAME, CONTAINERD_NAME].into_iter().filter_map(|key| self.annotations.get(key)).map(String::as_str)
    }
}

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
/// How the names of schema 1's types begin.
const SCHEMA1: &str = "application/vnd.docker.distribution.manifest.v1+";

/// How a layer is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// The layers that are supported: what `firstlight run` unpacks.
pub(crate) const LAYERS: &[(&str, Packing)] = &[
    ("application/vnd.oci.image.layer.v1.tar", Packing::Plain),
    ("application/vnd.oci.image.layer.v1.tar+gzip", Packing::Gzip),
    ("application/vnd.oci.image.layer.v1.tar+zstd", Packing::Zstd),
    ("application/vnd.docker.image.rootfs.diff.tar", Packing::Plain),
    ("application/vnd.docker.image.rootfs.diff.tar.gzip", Packing::Gzip),
    ("application/vnd.docker.image.rootfs.diff.tar.zstd", Packing::Zstd),
];

/// An index or a manifest.
#[derive(Debug)]
pub(crate) enum Document {
    Index(Vec<Descriptor>),
    Manifest(Manifest),
}

/// What an image is made of.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) media_type: String,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    schema_version: u64,
    media_type: Option<String>,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    fs_layers: Option<IgnoredAny>,
}

const READ: &str = "read the manifest";

impl Document {
    /// `declared` is the media type by which it came, if any.
    pub(crate) fn read(bytes: &[u8], object: &str, declared: Option<&str>) -> Result<Self, Error> {
        let wrong = |why: String| input(object, READ, why, OTHER_TOOL);
        if bytes.len() as u64 > limits::DOCUMENT {
            return Err(wrong(too_large(bytes.len() as u64)));
        }
        let schema1 = || wrong("it is of schema 1, which docker gave up and nobody can verify".to_owned());
        if declared.is_some_and(|declared| declared.starts_with(SCHEMA1)) {
            return Err(schema1());
        }
        let raw: Raw = serde_json::from_slice(bytes).map_err(|error| wrong(clipped(&error.to_string())))?;
        if raw.schema_version == 1 || raw.fs_layers.is_some() {
            return Err(schema1());
        }
        if raw.schema_version != 2 {
            return Err(wrong(format!("its schemaVersion is {}, not 2", raw.schema_version)));
        }
        let own = raw.media_type.as_deref();
        let is =
            |known: [&str; 2]| [own, declared].into_iter().flatten().all(|one| one.is_empty() || known.contains(&one));
        match (raw.manifests, raw.config, raw.layers) {
            // The same bytes must not be two things to two readers.
            (Some(_), _, Some(_)) | (Some(_), Some(_), _) => {
                Err(wrong("it is an index and a manifest at once".to_owned()))
            }
            (Some(manifests), None, None) if is([OCI_INDEX, DOCKER_LIST]) => {
                if manifests.len() > limits::MANIFESTS {
                    return Err(wrong(format!("{} images; the limit is {}", manifests.len(), limits::MANIFESTS)));
                }
                Ok(Self::Index(manifests))
            }
            (None, Some(config), Some(layers)) if is([OCI_MANIFEST, DOCKER_MANIFEST]) => {
                let media_type = own.or(declared).filter(|one| !one.is_empty()).unwrap_or(OCI_MANIFEST).to_owned();
                let manifest = Manifest { media_type, config, layers };
                manifest.check(object)?;
                Ok(Self::Manifest(manifest))
            }
            _ => Err(wrong(format!(
                "it is neither an image index nor an image manifest; it calls itself {:?}",
                clipped(own.or(declared).unwrap_or("nothing"))
            ))),
        }
    }
}

pub(crate) fn too_large(size: u64) -> String {
    format!("it has {size} bytes or more; the limit is {}", limits::DOCUMENT)
}

impl Manifest {
    fn check(&self, object: &str) -> Result<(), Error> {
        let wrong = |why: String| input(object, READ, why, OTHER_TOOL);
        let config = self.config.media_type.as_str();
        if ![OCI_CONFIG, DOCKER_CONFIG].contains(&config) {
            let why = format!("it is no container image but an artifact of type {:?}", clipped(config));
            return Err(input(object, READ, why, "name an image"));
        }
        if self.config.size > limits::DOCUMENT {
            return Err(wrong(format!("its configuration: {}", too_large(self.config.size))));
        }
        if self.layers.len() > limits::LAYERS {
            return Err(wrong(format!("{} layers; the limit is {}", self.layers.len(), limits::LAYERS)));
        }
        let mut sum: u64 = 0;
        for layer in &self.layers {
            if packing(&layer.media_type).is_none() {
                let known: Vec<&str> = LAYERS.iter().map(|(name, _)| *name).collect();
                return Err(wrong(format!(
                    "layer {} is of type {:?}; supported are {}",
                    layer.digest,
                    clipped(&layer.media_type),
                    known.join(", ")
                )));
            }
            sum = sum.saturating_add(layer.size);
            if layer.size > limits::BLOB || sum > limits::IMAGE {
                let why = format!(
                    "with layer {} of {} bytes it is too large; the limits are {} a layer and {} in all",
                    layer.digest,
                    layer.size,
                    limits::BLOB,
                    limits::IMAGE
                );
                return Err(wrong(why));
            }
        }
        Ok(())
    }
}

pub(crate) fn packing(media_type: &str) -> Option<Packing> {
    LAYERS.iter().find(|(name, _)| *name == media_type).map(|(_, packing)| *packing)
}

/// What of an image's configuration matters here.
#[derive(Debug, Deserialize)]
pub(crate) struct Config {
    #[serde(flatten)]
    pub(crate) platform: Platform,
    pub(crate) rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RootFs {
    #[serde(default)]
    pub(crate) diff_ids: Vec<Digest>,
}

impl Config {
    /// Of an image with this number of layers.
    pub(crate) fn read(bytes: &[u8], object: &str, layers: usize) -> Result<Self, Error> {
        let wrong = |why: String| input(object, "read the image's configuration", why, OTHER_TOOL);
        let mut config: Self = serde_json::from_slice(bytes).map_err(|error| wrong(clipped(&error.to_string())))?;
        config.platform.variant = config.platform.variant.filter(|variant| !variant.is_empty());
        if config.rootfs.diff_ids.len() != layers {
            return Err(wrong(format!(
                "it speaks of {} layers, the manifest of {layers}",
                config.rootfs.diff_ids.len()
            )));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptor(media_type: &str, size: u64) -> String {
        format!(r#"{{"mediaType":"{media_type}","digest":"sha256:{}","size":{size}}}"#, "a".repeat(64))
    }

    fn said(text: &str, declared: Option<&str>) -> String {
        Document::read(text.as_bytes(), "x.json", declared).unwrap_err().to_string()
    }

    #[test]
    fn manifests_and_indexes_are_told_apart() {
        let config = descriptor(OCI_CONFIG, 2);
        let layer = descriptor(LAYERS[1].0, 5);
        let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#);
        let Document::Manifest(read) = Document::read(manifest.as_bytes(), "x", Some(DOCKER_MANIFEST)).unwrap() else {
            panic!("a manifest");
        };
        assert_eq!((read.media_type.as_str(), read.layers.len()), (DOCKER_MANIFEST, 1));
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{config}]}}"#);
        assert!(matches!(Document::read(index.as_bytes(), "x", None).unwrap(), Document::Index(all) if all.len() == 1));
        // What one reader takes for an index and another for a manifest.
        let both = format!(r#"{{"schemaVersion":2,"manifests":[],"config":{config},"layers":[]}}"#);
        assert!(said(&both, None).contains("at once"));
        assert!(said(&index, Some(OCI_MANIFEST)).contains("neither"));
        assert!(said(&manifest, Some(OCI_INDEX)).contains("neither"));
    }

    #[test]
    fn what_is_refused_is_named() {
        let config = descriptor(OCI_CONFIG, 2);
        let with = |config: &str, layer: &str| format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#);
        for (text, parts) in [
            (r#"{"schemaVersion":1,"fsLayers":[]}"#.to_owned(), ["x.json", "schema 1"]),
            (r#"{"schemaVersion":3}"#.to_owned(), ["x.json", "schemaVersion is 3"]),
            ("{".to_owned(), ["x.json", "cannot read the manifest"]),
            (r#"{"schemaVersion":2}"#.to_owned(), ["x.json", "neither"]),
            (with(&config, &descriptor("text/evil", 1)), ["text/evil", "application/vnd.oci.image.layer.v1.tar+zstd"]),
            (with(&config, &descriptor(LAYERS[0].0, u64::MAX)), ["too large", "the limits"]),
            (with(&descriptor("application/vnd.cncf.helm.config.v1+json", 1), ""), ["artifact", "helm"]),
            (with(&descriptor(OCI_CONFIG, 1 << 40), ""), ["configuration", "the limit is 4194304"]),
            (with(&config.replace("sha256:", "sha512:"), ""), ["sha512", "only sha256"]),
            (with(&config.replace("\"size\":2", "\"size\":-2"), ""), ["x.json", "-2"]),
        ] {
            let said = said(&text, None);
            assert!(parts.iter().all(|part| said.contains(part)), "{parts:?} in {said}");
        }
        assert!(said("{}", Some("application/vnd.docker.distribution.manifest.v1+prettyjws")).contains("schema 1"));
        let large = vec![b' '; usize::try_from(limits::DOCUMENT).unwrap() + 1];
        let said = Document::read(&large, "x", None).unwrap_err().to_string();
        assert!(said.contains("the limit is 4194304"), "{said}");
    }

    #[test]
    fn a_configuration_counts_the_layers() {
        let text = format!(
            r#"{{"os":"linux","architecture":"amd64","variant":"","rootfs":{{"diff_ids":["sha256:{}"]}}}}"#,
            "b".repeat(64)
        );
        assert_eq!(Config::read(text.as_bytes(), "c", 1).unwrap().platform.to_string(), "linux/amd64");
        let error = Config::read(text.as_bytes(), "c", 2).unwrap_err().to_string();
        assert!(error.contains("1 layers, the manifest of 2"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Document::read(&bytes, "x", None);
            let _ = Config::read(&bytes, "x", 0);
        }

        #[test]
        fn a_digest_is_a_plain_file_name(text in "sha256:[0-9a-fA-F./]{60,68}") {
            if let Ok(digest) = text.parse::<Digest>() {
                prop_assert!(digest.hex().bytes().all(|b| b.is_ascii_hexdigit()) && digest.hex().len() == 64);
                prop_assert_eq!(digest.to_string(), text);
            }
        }
    }
}
