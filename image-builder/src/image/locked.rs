//! Builds from a lock, and creates locks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firstlight_image::digest;
use firstlight_progress::Progress;

use crate::cache::io_error;
use crate::image::build::{self, Image};
use crate::image::manifest::{Archive, Manifest, Variables};
use crate::packages::Packages;
use crate::packages::lock::{self, Lock, Output, SCHEMA};

/// Why a locked build failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The lock file cannot be used.
    #[error(transparent)]
    Lock(#[from] lock::Error),
    /// The image could not be built.
    #[error(transparent)]
    Build(Box<build::Error>),
    /// The lock belongs to another image.
    #[error("{} is the lock of image {locked}, but the manifest describes {image}", file.display())]
    ImageMismatch {
        /// The lock file.
        file: PathBuf,
        /// The image it is for.
        locked: String,
        /// The manifest's.
        image: String,
    },
    /// An archive differs from the lock.
    #[error(
        "{} has archive {name} with SHA-256 {locked}, but {given} is given: supply the locked one, or regenerate the lock with \
         image-builder lock", file.display()
    )]
    ArchiveMismatch {
        /// The lock file.
        file: PathBuf,
        /// The archive.
        name: String,
        /// The SHA-256 in the lock.
        locked: String,
        /// The SHA-256 in the manifest.
        given: String,
    },
    /// All inputs match the lock, but the result differs.
    #[error(
        "{output} was built from exactly the inputs of {} but has SHA-256 {found}, and the lock has {expected}: \
         the build depends on this machine; compare with image-builder diff and the image.json of the machine \
         that wrote the lock", file.display()
    )]
    Differs {
        /// The lock file.
        file: PathBuf,
        /// The file that was built.
        output: String,
        /// The SHA-256 in the lock.
        expected: String,
        /// Its SHA-256.
        found: String,
    },
}

impl From<build::Error> for Error {
    fn from(error: build::Error) -> Self {
        Self::Build(Box::new(error))
    }
}

/// An image to build, and its lock.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// The manifest.
    pub manifest: &'a Path,
    /// Values for `${NAME}` in it.
    pub variables: &'a Variables,
    /// Output directory.
    pub out: &'a Path,
    /// Cache directory for downloads and unpacked packages.
    pub cache: &'a Path,
    /// The lock file.
    pub lock: &'a Path,
    /// Progress reporter.
    pub progress: Progress,
}

/// Comparison of a result with its lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Identical to the lock, byte for byte.
    Same,
    /// The given inputs outside packages differ, so results are not comparable.
    DifferentInputs(&'static str),
}

/// Creates the lock of an image that was just built.
#[must_use]
pub fn create_lock(manifest_sha256: &str, packages: &Packages<'_>, image: &Image) -> Lock {
    let contents = &image.contents;
    let output = |(name, bytes): (&String, &firstlight_image::FileDigest)| {
        (name.clone(), Output { size: bytes.size, sha256: bytes.sha256.clone() })
    };
    let mut pinned = packages.used().to_vec();
    pinned.sort();
    let mut tools = packages.tools().to_vec();
    tools.sort();
    Lock {
        schema: SCHEMA,
        image: contents.name.clone(),
        manifest_sha256: manifest_sha256.to_owned(),
        own_files_sha256: contents.own_files_sha256.clone(),
        root_hash: contents.verity.as_ref().map(|verity| verity.root_hash.clone()),
        outputs: contents.outputs.iter().map(output).collect::<BTreeMap<_, _>>(),
        suites: packages.suites().to_vec(),
        packages: pinned,
        archives: contents.archives.clone(),
        kits: packages.kits().clone(),
        tools,
    }
}

fn sha256_of(manifest: &Path) -> Result<String, Error> {
    Ok(digest::of_file(manifest).map_err(io_error("read", manifest)).map_err(build::Error::from)?.0)
}

/// Builds an image from its suites' current packages, and writes its lock.
///
/// # Errors
/// As [`build::build`]; the lock is written last and atomically.
pub fn lock(task: &Task<'_>) -> Result<(Image, Lock), Error> {
    let sha256 = sha256_of(task.manifest)?;
    let read = Manifest::read(task.manifest, task.variables).map_err(build::Error::from)?;
    let mut packages = Packages::new(task.cache, None, task.progress);
    let image = build::build_from(&read, &mut packages, task.out)?;
    // The store and the lock must suffice to build the image again.
    packages.store_all().map_err(|error| build::Error::from(crate::image::content::Error::from(error)))?;
    let lock = create_lock(&sha256, &packages, &image);
    lock.write(task.lock).map_err(build::Error::from)?;
    Ok((image, lock))
}

/// Builds an image from exactly the packages of a lock, and compares the result with it.
///
/// # Errors
/// The lock is invalid or does not match, a package is no longer available,
/// or the result differs from the lock although all inputs match.
pub fn build_locked(task: &Task<'_>) -> Result<(Image, Verdict), Error> {
    let lock = Lock::read(task.lock)?;
    let sha256 = sha256_of(task.manifest)?;
    let read = Manifest::read(task.manifest, task.variables).map_err(build::Error::from)?;
    if lock.image != read.image.name {
        return Err(Error::ImageMismatch { file: task.lock.to_owned(), locked: lock.image, image: read.image.name });
    }
    check_archives(&lock, &read.archives, task.lock)?;
    let mut packages = Packages::new(task.cache, Some(&lock), task.progress);
    let image = build::build_from(&read, &mut packages, task.out)?;
    let verdict = compare(&lock, &sha256, &image, task.lock)?;
    Ok((image, verdict))
}

/// Checks that archives have the SHA-256 of the lock.
fn check_archives(lock: &Lock, given: &[Archive], file: &Path) -> Result<(), Error> {
    for archive in given {
        let locked = lock.archives.iter().find(|one| one.name == archive.name);
        let locked = locked.map_or("none", |one| one.sha256.as_str());
        if locked != archive.sha256 {
            return Err(Error::ArchiveMismatch {
                file: file.to_owned(),
                name: archive.name.clone(),
                locked: locked.to_owned(),
                given: archive.sha256.clone(),
            });
        }
    }
    Ok(())
}

fn compare(lock: &Lock, manifest_sha256: &str, image: &Image, file: &Path) -> Result<Verdict, Error> {
    if lock.manifest_sha256 != manifest_sha256 {
        return Ok(Verdict::DifferentInputs("the manifest"));
    }
    if lock.own_files_sha256 != image.contents.own_files_sha256 {
        return Ok(Verdict::DifferentInputs("own files or a locally compiled kernel"));
    }
    for (name, expected) in &lock.outputs {
        let found = image.contents.outputs.get(name.as_str()).map_or("no such file", |bytes| bytes.sha256.as_str());
        if found != expected.sha256 {
            return Err(Error::Differs {
                file: file.to_owned(),
                output: name.clone(),
                expected: expected.sha256.clone(),
                found: found.to_owned(),
            });
        }
    }
    Ok(Verdict::Same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image::{FileDigest, ImageRecord};

    fn image(own: &str, built: &str) -> Image {
        let bytes = FileDigest { size: 1, sha256: built.repeat(64) };
        let contents = ImageRecord {
            schema: 1,
            name: "x".into(),
            format: "initramfs".into(),
            kernel_release: "6.12".into(),
            own_files_sha256: own.repeat(64),
            outputs: BTreeMap::from([("initrd.cpio".into(), bytes)]),
            ..ImageRecord::default()
        };
        let (kernel, initrd, record) = (PathBuf::new(), PathBuf::new(), PathBuf::new());
        Image { kernel, initrd, disk: None, record, contents }
    }

    #[test]
    fn archive_that_differs_from_the_lock_is_refused() {
        let archive = |name: &str, digit: &str| Archive {
            name: name.into(),
            version: "1".into(),
            path: "/none".into(),
            sha256: digit.repeat(64),
            licence: "x".into(),
            reason: "x".into(),
            files: Vec::new(),
        };
        let lock = crate::packages::lock::tests::sample();
        let check =
            |one: Archive| check_archives(&lock, &[one], Path::new("x.lock")).map_err(|error| error.to_string());
        let error = check(archive("fabricmanager", "c")).unwrap_err();
        assert!(error.contains("fabricmanager") && error.contains("x.lock") && error.contains("abab"), "{error}");
        assert!(check(archive("other", "c")).unwrap_err().contains("SHA-256 none"));
        let same = Archive { sha256: lock.archives[0].sha256.clone(), ..archive("fabricmanager", "c") };
        check(same).unwrap();
    }

    #[test]
    fn different_result_from_the_same_inputs_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let packages = Packages::new(dir.path(), None, Progress::quiet());
        let manifest = "c".repeat(64);
        let lock = create_lock(&manifest, &packages, &image("a", "b"));
        let compared = |manifest: &str, image: &Image| compare(&lock, manifest, image, Path::new("x.lock"));
        assert_eq!(compared(&manifest, &image("a", "b")).unwrap(), Verdict::Same);
        assert!(matches!(compared("d", &image("a", "e")).unwrap(), Verdict::DifferentInputs("the manifest")));
        assert!(matches!(compared(&manifest, &image("d", "e")).unwrap(), Verdict::DifferentInputs(_)));
        let error = compared(&manifest, &image("a", "e")).unwrap_err().to_string();
        assert!(error.contains("initrd.cpio") && error.contains("x.lock") && error.contains("eeee"), "{error}");
        assert_eq!(Lock::parse(&lock.text().unwrap(), Path::new("x.lock")).unwrap(), lock);
    }
}
