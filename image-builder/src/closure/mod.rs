//! Whether an image has all that its files need.
//!
//! A library that is missing shows itself minutes into a boot, on somebody
//! else's machine, in a daemon's last words. What can be known is judged when
//! the image is built: the libraries and the loader that ELF files name, what
//! they open at run time (by rule), the paths in their configuration, and the
//! firmware of modules.

pub mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::path::Path;

use glob::{MatchOptions, Pattern};
use goblin::elf::Elf;

use crate::cache::{self, io_error};
use crate::kernel::{module_firmware, modules};
use crate::tree::{Content, Node, Tree};
use rules::Rules;

/// Where glibc's loader looks, without `/etc/ld.so.cache`, on Debian's amd64.
const LIBRARY_DIRECTORIES: &[&str] =
    &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib"];

/// Links that are followed before a path counts as a circle.
const MOST_LINKS: usize = 40;

/// Configuration and programs larger than this are not looked into, bytes.
const LARGEST: u64 = 1 << 30;

/// Something that is not there, or that nobody needs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// A file needs what the image lacks.
    Missing {
        /// Who needs it.
        file: String,
        /// What.
        need: String,
        /// How that is known.
        how: &'static str,
    },
    /// A rule is about a file that the image lacks, or that does not say what the rule reads.
    Idle {
        /// The rule.
        rule: String,
    },
    /// A library that no program of the image needs.
    Unused {
        /// The library.
        file: String,
        /// In bytes.
        size: u64,
    },
}

impl Finding {
    /// Whether an image with it must not be built.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        !matches!(self, Self::Unused { .. })
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { file, need, how } => write!(to, "/{file} needs {need} ({how}), which is not in the image"),
            Self::Idle { rule } => write!(to, "{rule}"),
            Self::Unused { file, size } => write!(to, "/{file} ({size} bytes): no program in the image needs it"),
        }
    }
}

/// Why it could not be judged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// An ELF file is cut or damaged.
    #[error("/{file} begins as an ELF file and is none: {what}")]
    Elf {
        /// The file.
        file: String,
        /// What is wrong.
        what: String,
    },
    /// A kernel module could not be looked into.
    #[error("/{file}: cannot see which firmware the module names: {what}")]
    Module {
        /// The file.
        file: String,
        /// What is wrong.
        what: String,
    },
}

/// What an ELF file says of itself.
#[derive(Debug, Default)]
struct Facts {
    needed: Vec<String>,
    interpreter: Option<String>,
    dirs: Vec<String>,
    /// A library: it has a name of its own, and no loader.
    library: bool,
    size: u64,
}

fn matches(pattern: &str, path: &str) -> bool {
    let pattern = pattern.strip_prefix('/').unwrap_or(pattern);
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    Pattern::new(pattern).is_ok_and(|pattern| pattern.matches_with(path, options))
}

/// The first of `directories` and the loader's own that has it.
fn library(tree: &Tree, dirs: &[String], name: &str) -> Option<String> {
    if name.contains('/') {
        return resolve(tree, name);
    }
    let dirs = dirs.iter().map(String::as_str).chain(LIBRARY_DIRECTORIES.iter().copied());
    dirs.map(|dir| format!("{dir}/{name}")).find_map(|path| resolve(tree, &path))
}

/// Follows links, in a path's directories too: where the file is in the end.
pub(crate) fn resolve(tree: &Tree, path: &str) -> Option<String> {
    let mut rest: Vec<String> = parts(path);
    rest.reverse();
    let (mut at, mut links) = (Vec::new(), 0);
    while let Some(part) = rest.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        at.push(part);
        match tree.get(&at.join("/"))? {
            Node::Symlink { target } => {
                links += 1;
                if links > MOST_LINKS {
                    return None;
                }
                at.pop();
                if target.starts_with('/') {
                    at.clear();
                }
                rest.extend(parts(target).into_iter().rev());
            }
            Node::File { .. } | Node::Character { .. } if !rest.is_empty() => return None,
            _ => {}
        }
    }
    Some(at.join("/"))
}

fn parts(path: &str) -> Vec<String> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").map(str::to_owned).collect()
}

/// All of a file; nothing of one that is too large to be looked at.
pub(crate) fn bytes(content: &Content) -> Result<Vec<u8>, Error> {
    match content {
        Content::Bytes(bytes) => Ok(bytes.clone()),
        Content::File(path) => {
            let size = fs::metadata(path).map_err(io_error("inspect", path))?.len();
            if size > LARGEST {
                return Ok(Vec::new());
            }
            Ok(fs::read(path).map_err(io_error("read", path))?)
        }
    }
}

/// The first bytes of a file, or all if it has not that many.
pub(crate) fn beginning(content: &Content, bytes: usize) -> Result<Vec<u8>, Error> {
    match content {
        Content::Bytes(all) => Ok(all.iter().copied().take(bytes).collect()),
        Content::File(path) => {
            let mut head = Vec::new();
            let file = fs::File::open(path).map_err(io_error("open", path))?;
            file.take(bytes as u64).read_to_end(&mut head).map_err(io_error("read", path))?;
            Ok(head)
        }
    }
}

/// Whether a file begins as ELF files do, without reading all of it.
fn is_elf(content: &Content) -> Result<bool, Error> {
    Ok(beginning(content, 4)? == b"\x7fELF")
}

fn facts_of(file: &str, data: &[u8]) -> Result<Facts, Error> {
    let elf = Elf::parse(data).map_err(|error| Error::Elf { file: file.to_owned(), what: error.to_string() })?;
    let origin = Path::new(file).parent().and_then(Path::to_str).unwrap_or_default();
    let dirs = elf.runpaths.iter().chain(&elf.rpaths).flat_map(|list| list.split(':')).map(|dir| {
        let dir = dir.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", &format!("/{origin}"));
        parts(&dir).join("/")
    });
    Ok(Facts {
        needed: elf.libraries.iter().map(|name| (*name).to_owned()).collect(),
        interpreter: elf.interpreter.map(str::to_owned),
        dirs: dirs.filter(|dir| !dir.is_empty()).collect(),
        library: elf.interpreter.is_none() && elf.soname.is_some(),
        size: data.len() as u64,
    })
}

/// Everything that is wrong with an image, and what is in it for nothing.
///
/// # Errors
/// A file cannot be read, or is damaged.
pub fn check(tree: &Tree, rules: &Rules) -> Result<Vec<Finding>, Error> {
    let mut judge = Judge { tree, rules, elves: BTreeMap::new(), found: BTreeSet::new(), used: BTreeSet::new() };
    for (path, node) in tree.iter() {
        if let Node::File { content, .. } = node
            && !is_module(path)
            && is_elf(content)?
        {
            judge.elves.insert(path.to_owned(), facts_of(path, &bytes(content)?)?);
        }
    }
    judge.libraries();
    judge.opened();
    judge.named()?;
    judge.firmware()?;
    judge.unused();
    Ok(judge.found.into_iter().collect())
}

fn is_module(path: &str) -> bool {
    modules::name_of(Path::new(path)).is_some()
}

struct Judge<'a> {
    tree: &'a Tree,
    rules: &'a Rules,
    elves: BTreeMap<String, Facts>,
    found: BTreeSet<Finding>,
    used: BTreeSet<String>,
}

impl Judge<'_> {
    fn missing(&mut self, file: &str, need: &str, how: &'static str) {
        let excused = |absent: &rules::Absent| absent.need == need && matches(&absent.file, file);
        if !self.rules.absent.iter().any(excused) {
            self.found.insert(Finding::Missing { file: file.to_owned(), need: need.to_owned(), how });
        }
    }

    /// What the files name themselves.
    fn libraries(&mut self) {
        let needs: Vec<(String, String, &str)> = self
            .elves
            .iter()
            .flat_map(|(file, facts)| {
                let needed = facts.needed.iter().map(|name| (file.clone(), name.clone(), "DT_NEEDED"));
                needed.chain(facts.interpreter.iter().map(|name| (file.clone(), name.clone(), "its loader")))
            })
            .collect();
        for (file, need, how) in needs {
            self.need(&file, &need, how);
        }
    }

    fn need(&mut self, file: &str, need: &str, how: &'static str) {
        let dirs = self.elves.get(file).map(|facts| facts.dirs.clone()).unwrap_or_default();
        match library(self.tree, &dirs, need) {
            Some(place) => drop(self.used.insert(place)),
            None => self.missing(file, need, how),
        }
    }

    /// What they open at run time.
    fn opened(&mut self) {
        for rule in &self.rules.opens {
            let files: Vec<String> =
                self.tree.iter().map(|(path, _)| path.to_owned()).filter(|path| matches(&rule.file, path)).collect();
            if files.is_empty() {
                let rule = format!("closure.opens: no file matches {:?}", rule.file);
                self.found.insert(Finding::Idle { rule });
            }
            for (file, need) in files.iter().flat_map(|file| rule.needs.iter().map(move |need| (file, need))) {
                self.need(file, need, "opened at run time");
            }
        }
    }

    /// Paths in configuration files.
    fn named(&mut self) -> Result<(), Error> {
        for rule in &self.rules.names {
            let file = rule.file.trim_start_matches('/');
            let idle = |what: &str| Finding::Idle { rule: format!("closure.names: {file}: {what}") };
            let place = resolve(self.tree, file);
            let Some(Node::File { content, .. }) = place.and_then(|place| self.tree.get(&place)) else {
                self.found.insert(idle("there is no such file in the image"));
                continue;
            };
            let text = bytes(content)?;
            let text = String::from_utf8_lossy(&text);
            let value = text.lines().find_map(|line| {
                let (key, value) = line.split_once('=')?;
                (key.trim() == rule.key).then(|| value.trim().to_owned())
            });
            match value {
                None => drop(self.found.insert(idle(&format!("no line {}=", rule.key)))),
                Some(path) if resolve(self.tree, &path).is_none() => {
                    self.missing(file, &path, "named in it");
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Firmware that modules name.
    fn firmware(&mut self) -> Result<(), Error> {
        for rule in &self.rules.firmware {
            let wanted = Some(modules::canonical(&rule.module));
            let module = self.tree.iter().find(|(path, _)| modules::name_of(Path::new(path)) == wanted);
            let Some((path, Node::File { content, .. })) = module else {
                let rule = format!("closure.firmware: no module {} in the image", rule.module);
                self.found.insert(Finding::Idle { rule });
                continue;
            };
            let data = bytes(content)?;
            let names = module_firmware(path, &data).map_err(|what| Error::Module { file: path.to_owned(), what })?;
            let there = |name: &String| {
                ["", ".xz", ".zst"].iter().any(|end| {
                    ["lib/firmware", "usr/lib/firmware"]
                        .iter()
                        .any(|dir| resolve(self.tree, &format!("{dir}/{name}{end}")).is_some())
                })
            };
            if !names.iter().any(there) {
                let path = path.to_owned();
                self.missing(&path, &format!("one of {}", names.join(", ")), "firmware that it names");
            }
        }
        Ok(())
    }

    /// Libraries that nobody needs.
    fn unused(&mut self) {
        for (file, facts) in &self.elves {
            let kept = self.rules.used.iter().any(|rule| matches(&rule.file, file));
            let loader = file.rsplit('/').next().is_some_and(|name| name.starts_with("ld-linux"));
            if facts.library && !kept && !loader && !self.used.contains(file) {
                self.found.insert(Finding::Unused { file: file.clone(), size: facts.size });
            }
        }
    }
}

#[cfg(test)]
mod tests;
