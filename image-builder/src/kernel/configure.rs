//! Configuring a kernel: runs Kconfig on the fragments and explains values that it does not apply. Only the
//! kernel's own Kconfig program is compiled.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use firstlight_progress::Progress;

use super::compile::{Job, check_tools};
use super::config::{self, UnmetValue};
use super::dot_config::DotConfig;
use super::kconfig::Tree;
use super::recipe::Recipe;
use super::{Error, Kernel, only_child};
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::debian::{self, PackageRequest};
use crate::packages::lock::Pinned;

/// Version of the cached directory's layout; changes when other parts of the source are stored.
const LAYOUT: u32 = 1;

impl Kernel {
    /// Configures the kernel of a recipe and returns its `.config` in the cache. Takes minutes less than
    /// [`Kernel::build`] and is as strict.
    ///
    /// # Errors
    /// A tool is missing, the source is unavailable, or the kernel does not apply the configuration (with each
    /// symbol and why).
    pub fn configure(cache: &Path, recipe: &Recipe, progress: Progress) -> Result<PathBuf, Error> {
        let compiler = check_tools()?;
        let mut packages = Packages::new(cache, None, progress);
        let pinned = packages.find(&recipe.suite, &recipe.source, PackageRequest::Newest)?;
        let source = kconfig_of(&mut packages, recipe, &pinned)?;
        let candidate = pinned.candidate();
        let requested = recipe.requested.text();
        let of_source = source.file_name().unwrap_or_default().to_string_lossy();
        let key =
            digest::of_bytes(format!("{LAYOUT}\n{of_source}\n{}\n{compiler}\n{requested}", recipe.name).as_bytes());
        let dir = cache.join("kernels").join(format!("configured-{}", &key[..16]));
        cache::publish(&dir, &progress, |half| {
            let job = Job::new(recipe, candidate, half, progress);
            let out = half.join("out");
            fs::create_dir_all(&out).map_err(io_error("create directory", &out))?;
            let config = job.configure(&source, Some(&out))?;
            fs::rename(&config, half.join("config")).map_err(io_error("move", &config))?;
            fs::remove_dir_all(&out).map_err(io_error("remove", &out))?;
            Ok::<(), Error>(())
        })?;
        Ok(dir.join("config"))
    }

    /// Returns the Kconfig files of a recipe's source, in the cache.
    ///
    /// # Errors
    /// The source is unavailable.
    pub fn kconfig(cache: &Path, recipe: &Recipe, progress: Progress) -> Result<PathBuf, Error> {
        let mut packages = Packages::new(cache, None, progress);
        let pinned = packages.find(&recipe.suite, &recipe.source, PackageRequest::Newest)?;
        kconfig_of(&mut packages, recipe, &pinned)
    }
}

/// [`Kernel::kconfig`] for a resolved source package.
fn kconfig_of(packages: &mut Packages<'_>, recipe: &Recipe, pinned: &Pinned) -> Result<PathBuf, Error> {
    let (candidate, progress) = (pinned.candidate(), packages.progress());
    let dir = packages.cache().join("kernels").join(format!("kconfig-{}-{LAYOUT}", &candidate.sha256[..16]));
    cache::publish(&dir, &progress, |half| {
        let work = half.with_extension("work");
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&work).map_err(io_error("create directory", &work))?;
        let job = Job::new(recipe, candidate, &work, progress);
        let tree = work.join("tree");
        job.unpack(packages, pinned, &tree, is_kconfig_input)?;
        for entry in fs::read_dir(&tree).map_err(io_error("read directory", &tree))?.flatten() {
            let to = half.join(entry.file_name());
            fs::rename(entry.path(), &to).map_err(io_error("move to", &to))?;
        }
        fs::remove_dir_all(&work).map_err(io_error("remove", &work))?;
        Ok::<(), Error>(())
    })?;
    Ok(dir)
}

/// Returns whether `make *config` reads a file of the source; `path` begins with the source's own directory.
fn is_kconfig_input(path: &Path) -> bool {
    let path: PathBuf = path.components().skip(1).collect();
    let named = |start: &str| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start));
    path.as_os_str().is_empty()
        || named("Kconfig")
        || path.starts_with("scripts")
        || (named("Makefile") && path.parent().is_some_and(|dir| dir == Path::new("") || dir == Path::new("arch/x86")))
}

impl Job<'_> {
    /// Unpacks the files that `filter` selects from the source archive in the package.
    pub(super) fn unpack(
        &self,
        packages: &mut Packages<'_>,
        pinned: &Pinned,
        tree: &Path,
        filter: impl Fn(&Path) -> bool,
    ) -> Result<(), Error> {
        let deb = packages.fetch_one(&format!("source of {}", self.label()), pinned)?;
        self.progress.say(format_args!("{}: unpacking the source", self.label()));
        let outer = self.dir.join("package");
        fs::create_dir_all(&outer).map_err(io_error("create directory", &outer))?;
        let name = format!("usr/src/{}.tar.xz", self.recipe.source);
        let name = Path::new(&name);
        debian::unpack(&deb, &outer, |path| name.starts_with(path))?;
        let archive = outer.join(name);
        let file = File::open(&archive).map_err(|_| Error::Incomplete {
            package: self.candidate.file_name(),
            what: "usr/src/*.tar.xz named as the package is",
        })?;
        let plain = lzma_rust2::XzReader::new(BufReader::new(file), true);
        let inner = self.dir.join("source");
        fs::create_dir_all(&inner).map_err(io_error("create directory", &inner))?;
        let failed = || io_error("unpack", &archive);
        for entry in tar::Archive::new(plain).entries().map_err(failed())? {
            let mut entry = entry.map_err(failed())?;
            let selected = entry.path().is_ok_and(|path| filter(&path));
            if selected && !entry.unpack_in(&inner).map_err(failed())? {
                let outside = std::io::Error::other("an entry points outside the directory");
                return Err(failed()(outside).into());
            }
        }
        let top = only_child(&inner)
            .ok_or(Error::Incomplete { package: self.candidate.file_name(), what: "single directory of source" })?;
        fs::rename(&top, tree).map_err(io_error("move", &top))?;
        for dir in [&outer, &inner] {
            fs::remove_dir_all(dir).map_err(io_error("remove", dir))?;
        }
        Ok(())
    }

    /// Runs `make allnoconfig` with the requested values, in `tree` or in `out`, and returns the `.config`.
    pub(super) fn configure(&self, tree: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
        let requested = self.dir.join("requested.config");
        fs::write(&requested, self.recipe.requested.text()).map_err(io_error("write", &requested))?;
        let allconfig = format!("KCONFIG_ALLCONFIG={}", requested.display());
        let elsewhere = out.map(|out| format!("O={}", out.display()));
        let arguments: Vec<&str> =
            elsewhere.as_deref().into_iter().chain([allconfig.as_str(), "allnoconfig"]).collect();
        self.make(tree, &arguments)?;
        let config = out.unwrap_or(tree).join(".config");
        let text = fs::read_to_string(&config).map_err(io_error("read", &config))?;
        self.check_requested_values(tree, &text)?;
        Ok(config)
    }

    /// Requires every symbol to have its requested value, unless the fragment marks it optional.
    fn check_requested_values(&self, tree: &Path, config: &str) -> Result<(), Error> {
        let mut unmet = self.recipe.requested.unmet_values(config);
        if unmet.is_empty() {
            return Ok(());
        }
        // The explanations are best effort.
        if let (Ok(source), Ok(config)) = (Tree::read(tree), DotConfig::parse(config)) {
            source.explain_unmet(&mut unmet, &config);
        }
        let (optional, unmet): (Vec<UnmetValue>, Vec<UnmetValue>) =
            unmet.into_iter().partition(|one| one.requested.optional);
        for one in optional {
            self.progress.say(format_args!("{}: {one}; ignored, the symbol is optional", self.label()));
        }
        if unmet.is_empty() {
            return Ok(());
        }
        Err(Error::Configuration { kernel: self.label(), source: config::Error::Unmet(unmet) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_files_are_retained_and_sources_are_not() {
        for stored in ["linux-6.12", "linux-6.12/Kconfig", "linux-6.12/Makefile", "linux-6.12/drivers/md/Kconfig.debug"]
        {
            assert!(is_kconfig_input(Path::new(stored)), "{stored}");
        }
        assert!(is_kconfig_input(Path::new("linux-6.12/scripts/kconfig/conf.c")));
        assert!(is_kconfig_input(Path::new("linux-6.12/arch/x86/Makefile_32.cpu")));
        for left_out in ["linux-6.12/drivers/md/Makefile", "linux-6.12/init/main.c", "linux-6.12/tools/scripts/x"] {
            assert!(!is_kconfig_input(Path::new(left_out)), "{left_out}");
        }
    }

    /// Configures a source tree whose `make` writes `config` as its `.config`.
    fn configure_with(fragment: &str, config: &str) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("a.config", fragment);
        write("r.toml", "name = \"r\"\nsource = \"linux-source-6.12\"\nsuite = \"sid\"\nfragments = [\"a.config\"]\n");
        write("Kconfig", "config NET\n\tbool \"Net\"\nconfig VSOCKETS\n\tbool \"V\"\n\tdepends on NET\n");
        write("Makefile", &format!("allnoconfig:\n\t@test -f $(KCONFIG_ALLCONFIG)\n\t@printf '{config}' > .config\n"));
        let recipe = Recipe::read(&dir.path().join("r.toml")).unwrap();
        let candidate = crate::packages::debian::Candidate {
            name: "linux-source-6.12".to_owned(),
            version: "6.12.95-1".to_owned(),
            architecture: "all".to_owned(),
            source: None,
            size: 1,
            sha256: "0".repeat(64),
            depends: String::new(),
        };
        let work = dir.path().join("work");
        fs::create_dir(&work).unwrap();
        let job = Job::new(&recipe, candidate, &work, Progress::quiet());
        job.configure(dir.path(), None).map(drop).map_err(|error| {
            let cause = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
            format!("{error}: {cause}")
        })
    }

    #[test]
    fn symbol_rejected_by_kernel_is_reported_with_reason() {
        let fragment = "# Sockets.\nCONFIG_VSOCKETS=y\nCONFIG_OTHER=y\n";
        let error = configure_with(fragment, "# CONFIG_NET is not set\\n").unwrap_err();
        for words in [
            "kernel r 6.12.95 does not apply the configuration: 2 of the requested symbols",
            "CONFIG_VSOCKETS=y (a.config:2) is n: unmet dependencies: NET is n",
            "CONFIG_OTHER=y (a.config:3) is n: this kernel does not have the symbol",
        ] {
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(configure_with("CONFIG_VSOCKETS=y\n", "CONFIG_NET=y\\nCONFIG_VSOCKETS=y\\n"), Ok(()));
    }

    #[test]
    fn missing_optional_symbol_is_accepted() {
        assert_eq!(configure_with("# [optional] Sockets.\nCONFIG_VSOCKETS=y\n", "# CONFIG_NET is not set\\n"), Ok(()));
    }
}
