//! Kernel modules: found by the lists that `depmod` writes, configured by `modprobe.d`, loaded by
//! `finit_module`. `modprobe` is not needed.
//!
//! * [`dep`]: files and dependencies; [`alias`] with [`glob`]: modules by modalias; [`config`]: `modprobe.d`
//! * [`order`]: the load order, as a pure function; [`load`]: threads and the system call
//! * [`devices`]: devices without a driver

pub mod alias;
pub mod config;
pub mod dep;
pub mod devices;
pub mod glob;
mod load;
pub mod name;
pub mod order;

use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

use self::config::{Config, text_of};
use self::dep::Dependencies;
use self::name::{has, same, stem};
use self::order::{Node, mark_requested};
use crate::root::Root;

/// Why a module could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// The module has no file and is not built into the kernel.
    #[error("module {name} is neither in {index} nor built into the kernel; add it to the image")]
    Unknown {
        /// The module's name.
        name: String,
        /// The list that was searched.
        index: PathBuf,
    },
    /// A hard dependency could not be loaded.
    #[error("module {name} was not loaded because {need}, which it needs, was not")]
    Needs {
        /// The module's name.
        name: String,
        /// The dependency's name.
        need: String,
    },
    /// The module's file could not be opened.
    #[error("module {name}: cannot open {file}: {source}; the image's modules.dep and its files do not match")]
    Open {
        /// The module's name.
        name: String,
        /// The file.
        file: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refused to load the module.
    #[error("module {name}: the kernel did not load {file}: {source}; {}", hint(source, *.compressed))]
    Load {
        /// The module's name.
        name: String,
        /// The file.
        file: PathBuf,
        /// The kernel's error.
        source: io::Error,
        /// Whether the file is compressed.
        compressed: bool,
    },
}

fn hint(error: &io::Error, compressed: bool) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOEXEC) => "it was built for another kernel: build it for the one in this image",
        Some(libc::EKEYREJECTED) => "its signature is missing or not of a key that this kernel trusts",
        Some(libc::EPERM) => {
            "module loading is locked (kernel.modules_disabled), or module_blacklist= on the kernel command line names it"
        }
        Some(libc::ENOENT) => "it uses a symbol that no loaded module has: look for 'Unknown symbol' in the kernel log",
        Some(libc::ENODEV) => "it found no device that it can drive: look for its lines in the kernel log",
        Some(libc::EINVAL) if !compressed => {
            "a parameter is wrong, or a symbol has another version: see the kernel log"
        }
        Some(libc::EOPNOTSUPP | libc::EINVAL) if compressed => {
            "this kernel cannot unpack modules (CONFIG_MODULE_DECOMPRESS): store it uncompressed"
        }
        _ => "see the kernel log",
    }
}

/// Maximum size of a list in bytes; those of distribution kernels are below 2 MiB.
const LARGEST: u64 = 16 << 20;

/// Whether independent modules may be loaded concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOrder {
    /// Independent modules are loaded concurrently, in any order.
    Free,
    /// Modules are loaded one after the other.
    InOrder,
}

/// The result of loading the requested modules.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Modules that were loaded now, in this order, with the duration in microseconds; dependencies
    /// included.
    pub loaded: Vec<(String, u64)>,
    /// Requested modules that are built into the kernel.
    pub built_in: Vec<String>,
    /// Missing soft dependencies and ignored configuration lines.
    pub remarks: Vec<String>,
    /// Requested modules that could not be loaded.
    pub errors: Vec<ModuleError>,
}

impl Outcome {
    /// Describes the result without the errors, in one line.
    #[must_use]
    pub fn detail(&self) -> String {
        let mut parts = Vec::new();
        if !self.loaded.is_empty() {
            let took = self.loaded.iter().map(|(name, us)| format!("{name} {}.{} ms", us / 1000, us % 1000 / 100));
            parts.push(format!("loaded {}", took.collect::<Vec<_>>().join(", ")));
        }
        parts.extend(self.built_in.iter().map(|name| format!("{name} built in")));
        parts.extend_from_slice(&self.remarks);
        parts.join("; ")
    }

    /// Appends a later result.
    pub fn add(&mut self, later: Self) {
        self.loaded.extend(later.loaded);
        self.built_in.extend(later.built_in);
        self.remarks.extend(later.remarks);
        self.errors.extend(later.errors);
    }

    /// Returns the description; or, if there are errors, the errors followed by the description.
    ///
    /// # Errors
    /// A requested module could not be loaded.
    pub fn to_result(&self) -> Result<String, String> {
        if self.errors.is_empty() {
            return Ok(self.detail());
        }
        let errors = self.errors.iter().map(ToString::to_string);
        let detail = Some(self.detail()).filter(|detail| !detail.is_empty());
        Err(errors.chain(detail).collect::<Vec<_>>().join("; "))
    }
}

/// The module lists of one kernel release, with the image's configuration.
#[derive(Debug)]
pub struct Modules {
    root: Root,
    dir: PathBuf,
    dependencies: Dependencies,
    /// The configuration from `modprobe.d`.
    pub config: Config,
    /// `modules.alias` and `modules.builtin`, read on first use, which is rare.
    aliases: OnceLock<String>,
    built_in: OnceLock<String>,
}

/// A set of modules during its construction.
#[derive(Debug, Default)]
struct Set {
    nodes: Vec<Node>,
    /// Offset of each node's line in `modules.dep`.
    lines: Vec<Option<usize>>,
    outcome: Outcome,
}

impl Modules {
    /// Reads the lists of a kernel release. Missing lists count as empty: a kernel without modules
    /// has none.
    #[must_use]
    pub fn read(root: &Root, release: &str) -> Self {
        Self::read_at(root, "", release)
    }

    /// Reads the lists and `modprobe.d` below the directory `place`.
    #[must_use]
    pub fn read_at(root: &Root, place: &str, release: &str) -> Self {
        let dir = root.path(&format!("{place}/lib/modules")).join(release);
        let dependencies = Dependencies::new(text_of(&dir.join("modules.dep"), LARGEST).unwrap_or_default());
        let config = Config::read(root, place, &dir.join("modules.softdep"));
        let (aliases, built_in) = (OnceLock::new(), OnceLock::new());
        Self { root: root.clone(), dir, dependencies, config, aliases, built_in }
    }

    /// Returns whether the image has modules for this kernel.
    #[must_use]
    pub fn any(root: &Root, release: &str) -> bool {
        let list = root.path("/lib/modules").join(release).join("modules.dep");
        list.metadata().is_ok_and(|data| data.len() > 0)
    }

    fn list(&self, name: &str) -> String {
        text_of(&self.dir.join(name), LARGEST).unwrap_or_default()
    }

    /// Returns whether a module has a file.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.dependencies.find(name).is_some()
    }

    /// Returns whether a module is built into the kernel.
    #[must_use]
    pub fn built_in(&self, name: &str) -> bool {
        self.built_in.get_or_init(|| self.list("modules.builtin")).lines().any(|line| same(stem(line), name))
    }

    /// Returns the modules that drive devices with these modaliases: by the aliases of
    /// `modprobe.d`, otherwise by `modules.alias`; without those that `blocked` excludes.
    #[must_use]
    pub fn drivers(&self, devices: &[String], blocked: &dyn Fn(&str) -> bool) -> Vec<String> {
        let configured = || self.config.aliases.iter().map(|(pattern, module)| (pattern.as_str(), module.as_str()));
        let named = |device: &String| configured().any(|(pattern, _)| glob::matches(pattern, device));
        let (by_image, by_list): (Vec<String>, Vec<String>) = devices.iter().cloned().partition(named);
        let mut found = alias::find(configured(), &by_image);
        if !by_list.is_empty() {
            let list = self.aliases.get_or_init(|| self.list("modules.alias"));
            found.extend(alias::find(alias::lines(list), &by_list));
        }
        let mut names: Vec<String> = Vec::new();
        for module in found {
            if !has(&names, module) && !self.config.blacklisted(module) && !blocked(module) {
                names.push(module.to_owned());
            }
        }
        names
    }

    /// Resolves a name: to itself, or to the modules of which it is an alias.
    #[must_use]
    pub fn resolve(&self, name: &str, blocked: &dyn Fn(&str) -> bool) -> Vec<String> {
        let aliased = self.config.aliases.iter().any(|(pattern, _)| glob::matches(pattern, name));
        if !aliased && (self.has(name) || self.built_in(name)) {
            return vec![name.to_owned()];
        }
        let found = self.drivers(&[name.to_owned()], blocked);
        if found.is_empty() { vec![name.to_owned()] } else { found }
    }

    /// Loads modules with their hard and soft dependencies. `params` returns the parameters of each
    /// module.
    pub fn load(&self, names: &[&str], order: LoadOrder, params: &(dyn Fn(&str) -> String + Sync)) -> Outcome {
        let set = self.set(names, order);
        let threads = if order::width(&set.nodes) > 1 { load::threads() } else { 1 };
        let insert =
            |node: &Node| load::insert(&self.root, &node.name, &self.dir.join(&node.file), &params(&node.name));
        let (nodes, done) = load::run(set.nodes, threads, &insert);
        let mut outcome = set.outcome;
        outcome.loaded = done.loaded;
        for (at, error) in done.failed {
            match nodes.get(at) {
                Some(node) if !node.requested => outcome.remarks.push(format!("left out: {error}")),
                _ => outcome.errors.push(error),
            }
        }
        outcome
    }

    /// Builds the set with an explicit work list, so that cycles and long dependency chains in a
    /// file use no stack.
    fn set(&self, names: &[&str], order: LoadOrder) -> Set {
        let mut set = Set::default();
        let mut before = None;
        for name in names {
            let Some(at) = self.place(&mut set, name) else {
                if self.built_in(name) {
                    set.outcome.built_in.push((*name).to_owned());
                } else {
                    let index = self.dir.join("modules.dep");
                    set.outcome.errors.push(ModuleError::Unknown { name: (*name).to_owned(), index });
                }
                continue;
            };
            set.nodes[at].requested = true;
            if order == LoadOrder::InOrder {
                set.nodes[at].needs.extend(before.filter(|before| *before != at));
                before = Some(at);
            }
        }
        let mut at = 0;
        while at < set.nodes.len() {
            self.add_dependencies(&mut set, at);
            self.add_soft_dependencies(&mut set, at);
            at += 1;
        }
        mark_requested(&mut set.nodes);
        set
    }

    /// Returns a module's index in the set; adds it first if needed.
    fn place(&self, set: &mut Set, name: &str) -> Option<usize> {
        let line = self.dependencies.find(name)?;
        Some(set.lines.iter().position(|known| *known == Some(line.at)).unwrap_or_else(|| {
            set.lines.push(Some(line.at));
            let (name, file) = (stem(line.file).to_owned(), line.file.to_owned());
            set.nodes.push(Node { name, file, ..Node::default() });
            set.nodes.len() - 1
        }))
    }

    fn add_dependencies(&self, set: &mut Set, at: usize) {
        let Some(line) = self.dependencies.find(&set.nodes[at].name).filter(|line| set.lines[at] == Some(line.at))
        else {
            return;
        };
        let mut last = None;
        for file in line.needs() {
            let place = self.place(set, stem(file)).unwrap_or_else(|| {
                // A file without a line of its own depends on the file listed before it.
                let known = set.nodes.iter().position(|node| node.file == file);
                known.unwrap_or_else(|| {
                    set.lines.push(None);
                    let needs = last.into_iter().collect();
                    set.nodes.push(Node {
                        name: stem(file).to_owned(),
                        file: file.to_owned(),
                        needs,
                        ..Node::default()
                    });
                    set.nodes.len() - 1
                })
            });
            if place != at {
                set.nodes[at].needs.push(place);
            }
            last = Some(place);
        }
    }

    fn add_soft_dependencies(&self, set: &mut Set, at: usize) {
        let name = set.nodes[at].name.clone();
        let Some(soft) = self.config.soft_dependencies(&name) else { return };
        for (list, first) in [(&soft.before, true), (&soft.after, false)] {
            for other in list.iter().flat_map(|other| self.resolve(other, &|_| false)) {
                match self.place(set, &other) {
                    Some(place) if place == at => {}
                    Some(place) if first => set.nodes[at].after.push(place),
                    Some(place) => set.nodes[place].after.push(at),
                    None if self.built_in(&other) => {}
                    None => set.outcome.remarks.push(format!("softdep of {name}: no module {other}")),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
