//! The state disk, which outlives the service VM: a file with an ext4 file system.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The file system's label and the disk's serial number, by which the guest finds it.
pub const LABEL: &str = "firstlight-state";

/// Minimum size in MiB: the ext4 journal alone takes four.
pub const MIN_SIZE_MIB: u32 = 16;

/// Offset and value of ext4's magic number.
const MAGIC: (u64, [u8; 2]) = (1024 + 0x38, [0x53, 0xef]);

/// Offset of the label, of 16 bytes.
const LABEL_AT: u64 = 1024 + 0x78;

/// Directories of mkfs.ext4 beside `PATH`, which for users often lacks them.
const SYSTEM_DIRECTORIES: &[&str] = &["/usr/sbin", "/sbin"];

/// Why there is no state disk.
#[derive(Debug, thiserror::Error)]
pub enum StateDiskError {
    /// A file operation failed.
    #[error("failed to {step} state disk {}: {source}", path.display())]
    File {
        /// The disk.
        path: PathBuf,
        /// The operation.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a state disk.
    #[error(
        "state disk {}: not an ext4 file system labelled {LABEL}, its content is left unchanged: name another \
         file, or move this one away",
        path.display()
    )]
    NotOurs {
        /// The disk.
        path: PathBuf,
    },
    /// The size is too small.
    #[error("state disk {}: {mib} MiB are too few for a file system: {MIN_SIZE_MIB} at least", path.display())]
    Small {
        /// The disk.
        path: PathBuf,
        /// The requested size.
        mib: u32,
    },
    /// mkfs.ext4 failed.
    #[error("state disk {}: mkfs.ext4: {what}: is e2fsprogs installed, and is there room?", path.display())]
    Mkfs {
        /// The disk.
        path: PathBuf,
        /// Its message.
        what: String,
    },
}

/// Whether the disk was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDisk {
    /// It existed.
    Existing,
    /// It was created.
    Created,
}

/// Ensures that there is a state disk at `path`; an existing one is never formatted, whatever its size.
///
/// # Errors
/// The file is something else, or cannot be created.
pub fn ensure(path: &Path, mib: u32) -> Result<StateDisk, StateDiskError> {
    match File::open(path) {
        Ok(file) => checked(path, &file).map(|()| StateDisk::Existing),
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(path, mib).map(|()| StateDisk::Created),
        Err(source) => Err(StateDiskError::File { path: path.to_owned(), step: "open", source }),
    }
}

fn checked(path: &Path, file: &File) -> Result<(), StateDiskError> {
    let mut magic = [0; 2];
    let mut label = [0; LABEL.len()];
    let read = file.read_exact_at(&mut magic, MAGIC.0).and_then(|()| file.read_exact_at(&mut label, LABEL_AT));
    if read.is_ok() && magic == MAGIC.1 && label == *LABEL.as_bytes() {
        return Ok(());
    }
    Err(StateDiskError::NotOurs { path: path.to_owned() })
}

fn mkfs() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(SYSTEM_DIRECTORIES.iter().map(PathBuf::from));
    let name = OsStr::new("mkfs.ext4");
    dirs.map(|dir| dir.join(name)).find(|file| file.is_file()).unwrap_or_else(|| name.into())
}

/// Creates it in a temporary file and renames it, so that it is complete or absent.
fn make(path: &Path, mib: u32) -> Result<(), StateDiskError> {
    if mib < MIN_SIZE_MIB {
        return Err(StateDiskError::Small { path: path.to_owned(), mib });
    }
    let failed = |step| move |source| StateDiskError::File { path: path.to_owned(), step, source };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(failed("create the directory of"))?;
    let new = tempfile::Builder::new().prefix(".state-").tempfile_in(dir).map_err(failed("create"))?;
    new.as_file().set_len(u64::from(mib) << 20).map_err(failed("resize"))?;
    // No reserved blocks: only root writes to it.
    let arguments = ["-q", "-F", "-t", "ext4", "-L", LABEL, "-m", "0"];
    let mut command = Command::new(mkfs());
    command.args(arguments).arg(new.path()).env("LC_ALL", "C").stdin(Stdio::null());
    let said = |what| StateDiskError::Mkfs { path: path.to_owned(), what };
    let output = command.output().map_err(|error| said(error.to_string()))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(said(format!("{}: {}", output.status, message.trim().replace('\n', " "))));
    }
    let file = File::open(new.path()).map_err(failed("read back"))?;
    checked(path, &file)?;
    file.sync_all().map_err(failed("sync"))?;
    // A file that was created meanwhile is not replaced.
    new.persist_noclobber(path).map_err(|error| failed("rename")(error.error))?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed("sync the directory of"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_disk_is_created_once_and_never_reformatted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/state.img");
        assert_eq!(ensure(&path, 16).unwrap(), StateDisk::Created);
        let before = fs::read(&path).unwrap();
        assert_eq!(before.len(), 16 << 20);
        assert_eq!(ensure(&path, 64).unwrap(), StateDisk::Existing);
        assert!(before == fs::read(&path).unwrap());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn file_that_is_no_state_disk_is_left_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for text in ["foreign content", ""] {
            fs::write(&path, text).unwrap();
            let error = ensure(&path, 64).unwrap_err().to_string();
            assert!(error.contains("left unchanged"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let other = dir.path().join("other");
        fs::write(&other, vec![0; 1 << 16]).unwrap();
        assert!(matches!(ensure(&other, 64), Err(StateDiskError::NotOurs { .. })));
        assert!(matches!(ensure(&dir.path().join("y"), 1), Err(StateDiskError::Small { mib: 1, .. })));
        assert!(!dir.path().join("y").exists());
        let below = path.join("state.img");
        assert!(ensure(&below, 64).unwrap_err().to_string().contains(below.to_str().unwrap()));
    }
}
