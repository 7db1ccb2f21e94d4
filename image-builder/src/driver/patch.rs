//! Applies patches to a driver's source.

use std::fs;
use std::path::{Path, PathBuf};

use super::matrix::{Patch, Table};
use super::version::Version;
use crate::cache::{self, io_error};

/// Why a patch could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text to replace does not occur exactly once.
    #[error("patch {patch}: the text to replace occurs {found} times in {}, expected once: the driver's source has changed", file.display())]
    NoUniqueMatch {
        /// The patch.
        patch: String,
        /// The file.
        file: PathBuf,
        /// The number of occurrences.
        found: usize,
    },
    /// The kernel headers contradict the kernel versions of the patch.
    #[error(
        "patch {patch} is needed for kernel {kernel} according to its version: {by_version}, according to {}: {by_headers}; correct the \
         patch's kernels in the table",
        file.display()
    )]
    Evidence {
        /// The patch.
        patch: String,
        /// The kernel.
        kernel: String,
        /// Whether the patch is needed according to the table.
        by_version: bool,
        /// Whether it is needed according to the headers.
        by_headers: bool,
        /// The header file.
        file: PathBuf,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    Io(#[from] cache::Error),
}

/// Checks every patch of `driver` with evidence against the headers of `kernel`
/// in the directory `headers`.
///
/// # Errors
/// [`Error::Evidence`] if version and headers disagree.
pub(super) fn check(table: &Table, driver: &Version, kernel: &Version, headers: &Path) -> Result<(), Error> {
    for patch in table.patches.iter().filter(|patch| patch.is_for_driver(driver)) {
        let Some(evidence) = &patch.evidence else { continue };
        let file = headers.join(&evidence.file);
        let text = fs::read_to_string(&file).map_err(io_error("read", &file))?;
        let (by_version, by_headers) = (patch.applies(driver, kernel), text.contains(&evidence.has));
        if by_version != by_headers {
            return Err(Error::Evidence {
                patch: patch.name.clone(),
                kernel: kernel.to_string(),
                by_version,
                by_headers,
                file,
            });
        }
    }
    Ok(())
}

/// Applies a patch to the source in the directory `source`.
///
/// # Errors
/// [`Error::NoUniqueMatch`] if the text to replace does not occur exactly once.
pub(super) fn apply(patch: &Patch, source: &Path) -> Result<(), Error> {
    let file = source.join(&patch.file);
    let text = fs::read_to_string(&file).map_err(io_error("read", &file))?;
    let found = text.matches(&patch.find).count();
    if found != 1 {
        return Err(Error::NoUniqueMatch { patch: patch.name.clone(), file, found });
    }
    fs::write(&file, text.replace(&patch.find, &patch.replace)).map_err(io_error("write", &file))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let text = "cell = []\n[[patch]]\nname = \"four\"\ndrivers = [\">=550\"]\nkernels = [\">=6.12.97, <6.13\"]\n\
                    file = \"nvidia/a.c\"\nfind = \"f(x)\"\nreplace = \"f(x, 0)\"\nreason = \"r\"\n\
                    evidence = { file = \"include/f.h\", has = \"int y);\" }\n";
        Table::parse(text).unwrap()
    }

    #[test]
    fn text_is_replaced_if_it_occurs_exactly_once() {
        let dir = tempfile::tempdir().unwrap();
        let patch = &table().patches[0];
        assert!(apply(patch, dir.path()).unwrap_err().to_string().contains("nvidia/a.c"));
        fs::create_dir(dir.path().join("nvidia")).unwrap();
        let file = dir.path().join("nvidia/a.c");
        fs::write(&file, "r = f(x);\n").unwrap();
        apply(patch, dir.path()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "r = f(x, 0);\n");
        for (text, times) in [("r = f(x, 0);\n", "occurs 0 times"), ("f(x); f(x);\n", "occurs 2 times")] {
            fs::write(&file, text).unwrap();
            let error = apply(patch, dir.path()).unwrap_err().to_string();
            assert!(error.contains("four") && error.contains(times), "{error}");
            assert_eq!(fs::read_to_string(&file).unwrap(), text, "the file is unchanged");
        }
    }

    #[test]
    fn headers_contradict_version_then_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("include")).unwrap();
        let header = dir.path().join("include/f.h");
        let check_headers = |kernel: &str, text: &str| {
            fs::write(&header, text).unwrap();
            check(&table(), &"550.1".parse().unwrap(), &kernel.parse().unwrap(), dir.path())
        };
        check_headers("6.12.107", "int f(int x, int y);").unwrap();
        check_headers("6.12.95", "int f(int x);").unwrap();
        for (kernel, text) in [("6.12.107", "int f(int x);"), ("6.1.200", "int f(int x, int y);")] {
            let error = check_headers(kernel, text).unwrap_err().to_string();
            for words in ["four", kernel, "include/f.h", "correct the patch's kernels"] {
                assert!(error.contains(words), "{error}");
            }
        }
        // The header is not read for a driver that the patch does not apply to.
        fs::remove_file(&header).unwrap();
        check(&table(), &"535.1".parse().unwrap(), &"6.12.107".parse().unwrap(), dir.path()).unwrap();
    }
}
