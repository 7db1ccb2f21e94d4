//! A container's folder: `config.json` and `rootfs`.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Process, RootBuilder, Spec};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::UnmountFlags;

use crate::error::{Error, Result};
use crate::{adapt, hooks};

/// Larger files are somebody's trick.
const LONGEST_PASSWD: u64 = 1 << 20;

fn io<'a>(path: &'a Path, what: &'a str) -> impl Fn(std::io::Error) -> Error + 'a {
    move |error| Error::internal(format!("{what} {}: {error}", path.display()))
}

/// The container's root in the guest.
#[must_use]
pub fn rootfs(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

/// Makes the folder, binds the root that the host gave to `rootfs`, completes
/// the environment and writes the configuration.
///
/// # Errors
/// The root is not there, or the kernel refuses.
pub fn make(bundle: &Path, mut spec: Spec) -> Result<()> {
    let target = rootfs(bundle);
    let root = spec.root().as_ref().map(|root| (root.path().clone(), root.readonly().unwrap_or(false)));
    let (source, readonly) = root.ok_or_else(|| Error::invalid("OCI configuration: Root is missing"))?;
    // Only root may look into a bundle: configurations hold environments.
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(bundle).map_err(io(bundle, "cannot make"))?;
    fs::create_dir_all(&target).map_err(io(&target, "cannot make"))?;
    if source != target {
        rustix::mount::mount_bind_recursive(&source, &target).map_err(|error| {
            Error::internal(format!(
                "cannot bind the root {} to {}: {error}; is the host's share mounted (CreateSandbox) and the image in it?",
                source.display(),
                target.display()
            ))
        })?;
    }
    let rebuilt = RootBuilder::default().path(&target).readonly(readonly).build();
    spec.set_root(Some(rebuilt.map_err(|error| Error::internal(error.to_string()))?));
    if let Some(process) = spec.process_mut() {
        complete(process, bundle);
    }
    if let Some(hooks) = spec.hooks_mut().as_mut().and_then(hooks::take_own) {
        write(&bundle.join(firstlight_runtime::HOOKS_FILE), &hooks)?;
    }
    write(&bundle.join("config.json"), &spec)
}

/// Writes a file that readers see as it was or as it is, and nothing between.
///
/// # Errors
/// The kernel refuses.
pub fn replace<T: serde::Serialize>(path: &Path, value: &T) -> Result<()> {
    let new = path.with_extension("new");
    write(&new, value)?;
    fs::rename(&new, path).map_err(io(path, "cannot replace"))
}

/// Gives a process's environment what libcontainer would otherwise look for itself.
pub fn complete(process: &mut Process, bundle: &Path) {
    let passwd = read_inside(&rootfs(bundle), "etc/passwd").unwrap_or_default();
    let home = adapt::home(&passwd, process.user().uid()).map(str::to_owned);
    adapt::set_home(process.env_mut().get_or_insert_default(), home.as_deref());
}

/// Writes a file that only root may read.
///
/// # Errors
/// The kernel refuses.
pub fn write<T: serde::Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_vec(value).map_err(|error| Error::internal(format!("{}: {error}", path.display())))?;
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(&text)).map_err(io(path, "cannot write"))
}

/// Reads a file of a container's image. No link in it can lead out of `root`.
fn read_inside(root: &Path, path: &str) -> Option<String> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root: OwnedFd = rustix::fs::open(root, directory, Mode::empty()).ok()?;
    // Non-blocking, so that a FIFO in its place does not stop us.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(&root, path, flags, Mode::empty(), inside).ok()?;
    let file = fs::File::from(file);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(LONGEST_PASSWD).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Takes the folder away again. Files are removed by name and folders only when
/// empty: what is mounted in them may be the host's and stays untouched.
pub fn remove(bundle: &Path) {
    let root = rootfs(bundle);
    // Once per mount: a create that was repeated may have stacked them.
    while rustix::mount::unmount(&root, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    let _ = fs::remove_dir(&root);
    for entry in fs::read_dir(bundle).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let _ = fs::remove_file(entry.path());
        }
    }
    if let Err(error) = fs::remove_dir(bundle)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        log::warn!("bundle {} stays: {error}", bundle.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn links_in_an_image_stay_in_it() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/real"), "root:x:0:0::/inside:/bin/sh\n").unwrap();
        symlink("/etc/real", root.path().join("etc/passwd")).unwrap();
        assert!(read_inside(root.path(), "etc/passwd").unwrap().contains("/inside"));
        fs::remove_file(root.path().join("etc/passwd")).unwrap();
        symlink("../../../../etc/hostname", root.path().join("etc/passwd")).unwrap();
        assert_eq!(read_inside(root.path(), "etc/passwd"), None);
        fs::remove_file(root.path().join("etc/passwd")).unwrap();
        symlink("/proc/self/environ", root.path().join("etc/passwd")).unwrap();
        assert_eq!(read_inside(root.path(), "etc/passwd"), None);
        assert_eq!(read_inside(root.path(), "etc"), None);
    }

    #[test]
    fn removing_leaves_strangers_alone() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join("c1");
        fs::create_dir_all(bundle.join("rootfs/precious")).unwrap();
        write(&bundle.join("config.json"), &1).unwrap();
        assert_eq!(fs::metadata(bundle.join("config.json")).unwrap().permissions().mode() & 0o777, 0o600);
        remove(&bundle);
        assert!(bundle.join("rootfs/precious").exists() && !bundle.join("config.json").exists());
        fs::remove_dir(bundle.join("rootfs/precious")).unwrap();
        remove(&bundle);
        assert!(!bundle.exists());
        remove(&bundle);
    }
}
