//! The corpus: one file per input in `tests/fuzz/corpus/TARGET`.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

/// Returns the directory of a target's corpus.
pub(crate) fn dir(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// Loads a target's corpus, sorted by file name; empty if there is no directory.
pub(crate) fn load(target: &str) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(dir(target)).into_iter().flatten().filter_map(Result::ok);
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files.iter().filter_map(|file| fs::read(file).ok()).collect()
}

/// Replaces a target's corpus. Each file is named after the hash of its contents.
///
/// # Errors
/// The directory or a file cannot be replaced.
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
