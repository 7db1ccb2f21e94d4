//! Headers of exactly the image's kernel, for building modules.
//!
//! Debian splits them into three packages that refer to each other by
//! absolute paths below `/usr`. In the cache, the only such path is replaced
//! by a relative one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_progress::Progress;

use super::{Error, Facts};
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::debian::{self, PackageRequest};
use crate::packages::lock::Pinned;

/// Version of the cached directory's layout; a change recreates cached headers.
const LAYOUT: u32 = 2;

/// Unpacked kernel headers for building out-of-tree modules with `make -C`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelHeaders {
    /// The kernel's release, `uname -r`.
    pub release: String,
    /// The directory for `make -C`.
    pub build: PathBuf,
    /// The headers common to all flavours, in the same directory as `build`.
    pub common: PathBuf,
    /// The directory that contains both and the build tools; relocatable as a whole.
    pub root: PathBuf,
    /// The packages.
    pub packages: Vec<Pinned>,
}

/// The file that records the packages.
const STAMP: &str = "stamp.json";

impl KernelHeaders {
    /// Downloads and unpacks the headers of the kernel `facts`, unless they are cached.
    ///
    /// # Errors
    /// A package is unknown, a download fails, or a package has unexpected contents.
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
            let pinned = select_packages(packages, &label, facts)?;
            for deb in packages.fetch_tools(&label, &pinned)? {
                debian::unpack(&deb, half, is_needed)?;
            }
            relocate_makefile(&half.join(&own))?;
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
        let common = find_common_headers(&root).filter(|_| build.join("Makefile").exists());
        let Some(common) = common else { return Err(Error::HeadersIncomplete { dir: root }) };
        let stamp = root.join(STAMP);
        let text = fs::read(&stamp).map_err(io_error("read", &stamp))?;
        let packages = serde_json::from_slice(&text).map_err(|_| Error::HeadersIncomplete { dir: root.clone() })?;
        Ok(Self { release: release.to_owned(), build, common, root, packages })
    }

    /// Returns the compiler that the kernel was built with, as the kernel's
    /// configuration names it: `x86_64-linux-gnu-gcc-14`.
    ///
    /// # Errors
    /// The configuration does not name a compiler.
    pub fn compiler(&self) -> Result<String, Error> {
        let path = self.build.join(".config");
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        parse_compiler(&text).map(str::to_owned).ok_or_else(|| Error::HeadersIncomplete { dir: self.root.clone() })
    }
}

fn parse_compiler(config: &str) -> Option<&str> {
    let text = config.lines().find_map(|line| line.strip_prefix("CONFIG_CC_VERSION_TEXT=\""))?;
    let name = text.split([' ', '"']).next()?;
    // The name becomes an argument and, without its prefix, a package name.
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    (plain && name.starts_with(|first: char| first.is_ascii_alphanumeric())).then_some(name)
}

fn find_common_headers(root: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(root.join("usr/src")).ok()?;
    let mut dirs = entries.flatten().map(|entry| entry.path());
    dirs.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().ends_with("-common")))
}

/// Selects the packages of the flavour's headers, of the common headers, and of the build tools.
fn select_packages(packages: &mut Packages<'_>, label: &str, facts: &Facts) -> Result<Vec<Pinned>, Error> {
    let exactly = PackageRequest::Exact(&facts.version);
    let own = packages.find(&facts.suite, &format!("linux-headers-{}", facts.release), exactly)?;
    // A lock does not record dependencies; the package does.
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

/// Returns whether building a module for x86-64 needs a file. The stripped `vmlinux` is
/// excluded: it is only used to generate BTF, which would need pahole on the host.
fn is_needed(path: &Path) -> bool {
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

/// Rewrites the flavour's `Makefile`: one line that includes the common one
/// by its absolute path.
fn relocate_makefile(dir: &Path) -> Result<(), Error> {
    let path = dir.join("Makefile");
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    fs::write(&path, make_include_relative(&text)).map_err(io_error("write", &path))?;
    Ok(())
}

fn make_include_relative(makefile: &str) -> String {
    makefile.replace("include /usr/src/", "include $(dir $(lastword $(MAKEFILE_LIST)))../")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_include_becomes_relative() {
        assert_eq!(
            make_include_relative("include /usr/src/linux-headers-6.12.95+deb12-common/Makefile\n"),
            "include $(dir $(lastword $(MAKEFILE_LIST)))../linux-headers-6.12.95+deb12-common/Makefile\n"
        );
    }

    #[test]
    fn compiler_is_read_from_configuration() {
        let line = |text: &str| format!("CONFIG_A=y\nCONFIG_CC_VERSION_TEXT=\"{text}\"\n");
        let gcc = line("x86_64-linux-gnu-gcc-14 (Debian 14.2.0-19) 14.2.0");
        assert_eq!(parse_compiler(&gcc), Some("x86_64-linux-gnu-gcc-14"));
        for invalid in [line(""), line("-x y"), line("$(touch /x) y"), "CONFIG_A=y\n".to_owned()] {
            assert_eq!(parse_compiler(&invalid), None, "{invalid}");
        }
    }

    #[test]
    fn incomplete_directory_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let own = "usr/src/linux-headers-6-cloud".to_owned();
        let open = || KernelHeaders::open(dir.path().to_owned(), own.clone(), "6-cloud");
        fs::create_dir_all(dir.path().join(&own)).unwrap();
        fs::create_dir_all(dir.path().join("usr/src/linux-headers-6-common")).unwrap();
        fs::write(dir.path().join(STAMP), "[]").unwrap();
        assert!(open().unwrap_err().to_string().contains("remove the directory"));
        fs::write(dir.path().join(&own).join("Makefile"), "").unwrap();
        assert_eq!(open().unwrap().common, dir.path().join("usr/src/linux-headers-6-common"));
        fs::write(dir.path().join(STAMP), "half").unwrap();
        assert!(open().is_err());
    }

    #[test]
    fn other_architectures_are_excluded() {
        for (path, needed) in [
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
            assert_eq!(is_needed(Path::new(path)), needed, "{path}");
        }
    }
}
