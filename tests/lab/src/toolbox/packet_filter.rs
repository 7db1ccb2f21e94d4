//! Fetches the iptables programs for guests' images.

use std::path::{Path, PathBuf};

use super::tree::{LIBRARIES, Members, Recipe, Tree};
use super::{Error, Toolbox};

/// The multi-call program with its links, and the libraries that it loads.
const IPTABLES: Recipe = Recipe {
    label: "iptables",
    suite: "trixie",
    packages: &["iptables"],
    members: Members::WithDependencies,
    keep: |path| {
        let (name, dir) = (path.file_name().unwrap_or_default().to_string_lossy(), path.parent());
        let program = name == "xtables-nft-multi" || name.ends_with("-nft-save") || name.ends_with("-nft-restore");
        // Excludes libraries of character sets and of other programs.
        let of_programs = dir == Some(Path::new(LIBRARIES)) || dir.is_some_and(|it| it.ends_with("xtables"));
        program || (of_programs && name.contains(".so")) || path.starts_with("usr/lib64")
    },
};

impl Toolbox {
    /// Fetches `iptables-nft-save`, related programs and their libraries; returns
    /// the root directory of their tree.
    ///
    /// # Errors
    /// A package cannot be fetched, or a file operation failed.
    pub fn iptables(&self) -> Result<PathBuf, Error> {
        let tree = Tree::prepare(&self.cache, &IPTABLES, self.progress)?;
        for family in ["iptables", "ip6tables"] {
            for job in ["save", "restore"] {
                tree.file(&[&format!("usr/sbin/{family}-nft-{job}")])?;
            }
        }
        Ok(tree.root)
    }
}
