//! Inputs that are worth keeping: one file each in `tests/fuzz/corpus/TARGET`.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

/// The directory of a target's inputs.
pub(crate) fn dir(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// The inputs of a target, in a fixed order; none if there is no directory.
pub(crate) fn load(target: &str) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(dir(target)).into_iter().flatten().filter_map(Result::ok);
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files.iter().filter_map(|file| fs::read(file).ok()).collect()
}

/// Replaces a target's inputs. A file is named after what is in it.
///
/// # Errors
/// They cannot be written.
pub(crate) fn replace(target: &str, inputs: &[Vec<u8>]) -> io::Result<()> {
    let dir = dir(target);
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => fs::create_dir_all(&dir)?,
    }
    inputs.iter().try_for_each(|input| {
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        fs::write(dir.join(format!("{:016x}", hasher.finish())), input)
    })
}
