//! A kernel for an image: an uncompressed `vmlinux` that a VMM can boot directly, the configuration, and modules.
//! They are unpacked from Debian's package, or built from Debian's source.

pub mod check;
mod compile;
pub mod config;
mod configure;
pub mod dot_config;
mod elf;
pub mod fragment;
mod headers;
pub mod kconfig;
pub mod modules;
mod package_config;
mod payload;
pub mod recipe;
pub(crate) mod version;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use firstlight_progress::Progress;
use serde::{Deserialize, Serialize};

use crate::cache::digests::Damaged;
use crate::cache::{self, io_error};
use crate::packages::debian::{self, Candidate, PackageRequest};
use crate::packages::{self, Packages};

pub use elf::ModuleInfo;
pub use headers::KernelHeaders;
pub use modules::ModuleTree;
pub use package_config::package_config;

/// Returns the files below `/lib/firmware` that a module names; the extension of its file `name` states the
/// compression.
///
/// # Errors
/// The compression differs from the extension, or the file is not a module.
pub fn module_firmware(name: &str, bytes: &[u8]) -> Result<Vec<String>, String> {
    Ok(elf::module_info(&modules::decompress(name, bytes)?)?.firmware)
}

/// Why a kernel could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The package is unavailable.
    #[error(transparent)]
    Packages(Box<packages::Error>),
    /// The package could not be unpacked.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// The package lacks a part of a kernel package.
    #[error("package {package} has no {what}")]
    Incomplete {
        /// The package file.
        package: String,
        /// What is missing.
        what: &'static str,
    },
    /// A recipe cannot be used.
    #[error(transparent)]
    Recipe(#[from] recipe::Error),
    /// The source does not apply the configuration.
    #[error("{kernel} does not apply the configuration")]
    Configuration {
        /// The kernel.
        kernel: String,
        /// The symbols.
        source: config::Error,
    },
    /// A program that a build needs is missing.
    #[error("building a kernel needs {tool}: install the package {package}")]
    Tool {
        /// The program.
        tool: &'static str,
        /// Its Debian package.
        package: &'static str,
    },
    /// A step of a build failed.
    #[error("{what}: {command}: {output}")]
    Build {
        /// The kernel.
        what: String,
        /// The command.
        command: String,
        /// Its exit status and last lines of output.
        output: String,
    },
    /// The compressed kernel could not be unpacked.
    #[error("{}: {what}", file.display())]
    Payload {
        /// The kernel file.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A module file could not be read.
    #[error("module {}: {what}", file.display())]
    Module {
        /// The module file.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A required module is neither a file nor built in.
    #[error("kernel {release} has no module {name} (needed by {needed_by}), as a file or built in")]
    NoModule {
        /// The kernel.
        release: String,
        /// The module.
        name: String,
        /// What requires it.
        needed_by: String,
    },
    /// The headers package lacks an expected dependency.
    #[error("package {package} does not depend on a {needed}* package: the layout of Debian's headers has changed")]
    Headers {
        /// The headers package.
        package: String,
        /// The prefix of the expected package's name.
        needed: &'static str,
    },
    /// A cached kernel is not the one that was unpacked or compiled.
    #[error("the kernel in {} has changed since it was put there: remove the directory and try again", dir.display())]
    KernelDamaged {
        /// Its directory.
        dir: PathBuf,
    },
    /// A cached module is not the one that was unpacked or compiled.
    #[error(transparent)]
    Damaged(#[from] Box<Damaged>),
    /// Unpacked headers lack a file.
    #[error("the kernel headers in {} are incomplete: remove the directory and run again", dir.display())]
    HeadersIncomplete {
        /// Their directory.
        dir: PathBuf,
    },
    /// A module was built for another kernel.
    #[error("module {} is for kernel {found}, the image has {release}: rebuild the module", file.display())]
    WrongKernel {
        /// The module file.
        file: PathBuf,
        /// The image's kernel.
        release: String,
        /// The module's kernel.
        found: String,
    },
}

impl From<packages::Error> for Error {
    fn from(error: packages::Error) -> Self {
        Self::Packages(Box::new(error))
    }
}

/// Where a kernel comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A Debian package.
    Package(Package),
    /// Built from source; the recipe's file.
    Recipe(PathBuf),
}

/// A kernel package and its suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// A kernel package, or a metapackage (`linux-image-cloud-amd64`).
    pub package: String,
    /// The Debian suite.
    pub suite: String,
    /// Version prefix to select.
    pub series: Option<String>,
}

/// A prepared kernel in the cache.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Facts recorded when it was prepared.
    pub facts: Facts,
    dir: PathBuf,
    modules: ModuleTree,
}

/// Facts about a prepared kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// `uname -r`.
    pub release: String,
    /// The Debian package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// The suite of the package.
    pub suite: String,
    /// SHA-256 of the package file.
    pub sha256: String,
    /// Size of the package file.
    pub size: u64,
    /// SHA-256 of the extracted `vmlinux`.
    pub vmlinux_sha256: String,
    /// Size of the extracted `vmlinux`.
    pub vmlinux_size: u64,
}

impl Facts {
    /// Writes the facts and the modules' digests into a prepared kernel's directory, after everything else.
    fn write(&self, dir: &Path) -> Result<(), Error> {
        ModuleTree::record(dir)?;
        let path = dir.join("facts.json");
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other).map_err(io_error("write", &path))?;
        fs::write(&path, text).map_err(io_error("write", &path))?;
        Ok(())
    }
}

/// Version of the cached directory's layout; a change recreates cached kernels.
const LAYOUT: u32 = 2;

impl Kernel {
    /// Downloads and unpacks a kernel package, or builds a recipe, unless the result is cached.
    ///
    /// # Errors
    /// The package is unknown, the download fails, the package is not a kernel, or [`Kernel::build`] fails.
    pub fn prepare(cache: &Path, source: &Source, progress: Progress) -> Result<Self, Error> {
        Self::prepare_from(&mut Packages::new(cache, None, progress), source)
    }

    /// [`Kernel::prepare`] with packages that may be locked.
    ///
    /// # Errors
    /// As [`Kernel::prepare`].
    pub fn prepare_from(packages: &mut Packages<'_>, source: &Source) -> Result<Self, Error> {
        match source {
            Source::Package(package) => Self::unpack(packages, package),
            Source::Recipe(file) => Self::build(packages, &recipe::Recipe::read(file)?),
        }
    }

    fn unpack(packages: &mut Packages<'_>, source: &Package) -> Result<Self, Error> {
        let version = source.series.as_deref().map_or(PackageRequest::Newest, PackageRequest::Series);
        let pinned = packages.find_through(&source.suite, &source.package, version, is_kernel_package)?;
        let candidate = pinned.candidate();
        let (label, progress) = (format!("kernel {}", candidate.upstream_version()), packages.progress());
        let dir = packages.cache().join("kernels").join(format!("{}-{LAYOUT}", &candidate.sha256[..16]));
        packages.note(&pinned);
        cache::publish(&dir, &progress, |half| {
            let deb = packages.fetch_one(&label, &pinned)?;
            progress.say(format_args!("{label}: unpacking"));
            unpack_kernel(half, &deb, &candidate, &source.suite)
        })?;
        Self::open(dir)
    }

    fn open(dir: PathBuf) -> Result<Self, Error> {
        let path = dir.join("facts.json");
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let facts =
            serde_json::from_slice(&text).map_err(|error| io_error("understand", &path)(io::Error::other(error)))?;
        let modules = ModuleTree::open(&dir)?;
        let kernel = Self { facts, dir, modules };
        let vmlinux = kernel.vmlinux();
        let (sha256, _) = digest::of_file(&vmlinux).map_err(io_error("read", &vmlinux))?;
        if sha256 == kernel.facts.vmlinux_sha256 { Ok(kernel) } else { Err(Error::KernelDamaged { dir: kernel.dir }) }
    }

    /// Returns the ELF file that a VMM boots through its PVH note.
    #[must_use]
    pub fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// Returns the configuration the kernel was built with.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.dir.join("config")
    }

    /// Returns the directory with `kernel/`, `modules.builtin` and so on.
    #[must_use]
    pub fn modules(&self) -> &ModuleTree {
        &self.modules
    }
}

/// Returns whether a package is a kernel and not a metapackage: its name has a version, as in
/// `linux-image-6.12.95+deb12-cloud-amd64`.
fn is_kernel_package(name: &str) -> bool {
    name.strip_prefix("linux-image-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        && !name.ends_with("-dbg")
}

fn unpack_kernel(dir: &Path, deb: &Path, candidate: &Candidate, suite: &str) -> Result<(), Error> {
    let tree = dir.join("package");
    // Since Debian 13 modules are in usr/lib.
    let selected =
        |path: &Path| ["boot", "lib", "usr/lib"].iter().any(|top| path.starts_with(top)) || path == Path::new("usr");
    fs::create_dir_all(&tree).map_err(io_error("create directory", &tree))?;
    debian::unpack(deb, &tree, selected)?;
    let incomplete = |what| Error::Incomplete { package: candidate.file_name(), what };

    let modules = ["lib/modules", "usr/lib/modules"].iter().find_map(|dir| only_child(&tree.join(dir)));
    let modules = modules.ok_or_else(|| incomplete("directory lib/modules/RELEASE"))?;
    // A package's symlinks are meant for the target system and may point outside the tree.
    let root = fs::canonicalize(&tree).map_err(io_error("inspect", &tree))?;
    let inside = |path: &Path| fs::canonicalize(path).is_ok_and(|real| real.starts_with(&root));
    let require_inside = |path: &Path, what| if inside(path) { Ok(()) } else { Err(incomplete(what)) };
    require_inside(&modules, "directory lib/modules/RELEASE inside the package")?;
    let release =
        modules.file_name().and_then(|name| name.to_str()).ok_or_else(|| incomplete("release name"))?.to_owned();
    let vmlinuz = tree.join(format!("boot/vmlinuz-{release}"));
    let config = tree.join(format!("boot/config-{release}"));
    require_inside(&vmlinuz, "boot/vmlinuz")?;
    require_inside(&config, "boot/config")?;
    require_inside(&modules.join("modules.builtin"), "modules.builtin")?;
    let packed = fs::read(&vmlinuz).map_err(|_| incomplete("boot/vmlinuz"))?;
    let bad = |what: String| Error::Payload { file: vmlinuz.clone(), what };
    let vmlinux = payload::extract(&packed).map_err(bad)?;
    elf::pvh_entry(&vmlinux).map_err(bad)?;

    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, bytes).map_err(io_error("write", &path))
    };
    write("vmlinux", &vmlinux)?;
    fs::rename(&config, dir.join("config")).map_err(|_| incomplete("boot/config"))?;
    fs::rename(&modules, dir.join("modules")).map_err(io_error("move", &modules))?;
    fs::remove_dir_all(&tree).map_err(io_error("remove", &tree))?;
    // Symlinks into /usr/src, where the target system has the headers.
    for link in ["build", "source"] {
        let _ = fs::remove_file(dir.join("modules").join(link));
    }
    let facts = Facts {
        release,
        package: candidate.name.clone(),
        version: candidate.version.clone(),
        suite: suite.to_owned(),
        sha256: candidate.sha256.clone(),
        size: candidate.size,
        vmlinux_sha256: digest::of_bytes(&vmlinux),
        vmlinux_size: vmlinux.len() as u64,
    };
    facts.write(dir)
}

fn only_child(dir: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(dir).ok()?.flatten();
    let first = entries.next()?.path();
    entries.next().is_none().then_some(first)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Builds a module with these modinfo pairs.
    pub(crate) fn module_with(pairs: &[&str]) -> Vec<u8> {
        elf::tests::module(pairs)
    }

    /// Creates a prepared kernel below `dir` with one module and one built in.
    pub(crate) fn fake(dir: &Path) -> Kernel {
        let dir = dir.join("kernel");
        fs::create_dir_all(dir.join("modules/kernel")).unwrap();
        fs::write(dir.join("vmlinux"), "vmlinux").unwrap();
        fs::write(dir.join("modules/modules.builtin"), "kernel/virtio_pci.ko\n").unwrap();
        let module = elf::tests::module(&["depends=virtio_pci", "vermagic=6.12.95 SMP"]);
        fs::write(dir.join("modules/kernel/vsock.ko"), module).unwrap();
        let facts = Facts {
            release: "6.12.95".to_owned(),
            package: "linux-image-test".to_owned(),
            version: "6.12.95-1".to_owned(),
            suite: "sid".to_owned(),
            sha256: "0".repeat(64),
            size: 1,
            vmlinux_sha256: digest::of_bytes(b"vmlinux"),
            vmlinux_size: 7,
        };
        facts.write(&dir).unwrap();
        Kernel::open(dir).unwrap()
    }

    #[test]
    fn metapackages_are_distinguished_from_kernels() {
        assert!(is_kernel_package("linux-image-6.12.95+deb12-cloud-amd64"));
        assert!(!is_kernel_package("linux-image-cloud-amd64"));
        assert!(!is_kernel_package("linux-base-cloud-amd64"));
        assert!(!is_kernel_package("linux-image-6.12.95+deb12-cloud-amd64-dbg"));
    }
}
