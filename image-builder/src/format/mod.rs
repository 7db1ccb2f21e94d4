//! Image formats: from a tree of files to what a guest boots from.
//!
//! Everything here depends on the tree and on the plan alone: owners are root,
//! times are zero, order is that of paths, identifiers and salts come from
//! names and contents. What the formats' own programs make of it depends on
//! their version besides, which [`Made::tools`] names.

mod archive;
pub mod disk;
mod earlier;
pub mod erofs;
mod feed;
mod filesystem;
mod initramfs;
pub mod kata;
mod plan;
mod tarball;
pub mod unpack;
pub mod verity;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::{FileDigest, digest};
use firstlight_progress::Bar;

use crate::cache::{self, io_error};
use crate::cpio;
use crate::lock::Pinned;
use crate::packages::Packages;
use crate::tools::{self, Kit, Toolset};
use crate::tree::Tree;

use archive::{Nowhere, fill};
use earlier::Place;

pub(crate) use archive::{Files, opened};
pub use plan::{Compression, Format, FormatSettings, InvalidSetting, Plan, VerityPlan};

/// Why an image could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive could not be written.
    #[error(transparent)]
    Cpio(#[from] cpio::Error),
    /// A file could not be read or written.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A program that is needed could not be had.
    #[error(transparent)]
    Tools(#[from] tools::Error),
    /// A file changed between being measured and being copied.
    #[error("/{path} changed while it was copied: {expected} bytes expected, {found} found; build again")]
    Changed {
        /// The path in the image.
        path: String,
        /// The size it had.
        expected: u64,
        /// The bytes that were there.
        found: u64,
    },
    /// An entry could not be handed on.
    #[error("cannot write /{path} into the image")]
    Feed {
        /// The path in the image.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot run {program}")]
    Start {
        /// Its name.
        program: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} could not make {} ({status}): {said}", file.display())]
    Program {
        /// Its name.
        program: &'static str,
        /// The file that it writes.
        file: PathBuf,
        /// How it ended.
        status: String,
        /// The last it said.
        said: String,
    },
}

/// The file that a guest gets its root from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Its name.
    pub file: String,
    /// What is on it, where it is a disk.
    pub disk: Option<disk::Disk>,
}

impl Root {
    /// What names the hash tree, where there is one.
    #[must_use]
    pub fn verity(&self) -> Option<&verity::Params> {
        self.disk.as_ref()?.verity.as_ref().map(|(_, params)| params)
    }
}

/// A made image.
#[derive(Debug, Clone)]
pub struct Made {
    /// The file.
    pub root: Root,
    /// Its size and hash.
    pub bytes: FileDigest,
    /// Whether it was made now and lies in the directory for that; else an
    /// earlier build has made it, and it is where that has put it.
    pub now: bool,
    /// Every regular file in it.
    pub files: Files,
    /// The packages of the programs that made it; none where we did.
    pub tools: Vec<Pinned>,
}

/// The programs that make it; none where we do.
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

/// Makes the image of `tree` that `plan` describes, as a file in `directory`,
/// where other files for the time between go too; unless it is in `finished`
/// already.
///
/// # Errors
/// A file that cannot be read or written, a package that cannot be had, or a
/// program that fails.
pub fn make(plan: &Plan, tree: &Tree, packages: &mut Packages<'_>, dir: &Path, finished: &Path) -> Result<Made, Error> {
    let set = kit(plan).map(|kit| Toolset::of(kit, packages)).transpose()?;
    let tools = set.as_ref().map(|set| set.packages.clone()).unwrap_or_default();
    let measured = fill(tree, &mut Nowhere, &Bar::none())?;
    let place = |files| Place::of(packages.cache(), plan, tree, files, &tools);
    if let Some((root, bytes)) = place(&measured).and_then(|place| place.find(finished, plan)) {
        return Ok(Made { root, bytes, now: false, files: measured, tools });
    }
    packages.progress().say(format_args!("{}: making {}", plan.name, plan.summary()));
    let total = measured.values().map(|file| file.size).sum();
    let bar = packages.progress().bytes(format!("packing {}", plan.name), total);
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
    let bytes = FileDigest { size, sha256 };
    // By the files as they were packed, should one have changed since it was measured.
    if let Some(place) = place(&files) {
        place.note(&root, &bytes)?;
    }
    Ok(Made { root, bytes, now: true, files, tools })
}
