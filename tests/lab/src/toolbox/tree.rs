//! Private trees of unpacked packages, and the programs in them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use firstlight_image_builder::cache;
use firstlight_image_builder::packages::debian::{self, Apt, Candidate, PackageRequest};
use firstlight_progress::Progress;
use firstlight_vm::Tool;
use serde::{Deserialize, Serialize};

use super::Error;

/// Version of the layout, part of the cache key: increase it to rebuild cached trees.
const LAYOUT: u32 = 1;
/// File in each tree with the list of its packages.
const STAMP: &str = "stamp.json";
/// The directory of shared libraries of a tree.
pub(super) const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The loader of a tree's own C library.
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";

/// Contents of a tree.
pub(super) struct Recipe {
    /// Display name; its version is that of the first package.
    pub(super) label: &'static str,
    /// The Debian suite.
    pub(super) suite: &'static str,
    /// The requested packages.
    pub(super) packages: &'static [&'static str],
    /// Whether their dependencies are included.
    pub(super) members: Members,
    /// Selects the files to unpack.
    pub(super) keep: fn(&Path) -> bool,
}

/// Packages of a tree in addition to the requested ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Members {
    /// None.
    Alone,
    /// All their dependencies.
    WithDependencies,
}

/// A package that is part of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Package name.
    pub name: String,
    /// Full version.
    pub version: String,
    /// The suite it came from.
    pub suite: String,
    /// SHA-256 of the package file.
    pub sha256: String,
}

/// A prepared tree.
pub(super) struct Tree {
    /// Its root directory.
    pub(super) root: PathBuf,
    /// Its packages.
    pub(super) origins: Vec<Origin>,
}

impl Tree {
    /// Downloads and unpacks the packages of `recipe`, unless the cache has the tree.
    pub(super) fn prepare(cache: &Path, recipe: &Recipe, progress: Progress) -> Result<Self, Error> {
        let root = cache.join("toolbox").join(format!("{}-{}", recipe.label, recipe.key()));
        cache::publish(&root, &progress, |half| {
            let apt = Apt::open(cache, recipe.suite, progress)?;
            let candidates = match recipe.members {
                Members::WithDependencies => apt.closure(recipe.packages)?,
                Members::Alone => recipe
                    .packages
                    .iter()
                    .map(|name| apt.candidate(name, PackageRequest::Newest))
                    .collect::<Result<_, _>>()?,
            };
            let label = recipe.versioned_label(&candidates);
            let packages = apt.fetch(&label, &candidates)?;
            progress.say(format_args!("{label}: unpacking"));
            for package in &packages {
                debian::unpack(&package.deb, half, recipe.keep)?;
            }
            write_stamp(half, recipe.suite, &candidates)
        })?;
        let origins = read_stamp(&root)?;
        Ok(Self { root, origins })
    }

    /// Returns the first of `places` that exists in the tree.
    pub(super) fn file(&self, places: &[&str]) -> Result<PathBuf, Error> {
        let found = places.iter().map(|place| self.root.join(place)).find(|path| path.exists());
        found.ok_or_else(|| Error::Missing {
            file: self.root.join(places.first().unwrap_or(&"")),
            tree: self.root.clone(),
        })
    }

    /// Returns the program at the first of `places`, run with the tree's own loader
    /// and libraries.
    pub(super) fn tool(&self, places: &[&str]) -> Result<Tool, Error> {
        let program = self.file(places)?;
        let name = program.file_name().unwrap_or(program.as_os_str()).to_owned();
        Ok(Tool {
            program: self.file(&[LOADER])?,
            args: vec![
                "--library-path".into(),
                self.root.join(LIBRARIES).into(),
                // Otherwise argv[0] would be the program's path instead of its name.
                "--argv0".into(),
                name,
                program.into(),
            ],
            env: Vec::new(),
        })
    }
}

impl Recipe {
    /// Returns a hash of the recipe, part of the tree's directory name.
    fn key(&self) -> String {
        let text = format!("{LAYOUT} {} {:?} {}", self.suite, self.members, self.packages.join(" "));
        digest::of_bytes(text.as_bytes())[..8].to_owned()
    }

    fn versioned_label(&self, candidates: &[Candidate]) -> String {
        let first = self.packages.first().and_then(|name| candidates.iter().find(|one| one.name == *name));
        first.map_or(self.label.to_owned(), |one| format!("{} {}", self.label, one.upstream_version()))
    }
}

fn write_stamp(dir: &Path, suite: &str, candidates: &[Candidate]) -> Result<(), Error> {
    let origins: Vec<Origin> = candidates
        .iter()
        .map(|one| Origin {
            name: one.name.clone(),
            version: one.version.clone(),
            suite: suite.to_owned(),
            sha256: one.sha256.clone(),
        })
        .collect();
    let path = dir.join(STAMP);
    let text = serde_json::to_vec_pretty(&origins).map_err(|error| io_error("write", &path, error.into()))?;
    fs::write(&path, text).map_err(|source| io_error("write", &path, source).into())
}

fn read_stamp(dir: &Path) -> Result<Vec<Origin>, Error> {
    let path = dir.join(STAMP);
    let missing = |_| Error::Missing { file: path.clone(), tree: dir.to_owned() };
    let text = fs::read(&path).map_err(missing)?;
    serde_json::from_slice(&text).map_err(|error| io_error("parse", &path, error.into()).into())
}

pub(super) fn io_error(what: &'static str, path: &Path, source: io::Error) -> cache::Error {
    cache::Error::Io { what, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: Recipe =
        Recipe { label: "tool", suite: "sid", packages: &["tool"], members: Members::Alone, keep: |_| true };

    fn finished() -> (tempfile::TempDir, PathBuf) {
        let cache = tempfile::tempdir().unwrap();
        let root = cache.path().join("toolbox").join(format!("tool-{}", RECIPE.key()));
        fs::create_dir_all(root.join("usr/bin")).unwrap();
        fs::create_dir_all(root.join(LIBRARIES)).unwrap();
        let candidate = Candidate {
            name: "tool".to_owned(),
            version: "1:2.3-4".to_owned(),
            architecture: "amd64".to_owned(),
            source: None,
            size: 1,
            sha256: "0".repeat(64),
            depends: String::new(),
        };
        write_stamp(&root, "sid", &[candidate]).unwrap();
        (cache, root)
    }

    #[test]
    fn complete_tree_is_used_without_a_network() {
        let (cache, root) = finished();
        let tree = Tree::prepare(cache.path(), &RECIPE, Progress::quiet()).unwrap();
        assert_eq!(tree.root, root);
        assert_eq!(tree.origins[0].version, "1:2.3-4");
    }

    #[test]
    fn programs_run_with_the_loader_of_their_tree() {
        let (cache, root) = finished();
        let tree = Tree::prepare(cache.path(), &RECIPE, Progress::quiet()).unwrap();
        let missing = tree.tool(&["usr/bin/tool"]).unwrap_err().to_string();
        assert!(missing.contains("usr/bin/tool") && missing.contains("remove the directory"), "{missing}");
        fs::write(root.join("usr/bin/tool"), "").unwrap();
        fs::write(root.join(LOADER), "").unwrap();
        let tool = tree.tool(&["usr/libexec/tool", "usr/bin/tool"]).unwrap();
        assert_eq!(tool.program, root.join(LOADER));
        let expected =
            ["--library-path".into(), root.join(LIBRARIES), "--argv0".into(), "tool".into(), root.join("usr/bin/tool")];
        assert_eq!(tool.args.iter().map(PathBuf::from).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn changed_recipe_gets_another_directory() {
        let other = Recipe { packages: &["tool", "more"], ..RECIPE };
        assert_ne!(RECIPE.key(), other.key());
    }
}
