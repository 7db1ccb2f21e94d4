//! Archives of `docker save` and `podman save`: layers, configurations and a list of
//! images.
//!
//! Only the configuration has digests: those of the uncompressed layers. Every layer is
//! verified against it, and a manifest is generated.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use firstlight_image::digest::Hashing;
use firstlight_progress::{Bar, Progress, megabytes};
use flate2::read::MultiGzDecoder;
use oci_spec::image::{Descriptor, Digest, ImageManifestBuilder, MediaType, SCHEMA_VERSION};
use serde::Deserialize;

use super::archive::Archive;
use super::blob_source::copy_local;
use super::digest::short;
use super::document::{Compression, Config, Document, LAYERS};
use super::error::{COPY_AGAIN, PullError, RECREATE, clipped, file_error, invalid, too_large};
use super::limits;
use super::platform::Platform;
use super::select::{SelectedImage, set_name};
use super::staging::Staging;

/// The file with the list of images.
const LIST: &str = "manifest.json";

const GIVE_A_NAME: &str = "append one of these names to the path: PATH:NAME";

/// An image of the list.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SavedImage {
    /// The name of the entry with the configuration.
    pub config: String,
    /// Names of the image: `busybox:1.36`.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub repo_tags: Vec<String>,
    /// The names of the entries with the layers, lowest first.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub layers: Vec<String>,
}

/// Deserializes a list; Go writes `null` for an empty one.
fn null_as_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::<Vec<String>>::deserialize(deserializer)?.unwrap_or_default())
}

/// Parses `manifest.json`, which is untrusted input.
///
/// # Errors
/// The reason: it is malformed, exceeds a limit, or has a name that escapes the archive.
pub fn parse_image_list(bytes: &[u8]) -> Result<Vec<SavedImage>, String> {
    if bytes.len() as u64 > limits::DOCUMENT {
        return Err(too_large(bytes.len() as u64));
    }
    let images: Vec<SavedImage> = serde_json::from_slice(bytes).map_err(|error| clipped(&error.to_string()))?;
    if images.len() > limits::MANIFESTS {
        return Err(format!("it has {} images; the limit is {}", images.len(), limits::MANIFESTS));
    }
    for image in &images {
        if image.layers.len() > limits::LAYERS {
            return Err(format!("an image has {} layers; the limit is {}", image.layers.len(), limits::LAYERS));
        }
        for name in image.layers.iter().chain([&image.config]) {
            if name.is_empty() || name.starts_with('/') || name.split('/').any(|part| part == "..") {
                return Err(format!("invalid entry name {:?}", clipped(name)));
            }
        }
    }
    Ok(images)
}

/// Expands a name as docker does: without its default registry, with its default tag.
fn normalize_name(name: &str) -> String {
    let name = name.strip_prefix("docker.io/").unwrap_or(name);
    let name = name.strip_prefix("library/").unwrap_or(name);
    let has_tag = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if has_tag { name.to_owned() } else { format!("{name}:latest") }
}

/// Selects the image with the name `reference`; without one, there must be a single image.
fn select_saved_image(
    mut images: Vec<SavedImage>,
    reference: Option<&str>,
    object: &str,
) -> Result<SavedImage, PullError> {
    let mut names: Vec<String> =
        images.iter().flat_map(|image| &image.repo_tags).map(|tag| format!("{:?}", clipped(tag))).collect();
    names.truncate(20);
    let names = if names.is_empty() { "none has a name".to_owned() } else { names.join(", ") };
    if let Some(reference) = reference {
        images.retain(|image| image.repo_tags.iter().any(|tag| normalize_name(tag) == normalize_name(reference)));
    }
    let error = |reason, advice| Err(invalid(object, "select an image", reason, advice));
    match (images.pop(), images.is_empty(), reference) {
        (Some(image), true, _) => Ok(image),
        (Some(_), false, _) => error(format!("there are several: {names}"), GIVE_A_NAME),
        (None, _, Some(reference)) => {
            error(format!("no image has the name {reference:?}; available: {names}"), GIVE_A_NAME)
        }
        (None, _, None) => error("it has no image".to_owned(), "save it again with the name of an image"),
    }
}

/// Copies an image of the archive at `path` to the staging directory.
pub(crate) fn import(
    path: &Path,
    reference: Option<&str>,
    requested: &Platform,
    staging: &mut Staging,
    progress: Progress,
) -> Result<SelectedImage, PullError> {
    let archive = Archive::open(path, &staging.parts())?;
    let object = archive.path().display().to_string();
    if !archive.has(LIST) {
        let advice = "an archive of `docker save` has one; an OCI image layout is oci:PATH";
        return Err(invalid(object, "read the archive", format!("it has no {LIST}"), advice));
    }
    let list = format!("{object}: {LIST}");
    let images = parse_image_list(&archive.read_document(LIST)?)
        .map_err(|reason| invalid(list.as_str(), "read the list of images", reason, RECREATE))?;
    let saved = select_saved_image(images, reference, &list)?;
    let bytes = archive.read_document(&saved.config)?;
    let config_object = format!("{object}: {}", saved.config);
    let config = Config::parse(&bytes, &config_object, saved.layers.len())?;
    if !config.platform.satisfies(requested) {
        let (requested, found) = (requested.to_string(), config.platform.to_string());
        return Err(PullError::Platform { object: config_object, requested, found });
    }
    let mut layers = Vec::new();
    for (number, (name, diff_id)) in saved.layers.iter().zip(&config.diff_ids).enumerate() {
        let layer = import_layer(&archive, name, diff_id, staging, progress)?;
        let (count, size) = (saved.layers.len(), megabytes(layer.size()));
        progress.say(format_args!("layer {} of {count}: {} {size}", number + 1, short(layer.digest())));
        layers.push(layer);
    }
    staging.show(Bar::none);
    let config = Descriptor::new(MediaType::ImageConfig, bytes.len() as u64, staging.put(&bytes)?);
    generate_manifest(config, layers, saved.repo_tags.into_iter().next(), staging, &list)
}

/// Generates and stores the manifest of an imported image.
fn generate_manifest(
    config: Descriptor,
    layers: Vec<Descriptor>,
    name: Option<String>,
    staging: &mut Staging,
    object: &str,
) -> Result<SelectedImage, PullError> {
    let error = |reason: String| invalid(object, "generate a manifest", reason, RECREATE);
    let manifest = ImageManifestBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageManifest)
        .config(config)
        .layers(layers)
        .build()
        .map_err(|cause| error(cause.to_string()))?;
    let bytes = serde_json::to_vec(&manifest).map_err(|cause| error(cause.to_string()))?;
    let mut descriptor = Descriptor::new(MediaType::ImageManifest, bytes.len() as u64, staging.put(&bytes)?);
    set_name(&mut descriptor, name);
    // The limits of manifests hold for a generated one as well.
    match Document::parse(&bytes, object, None)? {
        Document::Manifest(manifest) => Ok(SelectedImage { descriptor, bytes, manifest: *manifest }),
        Document::Index(_) => Err(error("the result is an index".to_owned())),
    }
}

/// Copies a layer to the staging directory and compares its uncompressed content with
/// `diff_id`.
fn import_layer(
    archive: &Archive,
    name: &str,
    diff_id: &Digest,
    staging: &mut Staging,
    progress: Progress,
) -> Result<Descriptor, PullError> {
    let object = format!("{}: {name}", archive.path().display());
    let (mut reader, size) = archive.open_entry(name)?;
    if size > limits::BLOB {
        let reason = format!("the layer has {size} bytes; the limit is {}", limits::BLOB);
        return Err(invalid(object, "read the archive", reason, RECREATE));
    }
    staging.show(|| progress.bytes(clipped(name), size));
    let compression = detect_compression(&mut reader).map_err(file_error("read", archive.path()))?;
    let media_type = LAYERS.iter().find(|(_, one)| *one == compression).map_or(LAYERS[0].0, |(name, _)| *name);
    let mut layer = Descriptor::new(MediaType::from(media_type), size, diff_id.clone());
    let mut reader = archive.open_entry(name)?.0;
    if compression == Compression::None {
        if !staging.has(&layer)? {
            copy_local(&mut reader, &layer, &object, staging)?;
        }
        return Ok(layer);
    }
    let mut blob = staging.new_blob(size)?;
    io::copy(&mut reader, &mut blob).map_err(file_error("copy a layer of", archive.path()))?;
    layer.set_digest(staging.finish_unverified(blob)?.0);
    let found = hash_decompressed(&staging.path(layer.digest()), compression)
        .map_err(|error| invalid(object.as_str(), "decompress the layer", error.to_string(), COPY_AGAIN))?;
    if found != diff_id.digest() {
        let reason = format!("its decompressed content is sha256:{found}; the configuration has {diff_id}");
        return Err(invalid(object, "verify the layer", reason, COPY_AGAIN));
    }
    Ok(layer)
}

fn detect_compression(reader: &mut impl Read) -> io::Result<Compression> {
    let mut magic = [0; 4];
    let count = reader.read(&mut magic)?;
    Ok(match &magic[..count] {
        [0x1f, 0x8b, ..] => Compression::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd] => Compression::Zstd,
        _ => Compression::None,
    })
}

/// Returns the SHA-256 of the decompressed content of a layer.
fn hash_decompressed(path: &Path, compression: Compression) -> io::Result<String> {
    let file = io::BufReader::new(File::open(path)?);
    let reader: Box<dyn Read> = match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(file)?),
    };
    let mut hashing = Hashing::new(reader.take(limits::BLOB + 1));
    if io::copy(&mut hashing, &mut io::sink())? > limits::BLOB {
        return Err(io::Error::other(format!("it has more than {} bytes", limits::BLOB)));
    }
    Ok(hashing.finish().0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn saved(tags: &[&str]) -> SavedImage {
        let repo_tags = tags.iter().map(ToString::to_string).collect();
        SavedImage { config: "c.json".into(), repo_tags, layers: vec!["l.tar".into()] }
    }

    #[test]
    fn malformed_or_escaping_list_is_refused() {
        let good = br#"[{"Config":"c.json","RepoTags":null,"Layers":["a/layer.tar"],"LayerSources":{"x":{}}}]"#;
        assert_eq!(parse_image_list(good).unwrap()[0].layers, ["a/layer.tar"]);
        for (bad, expected) in [
            (r#"[{"Config":"../c","Layers":[]}]"#, "invalid entry name"),
            (r#"[{"Config":"c","Layers":["/l"]}]"#, "invalid entry name"),
            (r#"[{"Config":"c","Layers":[""]}]"#, "invalid entry name"),
            (r#"[{"Layers":[]}]"#, "Config"),
            ("{}", "invalid type"),
        ] {
            let error = parse_image_list(bad.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let many = format!(r#"[{{"Config":"c","Layers":[{}]}}]"#, vec![r#""l""#; limits::LAYERS + 1].join(","));
        assert!(parse_image_list(many.as_bytes()).unwrap_err().contains("501 layers"));
    }

    #[test]
    fn one_of_several_images_is_selected_by_name() {
        let images = || vec![saved(&["busybox:latest", "docker.io/library/busybox:1.36"]), saved(&["r.io:5000/a:1"])];
        for (name, at) in [("busybox", 0), ("docker.io/library/busybox", 0), ("busybox:1.36", 0), ("r.io:5000/a:1", 1)]
        {
            assert_eq!(select_saved_image(images(), Some(name), "x").unwrap(), images()[at], "{name}");
        }
        for (images, name, expected) in [
            (images(), None, "several: \"busybox:latest\""),
            (images(), Some("r.io:5000/a"), "no image has the name"),
            (Vec::new(), None, "it has no image"),
        ] {
            let error = select_saved_image(images, name, "x").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(select_saved_image(vec![saved(&[])], None, "x").unwrap(), saved(&[]));
    }

    proptest! {
        #[test]
        fn accepted_entry_names_do_not_escape(text in r#"\[\{"Config":"[a/.]{0,6}","Layers":\["[a/.]{0,6}"\]\}\]"#) {
            for image in parse_image_list(text.as_bytes()).unwrap_or_default() {
                let stays = |name: &String| !name.starts_with('/') && name.split('/').all(|part| part != "..");
                prop_assert!(image.layers.iter().all(stays));
            }
        }
    }
}
