//! Tools that create file systems and compress: Debian packages of one suite,
//! unpacked into the cache and run with their own C library, so that an image's
//! bytes do not depend on the host's versions, and no root is needed.

use std::path::{Path, PathBuf};
use std::process::Command;

use firstlight_image::digest;

use crate::cache;
use crate::packages::debian;
use crate::packages::lock::Pinned;
use crate::packages::{self, Packages};

/// Layout version of unpacked tool sets; increment it to invalidate cached ones.
const LAYOUT: u32 = 1;
/// Suite of all tools: its `mkfs.erofs` is Debian's first with tar input and zstd.
pub const SUITE: &str = "trixie";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The dynamic loader of a tool set's C library.
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
/// Directories of programs.
const PROGRAMS: &[&str] = &["usr/bin", "usr/sbin", "bin", "sbin"];

/// Why a tool is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A package is not available.
    #[error(transparent)]
    Packages(#[from] packages::Error),
    /// A package could not be unpacked.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A file is missing in the packages.
    #[error("{} is missing: remove the directory {} and try again", file.display(), tree.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// The directory of the tool set.
        tree: PathBuf,
    },
}

/// A tool set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kit {
    /// `mkfs.erofs`, `fsck.erofs`, `dump.erofs`.
    Erofs,
    /// `mksquashfs`, `unsquashfs`.
    Squashfs,
    /// `mke2fs`, `e2fsck`, `debugfs`.
    Ext4,
    /// `lz4`.
    Lz4,
    /// `zstd`.
    Zstd,
    /// `veritysetup`; for tests that compare hash trees with its output.
    Verity,
}

impl Kit {
    /// Returns the requested packages, without dependencies.
    #[must_use]
    pub fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Erofs => &["erofs-utils"],
            Self::Squashfs => &["squashfs-tools"],
            // mke2fs loads libarchive at run time to read tar archives.
            Self::Ext4 => &["e2fsprogs", "libarchive13t64"],
            Self::Lz4 => &["lz4"],
            Self::Zstd => &["zstd"],
            Self::Verity => &["cryptsetup-bin"],
        }
    }

    /// Returns the programs that are unpacked.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Erofs => &["mkfs.erofs", "fsck.erofs", "dump.erofs"],
            Self::Squashfs => &["mksquashfs", "unsquashfs"],
            Self::Ext4 => &["mke2fs", "e2fsck", "debugfs"],
            Self::Lz4 => &["lz4"],
            Self::Zstd => &["zstd"],
            Self::Verity => &["veritysetup"],
        }
    }

    fn is_needed(self, path: &Path) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let dir = path.parent().unwrap_or(Path::new(""));
        let program = self.programs().contains(&name.as_ref()) && PROGRAMS.iter().any(|known| dir == Path::new(known));
        // Not the subdirectories: character sets, OpenSSL engines.
        let library = dir == Path::new(LIBRARIES) && name.contains(".so");
        program || library || path.starts_with("usr/lib64")
    }

    /// Returns the name prefix of its cache directory.
    fn label(self) -> &'static str {
        self.packages().first().copied().unwrap_or("none")
    }
}

/// An unpacked tool set.
#[derive(Debug, Clone)]
pub struct Toolset {
    root: PathBuf,
    /// Every package of the set, libraries included.
    pub packages: Vec<Pinned>,
}

impl Toolset {
    /// Downloads and unpacks the tool set `kit` unless cached: the suite's current
    /// packages, or those of the lock.
    ///
    /// # Errors
    /// An unavailable package, or a failed file operation.
    pub fn of(kit: Kit, packages: &mut Packages<'_>) -> Result<Self, Error> {
        let found = packages.find_tools(SUITE, kit.packages())?;
        let mut key = format!("{LAYOUT} {kit:?}");
        found.iter().for_each(|package| key.push_str(&package.sha256));
        // Each set of packages has its own directory.
        let name = format!("{}-{}", kit.label(), &digest::of_bytes(key.as_bytes())[..16]);
        let (root, progress) = (packages.cache().join("format-tools").join(name), packages.progress());
        cache::publish(&root, &progress, |half| {
            progress.say(format_args!("{}: unpacking", kit.label()));
            for package in &found {
                let deb = packages.fetch_tool(&package.name, package)?;
                debian::unpack(&deb, half, |path| kit.is_needed(path))?;
            }
            Ok::<_, Error>(())
        })?;
        Ok(Self { root, packages: found })
    }

    /// Returns a command for `program` of this set with a cleared environment: no
    /// locale, option variables or libraries of the host.
    ///
    /// # Errors
    /// The set has no such program.
    pub fn command(&self, program: &str) -> Result<Command, Error> {
        let path = PROGRAMS.iter().map(|dir| self.root.join(dir).join(program)).find(|candidate| candidate.exists());
        let missing = |file: PathBuf| Error::Missing { file, tree: self.root.clone() };
        let path = path.ok_or_else(|| missing(self.root.join("usr/bin").join(program)))?;
        let loader = self.root.join(LOADER);
        if !loader.exists() {
            return Err(missing(loader));
        }
        let mut command = Command::new(loader);
        command.arg("--library-path").arg(self.root.join(LIBRARIES));
        // Otherwise argv[0] would be the full path.
        command.arg("--argv0").arg(program).arg(path);
        command.env_clear().env("LC_ALL", "C.UTF-8");
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packages::lock::Lock;
    use firstlight_progress::Progress;
    use std::fs;

    #[test]
    fn programs_run_through_the_loader_of_their_set() {
        let dir = tempfile::tempdir().unwrap();
        let set = Toolset { root: dir.path().to_owned(), packages: Vec::new() };
        let missing = set.command("mkfs.erofs").unwrap_err().to_string();
        assert!(missing.contains("mkfs.erofs") && missing.contains("remove the directory"), "{missing}");
        fs::create_dir_all(set.root.join("usr/bin")).unwrap();
        fs::create_dir_all(set.root.join(LIBRARIES)).unwrap();
        fs::write(set.root.join("usr/bin/mkfs.erofs"), "").unwrap();
        assert!(set.command("mkfs.erofs").unwrap_err().to_string().contains("ld-linux"));
        fs::write(set.root.join(LOADER), "").unwrap();
        let command = set.command("mkfs.erofs").unwrap();
        assert_eq!(command.get_program(), set.root.join(LOADER));
        let arguments: Vec<PathBuf> = command.get_args().map(PathBuf::from).collect();
        let (libraries, program) = (set.root.join(LIBRARIES), set.root.join("usr/bin/mkfs.erofs"));
        let expected = ["--library-path".into(), libraries, "--argv0".into(), "mkfs.erofs".into(), program];
        assert_eq!(arguments, expected);
        let names: Vec<_> = command.get_envs().map(|(name, _)| name.to_owned()).collect();
        assert_eq!(names, ["LC_ALL"]);
    }

    #[test]
    fn lock_determines_the_packages() {
        let cache = tempfile::tempdir().unwrap();
        let mut lock = Lock::default();
        let error = Toolset::of(Kit::Lz4, &mut Packages::new(cache.path(), Some(&lock), Progress::quiet()));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("lz4 of trixie among its tools"), "{error}");
        let kit = format!("{SUITE}:{}", Kit::Lz4.packages().join("+"));
        lock.kits.insert(kit, vec!["lz4".to_owned()]);
        let mut keep = |version: &str, sha256: &str| {
            lock.tools = vec![Pinned {
                suite: SUITE.to_owned(),
                name: "lz4".to_owned(),
                requested: None,
                version: version.to_owned(),
                architecture: "amd64".to_owned(),
                source: None,
                size: 1,
                sha256: sha256.repeat(64),
            }];
            // Simulate an unpacked set.
            let mut key = format!("{LAYOUT} {:?}", Kit::Lz4);
            key.push_str(&sha256.repeat(64));
            let name = format!("lz4-{}", &digest::of_bytes(key.as_bytes())[..16]);
            fs::create_dir_all(cache.path().join("format-tools").join(name)).unwrap();
            let mut packages = Packages::new(cache.path(), Some(&lock), Progress::quiet());
            let set = Toolset::of(Kit::Lz4, &mut packages).unwrap();
            assert_eq!((packages.tools(), packages.used().len()), (&lock.tools[..], 0));
            (set.root, set.packages[0].version.clone())
        };
        let (one, two) = (keep("1", "a"), keep("2", "b"));
        assert_ne!(one.0, two.0);
        assert_eq!((one.1.as_str(), two.1.as_str()), ("1", "2"));
    }

    #[test]
    fn only_programs_and_their_libraries_are_unpacked() {
        for (path, expected) in [
            ("usr/bin/mkfs.erofs", true),
            ("usr/sbin/mke2fs", false),
            ("usr/share/mkfs.erofs", false),
            ("usr/lib/x86_64-linux-gnu/liblz4.so.1", true),
            ("usr/lib/x86_64-linux-gnu/gconv/UTF-16.so", false),
            ("usr/lib64/ld-linux-x86-64.so.2", true),
        ] {
            assert_eq!(Kit::Erofs.is_needed(Path::new(path)), expected, "{path}");
        }
    }
}
