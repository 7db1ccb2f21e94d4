//! Unpacks a `.deb` without installing it.

use std::error::Error as _;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use tar::EntryType;

use super::{Error, index};

/// Unpacks the files of the package `deb` for which `keep` returns true into the
/// directory `into`, and returns their number.
///
/// `keep` gets paths relative to the root (`usr/bin/busybox`). Owners and set-uid
/// bits are dropped, and the owner gets read permission for every file and write
/// permission for every directory. Device nodes and paths outside of `into`, by `/`,
/// `..` or a link, are refused. Modification times are preserved.
///
/// # Errors
/// [`Error::Start`] if `dpkg-deb` cannot be run, [`Error::Unpack`] for an invalid
/// package or a failed write.
pub fn unpack(deb: &Path, into: &Path, keep: impl Fn(&Path) -> bool) -> Result<usize, Error> {
    // dpkg-deb supports every compression of packages; the paths, which are
    // untrusted, are checked here.
    let mut child = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(deb)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| Error::Start { program: "dpkg-deb", source })?;
    let unpacked = match child.stdout.take() {
        Some(mut tar) => {
            let result = unpack_tar(&mut tar, into, keep);
            // dpkg-deb fails with a broken pipe if the padding is not read.
            if result.is_ok() {
                let _ = io::copy(&mut tar, &mut io::sink());
            }
            result
        }
        None => Err("no output".to_owned()),
    };
    let output = child.wait_with_output().map_err(|source| Error::Start { program: "dpkg-deb", source })?;
    let failed = |message: String| Error::Unpack { file: deb.to_owned(), message };
    if !output.status.success() && unpacked.is_ok() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    unpacked.map_err(|error| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        failed(format!("{error}{}{}", if stderr.trim().is_empty() { "" } else { "; " }, stderr.trim()))
    })
}

/// Formats the cause of an error: the system error if there is one, otherwise the
/// error chain, because the package is invalid.
fn cause_of(error: &io::Error) -> String {
    if error.raw_os_error().is_some() {
        return error.to_string();
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(one) = cause {
        if one.downcast_ref::<io::Error>().is_some_and(|error| error.raw_os_error().is_some()) {
            return one.to_string();
        }
        text = format!("{text}: {one}");
        cause = one.source();
    }
    format!("{text}: {INVALID_PACKAGE}")
}

/// The reason and next step for an invalid package.
const INVALID_PACKAGE: &str = "the package is invalid; use another version of it";

/// Returns the names in the `Depends` field of the package `deb`, the first of each
/// alternative.
///
/// # Errors
/// As [`unpack`].
pub fn depends(deb: &Path) -> Result<Vec<String>, Error> {
    let output = Command::new("dpkg-deb")
        .arg("--field")
        .arg(deb)
        .arg("Depends")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Start { program: "dpkg-deb", source })?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Unpack { file: deb.to_owned(), message });
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(index::depends_on(&text).map(str::to_owned).collect())
}

/// Unpacks all files of a package; see [`unpack`].
///
/// # Errors
/// As [`unpack`].
pub fn unpack_all(deb: &Path, into: &Path) -> Result<usize, Error> {
    unpack(deb, into, |_| true)
}

fn unpack_tar(tar: &mut dyn Read, into: &Path, keep: impl Fn(&Path) -> bool) -> Result<usize, String> {
    let mut archive = tar::Archive::new(tar);
    let mut count = 0;
    for entry in archive.entries().map_err(|error| cause_of(&error))? {
        let mut entry = entry.map_err(|error| cause_of(&error))?;
        let path = entry.path().map_err(|error| cause_of(&error))?.into_owned();
        let path = path.strip_prefix(".").unwrap_or(&path);
        if path.as_os_str().is_empty() || !keep(path) {
            continue;
        }
        let refused = |reason: &str| Err(format!("{} {reason}: {INVALID_PACKAGE}", path.display()));
        if path.has_root() {
            return refused("begins with /");
        }
        let kind = entry.header().entry_type();
        if kind.is_block_special() || kind.is_character_special() || kind.is_fifo() {
            return refused("is a device node or FIFO");
        }
        let target = into.join(path);
        let failed = |error: io::Error| format!("{}: {}", target.display(), cause_of(&error));
        if !entry.unpack_in(into).map_err(failed)? {
            return refused("escapes the directory");
        }
        let needed = match kind {
            EntryType::Directory => 0o700,
            EntryType::Regular | EntryType::Continuous => 0o600,
            _ => 0,
        };
        let mode = entry.header().mode().map_err(failed)? & 0o777;
        add_permissions(&target, mode, needed).map_err(failed)?;
        count += 1;
    }
    Ok(count)
}

/// Adds the owner permissions in `needed` that `mode` lacks; without them, a user other than root
/// could not read or remove the files.
fn add_permissions(path: &Path, mode: u32, needed: u32) -> io::Result<()> {
    match mode & needed == needed {
        true => Ok(()),
        false => fs::set_permissions(path, fs::Permissions::from_mode(mode | needed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tar::{Builder, Header};

    fn header(kind: EntryType, size: u64, mode: u32) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(mode);
        header
    }

    fn with_raw_path(mut header: Header, path: &str) -> Header {
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        header
    }

    #[test]
    fn selected_files_are_unpacked_without_set_uid() {
        let mut tar = Builder::new(Vec::new());
        tar.append(&with_raw_path(header(EntryType::Directory, 0, 0o755), "./usr/"), io::empty()).unwrap();
        tar.append(&with_raw_path(header(EntryType::Regular, 2, 0o4755), "./usr/su"), &b"hi"[..]).unwrap();
        tar.append(&with_raw_path(header(EntryType::Regular, 2, 0o644), "./usr/doc"), &b"no"[..]).unwrap();
        let tar = tar.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let count = unpack_tar(&mut &tar[..], dir.path(), |path| path != Path::new("usr/doc")).unwrap();
        assert_eq!(count, 2);
        assert_eq!(fs::metadata(dir.path().join("usr/su")).unwrap().permissions().mode() & 0o7777, 0o755);
        assert!(!dir.path().join("usr/doc").exists());
    }

    #[test]
    fn owner_may_read_and_remove_all_unpacked_files() {
        let mut tar = Builder::new(Vec::new());
        tar.append(&with_raw_path(header(EntryType::Directory, 0, 0o555), "./usr/"), io::empty()).unwrap();
        tar.append(&with_raw_path(header(EntryType::Regular, 2, 0o000), "./usr/shadow"), &b"hi"[..]).unwrap();
        tar.append(&with_raw_path(header(EntryType::Regular, 2, 0o4111), "./usr/su"), &b"hi"[..]).unwrap();
        let tar = tar.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        unpack_tar(&mut &tar[..], dir.path(), |_| true).unwrap();
        for (path, expected) in [("usr", 0o755), ("usr/shadow", 0o600), ("usr/su", 0o711)] {
            let mode = fs::metadata(dir.path().join(path)).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, expected, "{path}");
        }
    }

    #[test]
    fn paths_outside_the_directory_and_devices_then_error() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        let inside = dir.path().join("inside");
        fs::create_dir(&outside).unwrap();
        fs::create_dir(&inside).unwrap();

        let dots = with_raw_path(header(EntryType::Regular, 1, 0o644), "./../outside/a");
        let mut tar = Builder::new(Vec::new());
        tar.append(&dots, &b"x"[..]).unwrap();
        assert!(unpack_tar(&mut &tar.into_inner().unwrap()[..], &inside, |_| true).is_err());

        let mut tar = Builder::new(Vec::new());
        tar.append(&with_raw_path(header(EntryType::Regular, 1, 0o644), "/a"), &b"x"[..]).unwrap();
        let error = unpack_tar(&mut &tar.into_inner().unwrap()[..], &inside, |_| true).unwrap_err();
        assert!(error.contains("/a begins with /") && error.contains("another version"), "{error}");

        let mut link = header(EntryType::Symlink, 0, 0o777);
        link.set_link_name(&outside).unwrap();
        let mut tar = Builder::new(Vec::new());
        tar.append(&with_raw_path(link, "./link"), io::empty()).unwrap();
        tar.append(&with_raw_path(header(EntryType::Regular, 1, 0o644), "./link/b"), &b"x"[..]).unwrap();
        assert!(unpack_tar(&mut &tar.into_inner().unwrap()[..], &inside, |_| true).is_err());

        let mut tar = Builder::new(Vec::new());
        tar.append(&with_raw_path(header(EntryType::Char, 0, 0o666), "./null"), io::empty()).unwrap();
        assert!(unpack_tar(&mut &tar.into_inner().unwrap()[..], &inside, |_| true).is_err());

        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }
}
