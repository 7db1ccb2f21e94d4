//! Creating a one-layer image, for tests and examples.

use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use crate::OciError;

/// One entry of the new image.
#[derive(Debug, Clone)]
pub enum File {
    /// A directory.
    Directory {
        /// Path inside the image.
        path: String,
        /// Mode bits.
        mode: u32,
    },
    /// A copy of a host file.
    Copy {
        /// Path inside the image.
        path: String,
        /// The host file.
        source: PathBuf,
        /// Mode bits.
        mode: u32,
    },
    /// A text file.
    Text {
        /// Path inside the image.
        path: String,
        /// Its content.
        text: String,
    },
    /// A symbolic link.
    Link {
        /// Path inside the image.
        path: String,
        /// Its target.
        target: String,
    },
}

/// The content of a new image. Reproducible: equal input gives equal bytes.
#[derive(Debug, Clone, Default)]
pub struct NewImage {
    /// Entries in the order in which they are written.
    pub files: Vec<File>,
    /// `NAME=value` entries.
    pub env: Vec<String>,
    /// Default command.
    pub command: Vec<String>,
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

impl NewImage {
    fn layer(&self) -> Result<Vec<u8>, OciError> {
        let mut builder = Builder::new(Vec::new());
        for file in &self.files {
            let (path, result) = match file {
                File::Directory { path, mode } => {
                    let mut header = header(EntryType::Directory, *mode, 0);
                    (path, builder.append_data(&mut header, format!("{path}/"), std::io::empty()))
                }
                File::Copy { path, source, mode } => {
                    let mut bytes = Vec::new();
                    fs::File::open(source)
                        .and_then(|mut f| f.read_to_end(&mut bytes))
                        .map_err(OciError::file(source))?;
                    let mut header = header(EntryType::Regular, *mode, bytes.len() as u64);
                    (path, builder.append_data(&mut header, path, bytes.as_slice()))
                }
                File::Text { path, text } => {
                    let mut header = header(EntryType::Regular, 0o644, text.len() as u64);
                    (path, builder.append_data(&mut header, path, text.as_bytes()))
                }
                File::Link { path, target } => {
                    let mut header = header(EntryType::Symlink, 0o777, 0);
                    (path, builder.append_link(&mut header, path, target))
                }
            };
            result.map_err(OciError::file(path))?;
        }
        builder.into_inner().map_err(OciError::file("layer"))
    }

    /// Writes the image as a layout to `dir`, which is created if missing. Files of an existing layout are replaced
    /// atomically: readers see the old or the new content.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn write(&self, dir: &Path) -> Result<(), OciError> {
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).map_err(OciError::file(&blobs))?;
        let put = |bytes: &[u8], media_type: &str| -> Result<Value, OciError> {
            let hex = digest::of_bytes(bytes);
            replace(&blobs, &hex, bytes)?;
            Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len() }))
        };
        let layer = put(&self.layer()?, "application/vnd.oci.image.layer.v1.tar")?;
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": { "Env": self.env, "Cmd": self.command, "WorkingDir": "/" },
            "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] },
        });
        let config = put(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json")?;
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({ "schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": [layer] });
        let mut manifest = put(manifest.to_string().as_bytes(), manifest_type)?;
        manifest["platform"] = json!({ "architecture": "amd64", "os": "linux" });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [manifest],
        });
        for (name, text) in
            [("index.json", index.to_string()), ("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#.into())]
        {
            replace(dir, name, text.as_bytes())?;
        }
        Ok(())
    }
}

/// Writes a file under a temporary name and renames it.
fn replace(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), OciError> {
    let path = dir.join(name);
    let write = || -> io::Result<()> {
        let mut file =
            tempfile::Builder::new().prefix(".new-").permissions(Permissions::from_mode(0o644)).tempfile_in(dir)?;
        file.write_all(bytes)?;
        file.persist(&path)?;
        Ok(())
    };
    write().map_err(OciError::file(&path))
}
