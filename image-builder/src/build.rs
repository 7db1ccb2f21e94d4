//! From a manifest to a bootable image.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cache::{self, io_error};
use crate::cpio;
use crate::digest::{self, Hashing};
use crate::kernel::modules::{self, TypeInformation};
use crate::kernel::{self, Kernel};
use crate::manifest::{self, Format, Manifest, Variables};
use crate::progress::Progress;
use crate::tree::{self, Content, Node, Tree};

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifest is wrong.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The kernel or its modules could not be had.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// Two entries of the manifest do not fit together.
    #[error(transparent)]
    Tree(#[from] tree::Error),
    /// The archive could not be written.
    #[error(transparent)]
    Cpio(#[from] cpio::Error),
    /// A file could not be read or written.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// A built image: three files of one folder, and what they hold.
#[derive(Debug, Clone)]
pub struct Image {
    /// The kernel, an ELF file with a PVH note.
    pub kernel: PathBuf,
    /// The initial RAM file system.
    pub initrd: PathBuf,
    /// The record, as JSON.
    pub record: PathBuf,
    /// What the record says.
    pub contents: Contents,
}

/// What `image.json` says. It holds no path of the building machine and no
/// time, so it is as reproducible as the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Contents {
    /// Version of this record's shape.
    pub schema: u32,
    /// The manifest's name for the image.
    pub name: String,
    /// The image's format.
    pub format: &'static str,
    /// `uname -r`.
    pub kernel_release: String,
    /// Wanted modules that the kernel has built in.
    pub built_in_modules: Vec<String>,
    /// Every package something was taken from.
    pub packages: Vec<PackageRecord>,
    /// The files beside this record.
    pub outputs: BTreeMap<&'static str, Bytes>,
    /// Every file in the image, by path.
    pub files: BTreeMap<String, Bytes>,
    /// Entries of any kind in the image.
    pub entries: usize,
    /// Bytes of all files in the image together.
    pub file_bytes: u64,
}

/// A package that contributed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackageRecord {
    /// Package name.
    pub name: String,
    /// Full version.
    pub version: String,
    /// The suite it came from.
    pub suite: String,
    /// SHA-256 of the package file.
    pub sha256: String,
}

/// Size and hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// In bytes.
    pub size: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// Nodes the kernel and PID 1 use before devtmpfs is mounted.
const EARLY_DEVICES: &[(&str, u32, u32, u32)] = &[("dev/console", 0o600, 5, 1), ("dev/null", 0o666, 1, 3)];

/// Builds the image that `manifest` describes into the folder `out`:
/// `vmlinux`, `initrd.cpio` and `image.json`.
///
/// # Errors
/// A wrong manifest, a package that cannot be had, or a failed file operation.
pub fn build(
    manifest: &Path,
    variables: &Variables,
    out: &Path,
    cache: &Path,
    progress: Progress,
) -> Result<Image, Error> {
    let manifest = Manifest::read(manifest, variables)?;
    let kernel = Kernel::prepare(cache, &manifest.kernel_source(), progress)?;
    build_with(&manifest, &kernel, out)
}

/// [`build`] with a kernel that is prepared already.
///
/// # Errors
/// As [`build`].
pub fn build_with(manifest: &Manifest, kernel: &Kernel, out: &Path) -> Result<Image, Error> {
    let Format::Initramfs = manifest.image.format;
    let extra: Vec<PathBuf> = manifest.extra_modules.iter().map(|module| PathBuf::from(&module.path)).collect();
    let types = if manifest.kernel.strip_btf { TypeInformation::Drop } else { TypeInformation::Keep };
    let modules = modules::select(&kernel.facts.release, &kernel.modules(), &manifest.kernel.modules, &extra, types)?;
    let tree = tree_of(manifest, &kernel.facts.release, &kernel.modules(), &modules)?;

    fs::create_dir_all(out).map_err(io_error("create folder", out))?;
    let initrd = out.join("initrd.cpio");
    let (files, initrd_bytes) = write_initramfs(&tree, &initrd)?;
    let vmlinux = out.join("vmlinux");
    place_kernel(kernel, &vmlinux)?;

    let facts = &kernel.facts;
    let contents = Contents {
        schema: 1,
        name: manifest.image.name.clone(),
        format: "initramfs",
        kernel_release: facts.release.clone(),
        built_in_modules: modules.built_in.into_iter().collect(),
        packages: vec![PackageRecord {
            name: facts.package.clone(),
            version: facts.version.clone(),
            suite: facts.suite.clone(),
            sha256: facts.sha256.clone(),
        }],
        outputs: BTreeMap::from([
            ("vmlinux", Bytes { size: facts.vmlinux_size, sha256: facts.vmlinux_sha256.clone() }),
            ("initrd.cpio", initrd_bytes),
        ]),
        entries: tree.iter().count(),
        file_bytes: files.values().map(|file| file.size).sum(),
        files,
    };
    let record = out.join("image.json");
    let text = serde_json::to_vec_pretty(&contents).map_err(io::Error::other).map_err(io_error("write", &record))?;
    cache::write_atomically(&record, &text)?;
    Ok(Image { kernel: vmlinux, initrd, record, contents })
}

fn tree_of(manifest: &Manifest, release: &str, tree: &Path, modules: &modules::Set) -> Result<Tree, Error> {
    let mut image = Tree::default();
    for directory in &manifest.directories {
        image.add(&directory.path, Node::Directory { mode: directory.mode.unwrap_or(0o755) })?;
    }
    for file in &manifest.files {
        let content = match (&file.source, &file.content) {
            (Some(source), _) => Content::File(source.into()),
            (None, text) => Content::Bytes(text.clone().unwrap_or_default().into_bytes()),
        };
        image.add(&file.path, Node::File { mode: file.mode.unwrap_or(0o644), content })?;
    }
    for folder in &manifest.trees {
        let root = Path::new(&folder.source);
        if folder.only.is_empty() {
            copy_tree(&mut image, root, Path::new(""))?;
        }
        for part in &folder.only {
            copy_tree(&mut image, root, Path::new(part))?;
        }
    }
    for link in &manifest.symlinks {
        image.add(&link.path, Node::Symlink { target: link.target.clone() })?;
    }
    for &(path, mode, major, minor) in EARLY_DEVICES {
        image.add(path, Node::Character { mode, major, minor })?;
    }
    let place = format!("lib/modules/{release}");
    let plain = |bytes: Vec<u8>| Node::File { mode: 0o644, content: Content::Bytes(bytes) };
    for module in modules.iter() {
        image.add(&format!("{place}/{}", module.path), plain(module.data.clone()))?;
    }
    image.add(&format!("{place}/modules.dep"), plain(modules.dependency_file().into_bytes()))?;
    let built_in = Content::File(tree.join("modules.builtin"));
    image.add(&format!("{place}/modules.builtin"), Node::File { mode: 0o644, content: built_in })?;
    Ok(image)
}

/// Adds `part` of the folder `root`, with everything below it, at the same place.
fn copy_tree(image: &mut Tree, root: &Path, part: &Path) -> Result<(), Error> {
    let path = root.join(part);
    let data = fs::symlink_metadata(&path).map_err(io_error("copy", &path))?;
    let odd = |what: &str| Error::from(io_error("copy", &path)(io::Error::other(what)));
    let place = part.to_str().ok_or_else(|| odd("its name is not UTF-8"))?;
    let mode = data.permissions().mode() & 0o7777;
    if data.is_dir() {
        if !place.is_empty() {
            image.add(place, Node::Directory { mode })?;
        }
        let mut names: Vec<_> = fs::read_dir(&path)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect())
            .map_err(io_error("list", &path))?;
        names.sort();
        return names.into_iter().try_for_each(|name| copy_tree(image, root, &part.join(name)));
    }
    let node = if data.is_symlink() {
        let target = fs::read_link(&path).map_err(io_error("read link", &path))?;
        Node::Symlink { target: target.to_str().ok_or_else(|| odd("its target is not UTF-8"))?.to_owned() }
    } else if data.is_file() {
        Node::File { mode, content: Content::File(path.clone()) }
    } else {
        return Err(odd("neither a file, nor a folder, nor a symbolic link"));
    };
    Ok(image.add(place, node)?)
}

/// Writes the archive under another name first: a VM that is starting must
/// never read half of it.
fn write_initramfs(tree: &Tree, path: &Path) -> Result<(BTreeMap<String, Bytes>, Bytes), Error> {
    let new = path.with_extension("cpio.new");
    let file = File::create(&new).map_err(io_error("create", &new))?;
    let mut archive = cpio::Writer::new(Hashing::new(BufWriter::with_capacity(1 << 20, file)));
    let mut files = BTreeMap::new();
    for (name, node) in tree.iter() {
        match node {
            Node::Directory { mode } => archive.directory(name, *mode)?,
            Node::Symlink { target } => archive.symlink(name, target)?,
            Node::Character { mode, major, minor } => archive.character_device(name, *mode, *major, *minor)?,
            Node::File { mode, content } => {
                let (mut data, size) = opened(content)?;
                let mut hashing = Hashing::new(&mut *data);
                archive.file(name, *mode, size, &mut hashing)?;
                files.insert(name.to_owned(), Bytes { size, sha256: hashing.finish().0 });
            }
        }
    }
    let (sha256, buffered) = archive.finish()?.finish();
    let file = buffered.into_inner().map_err(|error| io_error("write", &new)(error.into_error()))?;
    let size = file.metadata().map_err(io_error("inspect", &new))?.len();
    fs::rename(&new, path).map_err(io_error("rename into place", path))?;
    Ok((files, Bytes { size, sha256 }))
}

fn opened(content: &Content) -> Result<(Box<dyn Read + '_>, u64), Error> {
    Ok(match content {
        Content::Bytes(bytes) => (Box::new(&bytes[..]), bytes.len() as u64),
        Content::File(path) => {
            let file = File::open(path).map_err(io_error("open", path))?;
            let data = file.metadata().map_err(io_error("inspect", path))?;
            if !data.is_file() {
                return Err(io_error("copy", path)(io::Error::other("not a regular file")).into());
            }
            (Box::new(file), data.len())
        }
    })
}

/// Copies the kernel unless the very same one is there: it is the largest
/// file, and the one that changes least.
fn place_kernel(kernel: &Kernel, path: &Path) -> Result<(), Error> {
    let facts = &kernel.facts;
    let same_size = fs::metadata(path).is_ok_and(|data| data.len() == facts.vmlinux_size);
    if same_size && digest::of_file(path).is_ok_and(|(hash, _)| hash == facts.vmlinux_sha256) {
        return Ok(());
    }
    let new = path.with_extension("new");
    let from = kernel.vmlinux();
    fs::copy(&from, &new).map_err(io_error("copy", &from))?;
    fs::rename(&new, path).map_err(io_error("rename into place", path))?;
    Ok(())
}

#[cfg(test)]
mod tests;
