//! Reuses the image of an earlier build with identical inputs.
//!
//! Compression takes most of the time of a build. So the cache contains a record
//! for each image that was built, named by the hash of all of its inputs. A later
//! build with the same inputs and output directory finds the record, verifies
//! the hash of the image in that directory, and skips compression.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use firstlight_image::{FileDigest, digest};
use serde::{Deserialize, Serialize};

use super::archive::Files;
use super::disk::{self, Disk};
use super::{Format, Plan, Root};
use crate::cache;
use crate::packages::lock::Pinned;
use crate::tree::{Tree, others};

/// The recorded result of a build.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BuildResult {
    /// Size and hash of the image file.
    file: FileDigest,
    /// The parameters of the dm-verity hash tree.
    verity: Option<String>,
}

/// A cache entry, which may not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CacheEntry {
    path: PathBuf,
}

impl CacheEntry {
    /// Returns the entry for these inputs: plan, tree and tools. Returns `None` if
    /// the running program cannot be identified.
    pub(super) fn of(cache: &Path, plan: &Plan, tree: &Tree, files: &Files, tools: &[Pinned]) -> Option<Self> {
        // The builder is an input, too: another version may write other bytes.
        let builder = fs::metadata("/proc/self/exe").ok()?;
        let builder = (builder.size(), builder.mtime(), builder.mtime_nsec());
        let tools: Vec<&str> = tools.iter().map(|tool| tool.sha256.as_str()).collect();
        let inputs = (builder, format!("{plan:?}"), tools, files, others(tree));
        let key = digest::of_bytes(&serde_json::to_vec(&inputs).ok()?);
        Some(Self { path: cache.join("made").join(format!("{key}.json")) })
    }

    /// Returns the recorded image if it is still in `dir`, unmodified.
    pub(super) fn lookup(&self, dir: &Path, plan: &Plan) -> Option<(Root, FileDigest)> {
        let result: BuildResult = serde_json::from_slice(&fs::read(&self.path).ok()?).ok()?;
        let name = plan.file_name();
        let path = dir.join(&name);
        let file = File::open(&path).ok()?;
        if file.metadata().ok()?.len() != result.file.size || digest::of_file(&path).ok()?.0 != result.file.sha256 {
            return None;
        }
        let root = match plan.format {
            Format::Initramfs => Root { file: name, disk: None },
            Format::Erofs | Format::Squashfs | Format::Ext4 => {
                let partitions = disk::read_partitions(&file).ok()?;
                let verity = match &result.verity {
                    Some(params) => Some((*partitions.get(1)?, params.parse().ok()?)),
                    None => None,
                };
                Root { file: name, disk: Some(Disk { data: *partitions.first()?, verity }) }
            }
        };
        Some((root, result.file))
    }

    /// Writes the entry.
    ///
    /// # Errors
    /// A failed file operation.
    pub(super) fn store(&self, root: &Root, file: &FileDigest) -> Result<(), cache::Error> {
        let result = BuildResult { file: file.clone(), verity: root.verity().map(ToString::to_string) };
        let text = serde_json::to_vec(&result).map_err(std::io::Error::other);
        let text = text.map_err(cache::io_error("write", &self.path))?;
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir).map_err(cache::io_error("create directory", dir))?;
        }
        cache::write_atomically(&self.path, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{BuiltImage, Compression, FormatSettings, build_image};
    use crate::packages::Packages;
    use crate::tree::{Content, Node};
    use firstlight_progress::Progress;

    /// Builds as image-builder does: in a staging directory, then renames the new file.
    fn built(dir: &Path, name: &str, content: &str) -> BuiltImage {
        let settings = FormatSettings {
            name,
            format: Format::Initramfs,
            compression: Some(Compression::None),
            level: None,
            cluster: None,
            extension: None,
            verity: None,
        };
        let mut tree = Tree::default();
        tree.add("etc", Node::Directory { mode: 0o755 }).unwrap();
        tree.add("etc/x", Node::File { mode: 0o644, content: Content::Bytes(content.into()) }).unwrap();
        let (staging, out) = (dir.join("staging"), dir.join("out"));
        fs::create_dir_all(&staging).unwrap();
        fs::create_dir_all(&out).unwrap();
        let mut packages = Packages::new(&dir.join("cache"), None, Progress::quiet());
        let image = build_image(&Plan::new(&settings).unwrap(), &tree, &mut packages, &staging, &out).unwrap();
        if !image.reused {
            fs::rename(staging.join(&image.root.file), out.join(&image.root.file)).unwrap();
        }
        image
    }

    #[test]
    fn unchanged_image_is_reused_and_changed_one_rebuilt() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("out/initrd.cpio");
        let first = built(dir.path(), "x", "one");
        assert!(!first.reused);
        let again = built(dir.path(), "x", "one");
        assert!(again.reused);
        assert_eq!((&again.root, &again.digest, &again.files), (&first.root, &first.digest, &first.files));
        // Any changed input, even only the name, causes a rebuild.
        for (name, content) in [("y", "one"), ("y", "two"), ("x", "one")] {
            assert!(!built(dir.path(), name, content).reused, "{name} {content}");
            assert!(built(dir.path(), name, content).reused, "{name} {content}");
        }
        // A modified, truncated or missing image is rebuilt.
        let whole = fs::read(&image).unwrap();
        let mut changed = whole.clone();
        changed[200] ^= 1;
        for bytes in [changed, whole[..whole.len() - 4].to_vec()] {
            fs::write(&image, bytes).unwrap();
            assert!(!built(dir.path(), "x", "one").reused);
            assert_eq!(fs::read(&image).unwrap(), whole);
        }
        fs::remove_file(&image).unwrap();
        assert!(!built(dir.path(), "x", "one").reused);
        // An invalid cache entry is ignored.
        for result in fs::read_dir(dir.path().join("cache/made")).unwrap() {
            fs::write(result.unwrap().path(), "{").unwrap();
        }
        assert!(!built(dir.path(), "x", "one").reused);
    }
}
