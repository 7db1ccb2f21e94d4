//! Which image of an index it is.

use super::document::{Descriptor, Digest, Document, Manifest, REF_NAME, clipped};
use super::error::{Error, OTHER_TOOL, input};
use super::limits;
use super::origin::Origin;
use super::platform::Platform;

/// The image that was chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    /// Its manifest, as it goes into the new layout's index.
    pub(crate) descriptor: Descriptor,
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
}

/// Follows indexes down to one image for `wanted`.
pub(crate) fn choose(origin: &mut dyn Origin, wanted: &Platform) -> Result<Chosen, Error> {
    let root = origin.root()?;
    let mut object = root.object;
    let mut bytes = root.bytes;
    let mut media_type = root.media_type;
    let mut named: Option<Descriptor> = None;
    let mut reference = root.reference;
    // The first one, those within, and the manifest.
    for depth in 0..limits::DEPTH + 2 {
        let index = match Document::read(&bytes, &object, media_type.as_deref())? {
            Document::Manifest(manifest) => {
                let mut descriptor = named.unwrap_or_else(|| own(&bytes));
                descriptor.media_type.clone_from(&manifest.media_type);
                return Ok(Chosen { descriptor, bytes, manifest });
            }
            Document::Index(index) => index,
        };
        let mut next = pick(index, reference.as_deref(), depth == 0, wanted, &object)?;
        // A name is that of the image, however deep it lies.
        if let (None, Some(name)) =
            (next.annotations.get(REF_NAME), named.and_then(|mut by| by.annotations.remove(REF_NAME)))
        {
            next.annotations.insert(REF_NAME.to_owned(), name);
        }
        reference = None;
        bytes = origin.document(&next)?;
        object = format!("{}: {}", origin.object(&next), next.digest);
        media_type = Some(next.media_type.clone());
        named = Some(next);
    }
    Err(input(object, "choose an image", "indexes are nested too deeply", OTHER_TOOL))
}

/// The descriptor of a document that nobody described.
fn own(bytes: &[u8]) -> Descriptor {
    Descriptor {
        media_type: String::new(),
        digest: Digest::of_hex(firstlight_image::digest::of_bytes(bytes)),
        size: bytes.len() as u64,
        platform: None,
        annotations: std::collections::BTreeMap::new(),
    }
}

fn pick(
    index: Vec<Descriptor>,
    reference: Option<&str>,
    top: bool,
    wanted: &Platform,
    object: &str,
) -> Result<Descriptor, Error> {
    let mut index: Vec<Descriptor> =
        index.into_iter().filter(|one| one.platform.as_ref().is_none_or(|platform| !platform.is_unknown())).collect();
    if let Some(reference) = reference {
        let names = names(&index);
        index.retain(|one| one.names().any(|name| name == reference) || one.digest.to_string() == reference);
        if index.is_empty() {
            let why = format!("no image is called {reference:?}; there is {names}");
            return Err(input(object, "choose an image", why, "name one of these after the path"));
        }
    }
    let found = platforms(&index);
    let exact: Vec<&Descriptor> =
        index.iter().filter(|one| one.platform.as_ref().is_some_and(|platform| platform.serves(wanted))).collect();
    // Who says nothing may be anything; the configuration will tell.
    let fitting = if exact.is_empty() { index.iter().filter(|one| one.platform.is_none()).collect() } else { exact };
    let Some(first) = fitting.iter().find(|one| one.platform.as_ref() == Some(wanted)).or(fitting.first()) else {
        return Err(Error::Platform { object: object.to_owned(), wanted: wanted.to_string(), found });
    };
    let another = |one: &&&Descriptor| one.digest != first.digest && !one.names().eq(first.names());
    if top && reference.is_none() && fitting.iter().any(|one| another(&one)) {
        let why = format!("there are several: {}", names(&index));
        return Err(input(object, "choose an image", why, "name one of these after the path"));
    }
    Ok((*first).clone())
}

fn names(index: &[Descriptor]) -> String {
    let mut names: Vec<String> =
        index.iter().flat_map(Descriptor::names).map(|name| format!("{:?}", clipped(name))).collect();
    names.sort();
    names.dedup();
    names.truncate(20);
    if names.is_empty() { "none with a name".to_owned() } else { names.join(", ") }
}

fn platforms(index: &[Descriptor]) -> String {
    let one =
        |one: &Descriptor| one.platform.as_ref().map_or("one that names no platform".to_owned(), Platform::to_string);
    let mut found: Vec<String> = index.iter().map(one).collect();
    found.sort();
    found.dedup();
    found.truncate(40);
    if found.is_empty() { "no image at all".to_owned() } else { found.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn image(platform: &str, name: &str) -> Descriptor {
        let digest = Digest::of_hex(firstlight_image::digest::of_bytes(format!("{platform} {name}").as_bytes()));
        let annotations = match name {
            "" => BTreeMap::new(),
            name => BTreeMap::from([(REF_NAME.to_owned(), name.to_owned())]),
        };
        Descriptor { media_type: String::new(), digest, size: 1, platform: platform.parse().ok(), annotations }
    }

    fn picked(index: &[Descriptor], reference: Option<&str>, wanted: &str) -> Result<Descriptor, String> {
        pick(index.to_vec(), reference, true, &wanted.parse().unwrap(), "x").map_err(|error| error.to_string())
    }

    #[test]
    fn the_platform_decides() {
        let attestation = image("unknown/unknown", "");
        let index = [attestation, image("linux/arm64/v8", ""), image("linux/amd64/v3", ""), image("linux/amd64", "")];
        assert_eq!(picked(&index, None, "linux/amd64").unwrap(), index[3]);
        assert_eq!(picked(&index, None, "linux/amd64/v3").unwrap(), index[2]);
        assert_eq!(picked(&index, None, "linux/arm64").unwrap(), index[1]);
        let error = picked(&index, None, "linux/riscv64").unwrap_err();
        assert!(error.contains("linux/riscv64; there is linux/amd64, linux/amd64/v3, linux/arm64/v8:"), "{error}");
        assert!(picked(&[], None, "linux/amd64").unwrap_err().contains("no image at all"));
        // One that says nothing is taken if no other fits.
        let silent = [image("", ""), image("linux/arm64", "")];
        assert_eq!(picked(&silent, None, "linux/amd64").unwrap(), silent[0]);
    }

    #[test]
    fn names_decide_where_there_are_several() {
        let index = [image("", "a:1"), image("", "b:2")];
        assert!(picked(&index, None, "linux/amd64").unwrap_err().contains("several: \"a:1\", \"b:2\""));
        assert_eq!(picked(&index, Some("b:2"), "linux/amd64").unwrap(), index[1]);
        assert_eq!(picked(&index, Some(&index[0].digest.to_string()), "linux/amd64").unwrap(), index[0]);
        let error = picked(&index, Some("c"), "linux/amd64").unwrap_err();
        assert!(error.contains("called \"c\"") && error.contains("\"a:1\""), "{error}");
        // Twice the same image, or one image for several machines, is no choice.
        let same = [image("", "a"), image("", "a")];
        assert_eq!(picked(&same, None, "linux/amd64").unwrap(), same[0]);
    }
}
