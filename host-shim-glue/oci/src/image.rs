//! Images of a layout.

use std::fs;
use std::path::{Path, PathBuf};

use oci_spec::image::{Arch, Config, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType, Os};

use crate::{OciError, blob, unpack};

/// An image of a layout, with its documents parsed and verified.
#[derive(Debug)]
pub struct Image {
    layout: PathBuf,
    manifest: ImageManifest,
    config: ImageConfiguration,
}

/// Maximum nesting depth of indexes.
const MAX_DEPTH: usize = 4;

fn matches_platform(descriptor: &Descriptor) -> bool {
    descriptor.platform().as_ref().is_none_or(|p| *p.os() == Os::Linux && *p.architecture() == Arch::Amd64)
}

fn parse<T>(path: &Path, kind: &'static str, read: impl FnOnce() -> oci_spec::Result<T>) -> Result<T, OciError> {
    read().map_err(|error| OciError::Document { path: path.to_owned(), kind, reason: error.to_string() })
}

impl Image {
    /// Opens the layout in `dir` and selects its image for linux/amd64: the first
    /// with that platform or without a platform.
    ///
    /// # Errors
    /// The directory is not a layout, a document is malformed or does not match its
    /// digest, or no image matches the platform.
    pub fn open(dir: &Path) -> Result<Self, OciError> {
        let not_a_layout = |reason: String| OciError::NotALayout { path: dir.to_owned(), reason };
        for name in ["oci-layout", "index.json"] {
            if !dir.join(name).is_file() {
                return Err(not_a_layout(format!("no {name}")));
            }
        }
        let path = dir.join("index.json");
        let text = fs::read(&path).map_err(OciError::file(&path))?;
        let index = parse(&path, "image index", || ImageIndex::from_reader(text.as_slice()))?;
        let descriptor = select_manifest(dir, index, 0)?;
        let (path, bytes) = blob::document(dir, &descriptor)?;
        let manifest = parse(&path, "image manifest", || ImageManifest::from_reader(bytes.as_slice()))?;
        let (path, bytes) = blob::document(dir, manifest.config())?;
        let config = parse(&path, "image configuration", || ImageConfiguration::from_reader(bytes.as_slice()))?;
        Ok(Self { layout: dir.to_owned(), manifest, config })
    }

    fn settings(&self) -> Option<&Config> {
        self.config.config().as_ref()
    }

    /// Returns entry point and command, the image's default command.
    #[must_use]
    pub fn default_command(&self) -> Vec<String> {
        let settings = self.settings();
        let entrypoint = settings.and_then(|c| c.entrypoint().clone()).unwrap_or_default();
        let command = settings.and_then(|c| c.cmd().clone()).unwrap_or_default();
        entrypoint.into_iter().chain(command).collect()
    }

    /// Returns the image's environment.
    #[must_use]
    pub fn environment(&self) -> Vec<String> {
        self.settings().and_then(|c| c.env().clone()).unwrap_or_default()
    }

    /// Returns the image's working directory.
    #[must_use]
    pub fn working_directory(&self) -> Option<String> {
        self.settings().and_then(|c| c.working_dir().clone()).filter(|path| !path.is_empty())
    }

    /// Unpacks all layers, lowest first, into `target`, which must be an empty directory.
    ///
    /// # Errors
    /// A blob is damaged, a layer's format is unsupported, or an entry cannot be created.
    pub fn unpack(&self, target: &Path) -> Result<(), OciError> {
        for layer in self.manifest.layers() {
            let file = blob::open(&self.layout, layer)?;
            unpack::unpack_layer(file, layer, target)?;
        }
        Ok(())
    }
}

fn select_manifest(dir: &Path, index: ImageIndex, depth: usize) -> Result<Descriptor, OciError> {
    let found: Vec<String> = index
        .manifests()
        .iter()
        .map(|d| {
            d.platform()
                .as_ref()
                .map_or("an unspecified platform".into(), |p| format!("{}/{}", p.os(), p.architecture()))
        })
        .collect();
    let none = || OciError::Platform {
        path: dir.to_owned(),
        found: if found.is_empty() { "no images".into() } else { found.join(", ") },
    };
    let chosen = index.manifests().iter().find(|d| matches_platform(d)).cloned().ok_or_else(none)?;
    if *chosen.media_type() != MediaType::ImageIndex {
        return Ok(chosen);
    }
    if depth == MAX_DEPTH {
        let reason = "indexes are nested too deeply".to_owned();
        return Err(OciError::Blob { digest: chosen.digest().to_string(), reason });
    }
    let (path, bytes) = blob::document(dir, &chosen)?;
    select_manifest(dir, parse(&path, "image index", || ImageIndex::from_reader(bytes.as_slice()))?, depth + 1)
}
