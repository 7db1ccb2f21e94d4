//! The disk of what has to outlive the service VM: a file with an ext4 file system.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The file system's label and the disk's serial number, by which the guest knows it.
pub const LABEL: &str = "firstlight-state";

/// The smallest disk, MiB: a journal alone takes four.
pub const LEAST_MIB: u32 = 16;

/// Where the superblock has ext4's magic number, and its value.
const MAGIC: (u64, [u8; 2]) = (1024 + 0x38, [0x53, 0xef]);

/// Where the superblock has the label, of 16 bytes.
const LABEL_AT: u64 = 1024 + 0x78;

/// Where the program is, beside `PATH`: users' does not have these.
const SYSTEM_DIRECTORIES: &[&str] = &["/usr/sbin", "/sbin"];

/// Why there is no state disk.
#[derive(Debug, thiserror::Error)]
pub enum StateDiskError {
    /// A step of it failed.
    #[error("state disk {}: {step}: {source}", path.display())]
    File {
        /// The disk.
        path: PathBuf,
        /// What was done.
        step: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The file has something else on it.
    #[error(
        "state disk {}: it is no ext4 file system labelled {LABEL}, and what is there is left as it is: name another \
         file, or move this one away",
        path.display()
    )]
    Other {
        /// The disk.
        path: PathBuf,
    },
    /// Too small.
    #[error("state disk {}: {mib} MiB are too few for a file system: {LEAST_MIB} at least", path.display())]
    Small {
        /// The disk.
        path: PathBuf,
        /// What was asked for.
        mib: u32,
    },
    /// The program that makes it.
    #[error("state disk {}: mkfs.ext4: {what}: is e2fsprogs installed, and is there room?", path.display())]
    Mkfs {
        /// The disk.
        path: PathBuf,
        /// What it said.
        what: String,
    },
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDisk {
    /// It was there.
    There,
    /// It was made.
    Made,
}

/// Sees to it that there is a state disk at `path`: one that is there is never
/// formatted again, of whatever size.
///
/// # Errors
/// The file is something else, or cannot be made.
pub fn ensure(path: &Path, mib: u32) -> Result<StateDisk, StateDiskError> {
    match File::open(path) {
        Ok(file) => checked(path, &file).map(|()| StateDisk::There),
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(path, mib).map(|()| StateDisk::Made),
        Err(source) => Err(StateDiskError::File { path: path.to_owned(), step: "open it", source }),
    }
}

fn checked(path: &Path, file: &File) -> Result<(), StateDiskError> {
    let mut magic = [0; 2];
    let mut label = [0; LABEL.len()];
    let read = file.read_exact_at(&mut magic, MAGIC.0).and_then(|()| file.read_exact_at(&mut label, LABEL_AT));
    if read.is_ok() && magic == MAGIC.1 && label == *LABEL.as_bytes() {
        return Ok(());
    }
    Err(StateDiskError::Other { path: path.to_owned() })
}

fn mkfs() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(SYSTEM_DIRECTORIES.iter().map(PathBuf::from));
    let name = OsStr::new("mkfs.ext4");
    dirs.map(|dir| dir.join(name)).find(|file| file.is_file()).unwrap_or_else(|| name.into())
}

/// Makes it beside its place and moves it there, so that there is none or a whole one.
fn make(path: &Path, mib: u32) -> Result<(), StateDiskError> {
    if mib < LEAST_MIB {
        return Err(StateDiskError::Small { path: path.to_owned(), mib });
    }
    let failed = |step| move |source| StateDiskError::File { path: path.to_owned(), step, source };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(failed("make its directory"))?;
    let new = tempfile::Builder::new().prefix(".state-").tempfile_in(dir).map_err(failed("make it"))?;
    new.as_file().set_len(u64::from(mib) << 20).map_err(failed("size it"))?;
    // Nobody but root has anything to do there.
    let arguments = ["-q", "-F", "-t", "ext4", "-L", LABEL, "-m", "0"];
    let mut command = Command::new(mkfs());
    command.args(arguments).arg(new.path()).env("LC_ALL", "C").stdin(Stdio::null());
    let said = |what| StateDiskError::Mkfs { path: path.to_owned(), what };
    let output = command.output().map_err(|error| said(error.to_string()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(said(format!("{}: {}", output.status, words.trim().replace('\n', " "))));
    }
    let file = File::open(new.path()).map_err(failed("read it back"))?;
    checked(path, &file)?;
    file.sync_all().map_err(failed("write it"))?;
    // Somebody else's is not replaced.
    new.persist_noclobber(path).map_err(|error| failed("move it to its place")(error.error))?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed("write its directory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_never_formatted_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/state.img");
        assert_eq!(ensure(&path, 16).unwrap(), StateDisk::Made);
        let before = fs::read(&path).unwrap();
        assert_eq!(before.len(), 16 << 20);
        assert_eq!(ensure(&path, 64).unwrap(), StateDisk::There);
        assert!(before == fs::read(&path).unwrap());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn what_is_something_else_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for text in ["somebody's", ""] {
            fs::write(&path, text).unwrap();
            let error = ensure(&path, 64).unwrap_err().to_string();
            assert!(error.contains("left as it is"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let other = dir.path().join("other");
        fs::write(&other, vec![0; 1 << 16]).unwrap();
        assert!(matches!(ensure(&other, 64), Err(StateDiskError::Other { .. })));
        assert!(matches!(ensure(&dir.path().join("y"), 1), Err(StateDiskError::Small { mib: 1, .. })));
        assert!(!dir.path().join("y").exists());
        let below = path.join("state.img");
        assert!(ensure(&below, 64).unwrap_err().to_string().contains(below.to_str().unwrap()));
    }
}
