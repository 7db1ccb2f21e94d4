//! Selection of one image of an index.

use std::collections::HashMap;

use oci_spec::image::{ANNOTATION_REF_NAME, Descriptor, Digest, ImageManifest, MediaType};

use super::blob_source::{BlobSource, RootDocument};
use super::digest;
use super::document::{Document, OCI_MANIFEST};
use super::error::{PullError, RECREATE, clipped, invalid};
use super::limits;
use super::platform::Platform;

/// Annotation with the name of an image and its repository, as containerd and docker write it.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

const SELECT: &str = "select an image";
const GIVE_A_NAME: &str = "append one of these names to the path: PATH:NAME";

/// The image that is pulled.
#[derive(Debug)]
pub(crate) struct SelectedImage {
    /// The manifest's descriptor in the index of the source, with the image's name.
    pub(crate) descriptor: Descriptor,
    /// The manifest as it was read.
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: ImageManifest,
}

impl SelectedImage {
    /// Returns the descriptors of all blobs: manifest, configuration, layers.
    pub(crate) fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        [&self.descriptor, self.manifest.config()].into_iter().chain(self.manifest.layers())
    }
}

/// Follows indexes down to one image for `requested`.
pub(crate) fn select_image(source: &mut dyn BlobSource, requested: &Platform) -> Result<SelectedImage, PullError> {
    let RootDocument { mut object, mut bytes, mut media_type, mut reference } = source.root_document()?;
    let mut current: Option<Descriptor> = None;
    // The root document, the nested indexes, and the manifest.
    for depth in 0..limits::DEPTH + 2 {
        let index = match Document::parse(&bytes, &object, media_type.as_deref())? {
            Document::Manifest(manifest) => {
                let media_type = manifest.media_type().clone().unwrap_or(MediaType::ImageManifest);
                let mut descriptor = current.map_or_else(|| describe(&bytes), Ok)?;
                descriptor.set_media_type(media_type);
                return Ok(SelectedImage { descriptor, bytes, manifest: *manifest });
            }
            Document::Index(index) => index,
        };
        let mut next = select_descriptor(index, reference.take().as_deref(), depth == 0, requested, &object)?;
        // The name of a nested index is the name of its image.
        if annotation(&next, ANNOTATION_REF_NAME).is_none() {
            let name = current.as_ref().and_then(|by| annotation(by, ANNOTATION_REF_NAME)).map(str::to_owned);
            set_name(&mut next, name);
        }
        bytes = source.read_document(&next)?;
        object = format!("{}: {}", source.name(), next.digest());
        media_type = Some(next.media_type().to_string());
        current = Some(next);
    }
    Err(invalid(object, SELECT, "indexes are nested too deeply", RECREATE))
}

/// Returns a descriptor of a manifest to which no index refers.
fn describe(bytes: &[u8]) -> Result<Descriptor, PullError> {
    let digest: Digest = digest::from_sha256(&firstlight_image::digest::of_bytes(bytes))?;
    Ok(Descriptor::new(MediaType::from(OCI_MANIFEST), bytes.len() as u64, digest))
}

pub(crate) fn annotation<'a>(descriptor: &'a Descriptor, key: &str) -> Option<&'a str> {
    descriptor.annotations().as_ref().and_then(|all| all.get(key)).map(String::as_str)
}

/// Sets the name of an image in an index, and removes all other annotations, which are
/// untrusted and not needed in the new layout.
pub(crate) fn set_name(descriptor: &mut Descriptor, name: Option<String>) {
    descriptor.set_annotations(name.map(|name| HashMap::from([(ANNOTATION_REF_NAME.to_owned(), name)])));
}

/// Returns the names of an image in an index.
fn names(descriptor: &Descriptor) -> impl Iterator<Item = &str> {
    [ANNOTATION_REF_NAME, CONTAINERD_NAME].into_iter().filter_map(|key| annotation(descriptor, key))
}

fn platform(descriptor: &Descriptor) -> Option<Platform> {
    descriptor.platform().as_ref().map(Platform::from)
}

/// Selects the descriptor with the name or digest `reference` for `requested`. In the
/// root index without a reference, only one name may match.
fn select_descriptor(
    mut index: Vec<Descriptor>,
    reference: Option<&str>,
    is_root: bool,
    requested: &Platform,
    object: &str,
) -> Result<Descriptor, PullError> {
    index.retain(|one| platform(one).is_none_or(|platform| !platform.is_unknown()));
    if let Some(reference) = reference {
        let available = list_names(&index);
        index.retain(|one| names(one).any(|name| name == reference) || one.digest().as_ref() == reference);
        if index.is_empty() {
            let reason = format!("no image has the name {reference:?}; available: {available}");
            return Err(invalid(object, SELECT, reason, GIVE_A_NAME));
        }
    }
    let mut candidates: Vec<&Descriptor> =
        index.iter().filter(|one| platform(one).is_some_and(|platform| platform.satisfies(requested))).collect();
    if candidates.is_empty() {
        // The configuration of an image without a platform is checked later.
        candidates = index.iter().filter(|one| one.platform().is_none()).collect();
    }
    let exact = candidates.iter().find(|one| platform(one).as_ref() == Some(requested));
    let Some(first) = exact.or(candidates.first()).copied() else {
        let found = list_platforms(&index);
        return Err(PullError::Platform { object: object.to_owned(), requested: requested.to_string(), found });
    };
    let differs = |one: &&Descriptor| one.digest() != first.digest() && !names(one).eq(names(first));
    if is_root && reference.is_none() && candidates.iter().any(differs) {
        let reason = format!("there are several: {}", list_names(&index));
        return Err(invalid(object, SELECT, reason, GIVE_A_NAME));
    }
    Ok(first.clone())
}

fn list_names(index: &[Descriptor]) -> String {
    let names = index.iter().flat_map(names).map(|name| format!("{:?}", clipped(name)));
    list(names.collect(), 20, "none has a name")
}

fn list_platforms(index: &[Descriptor]) -> String {
    let text = |one| platform(one).map_or("an image without a platform".to_owned(), |platform| platform.to_string());
    list(index.iter().map(text).collect(), 40, "none, the index is empty")
}

/// Sorts and joins the first `limit` entries, or returns `empty`.
fn list(mut entries: Vec<String>, limit: usize, empty: &str) -> String {
    entries.sort();
    entries.dedup();
    entries.truncate(limit);
    if entries.is_empty() { empty.to_owned() } else { entries.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(platform: &str, name: &str) -> Descriptor {
        let mut descriptor = describe(format!("{platform} {name}").as_bytes()).unwrap();
        descriptor.set_platform(platform.parse().ok().map(|platform: Platform| platform.to_oci()));
        set_name(&mut descriptor, (!name.is_empty()).then(|| name.to_owned()));
        descriptor
    }

    fn selected(index: &[Descriptor], reference: Option<&str>, requested: &str) -> Result<Descriptor, String> {
        select_descriptor(index.to_vec(), reference, true, &requested.parse().unwrap(), "x")
            .map_err(|error| error.to_string())
    }

    #[test]
    fn image_is_selected_by_platform() {
        let attestation = image("unknown/unknown", "");
        let index = [attestation, image("linux/arm64/v8", ""), image("linux/amd64/v3", ""), image("linux/amd64", "")];
        assert_eq!(selected(&index, None, "linux/amd64").unwrap(), index[3]);
        assert_eq!(selected(&index, None, "linux/amd64/v3").unwrap(), index[2]);
        assert_eq!(selected(&index, None, "linux/arm64").unwrap(), index[1]);
        let error = selected(&index, None, "linux/riscv64").unwrap_err();
        assert!(
            error.contains("linux/riscv64; available: linux/amd64, linux/amd64/v3, linux/arm64/v8; select"),
            "{error}"
        );
        assert!(selected(&[], None, "linux/amd64").unwrap_err().contains("the index is empty"));
        // An image without a platform is used if no other matches.
        let unspecified = [image("", ""), image("linux/arm64", "")];
        assert_eq!(selected(&unspecified, None, "linux/amd64").unwrap(), unspecified[0]);
    }

    #[test]
    fn one_of_several_images_is_selected_by_name() {
        let index = [image("", "a:1"), image("", "b:2")];
        assert!(selected(&index, None, "linux/amd64").unwrap_err().contains("several: \"a:1\", \"b:2\""));
        assert_eq!(selected(&index, Some("b:2"), "linux/amd64").unwrap(), index[1]);
        assert_eq!(selected(&index, Some(index[0].digest().as_ref()), "linux/amd64").unwrap(), index[0]);
        let error = selected(&index, Some("c"), "linux/amd64").unwrap_err();
        assert!(error.contains("the name \"c\"") && error.contains("\"a:1\""), "{error}");
        // The same image twice is not ambiguous.
        let same = [image("", "a"), image("", "a")];
        assert_eq!(selected(&same, None, "linux/amd64").unwrap(), same[0]);
    }
}
