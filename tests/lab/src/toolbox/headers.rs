//! Headers of exactly the image's kernel, to build modules against.
//!
//! Debian splits them over three packages which point at each other by
//! absolute paths below `/usr`. Here they lie in the cache; the one absolute
//! path among them is replaced by a relative one.

use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image_builder::cache;
use firstlight_image_builder::debian::{self, Apt, Candidate, Wish};
use firstlight_image_builder::kernel::Facts;
use firstlight_image_builder::progress::Progress;

use super::Error;
use super::tree::{io_error, write_stamp};

/// Changes when the folder is made differently, so that old ones are made anew.
const LAYOUT: u32 = 1;

/// What `make -C` is given to build a module out of the kernel's tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelHeaders {
    /// The kernel they belong to, `uname -r`.
    pub release: String,
    /// The folder for `make -C`.
    pub build: PathBuf,
}

impl KernelHeaders {
    /// Downloads and unpacks the headers of the kernel `facts`, unless that
    /// was done before.
    pub(super) fn prepare(cache: &Path, facts: &Facts, progress: Progress) -> Result<Self, Error> {
        let release = &facts.release;
        let root = cache.join("headers").join(format!("{release}-{}-{LAYOUT}", facts.version.replace([':', '~'], "_")));
        let own = format!("usr/src/linux-headers-{release}");
        cache::publish(&root, &progress, |half| {
            let apt = Apt::open(cache, &facts.suite, progress)?;
            let candidates = packages(&apt, facts)?;
            let label = format!("kernel headers {release}");
            for package in apt.fetch(&label, &candidates)? {
                debian::unpack(&package.deb, half, keep)?;
            }
            relocate(&half.join(&own))?;
            write_stamp(half, &facts.suite, &candidates)
        })?;
        let build = root.join(own);
        if !build.join("Makefile").exists() {
            return Err(Error::Missing { file: build.join("Makefile"), tree: root });
        }
        Ok(Self { release: release.clone(), build })
    }
}

/// The flavour's headers, those common to all flavours, and the build tools.
fn packages(apt: &Apt, facts: &Facts) -> Result<Vec<Candidate>, Error> {
    let exactly = Wish::Exact(&facts.version);
    let own = apt.candidate(&format!("linux-headers-{}", facts.release), exactly)?;
    let mut all = Vec::new();
    for needed in ["linux-headers-", "linux-kbuild-"] {
        let name = own
            .depends_on()
            .find(|name| name.starts_with(needed))
            .ok_or_else(|| Error::Headers { package: own.name.clone(), needed })?;
        all.push(apt.candidate(name, exactly)?);
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
fn relocate(folder: &Path) -> Result<(), Error> {
    let path = folder.join("Makefile");
    let text = fs::read_to_string(&path).map_err(|source| io_error("read", &path, source))?;
    fs::write(&path, relocated(&text)).map_err(|source| io_error("write", &path, source).into())
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
