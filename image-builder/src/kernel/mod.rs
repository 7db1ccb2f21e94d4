//! A kernel as image material: an uncompressed `vmlinux` that a VMM can enter
//! directly, the configuration, and modules. Debian's package is taken apart;
//! a kernel of our own is built from Debian's source.

pub mod check;
mod compile;
pub mod config;
mod configure;
pub mod dot_config;
mod elf;
pub mod fragment;
pub mod headers;
pub mod kconfig;
pub mod modules;
mod package_config;
mod payload;
pub mod recipe;
pub mod version;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cache::{self, io_error};
use crate::debian::{self, Candidate, Wish};
use crate::digest;
use crate::packages::{self, Packages};
use crate::progress::Progress;

pub use elf::ModuleInfo;
pub use headers::KernelHeaders;
pub use package_config::package_config;

/// The files below `/lib/firmware` that a module names; `name` is that of its
/// file, whose end says how it is packed.
///
/// # Errors
/// It is not packed as its name says, or no module.
pub fn module_firmware(name: &str, bytes: &[u8]) -> Result<Vec<String>, String> {
    Ok(elf::module_info(&modules::unpacked(name, bytes)?)?.firmware)
}

/// Why a kernel could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The package could not be had.
    #[error(transparent)]
    Packages(Box<packages::Error>),
    /// It could not be unpacked.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// The package does not hold what a kernel package holds.
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
    /// The source does not take the configuration.
    #[error("{kernel} does not take the configuration")]
    Configuration {
        /// Which kernel.
        kernel: String,
        /// The symbols.
        source: config::Error,
    },
    /// A program that a build needs is not there.
    #[error("building a kernel needs {tool}: install the package {package}")]
    Tool {
        /// The program.
        tool: &'static str,
        /// Debian's package of it.
        package: &'static str,
    },
    /// A step of a build failed.
    #[error("{what}: {command}: {said}")]
    Build {
        /// Which kernel.
        what: String,
        /// The command.
        command: String,
        /// How it ended, and its last lines.
        said: String,
    },
    /// The compressed kernel could not be taken apart.
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
    /// A wanted module is neither a file nor built in.
    #[error("kernel {release} has no module {name} (needed by {needed_by}), as a file or built in")]
    NoModule {
        /// The kernel.
        release: String,
        /// The module.
        name: String,
        /// Who wants it.
        needed_by: String,
    },
    /// The headers package does not name what it needs.
    #[error("package {package} depends on no {needed}* package: the layout of Debian's headers has changed")]
    Headers {
        /// The headers package.
        package: String,
        /// How the name of the other package begins.
        needed: &'static str,
    },
    /// A cached kernel is not the one that was unpacked or compiled.
    #[error("the kernel in {} has changed since it was put there: remove the directory and try again", dir.display())]
    KernelDamaged {
        /// Its directory.
        dir: PathBuf,
    },
    /// Unpacked headers lack a file.
    #[error("the kernel headers in {} are not complete: remove it and try again", dir.display())]
    HeadersDamaged {
        /// Their directory.
        dir: PathBuf,
    },
    /// A module was built for another kernel.
    #[error("module {} is for kernel {found}, the image has {release}: build it again", file.display())]
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

/// Which kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A package of Debian.
    Package(Package),
    /// One that we build; the recipe's file.
    Recipe(PathBuf),
}

/// Which kernel package, and from where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// A kernel package, or one that depends on the newest of its kind
    /// (`linux-image-cloud-amd64`).
    pub package: String,
    /// The Debian suite.
    pub suite: String,
    /// Only versions that begin with these numbers.
    pub series: Option<String>,
}

/// A prepared kernel in the cache.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// What was recorded when it was unpacked.
    pub facts: Facts,
    dir: PathBuf,
}

/// What is known about a prepared kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// `uname -r`.
    pub release: String,
    /// The Debian package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// The suite it came from.
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
    /// Writes them into a prepared kernel's directory, last of all.
    fn write(&self, dir: &Path) -> Result<(), Error> {
        let path = dir.join("facts.json");
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other).map_err(io_error("write", &path))?;
        fs::write(&path, text).map_err(io_error("write", &path))?;
        Ok(())
    }
}

/// Changes when the directory's layout does, so that old ones are made anew.
const LAYOUT: u32 = 1;

impl Kernel {
    /// Makes the kernel ready: a package is found, downloaded and unpacked, a
    /// recipe built, each only if needed.
    ///
    /// # Errors
    /// No such package, a failed download, a package that is no kernel, or what
    /// [`Kernel::build`] fails with.
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
        let wish = source.series.as_deref().map_or(Wish::Newest, Wish::Series);
        let pinned = packages.find_through(&source.suite, &source.package, wish, is_kernel_package)?;
        let candidate = pinned.candidate();
        let (label, progress) = (format!("kernel {}", candidate.upstream_version()), packages.progress());
        let dir = packages.cache().join("kernels").join(format!("{}-{LAYOUT}", &candidate.sha256[..16]));
        packages.note(&pinned);
        cache::publish(&dir, &progress, |half| {
            let deb = packages.fetch_one(&label, &pinned)?;
            progress.say(format_args!("{label}: unpacking"));
            fill(half, &deb, &candidate, &source.suite)
        })?;
        Self::open(dir)
    }

    fn open(dir: PathBuf) -> Result<Self, Error> {
        let path = dir.join("facts.json");
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let facts =
            serde_json::from_slice(&text).map_err(|error| io_error("understand", &path)(io::Error::other(error)))?;
        let kernel = Self { facts, dir };
        let vmlinux = kernel.vmlinux();
        let (sha256, _) = digest::of_file(&vmlinux).map_err(io_error("read", &vmlinux))?;
        if sha256 == kernel.facts.vmlinux_sha256 { Ok(kernel) } else { Err(Error::KernelDamaged { dir: kernel.dir }) }
    }

    /// The ELF file that a VMM enters through its PVH note.
    #[must_use]
    pub fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// The configuration the kernel was built with.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.dir.join("config")
    }

    /// The directory with `kernel/`, `modules.builtin` and so on.
    #[must_use]
    pub fn modules(&self) -> PathBuf {
        self.dir.join("modules")
    }
}

/// `linux-image-6.12.95+deb12-cloud-amd64`: the number tells it from a pointer.
fn is_kernel_package(name: &str) -> bool {
    name.strip_prefix("linux-image-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        && !name.ends_with("-dbg")
}

fn fill(dir: &Path, deb: &Path, candidate: &Candidate, suite: &str) -> Result<(), Error> {
    let tree = dir.join("package");
    // Since Debian 13 modules lie under usr/lib.
    let wanted =
        |path: &Path| ["boot", "lib", "usr/lib"].iter().any(|top| path.starts_with(top)) || path == Path::new("usr");
    fs::create_dir_all(&tree).map_err(io_error("create directory", &tree))?;
    debian::unpack(deb, &tree, wanted)?;
    let incomplete = |what| Error::Incomplete { package: candidate.file_name(), what };

    let modules = ["lib/modules", "usr/lib/modules"].iter().find_map(|place| only_child(&tree.join(place)));
    let modules = modules.ok_or_else(|| incomplete("directory lib/modules/RELEASE"))?;
    // A package's links are for the system that it is installed on, not for this one.
    let root = fs::canonicalize(&tree).map_err(io_error("inspect", &tree))?;
    let inside = |path: &Path| fs::canonicalize(path).is_ok_and(|real| real.starts_with(&root));
    let own = |path: &Path, what| if inside(path) { Ok(()) } else { Err(incomplete(what)) };
    own(&modules, "directory lib/modules/RELEASE of its own")?;
    let release =
        modules.file_name().and_then(|name| name.to_str()).ok_or_else(|| incomplete("release name"))?.to_owned();
    let vmlinuz = tree.join(format!("boot/vmlinuz-{release}"));
    let config = tree.join(format!("boot/config-{release}"));
    own(&vmlinuz, "boot/vmlinuz")?;
    own(&config, "boot/config")?;
    own(&modules.join("modules.builtin"), "modules.builtin")?;
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
    // They point into /usr/src of a machine that has the headers installed.
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

    /// A module that says this of itself.
    pub(crate) fn module_with(pairs: &[&str]) -> Vec<u8> {
        elf::tests::module(pairs)
    }

    /// A prepared kernel below `directory` with one module and one built in.
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
        Kernel { facts, dir }
    }

    #[test]
    fn pointers_are_told_from_kernels() {
        assert!(is_kernel_package("linux-image-6.12.95+deb12-cloud-amd64"));
        assert!(!is_kernel_package("linux-image-cloud-amd64"));
        assert!(!is_kernel_package("linux-base-cloud-amd64"));
        assert!(!is_kernel_package("linux-image-6.12.95+deb12-cloud-amd64-dbg"));
    }
}
