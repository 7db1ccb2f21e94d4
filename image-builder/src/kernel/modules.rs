//! Selects the modules of an image: the requested ones and their dependencies.
//!
//! Dependencies come from the modules themselves (`.modinfo`), because a
//! kernel package has no `modules.dep`: `depmod` generates it on installation.
//! Out-of-tree modules are treated the same way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image::digest;

use super::{Error, ModuleInfo, elf, payload};
use crate::cache::digests::{CachedFile, Digests};
use crate::cache::{self, io_error};

/// A module as stored in the image.
#[derive(Debug, Clone)]
pub struct Module {
    /// Name as the kernel spells it, with underscores.
    pub name: String,
    /// Path below `lib/modules/RELEASE`, ending in `.ko` unless the file stays compressed.
    pub path: String,
    /// The file's contents.
    pub data: Vec<u8>,
    /// Names of its direct dependencies.
    pub needs: Vec<String>,
    /// Aliases: patterns of the devices that it drives, and other names.
    pub aliases: Vec<String>,
    /// Soft dependencies, as its `.modinfo` states them.
    pub softdeps: Vec<String>,
}

/// The modules of an image.
#[derive(Debug, Clone, Default)]
pub struct Set {
    modules: BTreeMap<String, Module>,
    /// Requested modules and dependencies that are built into the kernel.
    pub built_in: BTreeSet<String>,
}

impl Set {
    /// Iterates over the modules, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Module> {
        self.modules.values()
    }

    /// Formats `modules.dep`: one line per module with all its dependencies in
    /// reverse load order, as `depmod` writes it.
    #[must_use]
    pub fn dependency_file(&self) -> String {
        let mut lines: Vec<String> = self
            .modules
            .values()
            .map(|module| {
                let mut order = Vec::new();
                self.load_order(module, &mut BTreeSet::new(), &mut order);
                let mut line = format!("{}:", module.path);
                for need in order.iter().rev().filter(|need| need.name != module.name) {
                    let _ = write!(line, " {}", need.path);
                }
                line.push('\n');
                line
            })
            .collect();
        lines.sort();
        lines.concat()
    }

    /// Formats `modules.alias`, which maps the guest's devices to drivers.
    #[must_use]
    pub fn alias_file(&self) -> String {
        let line = |module: &Module, pattern: &String| format!("alias {pattern} {}\n", module.name);
        self.iter().flat_map(|module| module.aliases.iter().map(|pattern| line(module, pattern))).collect()
    }

    /// Formats `modules.softdep`, the modules' soft dependencies.
    /// They are in the image only if its manifest names them, too.
    #[must_use]
    pub fn softdep_file(&self) -> String {
        let with = self.iter().filter(|module| !module.softdeps.is_empty());
        with.map(|module| format!("softdep {} {}\n", module.name, module.softdeps.join(" "))).collect()
    }

    /// Appends the dependencies of `module` and then itself, each once. `seen` also
    /// breaks cycles, which the kernel's build rejects but a corrupt file may
    /// contain.
    fn load_order<'a>(&'a self, module: &'a Module, seen: &mut BTreeSet<&'a str>, order: &mut Vec<&'a Module>) {
        if !seen.insert(&module.name) {
            return;
        }
        for need in module.needs.iter().filter_map(|name| self.modules.get(name)) {
            self.load_order(need, seen, order);
        }
        order.push(module);
    }
}

/// Whether modules keep their type information (BTF).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TypeInformation {
    /// BTF and the module's signature are retained.
    #[default]
    Keep,
    /// BTF and the signature are removed: BPF programs cannot use this
    /// module's types, and loading it is several times as fast.
    Drop,
}

/// How the kernel's own modules are stored in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Uncompressed: every kernel can load them, without decompression at each boot.
    Plain(TypeInformation),
    /// As in the package, for a smaller image. The guest's kernel must
    /// support their compression (`CONFIG_MODULE_DECOMPRESS`); it supports the one
    /// that it was built with.
    AsPackaged,
}

impl TypeInformation {
    fn apply(self, file: &Path, data: &mut Vec<u8>) -> Result<(), Error> {
        match self {
            Self::Keep => Ok(()),
            Self::Drop => elf::strip_btf(data).map_err(|what| module_error(file, what)),
        }
    }
}

/// The modules directory of a prepared kernel, whose files are compared with their recorded digests when they are read.
#[derive(Debug, Clone)]
pub struct ModuleTree {
    /// The kernel's directory in the cache.
    entry: PathBuf,
    dir: PathBuf,
    digests: Digests,
}

impl ModuleTree {
    /// Records the digests of the files in `entry/modules`.
    pub(super) fn record(entry: &Path) -> Result<(), cache::Error> {
        Digests::of(&entry.join("modules"))?.write(&entry.join("modules.json"))
    }

    pub(super) fn open(entry: &Path) -> Result<Self, cache::Error> {
        let digests = Digests::read(&entry.join("modules.json"))?;
        Ok(Self { entry: entry.to_owned(), dir: entry.join("modules"), digests })
    }

    /// Returns a file by its path below the directory.
    pub(crate) fn file(&self, name: &str) -> CachedFile {
        self.digests.file(&self.entry, &self.dir, name)
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let cached = self.file(name);
        let bytes = fs::read(&cached.file).map_err(io_error("read module", &cached.file))?;
        cached.verify(&digest::of_bytes(&bytes))?;
        Ok(bytes)
    }
}

/// The directory of out-of-tree modules.
pub const EXTRA: &str = "extra";
/// The directory of modules that take precedence over the kernel's own.
pub const UPDATES: &str = "updates";

/// An out-of-tree module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extra {
    /// Its file, which ends in `.ko`.
    pub file: PathBuf,
    /// Its directory below `lib/modules/RELEASE`.
    pub dir: &'static str,
}

impl Extra {
    /// Returns a module in `extra`, where `make modules_install` installs out-of-tree modules.
    #[must_use]
    pub fn built(file: PathBuf) -> Self {
        Self { file, dir: EXTRA }
    }

    /// Returns a module in `updates`, which `depmod` prefers over the kernel's own modules.
    #[must_use]
    pub fn update(file: PathBuf) -> Self {
        Self { file, dir: UPDATES }
    }
}

/// Selects the `requested` modules by name from the directory `tree` of the kernel
/// `release`, all modules in `extra`, and all dependencies.
///
/// # Errors
/// An unknown module, an unreadable or damaged file, or an extra module that was built
/// for another kernel.
pub fn select(
    release: &str,
    tree: &ModuleTree,
    requested: &[String],
    extra: &[Extra],
    form: Form,
) -> Result<Set, Error> {
    let available = index_modules(&tree.dir)?;
    let built_in = read_built_in(tree)?;
    let mut set = Set::default();
    // Modules still to be selected, and what required them first.
    let mut pending: Vec<(String, String)> =
        requested.iter().map(|name| (canonical(name), "the manifest".to_owned())).collect();
    for Extra { file, dir } in extra {
        let (name, path) = extra_name(file, dir)?;
        let mut data = fs::read(file).map_err(io_error("read module", file))?;
        if let Form::Plain(types) = form {
            types.apply(file, &mut data)?;
        }
        let info = read_module_info(file, &data)?;
        if let Some(found) = info.release.as_ref().filter(|found| *found != release) {
            return Err(Error::WrongKernel { file: file.clone(), release: release.to_owned(), found: found.clone() });
        }
        let module = new_module(name, path, data, info);
        pending.extend(module.needs.iter().map(|need| (need.clone(), module.name.clone())));
        set.modules.insert(module.name.clone(), module);
    }
    while let Some((name, needed_by)) = pending.pop() {
        if set.modules.contains_key(&name) || set.built_in.contains(&name) {
            continue;
        }
        let Some(path) = available.get(&name) else {
            if built_in.contains(&name) {
                set.built_in.insert(name);
                continue;
            }
            return Err(Error::NoModule { release: release.to_owned(), name, needed_by });
        };
        let (file, packed) = (&tree.dir.join(path), tree.read(path)?);
        let mut data = decompress(path, &packed).map_err(|what| module_error(file, what))?;
        let info = read_module_info(file, &data)?;
        let path = match form {
            Form::Plain(types) => {
                types.apply(file, &mut data)?;
                plain_path(path)
            }
            Form::AsPackaged => {
                data = packed;
                path.clone()
            }
        };
        let module = new_module(name, path, data, info);
        pending.extend(module.needs.iter().map(|need| (need.clone(), module.name.clone())));
        set.modules.insert(module.name.clone(), module);
    }
    Ok(set)
}

fn new_module(name: String, path: String, data: Vec<u8>, info: ModuleInfo) -> Module {
    let needs = info.depends.iter().map(|need| canonical(need)).collect();
    Module { name, path, data, needs, aliases: info.aliases, softdeps: info.softdeps }
}

/// Replaces `-` with `_`: the kernel treats them as equal in module names.
pub(crate) fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the module's name from a file name such as `virtio-rng.ko.xz`.
pub(crate) fn name_of(file: &Path) -> Option<String> {
    let (stem, rest) = file.file_name()?.to_str()?.split_once(".ko")?;
    COMPRESSIONS.iter().any(|(suffix, _)| *suffix == rest).then(|| canonical(stem))
}

fn extra_name(file: &Path, dir: &str) -> Result<(String, String), Error> {
    let stem = file.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".ko"));
    let stem = stem.ok_or_else(|| module_error(file, "an extra module's file name must end in .ko".to_owned()))?;
    Ok((canonical(stem), format!("{dir}/{stem}.ko")))
}

type Unpack = fn(&[u8]) -> Result<Vec<u8>, String>;

/// Suffixes after `.ko`, and their decompressors.
const COMPRESSIONS: &[(&str, Unpack)] =
    &[("", |bytes| Ok(bytes.to_vec())), (".xz", payload::xz), (".zst", payload::zstd), (".gz", payload::gzip)];

/// Decompresses a module as its file name's suffix states.
///
/// # Errors
/// The suffix is unknown, or the contents do not match it.
pub(crate) fn decompress(name: &str, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let unpack = COMPRESSIONS.iter().find(|(suffix, _)| name.ends_with(&format!(".ko{suffix}")));
    let (_, unpack) = unpack.ok_or_else(|| "unknown compression".to_owned())?;
    unpack(bytes)
}

fn plain_path(path: &str) -> String {
    path.rsplit_once(".ko").map_or_else(|| path.to_owned(), |(stem, _)| format!("{stem}.ko"))
}

fn read_module_info(file: &Path, data: &[u8]) -> Result<ModuleInfo, Error> {
    elf::module_info(data).map_err(|what| module_error(file, what))
}

fn module_error(file: &Path, what: String) -> Error {
    Error::Module { file: file.to_owned(), what }
}

/// Returns the path below `tree` of every module file, by name; ignores symlinks, which may point outside, and names that
/// are not UTF-8.
fn index_modules(tree: &Path) -> Result<BTreeMap<String, String>, Error> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![tree.join("kernel")];
    while let Some(dir) = dirs.pop() {
        let entries = fs::read_dir(&dir).map_err(io_error("list", &dir))?;
        for entry in entries {
            let entry = entry.map_err(io_error("list", &dir))?;
            let kind = entry.file_type().map_err(io_error("inspect", &entry.path()))?;
            if kind.is_dir() {
                dirs.push(entry.path());
            } else if kind.is_file()
                && let Some(name) = name_of(&entry.path())
                && let Some(path) = entry.path().strip_prefix(tree).ok().and_then(Path::to_str)
            {
                found.insert(name, path.to_owned());
            }
        }
    }
    Ok(found)
}

/// Returns the names of the modules built into the kernel.
fn read_built_in(tree: &ModuleTree) -> Result<BTreeSet<String>, Error> {
    let text = tree.read("modules.builtin")?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(|line| name_of(Path::new(line.trim()))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::elf::tests::module;

    const KEEP: Form = Form::Plain(TypeInformation::Keep);

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let net = dir.path().join("kernel/net/vmw_vsock");
        fs::create_dir_all(&net).unwrap();
        let write = |name: &str, depends: &str| {
            fs::write(net.join(name), module(&[&format!("depends={depends}"), "vermagic=6.12.95 SMP"])).unwrap();
        };
        write("vsock.ko", "");
        write("vmw_common.ko", "vsock");
        write("virtio-transport.ko", "vmw_common,vsock");
        write("lost.ko", "nowhere");
        write("other.ko", "virtio_pci");
        fs::write(dir.path().join("modules.builtin"), "kernel/drivers/virtio/virtio_pci.ko\n").unwrap();
        dir
    }

    /// Returns the modules of a directory with the digests of its current files.
    fn of(tree: &tempfile::TempDir) -> ModuleTree {
        let dir = tree.path().to_owned();
        ModuleTree { entry: dir.clone(), digests: Digests::of(&dir).unwrap(), dir }
    }

    fn names(set: &Set) -> Vec<&str> {
        set.iter().map(|module| module.name.as_str()).collect()
    }

    #[test]
    fn dependencies_are_followed_and_ordered() {
        let tree = tree();
        let set = select("6.12.95", &of(&tree), &["virtio_transport".into(), "other".into()], &[], KEEP).unwrap();
        assert_eq!(names(&set), ["other", "virtio_transport", "vmw_common", "vsock"]);
        assert_eq!(set.built_in.iter().collect::<Vec<_>>(), ["virtio_pci"]);
        assert_eq!(
            set.dependency_file(),
            "kernel/net/vmw_vsock/other.ko:\n\
             kernel/net/vmw_vsock/virtio-transport.ko: kernel/net/vmw_vsock/vmw_common.ko kernel/net/vmw_vsock/vsock.ko\n\
             kernel/net/vmw_vsock/vmw_common.ko: kernel/net/vmw_vsock/vsock.ko\n\
             kernel/net/vmw_vsock/vsock.ko:\n"
        );
    }

    #[test]
    fn aliases_and_soft_dependencies_are_listed() {
        let tree = tree();
        let net = tree.path().join("kernel/net/vmw_vsock");
        let pairs = ["depends=", "alias=virtio:d00000013v*", "alias=net-pf-40", "softdep=pre: a", "softdep=post: b c"];
        fs::write(net.join("a-b.ko"), module(&pairs)).unwrap();
        let set = select("6.12.95", &of(&tree), &["a_b".into(), "vsock".into()], &[], KEEP).unwrap();
        assert_eq!(set.alias_file(), "alias virtio:d00000013v* a_b\nalias net-pf-40 a_b\n");
        assert_eq!(set.softdep_file(), "softdep a_b pre: a post: b c\n");
    }

    #[test]
    fn compressed_modules_stay_compressed_if_requested() {
        let tree = tree();
        let net = tree.path().join("kernel/net/vmw_vsock");
        let plain = module(&["depends=vsock", "vermagic=6.12.95 SMP"]);
        let mut writer = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
        std::io::Write::write_all(&mut writer, &plain).unwrap();
        let packed = writer.finish().unwrap();
        fs::write(net.join("packed.ko.xz"), &packed).unwrap();
        let data = |form| {
            let set = select("6.12.95", &of(&tree), &["packed".into()], &[], form).unwrap();
            assert_eq!(names(&set), ["packed", "vsock"]);
            let module = set.iter().next().unwrap();
            (module.path.clone(), module.data.clone())
        };
        assert_eq!(data(KEEP), ("kernel/net/vmw_vsock/packed.ko".to_owned(), plain));
        assert_eq!(data(Form::AsPackaged), ("kernel/net/vmw_vsock/packed.ko.xz".to_owned(), packed));
    }

    #[test]
    fn extra_modules_add_their_dependencies() {
        let tree = tree();
        let dir = tempfile::tempdir().unwrap();
        let nvidia = dir.path().join("nvidia.ko");
        let uvm = dir.path().join("nvidia-uvm.ko");
        fs::write(&nvidia, module(&["depends=vsock", "vermagic=6.12.95 SMP"])).unwrap();
        fs::write(&uvm, module(&["depends=nvidia", "vermagic=6.12.95 SMP"])).unwrap();
        let set = select("6.12.95", &of(&tree), &[], &[Extra::built(uvm.clone()), Extra::built(nvidia.clone())], KEEP)
            .unwrap();
        assert_eq!(names(&set), ["nvidia", "nvidia_uvm", "vsock"]);
        assert!(set.dependency_file().starts_with(
            "extra/nvidia-uvm.ko: extra/nvidia.ko kernel/net/vmw_vsock/vsock.ko\n\
             extra/nvidia.ko: kernel/net/vmw_vsock/vsock.ko\n"
        ));
        let updates = [Extra::update(uvm), Extra::update(nvidia.clone())];
        let set = select("6.12.95", &of(&tree), &[], &updates, KEEP).unwrap();
        assert!(set.dependency_file().contains("\nupdates/nvidia-uvm.ko: updates/nvidia.ko kernel/"));
        let error = select("6.12.99", &of(&tree), &[], &[Extra::built(nvidia)], KEEP).unwrap_err();
        assert!(matches!(error, Error::WrongKernel { .. }), "{error}");
    }

    #[test]
    fn missing_module_is_reported_with_what_requires_it() {
        let tree = tree();
        let unknown = select("6.12.95", &of(&tree), &["nosuch".into()], &[], KEEP).unwrap_err();
        assert!(unknown.to_string().contains("nosuch (needed by the manifest)"), "{unknown}");
        let lost = select("6.12.95", &of(&tree), &["lost".into()], &[], KEEP).unwrap_err();
        assert!(lost.to_string().contains("nowhere (needed by lost)"), "{lost}");
        let set = select("6.12.95", &of(&tree), &["virtio-pci".into()], &[], KEEP).unwrap();
        assert!(names(&set).is_empty());
    }

    #[test]
    fn module_that_changed_in_the_cache_is_refused() {
        let tree = tree();
        let recorded = of(&tree);
        let file = tree.path().join("kernel/net/vmw_vsock/vmw_common.ko");
        let mut bytes = fs::read(&file).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&file, bytes).unwrap();
        for form in [KEEP, Form::AsPackaged] {
            let error = select("6.12.95", &recorded, &["virtio_transport".into()], &[], form).unwrap_err();
            assert!(matches!(&error, Error::Damaged(damaged) if damaged.file == file), "{error}");
        }
        select("6.12.95", &recorded, &["vsock".into()], &[], KEEP).expect("the other modules are usable");
    }

    #[test]
    fn dependency_cycle_is_broken() {
        let tree = tree();
        let net = tree.path().join("kernel/net/vmw_vsock");
        fs::write(net.join("a.ko"), module(&["depends=b"])).unwrap();
        fs::write(net.join("b.ko"), module(&["depends=a"])).unwrap();
        let set = select("6.12.95", &of(&tree), &["a".into()], &[], KEEP).unwrap();
        assert_eq!(set.dependency_file().lines().count(), 2);
    }
}
