//! Kernel modules: found through `modules.dep`, loaded by `finit_module`.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::clock::now_us;
use crate::root::Root;

/// `MODULE_INIT_COMPRESSED_FILE`: the kernel unpacks the file itself.
const COMPRESSED: i32 = 4;

/// Why a module is not there.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// Neither a file nor built in.
    #[error("module {name} is neither in {index} nor built into the kernel; add it to the image")]
    Unknown {
        /// The module.
        name: String,
        /// Where it was looked for.
        index: PathBuf,
    },
    /// Its file could not be opened.
    #[error("module {name}: cannot open {file}: {source}; the image's modules.dep and its files do not match")]
    Open {
        /// The module.
        name: String,
        /// Its file.
        file: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel did not take it.
    #[error("module {name}: the kernel did not load {file}: {source}; {}", hint(source, *.compressed))]
    Load {
        /// The module.
        name: String,
        /// Its file.
        file: PathBuf,
        /// What the kernel said.
        source: io::Error,
        /// Whether the file is compressed.
        compressed: bool,
    },
}

fn hint(error: &io::Error, compressed: bool) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOEXEC) => "it was built for another kernel: build it for the one in this image",
        Some(libc::EKEYREJECTED) => "its signature is missing or not of a key that this kernel trusts",
        Some(libc::EPERM) => "module loading is locked (kernel.modules_disabled) or not allowed",
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

/// What became of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loaded {
    /// Loaded now, or before: it and what it needs, with µs for each.
    Module(Vec<(String, u64)>),
    /// Part of the kernel.
    BuiltIn,
}

/// The modules of one kernel.
#[derive(Debug)]
pub struct Modules {
    folder: PathBuf,
    dep: String,
    builtin: String,
}

/// `-` and `_` are the same in module names.
pub(crate) fn same(a: &str, b: &str) -> bool {
    let fold = |byte: u8| if byte == b'-' { b'_' } else { byte };
    a.len() == b.len() && a.bytes().zip(b.bytes()).all(|(a, b)| fold(a) == fold(b))
}

/// `kernel/drivers/x/foo-bar.ko.xz` is the module `foo-bar`.
fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.find(".ko").map_or(name, |end| &name[..end])
}

impl Modules {
    /// Reads the lists of `release`. Missing lists are empty ones: a kernel
    /// without modules has none.
    #[must_use]
    pub fn read(root: &Root, release: &str) -> Self {
        let folder = root.path("/lib/modules").join(release);
        let list = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
        let (dep, builtin) = (list("modules.dep"), list("modules.builtin"));
        Self { folder, dep, builtin }
    }

    /// Whether the image brings modules at all.
    #[must_use]
    pub fn any(root: &Root, release: &str) -> bool {
        root.path("/lib/modules").join(release).join("modules.dep").exists()
    }

    /// The files to load for a module, in order; `None` if it has no file.
    #[must_use]
    pub fn files(&self, name: &str) -> Option<Vec<&str>> {
        let found = self.dep.lines().find_map(|line| {
            let (file, needs) = line.split_once(':')?;
            same(stem(file), name).then_some((file, needs))
        });
        let (file, needs) = found?;
        // depmod lists what a module needs with the last one to be loaded first.
        Some(needs.split_ascii_whitespace().rev().chain([file]).collect())
    }

    /// Whether a module is part of the kernel.
    #[must_use]
    pub fn built_in(&self, name: &str) -> bool {
        self.builtin.lines().any(|line| same(stem(line), name))
    }

    /// Loads a module and what it needs. `params` gives a module's parameters by its name.
    ///
    /// # Errors
    /// The module is unknown, or the kernel did not take it or one that it needs.
    pub fn load(&self, name: &str, params: impl Fn(&str) -> String) -> Result<Loaded, ModuleError> {
        let Some(files) = self.files(name) else {
            if self.built_in(name) {
                return Ok(Loaded::BuiltIn);
            }
            return Err(ModuleError::Unknown { name: name.to_owned(), index: self.folder.join("modules.dep") });
        };
        let mut took = Vec::with_capacity(files.len());
        for file in files {
            let begin = now_us();
            insert(stem(file), &self.folder.join(file), &params(stem(file)))?;
            took.push((stem(file).to_owned(), now_us() - begin));
        }
        Ok(Loaded::Module(took))
    }
}

fn insert(name: &str, file: &Path, params: &str) -> Result<(), ModuleError> {
    let opened = File::open(file).map_err(|source| ModuleError::Open {
        name: name.to_owned(),
        file: file.to_owned(),
        source,
    })?;
    let compressed = file.extension().is_some_and(|end| end != "ko");
    // The command line has no NUL byte, so neither have parameters taken from it.
    let params = CString::new(params).unwrap_or_default();
    match rustix::system::finit_module(&opened, &params, if compressed { COMPRESSED } else { 0 }) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(source) => {
            Err(ModuleError::Load { name: name.to_owned(), file: file.to_owned(), source: source.into(), compressed })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(dep: &str, builtin: &str) -> (tempfile::TempDir, Modules) {
        let folder = tempfile::tempdir().unwrap();
        let lists = folder.path().join("lib/modules/6.12");
        fs::create_dir_all(&lists).unwrap();
        fs::write(lists.join("modules.dep"), dep).unwrap();
        fs::write(lists.join("modules.builtin"), builtin).unwrap();
        let modules = Modules::read(&Root::at(folder.path()), "6.12");
        (folder, modules)
    }

    #[test]
    fn what_a_module_needs_comes_first() {
        let (_folder, modules) = modules(
            "kernel/net/vsock.ko.xz:\n\
             kernel/net/vmw_vsock_virtio_transport.ko.xz: kernel/net/vmw_vsock_virtio_transport_common.ko.xz kernel/net/vsock.ko.xz\n\
             updates/nvidia-uvm.ko: updates/nvidia.ko\n",
            "kernel/fs/fuse/virtiofs.ko\n",
        );
        assert_eq!(
            modules.files("vmw-vsock-virtio-transport").unwrap().iter().map(|file| stem(file)).collect::<Vec<_>>(),
            ["vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"]
        );
        assert_eq!(modules.files("nvidia_uvm").unwrap(), ["updates/nvidia.ko", "updates/nvidia-uvm.ko"]);
        assert_eq!(modules.files("nvidia"), None);
        assert_eq!(modules.load("virtiofs", |_| String::new()).unwrap(), Loaded::BuiltIn);
    }

    #[test]
    fn errors_name_the_module_the_file_and_the_way_out() {
        let (_folder, modules) = modules("updates/nvidia.ko:\n", "");
        let error = modules.load("nvidia", |_| String::new()).unwrap_err().to_string();
        assert!(error.contains("updates/nvidia.ko") && error.contains("do not match"), "{error}");
        let error = modules.load("overlay", |_| String::new()).unwrap_err().to_string();
        assert!(error.contains("overlay") && error.contains("modules.dep") && error.contains("image"), "{error}");
        let load = |errno, compressed| {
            let source = io::Error::from_raw_os_error(errno);
            ModuleError::Load { name: "x".into(), file: "x.ko".into(), source, compressed }.to_string()
        };
        assert!(load(libc::ENOEXEC, false).contains("another kernel"));
        assert!(load(libc::EINVAL, true).contains("uncompressed"));
        assert!(load(libc::EINVAL, false).contains("parameter"));
    }

    #[test]
    fn a_kernel_without_lists_has_no_modules() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(!Modules::any(&root, "6.12"));
        assert!(Modules::read(&root, "6.12").load("x", |_| String::new()).is_err());
    }

    #[test]
    fn stems_and_compression_go_by_the_file_name() {
        for (path, name) in [("a/b/foo.ko", "foo"), ("foo.ko.zst", "foo"), ("foo", "foo"), ("a/", "")] {
            assert_eq!(stem(path), name);
        }
    }
}
