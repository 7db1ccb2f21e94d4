//! Files of an image that do not come from packages.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use firstlight_image::{FileDigest, digest::Hashing};

use super::{Error, digest_of};
use crate::cache::io_error;
use crate::format::open_content;
use crate::image::manifest::{ExtraModule, Manifest};
use crate::tree::{Content, Node, Tree};

/// Device nodes that the kernel and PID 1 use before devtmpfs is mounted.
const EARLY_DEVICES: &[(&str, u32, u32, u32)] = &[("dev/console", 0o600, 5, 1), ("dev/null", 0o666, 1, 3)];

/// Returns the entries that the manifest itself lists.
pub(super) fn tree(manifest: &Manifest) -> Result<Tree, Error> {
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
    for dir in &manifest.trees {
        let root = Path::new(&dir.source);
        if dir.only.is_empty() {
            copy_tree(&mut image, root, Path::new(""))?;
        }
        for part in &dir.only {
            copy_tree(&mut image, root, Path::new(part))?;
        }
    }
    for link in &manifest.symlinks {
        image.add(&link.path, Node::Symlink { target: link.target.clone() })?;
    }
    // An extension is mounted nodev after /dev exists.
    let early = if manifest.image.extension.is_none() { EARLY_DEVICES } else { &[] };
    for &(path, mode, major, minor) in early {
        image.add(path, Node::Character { mode, major, minor })?;
    }
    Ok(image)
}

/// Adds `part` of the directory `root` recursively at the same path.
fn copy_tree(image: &mut Tree, root: &Path, part: &Path) -> Result<(), Error> {
    let path = root.join(part);
    let metadata = fs::symlink_metadata(&path).map_err(io_error("copy", &path))?;
    let error = |what: &str| Error::from(io_error("copy", &path)(io::Error::other(what)));
    let image_path = part.to_str().ok_or_else(|| error("its name is not UTF-8"))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if metadata.is_dir() {
        if !image_path.is_empty() {
            image.add(image_path, Node::Directory { mode })?;
        }
        let mut names: Vec<_> = fs::read_dir(&path)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect())
            .map_err(io_error("list", &path))?;
        names.sort();
        return names.into_iter().try_for_each(|name| copy_tree(image, root, &part.join(name)));
    }
    let node = if metadata.is_symlink() {
        let target = fs::read_link(&path).map_err(io_error("read link", &path))?;
        Node::Symlink { target: target.to_str().ok_or_else(|| error("its target is not UTF-8"))?.to_owned() }
    } else if metadata.is_file() {
        Node::File { mode, content: Content::File(path.clone()) }
    } else {
        return Err(error("neither a file, nor a directory, nor a symbolic link"));
    };
    Ok(image.add(image_path, node)?)
}

/// Returns one hash over all inputs that no package determines: the manifest's own
/// entries, out-of-tree modules, and a kernel compiled with the host's compiler.
pub(super) fn digest(tree: &Tree, extra: &[ExtraModule], kernel: Option<&str>) -> Result<String, Error> {
    let mut hashing = Hashing::new(io::sink());
    let mut update = |text: String| hashing.write_all(text.as_bytes()).map_err(io_error("hash", Path::new("")));
    for (path, node) in tree.iter() {
        match node {
            Node::Directory { mode } => update(format!("{path}\0d{mode:o}\0"))?,
            Node::Symlink { target } => update(format!("{path}\0l{target}\0"))?,
            Node::Character { mode, major, minor } => update(format!("{path}\0c{mode:o} {major} {minor}\0"))?,
            Node::File { mode, content } => {
                let (mut data, size) = open_content(content)?;
                let mut file = Hashing::new(io::sink());
                io::copy(&mut data, &mut file).map_err(io_error("read", Path::new(path)))?;
                update(format!("{path}\0f{mode:o} {size} {}\0", file.finish().0))?;
            }
        }
    }
    // Tree paths never begin with //.
    for module in extra {
        let path = Path::new(&module.path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let FileDigest { size, sha256 } = digest_of(path)?;
        update(format!("//extra-modules/{name}\0f {size} {sha256}\0"))?;
    }
    if let Some(sha256) = kernel {
        update(format!("//vmlinux\0f {sha256}\0"))?;
    }
    Ok(hashing.finish().0)
}
