//! Image formats: writes a file tree as a bootable image.
//!
//! The output depends only on the tree, the plan and the versions of the
//! programs in [`BuiltImage::tools`]: owners are root, times are zero, entries are
//! sorted by path, and UUIDs and salts are derived from names and contents.

mod archive;
pub mod cpio;
pub mod disk;
pub mod erofs;
mod filesystem;
mod initramfs;
pub(crate) mod kata;
pub mod list;
mod pipe;
mod plan;
mod reuse;
mod tar_writer;
pub mod unpack;
pub mod verity;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::{FileDigest, digest};
use firstlight_progress::Bar;

use crate::cache::digests::Damaged;
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::lock::Pinned;
use crate::packages::tools::{self, Kit, Toolset};
use crate::tree::Tree;

use archive::{NullArchive, write_tree};
use reuse::CacheEntry;

pub(crate) use archive::{Files, open_content};
pub use plan::{Compression, Format, FormatSettings, InvalidSetting, Plan, VerityPlan};

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive could not be written.
    #[error(transparent)]
    Cpio(#[from] cpio::Error),
    /// A file could not be read or written.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A required program is not available.
    #[error(transparent)]
    Tools(#[from] tools::Error),
    /// A file of the cache is damaged.
    #[error(transparent)]
    Damaged(#[from] Box<Damaged>),
    /// A file changed while the image was built.
    #[error("/{path} changed while it was copied: {expected} bytes expected, {found} found; build again")]
    Changed {
        /// The path in the image.
        path: String,
        /// Its size at first, in bytes.
        expected: u64,
        /// The number of bytes read.
        found: u64,
    },
    /// An entry could not be written.
    #[error("failed to write /{path} to the image")]
    Entry {
        /// The path in the image.
        path: String,
        /// The I/O error.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("failed to run {program}")]
    Start {
        /// Its name.
        program: &'static str,
        /// The I/O error.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} failed to create {} ({status}): {stderr}", file.display())]
    Program {
        /// Its name.
        program: &'static str,
        /// The file that it writes.
        file: PathBuf,
        /// The exit status.
        status: String,
        /// The last lines of its stderr.
        stderr: String,
    },
}

/// The image file that contains the root file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Its name.
    pub file: String,
    /// The partitions, for a disk image.
    pub disk: Option<disk::Disk>,
}

impl Root {
    /// Returns the dm-verity parameters, if there is a hash tree.
    #[must_use]
    pub fn verity(&self) -> Option<&verity::Params> {
        self.disk.as_ref()?.verity.as_ref().map(|(_, params)| params)
    }
}

/// A built image.
#[derive(Debug, Clone)]
pub struct BuiltImage {
    /// The file.
    pub root: Root,
    /// Size and hash of the file.
    pub digest: FileDigest,
    /// If true, the file of an earlier build in the directory of finished
    /// images was reused; otherwise the file is in the staging directory.
    pub reused: bool,
    /// The regular files in the image.
    pub files: Files,
    /// The packages of the programs used; empty if none was used.
    pub tools: Vec<Pinned>,
}

/// Returns the tool set for a format; `None` if no program is needed.
fn kit(plan: &Plan) -> Option<Kit> {
    match (plan.format, plan.compression) {
        (Format::Initramfs, Compression::Lz4) => Some(Kit::Lz4),
        (Format::Initramfs, Compression::Zstd) => Some(Kit::Zstd),
        (Format::Initramfs, _) => None,
        (Format::Erofs, _) => Some(Kit::Erofs),
        (Format::Squashfs, _) => Some(Kit::Squashfs),
        (Format::Ext4, _) => Some(Kit::Ext4),
    }
}

/// Builds the image of `tree` according to `plan` in the staging directory `dir`, which also
/// holds temporary files, unless `finished` contains the image of an earlier build
/// with the same inputs.
///
/// # Errors
/// A failed file operation, an unavailable package, or a failed program.
pub fn build_image(
    plan: &Plan,
    tree: &Tree,
    packages: &mut Packages<'_>,
    dir: &Path,
    finished: &Path,
) -> Result<BuiltImage, Error> {
    let set = kit(plan).map(|kit| Toolset::of(kit, packages)).transpose()?;
    let tools = set.as_ref().map(|set| set.packages.clone()).unwrap_or_default();
    let measured = write_tree(tree, &mut NullArchive, &Bar::none())?;
    let cache_entry = |files| CacheEntry::of(packages.cache(), plan, tree, files, &tools);
    if let Some((root, digest)) = cache_entry(&measured).and_then(|entry| entry.lookup(finished, plan)) {
        return Ok(BuiltImage { root, digest, reused: true, files: measured, tools });
    }
    packages.progress().say(format_args!("{}: building {}", plan.name, plan.summary()));
    let total = measured.values().map(|file| file.size).sum();
    let bar = packages.progress().bytes(format!("writing {}", plan.name), total);
    let file = plan.file_name();
    let path = dir.join(&file);
    let (files, root) = match &set {
        Some(set) if plan.format != Format::Initramfs => {
            let content = dir.join("content");
            let files = filesystem::write(plan, tree, set, &content, &bar)?;
            let layout = disk::Layout {
                name: &plan.name,
                signature: plan.signature(),
                verity: plan.verity.as_ref().map(|verity| verity.salt.as_deref()),
            };
            let disk = disk::assemble(&layout, &content, &path)?;
            fs::remove_file(&content).map_err(io_error("remove", &content))?;
            (files, Root { file, disk: Some(disk) })
        }
        set => (initramfs::write(plan, tree, set.as_ref(), &path, &bar)?, Root { file, disk: None }),
    };
    drop(bar);
    let (sha256, size) = digest::of_file(&path).map_err(io_error("read", &path))?;
    let digest = FileDigest { size, sha256 };
    // The key is computed from the files as written: one may have changed since `measured`.
    if let Some(entry) = cache_entry(&files) {
        entry.store(&root, &digest)?;
    }
    Ok(BuiltImage { root, digest, reused: false, files, tools })
}
