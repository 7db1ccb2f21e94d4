//! Driver `erofs.multi-layer`: several storages are the layers of one overlay root. Those with a
//! lower layer are read-only images, topmost first; one is the writable disk, and its mount point
//! is the overlay's.

use std::path::{Path, PathBuf};

use firstlight_agent_api::agent::Storage;
use rustix::fs::Mode;

use super::mount::Mounted;
use super::options::Options;
use super::overlay::Layers;
use super::safe_path::{Kind, MountPoint, by_descriptor};
use super::{Job, Resource, Resources, block, scratch};
use crate::error::{Error, Result};
use crate::paths::Paths;

/// The driver's name.
pub(super) const NAME: &str = "erofs.multi-layer";

const MEMBER: &str = "X-kata.multi-layer=true";
const UPPER: &str = "X-kata.overlay-upper";
const LOWER: &str = "X-kata.overlay-lower";
/// Requests a directory: `{{ mount 0 }}/path[:mode]`.
const MAKE_DIRECTORY: &str = "X-kata.mkdir.path=";
/// Placeholder for the writable disk.
const DISK: &str = "{{ mount 0 }}";
/// Placeholder for the topmost image.
const IMAGE: &str = "{{ mount 1 }}";

fn has_option(storage: &Storage, name: &str) -> bool {
    storage.options.iter().flat_map(|entry| entry.split(',')).any(|option| option == name)
}

/// Returns whether a storage is a layer of a multi-layer root.
pub(super) fn is_layer(storage: &Storage) -> bool {
    storage.driver == NAME || has_option(storage, MEMBER)
}

fn is_upper(storage: &Storage) -> bool {
    has_option(storage, UPPER) || (!has_option(storage, LOWER) && storage.fstype != "erofs")
}

/// The layers of one root.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Group {
    pub(super) upper: Storage,
    pub(super) lower: Vec<Storage>,
}

impl Group {
    /// Separates the writable layer from the read-only ones.
    ///
    /// # Errors
    /// There is not exactly one writable layer, or no read-only one.
    pub(super) fn of(layers: Vec<Storage>) -> Result<Self> {
        let (mut upper, lower): (Vec<_>, Vec<_>) = layers.into_iter().partition(is_upper);
        let (count, last) = (upper.len(), upper.pop());
        match last {
            Some(upper) if count == 1 && !lower.is_empty() => Ok(Self { upper, lower }),
            _ => Err(Error::invalid(format!(
                "{NAME}: {count} writable layers ({UPPER}) and {} read-only layers ({LOWER}); needed are exactly one and at least one",
                lower.len()
            ))),
        }
    }

    /// Returns all layers, the writable one first.
    pub(super) fn all(&self) -> impl Iterator<Item = &Storage> {
        std::iter::once(&self.upper).chain(&self.lower)
    }
}

/// Rejects a layer without the others of its root.
pub(super) fn alone(_: &Job<'_>) -> Result<Resources> {
    Err(Error::invalid(format!("{NAME}: a layer without the others of its root")))
}

fn mount(layer: &Storage, device: &Path, paths: &Paths, readonly: bool) -> Result<(Mounted, PathBuf)> {
    block::check(&layer.driver_options)?;
    let mut entries = layer.options.clone();
    if readonly {
        entries.push("ro".to_owned());
    }
    let options = Options::of(&entries)?;
    let kind = if layer.fstype.is_empty() && readonly { "erofs" } else { &layer.fstype };
    let at = scratch::fresh(&paths.run, if readonly { "lower" } else { "upper" });
    let mount = block::filesystem(kind, device, &options)?;
    let mount = mount.attach(&paths.run, MountPoint::create(&paths.run, &at, Kind::Directory)?, &options)?;
    Ok((mount, at))
}

/// Creates the directory that an option requests.
fn dir(text: &str, disk: &Path, image: &Path) -> Result<()> {
    let wrong = || Error::invalid(format!("option {MAKE_DIRECTORY}{text}: is not {DISK}/path[:mode]"));
    let (path, mode) = text.rsplit_once(':').map_or((text, None), |(path, mode)| (path, Some(mode)));
    let inside = |mount: &str| path.strip_prefix(mount).and_then(|rest| rest.strip_prefix('/'));
    if let Some(path) = inside(IMAGE) {
        // Images are read-only: only checks that it exists.
        return scratch::required(image, path);
    }
    let made = scratch::inside(disk, inside(DISK).ok_or_else(wrong)?)?;
    if let Some(mode) = mode {
        let mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777).ok_or_else(wrong)?;
        rustix::fs::chmod(by_descriptor(&made), Mode::from_raw_mode(mode))
            .map_err(|error| Error::internal(format!("{path}: {error}")))?;
    }
    Ok(())
}

/// Mounts the layers, in the order of [`Group::all`], and the overlay.
pub(super) fn make(group: &Group, devices: &[PathBuf], paths: &Paths) -> Result<Resources> {
    let (Some((disk, images)), true) = (devices.split_first(), devices.len() == group.lower.len() + 1) else {
        return Err(Error::internal(format!("{NAME}: a layer's device was not resolved")));
    };
    let mut made = Resources::default();
    let mut layers = Layers::default();
    let (mounted, written) = mount(&group.upper, disk, paths, false)?;
    made.add(Resource::Mount(mounted));
    for (layer, image) in group.lower.iter().zip(images) {
        let (mounted, at) = mount(layer, image, paths, true)?;
        made.add(Resource::Mount(mounted));
        layers.lower.push(at);
    }
    let top = layers.lower.first().cloned().unwrap_or_default();
    for option in Options::of(&group.upper.options)?.agent_options {
        if let Some(text) = option.strip_prefix(MAKE_DIRECTORY) {
            dir(text, &written, &top)?;
        }
    }
    for name in ["upper", "work"] {
        drop(scratch::inside(&written, name)?);
    }
    layers.upper = Some((written.join("upper"), written.join("work")));
    let whole = layers.mount(paths, Path::new(&group.upper.mount_point), &Options::of(&[])?)?;
    made.add(Resource::Mount(whole));
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(fstype: &str, options: &[&str]) -> Storage {
        Storage {
            fstype: fstype.into(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn layers_are_classified_by_their_options() {
        assert!(is_layer(&layer("erofs", &["ro", MEMBER])) && !is_layer(&layer("erofs", &["ro"])));
        let layers = [layer("ext4", &[MEMBER, UPPER]), layer("erofs", &[MEMBER, LOWER]), layer("erofs", &[MEMBER])];
        let group = Group::of(layers.to_vec()).unwrap();
        assert_eq!((group.lower.len(), group.upper.fstype.as_str()), (2, "ext4"));
        for wrong in [&layers[..1], &layers[1..], &[layers[0].clone(), layers[0].clone(), layers[1].clone()]] {
            assert!(Group::of(wrong.to_vec()).unwrap_err().to_string().contains("writable layers"));
        }
    }

    #[test]
    fn directories_are_created_on_the_disk_only() {
        let (disk, image) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        dir("{{ mount 0 }}/upper/x:0700", disk.path(), image.path()).unwrap();
        assert!(disk.path().join("upper/x").is_dir());
        for wrong in ["/etc/x", "{{ mount 0 }}/../x", "{{ mount 0 }}", "{{ mount 1 }}/missing", "{{ mount 0 }}/x:9"] {
            dir(wrong, disk.path(), image.path()).unwrap_err();
        }
        assert_eq!(std::fs::read_dir(image.path()).unwrap().count(), 0);
    }
}
