//! Configuring a kernel: what its source makes of the fragments, and why it
//! does not take some of it. Nothing is compiled but the kernel's own
//! configuration program.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::compile::{Job, tools};
use super::config::{self, Refused};
use super::dot_config::DotConfig;
use super::kconfig::Tree;
use super::recipe::Recipe;
use super::{Error, Kernel, only_child};
use crate::cache::{self, io_error};
use crate::debian::{self, Wish};
use crate::digest;
use crate::lock::Pinned;
use crate::packages::Packages;
use crate::progress::Progress;

/// Changes when another part of the source is kept.
const LAYOUT: u32 = 1;

impl Kernel {
    /// Configures the kernel of a recipe and returns its `.config` in the
    /// cache: minutes sooner than [`Kernel::build`], and as strict.
    ///
    /// # Errors
    /// A tool is missing, the source cannot be had, or the kernel does not take
    /// the configuration (with each symbol and why).
    pub fn configure(cache: &Path, recipe: &Recipe, progress: Progress) -> Result<PathBuf, Error> {
        let compiler = tools()?;
        let mut packages = Packages::new(cache, None, progress);
        let pinned = packages.find(&recipe.suite, &recipe.source, Wish::Newest)?;
        let source = kconfig_of(&mut packages, recipe, &pinned)?;
        let candidate = pinned.candidate();
        let wanted = recipe.wishes.text();
        let of_source = source.file_name().unwrap_or_default().to_string_lossy();
        let key = digest::of_bytes(format!("{LAYOUT}\n{of_source}\n{}\n{compiler}\n{wanted}", recipe.name).as_bytes());
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

    /// The part of a recipe's source that says what can be configured, in the
    /// cache.
    ///
    /// # Errors
    /// The source cannot be had.
    pub fn kconfig(cache: &Path, recipe: &Recipe, progress: Progress) -> Result<PathBuf, Error> {
        let mut packages = Packages::new(cache, None, progress);
        let pinned = packages.find(&recipe.suite, &recipe.source, Wish::Newest)?;
        kconfig_of(&mut packages, recipe, &pinned)
    }
}

/// [`Kernel::kconfig`] of a source that was found already.
fn kconfig_of(packages: &mut Packages<'_>, recipe: &Recipe, pinned: &Pinned) -> Result<PathBuf, Error> {
    let (candidate, progress) = (pinned.candidate(), packages.progress());
    let dir = packages.cache().join("kernels").join(format!("kconfig-{}-{LAYOUT}", &candidate.sha256[..16]));
    cache::publish(&dir, &progress, |half| {
        let work = half.with_extension("work");
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&work).map_err(io_error("create directory", &work))?;
        let job = Job::new(recipe, candidate, &work, progress);
        let tree = work.join("tree");
        job.unpack(packages, pinned, &tree, says_what_can_be_configured)?;
        for entry in fs::read_dir(&tree).map_err(io_error("read directory", &tree))?.flatten() {
            let to = half.join(entry.file_name());
            fs::rename(entry.path(), &to).map_err(io_error("move to", &to))?;
        }
        fs::remove_dir_all(&work).map_err(io_error("remove", &work))?;
        Ok::<(), Error>(())
    })?;
    Ok(dir)
}

/// Whether `make *config` reads a file of the source; `path` begins with the source's own directory.
fn says_what_can_be_configured(path: &Path) -> bool {
    let path: PathBuf = path.components().skip(1).collect();
    let named = |start: &str| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start));
    path.as_os_str().is_empty()
        || named("Kconfig")
        || path.starts_with("scripts")
        || (named("Makefile") && path.parent().is_some_and(|dir| dir == Path::new("") || dir == Path::new("arch/x86")))
}

impl Job<'_> {
    /// The package holds the source as one compressed archive.
    pub(super) fn unpack(
        &self,
        packages: &mut Packages<'_>,
        pinned: &Pinned,
        tree: &Path,
        keep: impl Fn(&Path) -> bool,
    ) -> Result<(), Error> {
        let deb = packages.fetch_one(&format!("source of {}", self.what()), pinned)?;
        self.progress.say(format_args!("{}: unpacking the source", self.what()));
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
            let wanted = entry.path().is_ok_and(|path| keep(&path));
            if wanted && !entry.unpack_in(&inner).map_err(failed())? {
                let outside = std::io::Error::other("an entry leads out of the directory");
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

    /// Has the source configure itself, in its own directory or in `out`, and
    /// returns the `.config`.
    pub(super) fn configure(&self, tree: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
        let wanted = self.dir.join("wanted.config");
        fs::write(&wanted, self.recipe.wishes.text()).map_err(io_error("write", &wanted))?;
        let allconfig = format!("KCONFIG_ALLCONFIG={}", wanted.display());
        let elsewhere = out.map(|out| format!("O={}", out.display()));
        let arguments: Vec<&str> =
            elsewhere.as_deref().into_iter().chain([allconfig.as_str(), "allnoconfig"]).collect();
        self.make(tree, &arguments)?;
        let config = out.unwrap_or(tree).join(".config");
        let text = fs::read_to_string(&config).map_err(io_error("read", &config))?;
        self.judge(tree, &text)?;
        Ok(config)
    }

    /// Every symbol has to be as it was asked for; a fragment may say that one does not.
    fn judge(&self, tree: &Path, config: &str) -> Result<(), Error> {
        let mut refused = self.recipe.wishes.refused(config);
        if refused.is_empty() {
            return Ok(());
        }
        // Without reasons it is an error all the same.
        if let (Ok(source), Ok(config)) = (Tree::read(tree), DotConfig::parse(config)) {
            source.explain_refused(&mut refused, &config);
        }
        let (optional, refused): (Vec<Refused>, Vec<Refused>) = refused.into_iter().partition(|one| one.wish.optional);
        for one in optional {
            self.progress.say(format_args!("{}: {one}; it may be missing", self.what()));
        }
        if refused.is_empty() {
            return Ok(());
        }
        Err(Error::Configuration { kernel: self.what(), source: config::Error::Refused(refused) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_files_are_retained_and_sources_are_not() {
        for kept in ["linux-6.12", "linux-6.12/Kconfig", "linux-6.12/Makefile", "linux-6.12/drivers/md/Kconfig.debug"] {
            assert!(says_what_can_be_configured(Path::new(kept)), "{kept}");
        }
        assert!(says_what_can_be_configured(Path::new("linux-6.12/scripts/kconfig/conf.c")));
        assert!(says_what_can_be_configured(Path::new("linux-6.12/arch/x86/Makefile_32.cpu")));
        for left_out in ["linux-6.12/drivers/md/Makefile", "linux-6.12/init/main.c", "linux-6.12/tools/scripts/x"] {
            assert!(!says_what_can_be_configured(Path::new(left_out)), "{left_out}");
        }
    }

    /// A source tree in which `make` writes a `.config` that lacks something.
    fn judged(fragment: &str, config: &str) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("a.config", fragment);
        write("r.toml", "name = \"r\"\nsource = \"linux-source-6.12\"\nsuite = \"sid\"\nfragments = [\"a.config\"]\n");
        write("Kconfig", "config NET\n\tbool \"Net\"\nconfig VSOCKETS\n\tbool \"V\"\n\tdepends on NET\n");
        write("Makefile", &format!("allnoconfig:\n\t@test -f $(KCONFIG_ALLCONFIG)\n\t@printf '{config}' > .config\n"));
        let recipe = Recipe::read(&dir.path().join("r.toml")).unwrap();
        let candidate = crate::debian::Candidate {
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
        let wish = "# Sockets.\nCONFIG_VSOCKETS=y\nCONFIG_OTHER=y\n";
        let error = judged(wish, "# CONFIG_NET is not set\\n").unwrap_err();
        for words in [
            "kernel r 6.12.95 does not take the configuration: 2 of the wanted symbols",
            "CONFIG_VSOCKETS=y (a.config:2) is n: it needs others: NET is n",
            "CONFIG_OTHER=y (a.config:3) is n: this kernel does not know it",
        ] {
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(judged("CONFIG_VSOCKETS=y\n", "CONFIG_NET=y\\nCONFIG_VSOCKETS=y\\n"), Ok(()));
    }

    #[test]
    fn missing_optional_symbol_is_accepted() {
        assert_eq!(judged("# [optional] Sockets.\nCONFIG_VSOCKETS=y\n", "# CONFIG_NET is not set\\n"), Ok(()));
    }
}
