//! Checks that an image contains the dependencies of its files.
//!
//! Otherwise a missing library is detected only at run time, when a daemon fails.
//! Checked are the libraries and the loader that ELF files name, libraries that they
//! open with dlopen (declared by rules), paths in configuration files, and the
//! firmware of modules.

pub(crate) mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::path::Path;

use glob::{MatchOptions, Pattern};
use goblin::elf::Elf;

use crate::cache::digests::CachedFile;
use crate::cache::{self, io_error};
use crate::kernel::{module_firmware, modules};
use crate::tree::{Content, Node, Tree};
use rules::Rules;

/// Default search path of glibc's loader on Debian amd64, without `/etc/ld.so.cache`.
const LIBRARY_DIRECTORIES: &[&str] =
    &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib"];

/// Maximum number of links in a path; more are treated as a cycle.
const MAX_LINKS: usize = 40;

/// Maximum size of files that are read, in bytes.
const MAX_FILE: u64 = 1 << 30;

/// A missing dependency, an unused library, or a rule without effect.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// A dependency of a file is not in the image.
    Missing {
        /// The file.
        file: String,
        /// The dependency.
        need: String,
        /// The kind of dependency.
        how: &'static str,
    },
    /// A rule does not apply: its file is not in the image, or lacks the key.
    IneffectiveRule {
        /// The rule.
        rule: String,
    },
    /// A library that no program of the image needs.
    Unused {
        /// The library.
        file: String,
        /// Size in bytes.
        size: u64,
    },
}

impl Finding {
    /// Returns whether the finding is an error, so that the image is not built.
    #[must_use]
    pub fn is_error(&self) -> bool {
        !matches!(self, Self::Unused { .. })
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { file, need, how } => {
                write!(formatter, "/{file} needs {need} ({how}), which is not in the image")
            }
            Self::IneffectiveRule { rule } => write!(formatter, "{rule}"),
            Self::Unused { file, size } => {
                write!(formatter, "/{file} ({size} bytes): no program in the image needs it")
            }
        }
    }
}

/// Why an image could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// An ELF file is truncated or corrupt.
    #[error("/{file} is not a valid ELF file: {what}")]
    Elf {
        /// The file.
        file: String,
        /// The cause.
        what: String,
    },
    /// A kernel module could not be parsed.
    #[error("/{file}: failed to read which firmware the module names: {what}")]
    Module {
        /// The file.
        file: String,
        /// The cause.
        what: String,
    },
}

/// The dynamic section of an ELF file.
#[derive(Debug, Default)]
struct ElfInfo {
    needed: Vec<String>,
    interpreter: Option<String>,
    dirs: Vec<String>,
    /// Whether it is a library: it has a soname and no interpreter.
    library: bool,
    size: u64,
}

/// Returns whether a path matches a glob pattern of a rule.
fn matches(pattern: &str, path: &str) -> bool {
    let pattern = pattern.strip_prefix('/').unwrap_or(pattern);
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    Pattern::new(pattern).is_ok_and(|pattern| pattern.matches_with(path, options))
}

/// Finds a library in `dirs` and the default search path, and returns its resolved path.
fn find_library(tree: &Tree, dirs: &[String], name: &str) -> Option<String> {
    if name.contains('/') {
        return resolve(tree, name);
    }
    let dirs = dirs.iter().map(String::as_str).chain(LIBRARY_DIRECTORIES.iter().copied());
    dirs.map(|dir| format!("{dir}/{name}")).find_map(|path| resolve(tree, &path))
}

/// Resolves all symbolic links in a path, including those of its directories.
pub(crate) fn resolve(tree: &Tree, path: &str) -> Option<String> {
    let mut remaining: Vec<String> = components(path);
    remaining.reverse();
    let (mut at, mut links) = (Vec::new(), 0);
    while let Some(part) = remaining.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        at.push(part);
        match tree.get(&at.join("/"))? {
            Node::Symlink { target } => {
                links += 1;
                if links > MAX_LINKS {
                    return None;
                }
                at.pop();
                if target.starts_with('/') {
                    at.clear();
                }
                remaining.extend(components(target).into_iter().rev());
            }
            Node::File { .. } | Node::Character { .. } if !remaining.is_empty() => return None,
            _ => {}
        }
    }
    Some(at.join("/"))
}

fn components(path: &str) -> Vec<String> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").map(str::to_owned).collect()
}

/// Reads a file; returns no bytes if it is larger than [`MAX_FILE`].
pub(crate) fn read_file(content: &Content) -> Result<Vec<u8>, Error> {
    match content {
        Content::Bytes(bytes) => Ok(bytes.clone()),
        Content::File(path) | Content::Cached(CachedFile { file: path, .. }) => {
            let size = fs::metadata(path).map_err(io_error("inspect", path))?.len();
            if size > MAX_FILE {
                return Ok(Vec::new());
            }
            Ok(fs::read(path).map_err(io_error("read", path))?)
        }
    }
}

/// Reads up to `bytes` bytes from the start of a file.
pub(crate) fn read_start(content: &Content, bytes: usize) -> Result<Vec<u8>, Error> {
    match content {
        Content::Bytes(all) => Ok(all.iter().copied().take(bytes).collect()),
        Content::File(path) | Content::Cached(CachedFile { file: path, .. }) => {
            let mut head = Vec::new();
            let file = fs::File::open(path).map_err(io_error("open", path))?;
            file.take(bytes as u64).read_to_end(&mut head).map_err(io_error("read", path))?;
            Ok(head)
        }
    }
}

/// Returns whether a file has the magic number of ELF.
fn is_elf(content: &Content) -> Result<bool, Error> {
    Ok(read_start(content, 4)? == b"\x7fELF")
}

/// Parses an ELF file.
fn elf_info(file: &str, data: &[u8]) -> Result<ElfInfo, Error> {
    let elf = Elf::parse(data).map_err(|error| Error::Elf { file: file.to_owned(), what: error.to_string() })?;
    let origin = Path::new(file).parent().and_then(Path::to_str).unwrap_or_default();
    let dirs = elf.runpaths.iter().chain(&elf.rpaths).flat_map(|list| list.split(':')).map(|dir| {
        let dir = dir.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", &format!("/{origin}"));
        components(&dir).join("/")
    });
    Ok(ElfInfo {
        needed: elf.libraries.iter().map(|name| (*name).to_owned()).collect(),
        interpreter: elf.interpreter.map(str::to_owned),
        dirs: dirs.filter(|dir| !dir.is_empty()).collect(),
        library: elf.interpreter.is_none() && elf.soname.is_some(),
        size: data.len() as u64,
    })
}

/// Returns missing dependencies, unused libraries and ineffective rules of an image.
///
/// # Errors
/// A file cannot be read, or is corrupt.
pub(crate) fn check(tree: &Tree, rules: &Rules) -> Result<Vec<Finding>, Error> {
    let mut checker =
        Checker { tree, rules, elf_files: BTreeMap::new(), found: BTreeSet::new(), used: BTreeSet::new() };
    for (path, node) in tree.iter() {
        if let Node::File { content, .. } = node
            && !is_module(path)
            && is_elf(content)?
        {
            checker.elf_files.insert(path.to_owned(), elf_info(path, &read_file(content)?)?);
        }
    }
    checker.check_elf_dependencies();
    checker.check_opens();
    checker.check_names()?;
    checker.check_firmware()?;
    checker.find_unused();
    Ok(checker.found.into_iter().collect())
}

fn is_module(path: &str) -> bool {
    modules::name_of(Path::new(path)).is_some()
}

/// The state of a check.
struct Checker<'a> {
    tree: &'a Tree,
    rules: &'a Rules,
    elf_files: BTreeMap<String, ElfInfo>,
    found: BTreeSet<Finding>,
    used: BTreeSet<String>,
}

impl Checker<'_> {
    /// Adds a missing dependency, unless a rule excludes it.
    fn missing(&mut self, file: &str, need: &str, how: &'static str) {
        let excluded = |absent: &rules::Absent| absent.need == need && matches(&absent.file, file);
        if !self.rules.absent.iter().any(excluded) {
            self.found.insert(Finding::Missing { file: file.to_owned(), need: need.to_owned(), how });
        }
    }

    /// Checks the libraries and the interpreter of ELF files.
    fn check_elf_dependencies(&mut self) {
        let needs: Vec<(String, String, &str)> = self
            .elf_files
            .iter()
            .flat_map(|(file, elf)| {
                let needed = elf.needed.iter().map(|name| (file.clone(), name.clone(), "DT_NEEDED"));
                needed.chain(elf.interpreter.iter().map(|name| (file.clone(), name.clone(), "interpreter")))
            })
            .collect();
        for (file, need, how) in needs {
            self.need(&file, &need, how);
        }
    }

    /// Marks a library as used, or adds it as missing.
    fn need(&mut self, file: &str, need: &str, how: &'static str) {
        let dirs = self.elf_files.get(file).map(|elf| elf.dirs.clone()).unwrap_or_default();
        match find_library(self.tree, &dirs, need) {
            Some(resolved) => drop(self.used.insert(resolved)),
            None => self.missing(file, need, how),
        }
    }

    /// Checks the rules `closure.opens`.
    fn check_opens(&mut self) {
        for rule in &self.rules.opens {
            let files: Vec<String> =
                self.tree.iter().map(|(path, _)| path.to_owned()).filter(|path| matches(&rule.file, path)).collect();
            if files.is_empty() {
                let rule = format!("closure.opens: no file matches {:?}", rule.file);
                self.found.insert(Finding::IneffectiveRule { rule });
            }
            for (file, need) in files.iter().flat_map(|file| rule.needs.iter().map(move |need| (file, need))) {
                self.need(file, need, "opened with dlopen");
            }
        }
    }

    /// Checks the rules `closure.names`.
    fn check_names(&mut self) -> Result<(), Error> {
        for rule in &self.rules.names {
            let file = rule.file.trim_start_matches('/');
            let ineffective = |what: &str| Finding::IneffectiveRule { rule: format!("closure.names: {file}: {what}") };
            let resolved = resolve(self.tree, file);
            let Some(Node::File { content, .. }) = resolved.and_then(|resolved| self.tree.get(&resolved)) else {
                self.found.insert(ineffective("the file is not in the image"));
                continue;
            };
            let text = read_file(content)?;
            let text = String::from_utf8_lossy(&text);
            let value = text.lines().find_map(|line| {
                let (key, value) = line.split_once('=')?;
                (key.trim() == rule.key).then(|| value.trim().to_owned())
            });
            match value {
                None => drop(self.found.insert(ineffective(&format!("the key {} is missing", rule.key)))),
                Some(path) if resolve(self.tree, &path).is_none() => {
                    self.missing(file, &path, "value of a key");
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Checks the rules `closure.firmware`.
    fn check_firmware(&mut self) -> Result<(), Error> {
        for rule in &self.rules.firmware {
            let name = Some(modules::canonical(&rule.module));
            let module = self.tree.iter().find(|(path, _)| modules::name_of(Path::new(path)) == name);
            let Some((path, Node::File { content, .. })) = module else {
                let rule = format!("closure.firmware: no module {} in the image", rule.module);
                self.found.insert(Finding::IneffectiveRule { rule });
                continue;
            };
            let data = read_file(content)?;
            let names = module_firmware(path, &data).map_err(|what| Error::Module { file: path.to_owned(), what })?;
            let is_present = |firmware: &String| {
                ["", ".xz", ".zst"].iter().any(|extension| {
                    ["lib/firmware", "usr/lib/firmware"]
                        .iter()
                        .any(|dir| resolve(self.tree, &format!("{dir}/{firmware}{extension}")).is_some())
                })
            };
            if !names.iter().any(is_present) {
                let path = path.to_owned();
                self.missing(&path, &format!("one of {}", names.join(", ")), "firmware of the module");
            }
        }
        Ok(())
    }

    /// Adds libraries that no program needs.
    fn find_unused(&mut self) {
        for (file, elf) in &self.elf_files {
            let declared_used = self.rules.used.iter().any(|rule| matches(&rule.file, file));
            let loader = file.rsplit('/').next().is_some_and(|name| name.starts_with("ld-linux"));
            if elf.library && !declared_used && !loader && !self.used.contains(file) {
                self.found.insert(Finding::Unused { file: file.clone(), size: elf.size });
            }
        }
    }
}

#[cfg(test)]
mod tests;
