//! What `docker save` writes: layers as they are on a disk, and a list of images.
//!
//! Nothing in there has a digest but the configuration, which has those of the
//! layers' contents. So a manifest is made here, and every layer is verified
//! against the configuration.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use firstlight_image::digest::Hashing;
use firstlight_progress::{Bar, Progress, megabytes};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use serde_json::json;

use super::archive::Archive;
use super::choose::Chosen;
use super::document::{
    Config, Descriptor, Digest, Document, LAYERS, OCI_CONFIG, OCI_MANIFEST, Packing, REF_NAME, clipped,
};
use super::error::{COPY_AGAIN, Error, OTHER_TOOL, input, io_error};
use super::limits;
use super::origin::copy_local;
use super::platform::Platform;
use super::staging::Staging;

/// The list of images.
const LIST: &str = "manifest.json";

/// An image of the list.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Saved {
    /// The entry with the image's configuration.
    pub config: String,
    /// What it is called: `busybox:1.36`.
    #[serde(default, deserialize_with = "or_null")]
    pub repo_tags: Vec<String>,
    /// The entries with its layers, lowest first.
    #[serde(default, deserialize_with = "or_null")]
    pub layers: Vec<String>,
}

/// Go writes an empty list as null.
fn or_null<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::<Vec<String>>::deserialize(from)?.unwrap_or_default())
}

/// Reads `manifest.json`, which is anybody's.
///
/// # Errors
/// What is wrong with it, in words.
pub fn read(bytes: &[u8]) -> Result<Vec<Saved>, String> {
    if bytes.len() as u64 > limits::DOCUMENT {
        return Err(super::document::too_large(bytes.len() as u64));
    }
    let all: Vec<Saved> = serde_json::from_slice(bytes).map_err(|error| clipped(&error.to_string()))?;
    if all.len() > limits::MANIFESTS {
        return Err(format!("{} images; the limit is {}", all.len(), limits::MANIFESTS));
    }
    for one in &all {
        if one.layers.len() > limits::LAYERS {
            return Err(format!("an image of {} layers; the limit is {}", one.layers.len(), limits::LAYERS));
        }
        for name in one.layers.iter().chain([&one.config]) {
            if name.is_empty() || name.starts_with('/') || name.split('/').any(|part| part == "..") {
                return Err(format!("{:?} is no name of an entry", clipped(name)));
            }
        }
    }
    Ok(all)
}

/// A name as docker means it: without what it leaves out, with what it adds.
fn full(name: &str) -> String {
    let name = name.strip_prefix("docker.io/").unwrap_or(name);
    let name = name.strip_prefix("library/").unwrap_or(name);
    let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if tagged { name.to_owned() } else { format!("{name}:latest") }
}

fn pick(mut all: Vec<Saved>, reference: Option<&str>, object: &str) -> Result<Saved, Error> {
    let mut names: Vec<String> =
        all.iter().flat_map(|one| &one.repo_tags).map(|tag| format!("{:?}", clipped(tag))).collect();
    names.truncate(20);
    let names = if names.is_empty() { "none with a name".to_owned() } else { names.join(", ") };
    if let Some(reference) = reference {
        all.retain(|one| one.repo_tags.iter().any(|tag| full(tag) == full(reference)));
    }
    let refused = |why, next| Err(input(object, "choose an image", why, next));
    match (all.pop(), all.is_empty(), reference) {
        (Some(one), true, _) => Ok(one),
        (Some(_), false, _) => refused(format!("there are several: {names}"), "name one of these after the path"),
        (None, _, Some(reference)) => {
            refused(format!("no image is called {reference:?}; there is {names}"), "name one of these after the path")
        }
        (None, _, None) => refused("there is no image in it".to_owned(), "save it again with an image's name"),
    }
}

/// Brings an image of the archive into the staging directory.
pub(crate) fn import(
    path: &Path,
    reference: Option<&str>,
    wanted: &Platform,
    staging: &mut Staging,
    progress: Progress,
) -> Result<Chosen, Error> {
    let archive = Archive::open(path, &staging.parts())?;
    let object = archive.path().display().to_string();
    if !archive.has(LIST) {
        let next = "`docker save` writes one; an OCI image layout is oci:PATH";
        return Err(input(object, "read the archive", format!("it has no {LIST}"), next));
    }
    let list = format!("{object}: {LIST}");
    let all = read(&archive.document(LIST)?)
        .map_err(|why| input(list.as_str(), "read the list of images", why, OTHER_TOOL))?;
    let saved = pick(all, reference, &list)?;
    let bytes = archive.document(&saved.config)?;
    let config_name = format!("{object}: {}", saved.config);
    let config = Config::read(&bytes, &config_name, saved.layers.len())?;
    if !config.platform.serves(wanted) {
        let (wanted, found) = (wanted.to_string(), config.platform.to_string());
        return Err(Error::Platform { object: config_name, wanted, found });
    }
    let mut layers = Vec::new();
    for (number, (name, content)) in saved.layers.iter().zip(&config.rootfs.diff_ids).enumerate() {
        let layer = layer(&archive, name, content, staging, progress)?;
        let (all, size) = (saved.layers.len(), megabytes(layer.size));
        progress.say(format_args!("layer {} of {all}: {} {size}", number + 1, layer.digest.short()));
        layers.push(layer);
    }
    staging.show(Bar::none);
    let descriptor = |media_type: &str, digest, size| Descriptor {
        media_type: media_type.to_owned(),
        digest,
        size,
        platform: None,
        annotations: std::collections::BTreeMap::new(),
    };
    let config = descriptor(OCI_CONFIG, staging.put(&bytes)?, bytes.len() as u64);
    let manifest = json!({ "schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers });
    let bytes = manifest.to_string().into_bytes();
    let mut descriptor = descriptor(OCI_MANIFEST, staging.put(&bytes)?, bytes.len() as u64);
    if let Some(tag) = saved.repo_tags.first() {
        descriptor.annotations.insert(REF_NAME.to_owned(), tag.clone());
    }
    // Its own limits hold for what was made here as well.
    match Document::read(&bytes, &list, None)? {
        Document::Manifest(manifest) => Ok(Chosen { descriptor, bytes, manifest }),
        Document::Index(_) => Err(input(list, "make a manifest", "an index came of it", OTHER_TOOL)),
    }
}

fn layer(
    archive: &Archive,
    name: &str,
    content: &Digest,
    staging: &mut Staging,
    progress: Progress,
) -> Result<Descriptor, Error> {
    let object = format!("{}: {name}", archive.path().display());
    let (mut window, size) = archive.open_entry(name)?;
    if size > limits::BLOB {
        let why = format!("a layer of {size} bytes; the limit is {}", limits::BLOB);
        return Err(input(object, "read the archive", why, OTHER_TOOL));
    }
    staging.show(|| progress.bytes(clipped(name), size));
    let mut magic = [0; 4];
    let known = window.read(&mut magic).map_err(io_error("read", archive.path()))?;
    let packing = match &magic[..known] {
        [0x1f, 0x8b, ..] => Packing::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd] => Packing::Zstd,
        _ => Packing::Plain,
    };
    let media_type = LAYERS.iter().find(|(_, one)| *one == packing).map_or(LAYERS[0].0, |(media_type, _)| *media_type);
    let mut layer = Descriptor {
        media_type: media_type.to_owned(),
        digest: content.clone(),
        size,
        platform: None,
        annotations: std::collections::BTreeMap::new(),
    };
    let mut reader = archive.open_entry(name)?.0;
    if packing == Packing::Plain {
        if !staging.has(&layer)? {
            copy_local(&mut reader, &layer, &object, staging)?;
        }
        return Ok(layer);
    }
    let mut blob = staging.blob(size)?;
    io::copy(&mut reader, &mut blob).map_err(io_error("copy a layer of", archive.path()))?;
    layer.digest = staging.finish_any(blob)?.0;
    let found = unpacked_hash(&staging.path(&layer.digest), packing);
    let found = found.map_err(|error| input(object.as_str(), "unpack the layer", error.to_string(), COPY_AGAIN))?;
    if found != content.hex() {
        let why = format!("it unpacks to sha256:{found}; the configuration says {content}");
        return Err(input(object, "verify the layer", why, COPY_AGAIN));
    }
    Ok(layer)
}

fn unpacked_hash(path: &Path, packing: Packing) -> io::Result<String> {
    let file = io::BufReader::new(File::open(path)?);
    let reader: Box<dyn Read> = match packing {
        Packing::Plain => Box::new(file),
        Packing::Gzip => Box::new(MultiGzDecoder::new(file)),
        Packing::Zstd => Box::new(zstd::Decoder::with_buffer(file)?),
    };
    let mut hashing = Hashing::new(reader.take(limits::BLOB + 1));
    if io::copy(&mut hashing, &mut io::sink())? > limits::BLOB {
        return Err(io::Error::other(format!("more than {} bytes", limits::BLOB)));
    }
    Ok(hashing.finish().0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn saved(tags: &[&str]) -> Saved {
        let repo_tags = tags.iter().map(ToString::to_string).collect();
        Saved { config: "c.json".into(), repo_tags, layers: vec!["l.tar".into()] }
    }

    #[test]
    fn the_list_is_read_or_refused() {
        let good = br#"[{"Config":"c.json","RepoTags":null,"Layers":["a/layer.tar"],"LayerSources":{"x":{}}}]"#;
        assert_eq!(read(good).unwrap()[0].layers, ["a/layer.tar"]);
        for (bad, said) in [
            (r#"[{"Config":"../c","Layers":[]}]"#, "no name of an entry"),
            (r#"[{"Config":"c","Layers":["/l"]}]"#, "no name of an entry"),
            (r#"[{"Config":"c","Layers":[""]}]"#, "no name of an entry"),
            (r#"[{"Layers":[]}]"#, "Config"),
            ("{}", "invalid type"),
        ] {
            let error = read(bad.as_bytes()).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        let many = format!(r#"[{{"Config":"c","Layers":[{}]}}]"#, vec![r#""l""#; limits::LAYERS + 1].join(","));
        assert!(read(many.as_bytes()).unwrap_err().contains("501 layers"));
    }

    #[test]
    fn one_image_is_chosen_by_name() {
        let all = || vec![saved(&["busybox:latest", "docker.io/library/busybox:1.36"]), saved(&["r.io:5000/a:1"])];
        for (name, at) in [("busybox", 0), ("docker.io/library/busybox", 0), ("busybox:1.36", 0), ("r.io:5000/a:1", 1)]
        {
            assert_eq!(pick(all(), Some(name), "x").unwrap(), all()[at], "{name}");
        }
        for (images, name, said) in [
            (all(), None, "several: \"busybox:latest\""),
            (all(), Some("r.io:5000/a"), "no image is called"),
            (Vec::new(), None, "no image in it"),
        ] {
            let error = pick(images, name, "x").unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert_eq!(pick(vec![saved(&[])], None, "x").unwrap(), saved(&[]));
    }

    proptest! {
        #[test]
        fn what_is_read_has_plain_names(text in r#"\[\{"Config":"[a/.]{0,6}","Layers":\["[a/.]{0,6}"\]\}\]"#) {
            for one in read(text.as_bytes()).unwrap_or_default() {
                prop_assert!(one.layers.iter().all(|name| !name.starts_with('/') && name.split('/').all(|part| part != "..")));
            }
        }
    }
}
