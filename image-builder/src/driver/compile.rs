//! Compiles a driver's kernel modules, or takes them from the cache.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use firstlight_image::digest;
use firstlight_progress::{Progress, seconds};
use serde::{Deserialize, Serialize};

use super::build_root::{BUILD, BuildRoot, HEADERS, Job};
use super::matrix::{Patch, Table};
use super::version::Version;
use super::{Choice, Error, Gate, patch};
use crate::cache::{self, io_error};
use crate::kernel::{Facts, KernelHeaders};
use crate::packages::Packages;
use crate::packages::debian::{self, PackageRequest};
use crate::packages::lock::Pinned;

/// Debian's source package of the open kernel modules. The core of each module is
/// included as an object file; only the kernel interface layer is compiled.
const PACKAGE: &str = "nvidia-open-kernel-dkms";

/// The modules to build, always together, so that all manifests share a cache
/// entry. `nvidia-drm` and `nvidia-peermem` are excluded: without DRM in the kernel
/// and NVIDIA's InfiniBand stack they have no function.
pub const MODULES: &[&str] = &["nvidia", "nvidia-uvm", "nvidia-modeset"];

/// File name of the record in the cache directory.
const RECORD: &str = "record.json";

/// Build version; increment it when modules are built differently with the same script.
const LAYOUT: u32 = 1;

/// A driver and a kernel that match, and all inputs of the build.
#[derive(Debug)]
pub struct Plan {
    /// The driver's version.
    pub driver: Version,
    /// `uname -r` of the kernel.
    pub release: String,
    /// The driver's package.
    pub package: Pinned,
    /// The kernel's version.
    pub kernel: Version,
    headers: KernelHeaders,
    root: BuildRoot,
    patches: Vec<Patch>,
    cache: PathBuf,
    progress: Progress,
}

/// Compiled modules in the cache.
#[derive(Debug, Clone)]
pub struct BuiltModules {
    /// Their directory.
    pub dir: PathBuf,
    /// The record of the build.
    pub record: Record,
}

/// The record of compiled modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this format.
    pub schema: u32,
    /// The driver's version.
    pub driver: String,
    /// `uname -r` of the kernel.
    pub kernel_release: String,
    /// The compiler.
    pub compiler: String,
    /// Names of the applied patches.
    pub patches: Vec<String>,
    /// The driver's package.
    pub package: Pinned,
    /// The packages of the headers and the build root, whose files are not part of the modules.
    pub build_packages: Vec<Pinned>,
    /// The modules, by file name.
    pub modules: BTreeMap<String, Module>,
}

/// A module's size and hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Size in bytes.
    pub size: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
}

impl Plan {
    /// Selects the driver's package, checks the compatibility table, and prepares
    /// headers and build root.
    ///
    /// # Errors
    /// An incompatible combination, or an unavailable package.
    pub fn new(
        packages: &mut Packages<'_>,
        table: &Table,
        choice: &Choice,
        kernel: &Facts,
        gate: Gate,
    ) -> Result<Self, Error> {
        if !kernel.package.starts_with("linux-image-") {
            return Err(Error::OwnKernel { release: kernel.release.clone() });
        }
        let package = packages.find(&choice.suite, PACKAGE, PackageRequest::Series(choice.version.as_str()))?;
        let parse = |text: &str| upstream(text).parse::<Version>().map_err(|what| Error::Version { what });
        let (driver, kernel_version) = (parse(&package.version)?, parse(&kernel.version)?);
        if gate != Gate::Open {
            table.gate((&driver, &choice.suite), (&kernel_version, &kernel.suite), gate == Gate::Untried)?;
        }
        packages.note(&package);
        let headers = KernelHeaders::prepare_from(packages, kernel)?;
        patch::check(table, &driver, &kernel_version, &headers.common)?;
        let root = BuildRoot::prepare(packages, &kernel.suite, &headers.compiler()?)?;
        Ok(Self {
            release: kernel.release.clone(),
            patches: table.patches(&driver, &kernel_version).cloned().collect(),
            kernel: kernel_version,
            cache: packages.cache().to_owned(),
            progress: packages.progress(),
            driver,
            package,
            headers,
            root,
        })
    }

    /// Returns the modules, and compiles them unless cached.
    ///
    /// # Errors
    /// The first error of the compiler, or a failed file operation.
    pub fn build(&self, packages: &mut Packages<'_>) -> Result<BuiltModules, Error> {
        let dir = self.cache.join("driver").join(format!("{}-{}-{}", self.driver, self.release, &self.key()[..16]));
        let compiled = cache::publish(&dir, &self.progress, |staging| self.compile(packages, staging).map(|_| ()))?;
        let mut built = BuiltModules::open(&dir)?;
        if !compiled && let Some(corruption) = built.corruption() {
            self.progress.say(format_args!("{}: {corruption}: compiling again", self.description()));
            fs::remove_dir_all(&dir).map_err(io_error("remove", &dir))?;
            cache::publish(&dir, &self.progress, |staging| self.compile(packages, staging).map(|_| ()))?;
            built = BuiltModules::open(&dir)?;
        }
        Ok(built)
    }

    /// Compiles into the directory `into`, without using the cache.
    ///
    /// # Errors
    /// As [`Plan::build`].
    pub fn compile(&self, packages: &mut Packages<'_>, into: &Path) -> Result<Record, Error> {
        let build = into.join("build");
        let deb = packages.fetch_one(&format!("driver {}", self.driver), &self.package)?;
        self.progress.say(format_args!("{}: unpacking", self.description()));
        self.unpack(&deb, into, &build)?;
        for patch in &self.patches {
            self.progress.say(format_args!("{}: patch {}", self.description(), patch.name));
            patch::apply(patch, &build)?;
        }
        let started = Instant::now();
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.progress.say(format_args!(
            "{}: compiling with {} and {jobs} jobs, about 5 minutes of processor time",
            self.description(),
            self.root.compiler
        ));
        // The number of jobs does not affect the result, so it is not part of the script.
        let script = format!("jobs={jobs}\n{}", self.script());
        let log = into.join("log");
        let job =
            Job { name: &self.description(), build: &build, headers: &self.headers.root, script: &script, log: &log };
        if let Err(error) = self.root.run(&job, &self.progress) {
            return Err(self.save_log(&log, error));
        }
        self.progress.say(format_args!("{}: compiled in {}", self.description(), seconds(started.elapsed())));
        let record = self.collect(&build, into)?;
        fs::remove_file(&log).map_err(io_error("remove", &log))?;
        fs::remove_dir_all(&build).map_err(io_error("remove", &build))?;
        Ok(record)
    }

    fn description(&self) -> String {
        format!("driver {} for {}", self.driver, self.release)
    }

    fn incomplete(&self, what: &'static str) -> Error {
        Error::Incomplete { package: self.package.candidate().file_name(), what }
    }

    fn unpack(&self, deb: &Path, into: &Path, build: &Path) -> Result<(), Error> {
        let outer = into.join("package");
        fs::create_dir_all(&outer).map_err(io_error("create directory", &outer))?;
        let sources = Path::new("usr/src");
        debian::unpack(deb, &outer, |path| path.starts_with(sources) || sources.starts_with(path))?;
        let mut found = fs::read_dir(outer.join(sources))
            .map_err(|_| self.incomplete("usr/src"))?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.join("Kbuild").is_file());
        let source = found.next().ok_or_else(|| self.incomplete("source directory in usr/src"))?;
        fs::rename(&source, build).map_err(io_error("move", &source))?;
        fs::remove_dir_all(&outer).map_err(io_error("remove", &outer))?;
        Ok(())
    }

    /// Returns the script that the shell of the build root runs after setting
    /// `jobs`. It contains all settings that affect the modules' bytes.
    fn script(&self) -> String {
        let mounted = |dir: &Path| {
            let relative = dir.strip_prefix(&self.headers.root).unwrap_or(dir);
            format!("{HEADERS}/{}", relative.display())
        };
        let (common, own) = (mounted(&self.headers.common), mounted(&self.headers.build));
        let (release, compiler, modules) = (&self.release, &self.root.compiler, MODULES.join(" "));
        // The object file of a module's core is ten times larger with debug information,
        // which is stripped before the file is copied three times. The makefiles of Debian's headers
        // need the DEB_ variables, as dpkg-architecture is not in the build root.
        format!(
            "cd {BUILD}\n\
             find . -name '*.o_binary' -exec strip --strip-debug {{}} +\n\
             make -j\"$jobs\" modules KERNEL_UNAME={release} SYSSRC={common} SYSOUT={own} ARCH=x86_64 CC={compiler} \
             KCFLAGS=-g0 DEB_BUILD_ARCH=amd64 DEB_HOST_ARCH=amd64 NV_KERNEL_MODULES='{modules}'\n\
             for module in {modules}; do strip --strip-debug --remove-section=.comment $module.ko; done\n"
        )
    }

    /// Returns the hash of all inputs that the modules depend on.
    fn key(&self) -> String {
        let mut text = format!("{LAYOUT}\n{}\n{}", self.package.sha256, self.script());
        for one in self.headers.packages.iter().chain(&self.root.packages) {
            text.push_str(&format!("{}\n", one.sha256));
        }
        for patch in &self.patches {
            text.push_str(&format!("{}\n{}\n{}\n", patch.file, patch.find, patch.replace));
        }
        digest::of_bytes(text.as_bytes())
    }

    /// Moves the modules from the build directory to `into` and writes the record.
    fn collect(&self, build: &Path, into: &Path) -> Result<Record, Error> {
        let mut modules = BTreeMap::new();
        for name in MODULES {
            let file = format!("{name}.ko");
            let (from, to) = (build.join(&file), into.join(&file));
            if !from.is_file() {
                return Err(Error::NoModule { what: self.description(), module: file });
            }
            fs::rename(&from, &to).map_err(io_error("move", &from))?;
            let (sha256, size) = digest::of_file(&to).map_err(io_error("read", &to))?;
            modules.insert(file, Module { size, sha256 });
        }
        let record = Record {
            schema: 1,
            driver: self.driver.to_string(),
            kernel_release: self.release.clone(),
            compiler: self.root.compiler.clone(),
            patches: self.patches.iter().map(|patch| patch.name.clone()).collect(),
            package: self.package.clone(),
            build_packages: [&self.headers.packages[..], &self.root.packages].concat(),
            modules,
        };
        let path = into.join(RECORD);
        let text = serde_json::to_vec_pretty(&record).map_err(io::Error::other).map_err(io_error("write", &path))?;
        fs::write(&path, text).map_err(io_error("write", &path))?;
        Ok(record)
    }

    /// Copies the log of a failed build to the cache, as its directory will be removed.
    fn save_log(&self, log: &Path, error: Error) -> Error {
        let Error::Compile { what, first, status } = error else { return error };
        let saved = self.cache.join("driver").join(format!("{}-{}.log", self.driver, self.release));
        let copied = saved.parent().map(fs::create_dir_all).transpose().and_then(|_| fs::copy(log, &saved));
        match copied {
            Ok(_) => Error::CompileLog { what, first, log: saved },
            Err(_) => Error::Compile { what, first, status },
        }
    }
}

impl BuiltModules {
    fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(RECORD);
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let record = serde_json::from_slice(&text).map_err(io::Error::other).map_err(io_error("parse", &path))?;
        Ok(Self { dir: dir.to_owned(), record })
    }

    /// Returns a description of the first cached module that is missing or differs from the record.
    fn corruption(&self) -> Option<String> {
        let differs = |(name, recorded): (&String, &Module)| {
            let path = self.dir.join(name);
            match digest::of_file(&path) {
                Ok((sha256, _)) if sha256 == recorded.sha256 => None,
                Ok((sha256, _)) => {
                    Some(format!("cached {} has SHA-256 {sha256}, its record {}", path.display(), recorded.sha256))
                }
                Err(error) => Some(format!("cached {}: {error}", path.display())),
            }
        };
        self.record.modules.iter().find_map(differs)
    }

    /// Returns the path of a module.
    ///
    /// # Errors
    /// The name is not in [`MODULES`].
    pub fn module(&self, name: &str) -> Result<PathBuf, Error> {
        if MODULES.contains(&name) {
            return Ok(self.dir.join(format!("{name}.ko")));
        }
        Err(Error::UnknownModule { name: name.to_owned() })
    }
}

/// Returns the upstream version of a package version.
fn upstream(version: &str) -> &str {
    let bare = version.split_once(':').map_or(version, |(_, rest)| rest);
    bare.split(['-', '+', '~']).next().unwrap_or(bare)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned(name: &str) -> Pinned {
        Pinned {
            suite: "s".to_owned(),
            name: name.to_owned(),
            requested: None,
            version: "1".to_owned(),
            architecture: "amd64".to_owned(),
            source: None,
            size: 1,
            sha256: digest::of_bytes(name.as_bytes()),
        }
    }

    fn plan(cache: &Path) -> Plan {
        let root = PathBuf::from("/cache/headers/6");
        let table = Table::own().unwrap();
        let (driver, kernel) = ("550.163.01".parse().unwrap(), "6.12.107".parse().unwrap());
        Plan {
            patches: table.patches(&driver, &kernel).cloned().collect(),
            driver,
            kernel,
            release: "6.12.107+deb13-cloud-amd64".to_owned(),
            package: pinned("driver"),
            headers: KernelHeaders {
                release: "6.12.107+deb13-cloud-amd64".to_owned(),
                build: root.join("usr/src/linux-headers-6.12.107+deb13-cloud-amd64"),
                common: root.join("usr/src/linux-headers-6.12.107+deb13-common"),
                root,
                packages: vec![pinned("headers")],
            },
            root: BuildRoot::for_tests("x86_64-linux-gnu-gcc-14", vec![pinned("gcc-14")]),
            cache: cache.to_owned(),
            progress: Progress::quiet(),
        }
    }

    #[test]
    fn script_contains_only_fixed_paths() {
        let script = plan(Path::new("/cache")).script();
        assert!(script.contains(" SYSSRC=/headers/usr/src/linux-headers-6.12.107+deb13-common "), "{script}");
        assert!(script.contains(" SYSOUT=/headers/usr/src/linux-headers-6.12.107+deb13-cloud-amd64 "), "{script}");
        assert!(script.contains(" CC=x86_64-linux-gnu-gcc-14 ") && !script.contains("/cache"), "{script}");
    }

    #[test]
    fn key_depends_on_every_input_but_not_on_the_cache_path() {
        let one = plan(Path::new("/cache"));
        assert_eq!(one.key(), plan(Path::new("/elsewhere")).key());
        let changed = |change: fn(&mut Plan)| {
            let mut other = plan(Path::new("/cache"));
            change(&mut other);
            assert_ne!(one.key(), other.key());
        };
        changed(|plan| plan.package.sha256 = "1".repeat(64));
        changed(|plan| plan.headers.packages[0].sha256 = "1".repeat(64));
        changed(|plan| plan.root.packages[0].sha256 = "1".repeat(64));
        changed(|plan| plan.root.compiler = "gcc".to_owned());
        changed(|plan| plan.patches[0].replace = "other".to_owned());
        changed(|plan| plan.patches.clear());
    }

    #[test]
    fn cached_modules_are_reused_unless_corrupt() {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path());
        let cached = dir.path().join("driver").join(format!("550.163.01-{}-{}", plan.release, &plan.key()[..16]));
        let build = cached.join("build");
        fs::create_dir_all(&build).unwrap();
        for name in MODULES {
            fs::write(build.join(format!("{name}.ko")), name).unwrap();
        }
        let record = plan.collect(&build, &cached).unwrap();
        assert_eq!(record.patches, ["pci-resize-resource-exclude-bars"]);
        assert_eq!(record.modules["nvidia.ko"].sha256, digest::of_bytes(b"nvidia"));
        // The driver package is not available here, so this succeeds only with the cache.
        let built = plan.build(&mut Packages::new(dir.path(), None, Progress::quiet())).unwrap();
        assert_eq!(built.record, record);
        assert_eq!(fs::read(built.module("nvidia-uvm").unwrap()).unwrap(), b"nvidia-uvm");
        assert!(built.module("../x").unwrap_err().to_string().contains("nvidia-modeset"));

        // Corrupt modules in the cache are not used: they are compiled again, which fails here without packages.
        assert_eq!(built.corruption(), None);
        fs::write(cached.join("nvidia.ko"), "nvidiX").unwrap();
        let corruption = built.corruption().unwrap();
        assert!(
            corruption.contains("nvidia.ko") && corruption.contains(&record.modules["nvidia.ko"].sha256),
            "{corruption}"
        );
        assert!(plan.build(&mut Packages::new(dir.path(), None, Progress::quiet())).is_err());
        assert!(!cached.exists(), "the corrupt cache entry is removed");
    }

    #[test]
    fn missing_module_then_error_names_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("nvidia.ko"), "").unwrap();
        let into = dir.path().join("into");
        fs::create_dir(&into).unwrap();
        let error = plan(dir.path()).collect(dir.path(), &into).unwrap_err().to_string();
        assert!(error.contains("nvidia-uvm.ko") && error.contains("6.12.107+deb13"), "{error}");
        assert!(!into.join(RECORD).exists());
    }

    #[test]
    fn build_fails_then_log_is_saved() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        fs::write(&log, "everything").unwrap();
        let failed =
            Error::Compile { what: "x".to_owned(), first: "a.c: error: b".to_owned(), status: Default::default() };
        let error = plan(dir.path()).save_log(&log, failed);
        let Error::CompileLog { log: saved, .. } = &error else { panic!("{error}") };
        assert_eq!(fs::read(saved).unwrap(), b"everything");
        assert!(error.to_string().contains("a.c: error: b"), "{error}");
    }

    #[test]
    fn upstream_version_of_a_kernel_package() {
        assert_eq!(upstream("6.12.95-1~bpo12+1"), "6.12.95");
        assert_eq!(upstream("1:6.1.176-1"), "6.1.176");
    }
}
