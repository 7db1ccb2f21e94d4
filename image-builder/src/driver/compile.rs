//! Compiling a driver's kernel modules, once.

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
use crate::debian::{self, Wish};
use crate::kernel::{Facts, KernelHeaders};
use crate::lock::Pinned;
use crate::packages::Packages;

/// Debian's package of the open modules' source. The core of each module
/// comes linked; what depends on the kernel is compiled.
const PACKAGE: &str = "nvidia-open-kernel-dkms";

/// What is built, always together, so that one cache entry serves every
/// manifest. Not `nvidia-drm` and `nvidia-peermem`: on kernels without DRM and
/// NVIDIA's own InfiniBand stack they are empty.
pub const MODULES: &[&str] = &["nvidia", "nvidia-uvm", "nvidia-modeset"];

/// What the cache's directory says about itself.
const RECORD: &str = "record.json";

/// Changes when modules are built differently in a way that the script does not show.
const LAYOUT: u32 = 1;

/// A driver and a kernel that fit, and all that is needed to compile.
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
pub struct Built {
    /// Their directory.
    pub dir: PathBuf,
    /// What was recorded about them.
    pub record: Record,
}

/// What is known about compiled modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this record's shape.
    pub schema: u32,
    /// The driver's version.
    pub driver: String,
    /// `uname -r` of the kernel.
    pub kernel_release: String,
    /// The compiler.
    pub compiler: String,
    /// Names of the patches that were applied.
    pub patches: Vec<String>,
    /// The driver's package.
    pub package: Pinned,
    /// What it was compiled with, and nothing of which is in the modules: headers and build root.
    pub build_packages: Vec<Pinned>,
    /// The modules, by file name.
    pub modules: BTreeMap<String, Module>,
}

/// A module's size and hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// In bytes.
    pub size: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

impl Plan {
    /// Finds the driver, asks the table, and makes headers and build root ready.
    ///
    /// # Errors
    /// What the table refuses, and packages that cannot be had.
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
        let package = packages.find(&choice.suite, PACKAGE, Wish::Series(choice.version.as_str()))?;
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

    /// The modules, compiled unless the very same were before.
    ///
    /// # Errors
    /// What the compiler says first, or a failed file operation.
    pub fn build(&self, packages: &mut Packages<'_>) -> Result<Built, Error> {
        let dir = self.cache.join("driver").join(format!("{}-{}-{}", self.driver, self.release, &self.key()[..16]));
        let compiled = cache::publish(&dir, &self.progress, |half| self.compile(packages, half).map(|_| ()))?;
        let mut built = Built::open(&dir)?;
        if !compiled && let Some(damage) = built.damage() {
            self.progress.say(format_args!("{}: {damage}: compiling again", self.what()));
            fs::remove_dir_all(&dir).map_err(io_error("remove", &dir))?;
            cache::publish(&dir, &self.progress, |half| self.compile(packages, half).map(|_| ()))?;
            built = Built::open(&dir)?;
        }
        Ok(built)
    }

    /// Compiles into the directory `into`, whether or not it was done before.
    ///
    /// # Errors
    /// As [`Plan::build`].
    pub fn compile(&self, packages: &mut Packages<'_>, into: &Path) -> Result<Record, Error> {
        let build = into.join("build");
        let deb = packages.fetch_one(&format!("driver {}", self.driver), &self.package)?;
        self.progress.say(format_args!("{}: unpacking", self.what()));
        self.unpack(&deb, into, &build)?;
        for patch in &self.patches {
            self.progress.say(format_args!("{}: patch {}", self.what(), patch.name));
            patch::apply(patch, &build)?;
        }
        let started = Instant::now();
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.progress.say(format_args!(
            "{}: compiling with {} and {jobs} jobs, about 5 minutes of processor time",
            self.what(),
            self.root.compiler
        ));
        // How many run at once does not show in the result, so it is no part of the script.
        let script = format!("jobs={jobs}\n{}", self.script());
        let log = into.join("log");
        let job = Job { what: &self.what(), build: &build, headers: &self.headers.root, script: &script, log: &log };
        if let Err(error) = self.root.run(&job, &self.progress) {
            return Err(self.keep_log(&log, error));
        }
        self.progress.say(format_args!("{}: compiled in {}", self.what(), seconds(started.elapsed())));
        let record = self.keep(&build, into)?;
        fs::remove_file(&log).map_err(io_error("remove", &log))?;
        fs::remove_dir_all(&build).map_err(io_error("remove", &build))?;
        Ok(record)
    }

    fn what(&self) -> String {
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
        let source = found.next().ok_or_else(|| self.incomplete("directory of source below usr/src"))?;
        fs::rename(&source, build).map_err(io_error("move", &source))?;
        fs::remove_dir_all(&outer).map_err(io_error("remove", &outer))?;
        Ok(())
    }

    /// What the build root's shell runs, after `jobs` is set. All that decides
    /// about the modules' bytes beside the inputs is in here.
    fn script(&self) -> String {
        let inside = |dir: &Path| {
            let below = dir.strip_prefix(&self.headers.root).unwrap_or(dir);
            format!("{HEADERS}/{}", below.display())
        };
        let (common, own) = (inside(&self.headers.common), inside(&self.headers.build));
        let (release, compiler, modules) = (&self.release, &self.root.compiler, MODULES.join(" "));
        // The core of a module is ten times its size with debug information:
        // off it goes before it is copied three times. Debian's headers
        // want to know the architectures, and ask its packaging system, which is not here.
        format!(
            "cd {BUILD}\n\
             find . -name '*.o_binary' -exec strip --strip-debug {{}} +\n\
             make -j\"$jobs\" modules KERNEL_UNAME={release} SYSSRC={common} SYSOUT={own} ARCH=x86_64 CC={compiler} \
             KCFLAGS=-g0 DEB_BUILD_ARCH=amd64 DEB_HOST_ARCH=amd64 NV_KERNEL_MODULES='{modules}'\n\
             for module in {modules}; do strip --strip-debug --remove-section=.comment $module.ko; done\n"
        )
    }

    /// Names everything that the modules depend on.
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

    /// Takes the modules out of the source's directory.
    fn keep(&self, build: &Path, into: &Path) -> Result<Record, Error> {
        let mut modules = BTreeMap::new();
        for name in MODULES {
            let file = format!("{name}.ko");
            let (from, to) = (build.join(&file), into.join(&file));
            if !from.is_file() {
                return Err(Error::NoModule { what: self.what(), module: file });
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

    /// A failed build's directory goes away; its log stays beside.
    fn keep_log(&self, log: &Path, error: Error) -> Error {
        let Error::Compile { what, first, status } = error else { return error };
        let kept = self.cache.join("driver").join(format!("{}-{}.log", self.driver, self.release));
        let place = kept.parent().map(fs::create_dir_all).transpose().and_then(|_| fs::copy(log, &kept));
        match place {
            Ok(_) => Error::CompileLog { what, first, log: kept },
            Err(_) => Error::Compile { what, first, status },
        }
    }
}

impl Built {
    fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(RECORD);
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let record = serde_json::from_slice(&text).map_err(io::Error::other).map_err(io_error("understand", &path))?;
        Ok(Self { dir: dir.to_owned(), record })
    }

    /// Returns why the cached modules are not those of the record: a module is missing or has another hash.
    fn damage(&self) -> Option<String> {
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

    /// The module's file.
    ///
    /// # Errors
    /// A name that is none of [`MODULES`].
    pub fn module(&self, name: &str) -> Result<PathBuf, Error> {
        if MODULES.contains(&name) {
            return Ok(self.dir.join(format!("{name}.ko")));
        }
        Err(Error::UnknownModule { name: name.to_owned() })
    }
}

/// The version a person would say, of a package's version.
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
    fn the_script_uses_fixed_paths_only() {
        let script = plan(Path::new("/cache")).script();
        assert!(script.contains(" SYSSRC=/headers/usr/src/linux-headers-6.12.107+deb13-common "), "{script}");
        assert!(script.contains(" SYSOUT=/headers/usr/src/linux-headers-6.12.107+deb13-cloud-amd64 "), "{script}");
        assert!(script.contains(" CC=x86_64-linux-gnu-gcc-14 ") && !script.contains("/cache"), "{script}");
    }

    #[test]
    fn every_input_is_in_the_key_and_the_cache_is_not() {
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
    fn what_was_compiled_is_not_compiled_again() {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path());
        let cached = dir.path().join("driver").join(format!("550.163.01-{}-{}", plan.release, &plan.key()[..16]));
        let build = cached.join("build");
        fs::create_dir_all(&build).unwrap();
        for name in MODULES {
            fs::write(build.join(format!("{name}.ko")), name).unwrap();
        }
        let record = plan.keep(&build, &cached).unwrap();
        assert_eq!(record.patches, ["pci-resize-resource-exclude-bars"]);
        assert_eq!(record.modules["nvidia.ko"].sha256, digest::of_bytes(b"nvidia"));
        // No driver package can be had here: only the cache can answer.
        let built = plan.build(&mut Packages::new(dir.path(), None, Progress::quiet())).unwrap();
        assert_eq!(built.record, record);
        assert_eq!(fs::read(built.module("nvidia-uvm").unwrap()).unwrap(), b"nvidia-uvm");
        assert!(built.module("../x").unwrap_err().to_string().contains("nvidia-modeset"));

        // Bytes that changed in the cache never reach an image: it compiles again, which fails here for want of packages.
        assert_eq!(built.damage(), None);
        fs::write(cached.join("nvidia.ko"), "nvidiX").unwrap();
        let damage = built.damage().unwrap();
        assert!(damage.contains("nvidia.ko") && damage.contains(&record.modules["nvidia.ko"].sha256), "{damage}");
        assert!(plan.build(&mut Packages::new(dir.path(), None, Progress::quiet())).is_err());
        assert!(!cached.exists(), "what was damaged is not used again");
    }

    #[test]
    fn a_module_that_was_not_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("nvidia.ko"), "").unwrap();
        let into = dir.path().join("into");
        fs::create_dir(&into).unwrap();
        let error = plan(dir.path()).keep(dir.path(), &into).unwrap_err().to_string();
        assert!(error.contains("nvidia-uvm.ko") && error.contains("6.12.107+deb13"), "{error}");
        assert!(!into.join(RECORD).exists());
    }

    #[test]
    fn the_log_of_a_failed_build_stays() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        fs::write(&log, "everything").unwrap();
        let failed =
            Error::Compile { what: "x".to_owned(), first: "a.c: error: b".to_owned(), status: Default::default() };
        let error = plan(dir.path()).keep_log(&log, failed);
        let Error::CompileLog { log: kept, .. } = &error else { panic!("{error}") };
        assert_eq!(fs::read(kept).unwrap(), b"everything");
        assert!(error.to_string().contains("a.c: error: b"), "{error}");
    }

    #[test]
    fn versions_of_kernels() {
        assert_eq!(upstream("6.12.95-1~bpo12+1"), "6.12.95");
        assert_eq!(upstream("1:6.1.176-1"), "6.1.176");
    }
}
