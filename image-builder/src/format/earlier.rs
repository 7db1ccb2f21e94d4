//! An image that is there already, because an earlier build has made it of
//! the same.
//!
//! Packing takes most of a build. The cache remembers which bytes came of
//! what: a note for each image that was made, named by the hash of all that
//! decides them. Who builds the same into the same directory again finds them
//! there, compares their hash, and is done.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use firstlight_image::{FileDigest, digest};
use serde::{Deserialize, Serialize};

use super::archive::Files;
use super::disk::{self, Disk};
use super::{Format, Plan, Root};
use crate::cache;
use crate::lock::Pinned;
use crate::tree::{Tree, others};

/// What came of it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// The image's file.
    file: FileDigest,
    /// The parameters of its hash tree.
    verity: Option<String>,
}

/// A note that is there or could be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    path: PathBuf,
}

impl Place {
    /// The place for what `plan` makes of these files by these programs; none
    /// where that cannot be told.
    pub(super) fn of(cache: &Path, plan: &Plan, tree: &Tree, files: &Files, tools: &[Pinned]) -> Option<Self> {
        // This program decides, too: another one may lay out the same files in another way.
        let own = fs::metadata("/proc/self/exe").ok()?;
        let own = (own.size(), own.mtime(), own.mtime_nsec());
        let tools: Vec<&str> = tools.iter().map(|tool| tool.sha256.as_str()).collect();
        let all = (own, format!("{plan:?}"), tools, files, others(tree));
        let key = digest::of_bytes(&serde_json::to_vec(&all).ok()?);
        Some(Self { path: cache.join("made").join(format!("{key}.json")) })
    }

    /// What came of it, if that still is in `directory`.
    pub(super) fn find(&self, dir: &Path, plan: &Plan) -> Option<(Root, FileDigest)> {
        let note: Note = serde_json::from_slice(&fs::read(&self.path).ok()?).ok()?;
        let name = plan.file_name();
        let path = dir.join(&name);
        let file = File::open(&path).ok()?;
        if file.metadata().ok()?.len() != note.file.size || digest::of_file(&path).ok()?.0 != note.file.sha256 {
            return None;
        }
        let root = match plan.format {
            Format::Initramfs => Root { file: name, disk: None },
            Format::Erofs | Format::Squashfs | Format::Ext4 => {
                let partitions = disk::partitions_of(&file).ok()?;
                let verity = match &note.verity {
                    Some(params) => Some((*partitions.get(1)?, params.parse().ok()?)),
                    None => None,
                };
                Root { file: name, disk: Some(Disk { data: *partitions.first()?, verity }) }
            }
        };
        Some((root, note.file))
    }

    /// Remembers what came of it.
    ///
    /// # Errors
    /// A failed file operation.
    pub(super) fn note(&self, root: &Root, file: &FileDigest) -> Result<(), cache::Error> {
        let note = Note { file: file.clone(), verity: root.verity().map(ToString::to_string) };
        let text = serde_json::to_vec(&note).map_err(std::io::Error::other);
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
    use crate::format::{Compression, FormatSettings, Made, make};
    use crate::packages::Packages;
    use crate::tree::{Content, Node};
    use firstlight_progress::Progress;

    /// What a build does: makes it beside, and moves it into place if it was made.
    fn built(dir: &Path, name: &str, content: &str) -> Made {
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
        let (half, out) = (dir.join("half"), dir.join("out"));
        fs::create_dir_all(&half).unwrap();
        fs::create_dir_all(&out).unwrap();
        let mut packages = Packages::new(&dir.join("cache"), None, Progress::quiet());
        let made = make(&Plan::new(&settings).unwrap(), &tree, &mut packages, &half, &out).unwrap();
        if made.now {
            fs::rename(half.join(&made.root.file), out.join(&made.root.file)).unwrap();
        }
        made
    }

    #[test]
    fn unchanged_image_is_reused_and_changed_one_rebuilt() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("out/initrd.cpio");
        let first = built(dir.path(), "x", "one");
        assert!(first.now);
        let again = built(dir.path(), "x", "one");
        assert!(!again.now);
        assert_eq!((&again.root, &again.bytes, &again.files), (&first.root, &first.bytes, &first.files));
        // Anything else, be it only the name.
        for (name, content) in [("y", "one"), ("y", "two"), ("x", "one")] {
            assert!(built(dir.path(), name, content).now, "{name} {content}");
            assert!(!built(dir.path(), name, content).now, "{name} {content}");
        }
        // Not what was made: changed, cut, gone.
        let whole = fs::read(&image).unwrap();
        let mut changed = whole.clone();
        changed[200] ^= 1;
        for bytes in [changed, whole[..whole.len() - 4].to_vec()] {
            fs::write(&image, bytes).unwrap();
            assert!(built(dir.path(), "x", "one").now);
            assert_eq!(fs::read(&image).unwrap(), whole);
        }
        fs::remove_file(&image).unwrap();
        assert!(built(dir.path(), "x", "one").now);
        // A note that is none.
        for note in fs::read_dir(dir.path().join("cache/made")).unwrap() {
            fs::write(note.unwrap().path(), "{").unwrap();
        }
        assert!(built(dir.path(), "x", "one").now);
    }
}
