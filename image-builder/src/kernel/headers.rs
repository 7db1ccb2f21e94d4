//! Headers of exactly the image's kernel, to build modules against.
//!
//! Debian splits them over three packages which point at each other by
//! absolute paths below `/usr`. Here they lie in the cache; the one absolute
//! path among them is replaced by a relative one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Error, Facts};
use crate::cache::{self, io_error};
use crate::debian::{self, Wish};
use crate::lock::Pinned;
use crate::packages::Packages;
use crate::progress::Progress;

/// Changes when the directory is made differently, so that old ones are made anew.
const LAYOUT: u32 = 2;

/// What `make -C` is given to build a module out of the kernel's tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelHeaders {
    /// The kernel they belong to, `uname -r`.
    pub release: String,
    /// The directory for `make -C`.
    pub build: PathBuf,
    /// What all flavours have in common, beside `build`.
    pub common: PathBuf,
    /// The directory above both and the build tools: moved as a whole, they work.
    pub root: PathBuf,
    /// The packages.
    pub packages: Vec<Pinned>,
}

/// What the directory records about itself.
const STAMP: &str = "stamp.json";

impl KernelHeaders {
    /// Downloads and unpacks the headers of the kernel `facts`, unless that
    /// was done before.
    ///
    /// # Errors
    /// No such packages, a failed download, or packages that hold something else.
    pub fn prepare(cache: &Path, facts: &Facts, progress: Progress) -> Result<Self, Error> {
        Self::prepare_from(&mut Packages::new(cache, None, progress), facts)
    }

    /// [`KernelHeaders::prepare`] with packages that may be locked.
    ///
    /// # Errors
    /// As [`KernelHeaders::prepare`].
    pub fn prepare_from(packages: &mut Packages<'_>, facts: &Facts) -> Result<Self, Error> {
        let release = &facts.release;
        let name = format!("{release}-{}-{LAYOUT}", facts.version.replace([':', '~'], "_"));
        let root = packages.cache().join("headers").join(name);
        let own = format!("usr/src/linux-headers-{release}");
        cache::publish(&root, &packages.progress(), |half| {
            let label = format!("kernel headers {release}");
            let pinned = choose(packages, &label, facts)?;
            for deb in packages.fetch_tools(&label, &pinned)? {
                debian::unpack(&deb, half, keep)?;
            }
            relocate(&half.join(&own))?;
            let stamp = half.join(STAMP);
            let text =
                serde_json::to_vec_pretty(&pinned).map_err(io::Error::other).map_err(io_error("write", &stamp))?;
            fs::write(&stamp, text).map_err(io_error("write", &stamp))?;
            Ok::<(), Error>(())
        })?;
        let headers = Self::open(root, own, release)?;
        packages.note_tools(&headers.packages);
        Ok(headers)
    }

    fn open(root: PathBuf, own: String, release: &str) -> Result<Self, Error> {
        let build = root.join(own);
        let common = common_of(&root).filter(|_| build.join("Makefile").exists());
        let Some(common) = common else { return Err(Error::HeadersDamaged { dir: root }) };
        let stamp = root.join(STAMP);
        let text = fs::read(&stamp).map_err(io_error("read", &stamp))?;
        let packages = serde_json::from_slice(&text).map_err(|_| Error::HeadersDamaged { dir: root.clone() })?;
        Ok(Self { release: release.to_owned(), build, common, root, packages })
    }

    /// The compiler that the kernel was built with, as the kernel's
    /// configuration names it: `x86_64-linux-gnu-gcc-14`.
    ///
    /// # Errors
    /// A configuration that does not say so.
    pub fn compiler(&self) -> Result<String, Error> {
        let path = self.build.join(".config");
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        compiler_of(&text).map(str::to_owned).ok_or_else(|| Error::HeadersDamaged { dir: self.root.clone() })
    }
}

fn compiler_of(config: &str) -> Option<&str> {
    let text = config.lines().find_map(|line| line.strip_prefix("CONFIG_CC_VERSION_TEXT=\""))?;
    let name = text.split([' ', '"']).next()?;
    // It becomes an argument and, without its prefix, the name of a package.
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    (plain && name.starts_with(|first: char| first.is_ascii_alphanumeric())).then_some(name)
}

fn common_of(root: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(root.join("usr/src")).ok()?;
    let mut dirs = entries.flatten().map(|entry| entry.path());
    dirs.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().ends_with("-common")))
}

/// The flavour's headers, those common to all flavours, and the build tools.
fn choose(packages: &mut Packages<'_>, label: &str, facts: &Facts) -> Result<Vec<Pinned>, Error> {
    let exactly = Wish::Exact(&facts.version);
    let own = packages.find(&facts.suite, &format!("linux-headers-{}", facts.release), exactly)?;
    // A lock does not say what depends on what; the package does.
    let deb = packages.fetch_tools(label, std::slice::from_ref(&own))?.pop().unwrap_or_default();
    let depends = debian::depends(&deb)?;
    let mut all = Vec::new();
    for needed in ["linux-headers-", "linux-kbuild-"] {
        let name = depends
            .iter()
            .find(|name| name.starts_with(needed))
            .ok_or_else(|| Error::Headers { package: own.name.clone(), needed })?;
        all.push(packages.find(&facts.suite, name, exactly)?);
    }
    all.push(own);
    Ok(all)
}

/// Everything a module for x86-64 needs. The stripped-down `vmlinux` is left
/// out: it serves only to make BTF, for which the host would need pahole.
fn keep(path: &Path) -> bool {
    let mut parts = path.components().map(|part| part.as_os_str().to_string_lossy());
    let top: Vec<_> = parts.by_ref().take(3).collect();
    let [usr, kind, _] = &top[..] else { return true };
    if usr != "usr" || !(kind == "src" || kind == "lib") {
        return false;
    }
    match (parts.next().as_deref(), parts.next().as_deref()) {
        (Some("vmlinux"), None) => false,
        (Some("arch"), Some(arch)) => arch == "x86" || arch.starts_with("Kconfig"),
        _ => true,
    }
}

/// Rewrites the flavour's `Makefile`, one line that includes the common one
/// by its absolute path.
fn relocate(dir: &Path) -> Result<(), Error> {
    let path = dir.join("Makefile");
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    fs::write(&path, relocated(&text)).map_err(io_error("write", &path))?;
    Ok(())
}

fn relocated(makefile: &str) -> String {
    makefile.replace("include /usr/src/", "include $(dir $(lastword $(MAKEFILE_LIST)))../")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_include_becomes_relative() {
        assert_eq!(
            relocated("include /usr/src/linux-headers-6.12.95+deb12-common/Makefile\n"),
            "include $(dir $(lastword $(MAKEFILE_LIST)))../linux-headers-6.12.95+deb12-common/Makefile\n"
        );
    }

    #[test]
    fn the_kernel_says_what_it_was_compiled_with() {
        let line = |text: &str| format!("CONFIG_A=y\nCONFIG_CC_VERSION_TEXT=\"{text}\"\n");
        let gcc = line("x86_64-linux-gnu-gcc-14 (Debian 14.2.0-19) 14.2.0");
        assert_eq!(compiler_of(&gcc), Some("x86_64-linux-gnu-gcc-14"));
        for odd in [line(""), line("-x y"), line("$(touch /x) y"), "CONFIG_A=y\n".to_owned()] {
            assert_eq!(compiler_of(&odd), None, "{odd}");
        }
    }

    #[test]
    fn a_directory_that_lost_something_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let own = "usr/src/linux-headers-6-cloud".to_owned();
        let open = || KernelHeaders::open(dir.path().to_owned(), own.clone(), "6-cloud");
        fs::create_dir_all(dir.path().join(&own)).unwrap();
        fs::create_dir_all(dir.path().join("usr/src/linux-headers-6-common")).unwrap();
        fs::write(dir.path().join(STAMP), "[]").unwrap();
        assert!(open().unwrap_err().to_string().contains("remove it"));
        fs::write(dir.path().join(&own).join("Makefile"), "").unwrap();
        assert_eq!(open().unwrap().common, dir.path().join("usr/src/linux-headers-6-common"));
        fs::write(dir.path().join(STAMP), "half").unwrap();
        assert!(open().is_err());
    }

    #[test]
    fn other_architectures_are_left_out() {
        for (path, kept) in [
            ("usr", true),
            ("usr/src/linux-headers-6-common/Makefile", true),
            ("usr/src/linux-headers-6-common/arch", true),
            ("usr/src/linux-headers-6-common/arch/arm64/Makefile", false),
            ("usr/src/linux-headers-6-common/arch/x86/Makefile", true),
            ("usr/src/linux-headers-6-cloud/vmlinux", false),
            ("usr/src/linux-headers-6-cloud/Module.symvers", true),
            ("usr/lib/linux-kbuild-6/scripts/mod/modpost", true),
            ("usr/share/doc/x/copyright", false),
            ("lib/modules/6/build", false),
        ] {
            assert_eq!(keep(Path::new(path)), kept, "{path}");
        }
    }
}
