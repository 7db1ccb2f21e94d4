//! Which modules an image gets: the wanted ones and all that they need.
//!
//! Dependencies come from the modules themselves (`.modinfo`), because a
//! kernel package has no `modules.dep`: it is made on installation. Modules
//! built out of the kernel's tree take part on equal terms.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Error, ModuleInfo, elf, payload};
use crate::cache::io_error;

/// A module as it goes into the image: uncompressed.
#[derive(Debug, Clone)]
pub struct Module {
    /// Name as the kernel spells it, with underscores.
    pub name: String,
    /// Path below `lib/modules/RELEASE`, ending in `.ko`.
    pub path: String,
    /// The file's contents.
    pub data: Vec<u8>,
    /// Direct needs that are modules of this set.
    pub needs: Vec<String>,
}

/// The modules of an image.
#[derive(Debug, Clone, Default)]
pub struct Set {
    modules: BTreeMap<String, Module>,
    /// Wanted or needed ones that the kernel has built in.
    pub built_in: BTreeSet<String>,
}

impl Set {
    /// The modules, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Module> {
        self.modules.values()
    }

    /// The text of `modules.dep`: one line per module, with everything it
    /// needs, the one to be loaded first at the end, as `depmod` writes it.
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

    /// Appends what `module` needs and then itself, each once. `seen` also
    /// ends a cycle, which the kernel's build refuses but a damaged file may
    /// claim.
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

/// What becomes of the type information (BTF) in modules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TypeInformation {
    /// It stays, and with it the module's signature.
    #[default]
    Keep,
    /// It goes, and with it the signature: BPF programs cannot name this
    /// module's types, and loading it is several times as fast.
    Drop,
}

impl TypeInformation {
    fn apply(self, file: &Path, data: &mut Vec<u8>) -> Result<(), Error> {
        match self {
            Self::Keep => Ok(()),
            Self::Drop => elf::without_type_information(data).map_err(|what| bad(file, what)),
        }
    }
}

/// Selects `wanted` modules by name from the folder `tree` of the kernel
/// `release`, all of the files in `extra`, and everything those need.
///
/// # Errors
/// An unknown module, an unreadable file, or an extra module that was built
/// for another kernel.
pub fn select(
    release: &str,
    tree: &Path,
    wanted: &[String],
    extra: &[PathBuf],
    types: TypeInformation,
) -> Result<Set, Error> {
    let available = index(tree)?;
    let built_in = built_in(tree)?;
    let mut set = Set::default();
    // What is still to be had, and who asked for it first.
    let mut open: Vec<(String, String)> =
        wanted.iter().map(|name| (canonical(name), "the manifest".to_owned())).collect();
    for file in extra {
        let (name, path) = extra_name(file)?;
        let mut data = fs::read(file).map_err(io_error("read module", file))?;
        types.apply(file, &mut data)?;
        let info = inspect(file, &data)?;
        if let Some(found) = info.release.filter(|found| found != release) {
            return Err(Error::WrongKernel { file: file.clone(), release: release.to_owned(), found });
        }
        let needs: Vec<String> = info.depends.iter().map(|need| canonical(need)).collect();
        open.extend(needs.iter().map(|need| (need.clone(), name.clone())));
        set.modules.insert(name.clone(), Module { name, path, data, needs });
    }
    while let Some((name, needed_by)) = open.pop() {
        if set.modules.contains_key(&name) || set.built_in.contains(&name) {
            continue;
        }
        let Some(file) = available.get(&name) else {
            if built_in.contains(&name) {
                set.built_in.insert(name);
                continue;
            }
            return Err(Error::NoModule { release: release.to_owned(), name, needed_by });
        };
        let mut data = decompressed(file)?;
        types.apply(file, &mut data)?;
        let needs: Vec<String> = inspect(file, &data)?.depends.iter().map(|need| canonical(need)).collect();
        open.extend(needs.iter().map(|need| (need.clone(), name.clone())));
        let path = plain_path(file.strip_prefix(tree).unwrap_or(file));
        set.modules.insert(name.clone(), Module { name, path, data, needs });
    }
    Ok(set)
}

/// The kernel treats `-` and `_` in module names as one.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// The module's name, from a file name such as `virtio-rng.ko.xz`.
fn name_of(file: &Path) -> Option<String> {
    let (stem, rest) = file.file_name()?.to_str()?.split_once(".ko")?;
    COMPRESSIONS.iter().any(|(suffix, _)| *suffix == rest).then(|| canonical(stem))
}

/// Out-of-tree modules go where `make modules_install` puts them.
fn extra_name(file: &Path) -> Result<(String, String), Error> {
    let stem = file.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".ko"));
    let stem = stem.ok_or_else(|| bad(file, "an extra module's file name must end in .ko".to_owned()))?;
    Ok((canonical(stem), format!("extra/{stem}.ko")))
}

type Unpack = fn(&[u8]) -> Result<Vec<u8>, String>;

/// What may follow `.ko`, and who undoes it.
const COMPRESSIONS: &[(&str, Unpack)] =
    &[("", |bytes| Ok(bytes.to_vec())), (".xz", payload::xz), (".zst", payload::zstd), (".gz", payload::gzip)];

fn decompressed(file: &Path) -> Result<Vec<u8>, Error> {
    let bytes = fs::read(file).map_err(io_error("read module", file))?;
    let name = file.to_string_lossy();
    let (_, unpack) = COMPRESSIONS
        .iter()
        .find(|(suffix, _)| name.ends_with(&format!(".ko{suffix}")))
        .ok_or_else(|| bad(file, "unknown compression".to_owned()))?;
    unpack(&bytes).map_err(|what| bad(file, what))
}

fn plain_path(path: &Path) -> String {
    let path = path.to_string_lossy();
    path.rsplit_once(".ko").map_or_else(|| path.to_string(), |(stem, _)| format!("{stem}.ko"))
}

fn inspect(file: &Path, data: &[u8]) -> Result<ModuleInfo, Error> {
    elf::module_info(data).map_err(|what| bad(file, what))
}

fn bad(file: &Path, what: String) -> Error {
    Error::Module { file: file.to_owned(), what }
}

/// Every module file below `tree`, by name.
fn index(tree: &Path) -> Result<BTreeMap<String, PathBuf>, Error> {
    let mut found = BTreeMap::new();
    let mut folders = vec![tree.join("kernel")];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(io_error("list", &folder))?;
        for entry in entries {
            let entry = entry.map_err(io_error("list", &folder))?;
            let kind = entry.file_type().map_err(io_error("inspect", &entry.path()))?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if let Some(name) = name_of(&entry.path()) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

/// Names of the modules that the kernel has built in.
fn built_in(tree: &Path) -> Result<BTreeSet<String>, Error> {
    let path = tree.join("modules.builtin");
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    Ok(text.lines().filter_map(|line| name_of(Path::new(line.trim()))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::elf::tests::module;

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

    fn names(set: &Set) -> Vec<&str> {
        set.iter().map(|module| module.name.as_str()).collect()
    }

    #[test]
    fn needs_are_followed_and_ordered() {
        let tree = tree();
        let set =
            select("6.12.95", tree.path(), &["virtio_transport".into(), "other".into()], &[], TypeInformation::Keep)
                .unwrap();
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
    fn extra_modules_bring_what_they_need() {
        let tree = tree();
        let dir = tempfile::tempdir().unwrap();
        let nvidia = dir.path().join("nvidia.ko");
        let uvm = dir.path().join("nvidia-uvm.ko");
        fs::write(&nvidia, module(&["depends=vsock", "vermagic=6.12.95 SMP"])).unwrap();
        fs::write(&uvm, module(&["depends=nvidia", "vermagic=6.12.95 SMP"])).unwrap();
        let set = select("6.12.95", tree.path(), &[], &[uvm.clone(), nvidia.clone()], TypeInformation::Keep).unwrap();
        assert_eq!(names(&set), ["nvidia", "nvidia_uvm", "vsock"]);
        assert!(set.dependency_file().starts_with(
            "extra/nvidia-uvm.ko: extra/nvidia.ko kernel/net/vmw_vsock/vsock.ko\n\
             extra/nvidia.ko: kernel/net/vmw_vsock/vsock.ko\n"
        ));
        let error = select("6.12.99", tree.path(), &[], &[nvidia], TypeInformation::Keep).unwrap_err();
        assert!(matches!(error, Error::WrongKernel { .. }), "{error}");
    }

    #[test]
    fn what_is_missing_is_named_with_who_wants_it() {
        let tree = tree();
        let unknown = select("6.12.95", tree.path(), &["nosuch".into()], &[], TypeInformation::Keep).unwrap_err();
        assert!(unknown.to_string().contains("nosuch (needed by the manifest)"), "{unknown}");
        let lost = select("6.12.95", tree.path(), &["lost".into()], &[], TypeInformation::Keep).unwrap_err();
        assert!(lost.to_string().contains("nowhere (needed by lost)"), "{lost}");
        let set = select("6.12.95", tree.path(), &["virtio-pci".into()], &[], TypeInformation::Keep).unwrap();
        assert!(names(&set).is_empty());
    }

    #[test]
    fn modules_that_need_each_other_do_not_hang() {
        let tree = tree();
        let net = tree.path().join("kernel/net/vmw_vsock");
        fs::write(net.join("a.ko"), module(&["depends=b"])).unwrap();
        fs::write(net.join("b.ko"), module(&["depends=a"])).unwrap();
        let set = select("6.12.95", tree.path(), &["a".into()], &[], TypeInformation::Keep).unwrap();
        assert_eq!(set.dependency_file().lines().count(), 2);
    }
}
