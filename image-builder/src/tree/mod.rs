//! The entries of an image, independent of the image format.

pub(crate) mod closure;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::cache::digests::CachedFile;

/// Source of a file's contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A file on the host.
    File(PathBuf),
    /// A file of the cache, which must be the one that was cached.
    Cached(CachedFile),
    /// These bytes.
    Bytes(Vec<u8>),
}

impl Content {
    /// Returns the path of a file, cached or not.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Cached(cached) => Some(&cached.file),
            Self::Bytes(_) => None,
        }
    }
}

/// One entry of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A directory.
    Directory {
        /// Permission bits.
        mode: u32,
    },
    /// A regular file.
    File {
        /// Permission bits.
        mode: u32,
        /// Its contents.
        content: Content,
    },
    /// A symbolic link.
    Symlink {
        /// Its target.
        target: String,
    },
    /// A character device.
    Character {
        /// Permission bits.
        mode: u32,
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// Two entries conflict.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path already has an entry.
    #[error("/{path} is in the image twice: as {first} and as {second}")]
    Twice {
        /// The path.
        path: String,
        /// Kind of the existing entry.
        first: &'static str,
        /// Kind of the new entry.
        second: &'static str,
    },
    /// A parent path is not a directory.
    #[error("/{path} cannot be in the image: /{above} is {what}, not a directory")]
    Below {
        /// The path.
        path: String,
        /// The parent path.
        above: String,
        /// Kind of the parent entry.
        what: &'static str,
    },
}

impl Node {
    fn what(&self) -> &'static str {
        match self {
            Self::Directory { .. } => "a directory",
            Self::File { .. } => "a file",
            Self::Symlink { .. } => "a symbolic link",
            Self::Character { .. } => "a device",
        }
    }
}

/// Every entry of an image by path, without leading slash. Missing parents are
/// created as directories of mode 0755.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    nodes: BTreeMap<String, Node>,
    /// Directories created only as parents.
    implied: std::collections::BTreeSet<String>,
}

impl Tree {
    /// Adds `node` at `path` (relative and normalized, as checked by the manifest).
    ///
    /// # Errors
    /// The path has an entry already, or a parent is not a directory.
    pub fn add(&mut self, path: &str, node: Node) -> Result<(), Error> {
        for (end, _) in path.match_indices('/') {
            let above = &path[..end];
            match self.nodes.get(above) {
                Some(Node::Directory { .. }) => {}
                Some(other) => {
                    let what = other.what();
                    return Err(Error::Below { path: path.to_owned(), above: above.to_owned(), what });
                }
                None => {
                    self.nodes.insert(above.to_owned(), Node::Directory { mode: 0o755 });
                    self.implied.insert(above.to_owned());
                }
            }
        }
        // An explicit directory may replace one created as a parent.
        let may_replace = matches!(node, Node::Directory { .. }) && self.implied.remove(path);
        if let Some(first) = self.nodes.get(path)
            && !may_replace
        {
            return Err(Error::Twice { path: path.to_owned(), first: first.what(), second: node.what() });
        }
        self.nodes.insert(path.to_owned(), node);
        Ok(())
    }

    /// Returns the entry at a path without leading slash. Links are not followed.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Node> {
        // The root itself is not in the list.
        static ROOT: Node = Node::Directory { mode: 0o755 };
        if path.is_empty() { Some(&ROOT) } else { self.nodes.get(path) }
    }

    /// Returns the names in a directory (path without leading slash). Links are not followed.
    pub fn names<'a>(&'a self, dir: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        let below = if dir.is_empty() { String::new() } else { format!("{dir}/") };
        let all = self.nodes.range(below.clone()..).map_while(move |(path, _)| path.strip_prefix(below.as_str()));
        all.filter(|name| !name.contains('/'))
    }

    /// Iterates over entries sorted by path; a directory precedes its entries.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.nodes.iter().map(|(path, node)| (path.as_str(), node))
    }
}

/// Returns the entries other than files, in the format of [`firstlight_image::ImageRecord::others`].
pub(crate) fn others(tree: &Tree) -> BTreeMap<String, String> {
    let text = |node: &Node| match node {
        Node::File { .. } => None,
        Node::Directory { mode } => Some(format!("directory {mode:o}")),
        Node::Symlink { target } => Some(format!("link {target}")),
        Node::Character { mode, major, minor } => Some(format!("character {mode:o} {major},{minor}")),
    };
    tree.iter().filter_map(|(path, node)| Some((path.to_owned(), text(node)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Node {
        Node::File { mode: 0o644, content: Content::Bytes(Vec::new()) }
    }

    #[test]
    fn parents_are_created_and_come_first() {
        let mut tree = Tree::default();
        tree.add("usr/bin/agent", file()).unwrap();
        tree.add("init", file()).unwrap();
        tree.add("usr/bin-extra", file()).unwrap();
        tree.add("usr", Node::Directory { mode: 0o700 }).unwrap();
        let paths: Vec<&str> = tree.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["init", "usr", "usr/bin", "usr/bin-extra", "usr/bin/agent"]);
        assert_eq!(tree.nodes["usr"], Node::Directory { mode: 0o700 });
        assert_eq!(tree.nodes["usr/bin"], Node::Directory { mode: 0o755 });
        let names = |dir: &str| tree.names(dir).collect::<Vec<_>>();
        assert_eq!((names(""), names("usr")), (vec!["init", "usr"], vec!["bin", "bin-extra"]));
        assert_eq!((names("usr/bin"), names("usr/b")), (vec!["agent"], vec![]));
    }

    #[test]
    fn conflicting_entries_are_refused() {
        let mut tree = Tree::default();
        tree.add("run", Node::Directory { mode: 0o755 }).unwrap();
        tree.add("var/run", Node::Symlink { target: "/run".into() }).unwrap();
        let twice = tree.add("run", Node::Directory { mode: 0o700 }).unwrap_err();
        assert!(twice.to_string().contains("/run is in the image twice"), "{twice}");
        let below = tree.add("var/run/x", file()).unwrap_err();
        assert!(below.to_string().contains("/var/run is a symbolic link"), "{below}");
        assert!(tree.add("var", file()).is_err());
    }
}
