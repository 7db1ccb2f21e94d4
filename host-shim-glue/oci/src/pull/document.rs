//! Indexes, manifests and configurations of images.
//!
//! All of them are untrusted input: their size is limited before they are parsed, and
//! the types of oci-spec, which accept every media type and digest algorithm, are
//! checked afterwards for what is supported.

use oci_spec::image::{Descriptor, Digest, ImageConfiguration, ImageIndex, ImageManifest, MediaType};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::digest;
use super::error::{PullError, RECREATE, clipped, invalid, too_large};
use super::limits;
use super::platform::Platform;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
/// Prefix of the media types of docker's schema 1.
const SCHEMA1_PREFIX: &str = "application/vnd.docker.distribution.manifest.v1+";

/// Compression of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Media types of the supported layers, which are those that [`Image`](crate::Image) unpacks.
pub(crate) const LAYERS: &[(&str, Compression)] = &[
    ("application/vnd.oci.image.layer.v1.tar", Compression::None),
    ("application/vnd.oci.image.layer.v1.tar+gzip", Compression::Gzip),
    ("application/vnd.oci.image.layer.v1.tar+zstd", Compression::Zstd),
    ("application/vnd.docker.image.rootfs.diff.tar", Compression::None),
    ("application/vnd.docker.image.rootfs.diff.tar.gzip", Compression::Gzip),
    ("application/vnd.docker.image.rootfs.diff.tar.zstd", Compression::Zstd),
];

/// An index or a manifest.
#[derive(Debug)]
pub(crate) enum Document {
    Index(Vec<Descriptor>),
    /// Its media type is always set.
    Manifest(Box<ImageManifest>),
}

/// The properties that tell an index from a manifest. Parsed first, because the types of
/// oci-spec ignore the properties of each other.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    #[serde(default)]
    schema_version: u64,
    media_type: Option<String>,
    manifests: Option<IgnoredAny>,
    config: Option<IgnoredAny>,
    layers: Option<IgnoredAny>,
    fs_layers: Option<IgnoredAny>,
}

const READ_MANIFEST: &str = "read the manifest";

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|error| clipped(&error.to_string()))
}

impl Document {
    /// Parses and checks a document that was transferred with the media type `declared`.
    pub(crate) fn parse(bytes: &[u8], object: &str, declared: Option<&str>) -> Result<Self, PullError> {
        let error = |reason: String| invalid(object, READ_MANIFEST, reason, RECREATE);
        let header = Header::parse(bytes, declared).map_err(error)?;
        let own = header.media_type.as_deref();
        let stated = || [own, declared].into_iter().flatten().filter(|one| !one.is_empty());
        let is_one_of = |types: [&str; 2]| stated().all(|one| types.contains(&one));
        match (header.manifests, header.config, header.layers) {
            // Two readers could take the same bytes for different images.
            (Some(_), _, Some(_)) | (Some(_), Some(_), _) => {
                Err(error("it is both an index and a manifest".to_owned()))
            }
            (Some(_), None, None) if is_one_of([OCI_INDEX, DOCKER_LIST]) => {
                let index: ImageIndex = parse(bytes).map_err(error)?;
                check_index(&index).map_err(error)?;
                Ok(Self::Index(index.manifests().clone()))
            }
            (None, Some(_), Some(_)) if is_one_of([OCI_MANIFEST, DOCKER_MANIFEST]) => {
                let mut manifest: ImageManifest = parse(bytes).map_err(error)?;
                check_config(&manifest, object)?;
                check_layers(manifest.layers()).map_err(error)?;
                manifest.set_media_type(Some(MediaType::from(stated().next().unwrap_or(OCI_MANIFEST))));
                Ok(Self::Manifest(Box::new(manifest)))
            }
            _ => Err(error(format!(
                "it is neither an image index nor an image manifest; its media type is {:?}",
                clipped(own.or(declared).unwrap_or("not stated"))
            ))),
        }
    }
}

impl Header {
    fn parse(bytes: &[u8], declared: Option<&str>) -> Result<Self, String> {
        if bytes.len() as u64 > limits::DOCUMENT {
            return Err(too_large(bytes.len() as u64));
        }
        let schema1 = || Err("schema 1 of docker, which cannot be verified, is not supported".to_owned());
        if declared.is_some_and(|declared| declared.starts_with(SCHEMA1_PREFIX)) {
            return schema1();
        }
        let header: Self = parse(bytes)?;
        match header.schema_version {
            1 => schema1(),
            _ if header.fs_layers.is_some() => schema1(),
            2 => Ok(header),
            other => Err(format!("its schemaVersion is {other}, expected 2")),
        }
    }
}

fn check_index(index: &ImageIndex) -> Result<(), String> {
    let count = index.manifests().len();
    if count > limits::MANIFESTS {
        return Err(format!("it has {count} images; the limit is {}", limits::MANIFESTS));
    }
    index.manifests().iter().try_for_each(|descriptor| digest::check(descriptor.digest()))
}

fn check_config(manifest: &ImageManifest, object: &str) -> Result<(), PullError> {
    let config = manifest.config();
    let media_type = config.media_type().as_ref();
    if ![OCI_CONFIG, DOCKER_CONFIG].contains(&media_type) {
        let reason = format!("it is not a container image but an artifact of type {:?}", clipped(media_type));
        return Err(invalid(object, READ_MANIFEST, reason, "give the name of a container image"));
    }
    let error = |reason: String| invalid(object, READ_MANIFEST, format!("its configuration: {reason}"), RECREATE);
    digest::check(config.digest()).map_err(error)?;
    if config.size() > limits::DOCUMENT {
        return Err(error(too_large(config.size())));
    }
    Ok(())
}

fn check_layers(layers: &[Descriptor]) -> Result<(), String> {
    if layers.len() > limits::LAYERS {
        return Err(format!("it has {} layers; the limit is {}", layers.len(), limits::LAYERS));
    }
    let mut total: u64 = 0;
    for layer in layers {
        digest::check(layer.digest())?;
        let media_type = layer.media_type().as_ref();
        if !LAYERS.iter().any(|(supported, _)| *supported == media_type) {
            let supported: Vec<&str> = LAYERS.iter().map(|(name, _)| *name).collect();
            return Err(format!(
                "layer {} has the media type {:?}; supported are {}",
                layer.digest(),
                clipped(media_type),
                supported.join(", ")
            ));
        }
        total = total.saturating_add(layer.size());
        if layer.size() > limits::BLOB || total > limits::IMAGE {
            return Err(format!(
                "with layer {} of {} bytes it is too large; the limits are {} for a layer and {} for all",
                layer.digest(),
                layer.size(),
                limits::BLOB,
                limits::IMAGE
            ));
        }
    }
    Ok(())
}

/// The properties of an image's configuration that a pull checks.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) platform: Platform,
    /// Digests of the uncompressed layers, lowest first.
    pub(crate) diff_ids: Vec<Digest>,
}

impl Config {
    /// Parses the configuration of an image with `layers` layers.
    pub(crate) fn parse(bytes: &[u8], object: &str, layers: usize) -> Result<Self, PullError> {
        let error = |reason: String| invalid(object, "read the image's configuration", reason, RECREATE);
        let config: ImageConfiguration = parse(bytes).map_err(error)?;
        let platform = Platform::new(config.os().clone(), config.architecture().clone(), config.variant().clone());
        let ids = config.rootfs().diff_ids();
        if ids.len() != layers {
            return Err(error(format!("it lists {} layers, the manifest {layers}", ids.len())));
        }
        let diff_ids = ids.iter().map(|id| digest::parse(id)).collect::<Result<_, _>>().map_err(error)?;
        Ok(Self { platform, diff_ids })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptor(media_type: &str, size: u64) -> String {
        format!(r#"{{"mediaType":"{media_type}","digest":"sha256:{}","size":{size}}}"#, "a".repeat(64))
    }

    fn error_of(text: &str, declared: Option<&str>) -> String {
        Document::parse(text.as_bytes(), "x.json", declared).unwrap_err().to_string()
    }

    #[test]
    fn manifests_and_indexes_are_distinguished() {
        let config = descriptor(OCI_CONFIG, 2);
        let layer = descriptor(LAYERS[1].0, 5);
        let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#);
        let Document::Manifest(parsed) = Document::parse(manifest.as_bytes(), "x", Some(DOCKER_MANIFEST)).unwrap()
        else {
            panic!("expected a manifest");
        };
        assert_eq!(parsed.media_type(), &Some(MediaType::from(DOCKER_MANIFEST)));
        assert_eq!(parsed.layers().len(), 1);
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{config}]}}"#);
        assert!(
            matches!(Document::parse(index.as_bytes(), "x", None).unwrap(), Document::Index(all) if all.len() == 1)
        );
        let both = format!(r#"{{"schemaVersion":2,"manifests":[],"config":{config},"layers":[]}}"#);
        assert!(error_of(&both, None).contains("both an index and a manifest"));
        assert!(error_of(&index, Some(OCI_MANIFEST)).contains("neither"));
        assert!(error_of(&manifest, Some(OCI_INDEX)).contains("neither"));
    }

    #[test]
    fn unsupported_document_is_refused_with_its_reason() {
        let config = descriptor(OCI_CONFIG, 2);
        let with = |config: &str, layer: &str| format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#);
        let sha512 = config.replace("sha256:", &format!("sha512:{}", "b".repeat(64)));
        for (text, parts) in [
            (r#"{"schemaVersion":1,"fsLayers":[]}"#.to_owned(), ["x.json", "schema 1"]),
            (r#"{"schemaVersion":3}"#.to_owned(), ["x.json", "schemaVersion is 3"]),
            ("{".to_owned(), ["x.json", "failed to read the manifest"]),
            (r#"{"schemaVersion":2}"#.to_owned(), ["x.json", "neither"]),
            (with(&config, &descriptor("text/evil", 1)), ["text/evil", "application/vnd.oci.image.layer.v1.tar+zstd"]),
            (with(&config, &descriptor(LAYERS[0].0, u64::MAX)), ["too large", "the limits"]),
            (with(&descriptor("application/vnd.cncf.helm.config.v1+json", 1), ""), ["artifact", "helm"]),
            (with(&descriptor(OCI_CONFIG, 1 << 40), ""), ["configuration", "the limit is 4194304"]),
            // A valid digest of another algorithm in each place, and one of the wrong length.
            (with(&sha512, ""), ["sha512", "only sha256"]),
            (with(&config, &sha512.replace(OCI_CONFIG, LAYERS[0].0)), ["sha512", "only sha256"]),
            (format!(r#"{{"schemaVersion":2,"manifests":[{sha512}]}}"#), ["sha512", "only sha256"]),
            (with(&config.replace("sha256:", "sha512:"), ""), ["failed to read", "digest"]),
            (with(&config.replace("sha256:", "sha256:../"), ""), ["failed to read", "nvalid encoded value"]),
            (with(&config.replace("\"size\":2", "\"size\":-2"), ""), ["x.json", "-2"]),
        ] {
            let error = error_of(&text, None);
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} in {error}");
        }
        let schema1 = "application/vnd.docker.distribution.manifest.v1+prettyjws";
        assert!(error_of("{}", Some(schema1)).contains("schema 1"));
        let large = vec![b' '; usize::try_from(limits::DOCUMENT).unwrap() + 1];
        let error = Document::parse(&large, "x", None).unwrap_err().to_string();
        assert!(error.contains("the limit is 4194304"), "{error}");
    }

    #[test]
    fn configuration_with_another_number_of_layers_is_refused() {
        let text = format!(
            r#"{{"os":"linux","architecture":"amd64","variant":"","rootfs":{{"type":"layers","diff_ids":["sha256:{}"]}}}}"#,
            "b".repeat(64)
        );
        assert_eq!(Config::parse(text.as_bytes(), "c", 1).unwrap().platform.to_string(), "linux/amd64");
        let error = Config::parse(text.as_bytes(), "c", 2).unwrap_err().to_string();
        assert!(error.contains("1 layers, the manifest 2"), "{error}");
        let error = Config::parse(text.replace("sha256:b", "sha256:B").as_bytes(), "c", 1).unwrap_err().to_string();
        assert!(error.contains("invalid digest"), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Document::parse(&bytes, "x", None);
            let _ = Config::parse(&bytes, "x", 0);
        }
    }
}
