//! Edits of a driver's source.

use std::fs;
use std::path::{Path, PathBuf};

use super::matrix::{Patch, Table};
use super::version::Version;
use crate::cache::{self, io_error};

/// Why a source could not be edited.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text that should be edited is not there as expected.
    #[error("patch {patch}: {} has {found} times what it edits, not once: the driver's source has changed", file.display())]
    Misfit {
        /// The patch.
        patch: String,
        /// The file.
        file: PathBuf,
        /// How often.
        found: usize,
    },
    /// The kernel's headers are not what its version says.
    #[error(
        "patch {patch}: by its version, kernel {kernel} needs it: {by_version}; by {}: {by_headers}; correct the \
         patch's kernels in the table",
        file.display()
    )]
    Evidence {
        /// The patch.
        patch: String,
        /// The kernel.
        kernel: String,
        /// What the table says.
        by_version: bool,
        /// What the headers say.
        by_headers: bool,
        /// The header.
        file: PathBuf,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    Io(#[from] cache::Error),
}

/// Checks every patch of `driver` that has evidence against the headers of
/// `kernel` in the directory `headers`.
///
/// # Errors
/// [`Error::Evidence`] when version and headers disagree.
pub(super) fn check(table: &Table, driver: &Version, kernel: &Version, headers: &Path) -> Result<(), Error> {
    for patch in table.patches.iter().filter(|patch| patch.is_of(driver)) {
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

/// Edits the source in the directory `source`.
///
/// # Errors
/// [`Error::Misfit`] when a text is not there exactly once.
pub(super) fn apply(patch: &Patch, source: &Path) -> Result<(), Error> {
    let file = source.join(&patch.file);
    let text = fs::read_to_string(&file).map_err(io_error("read", &file))?;
    let found = text.matches(&patch.find).count();
    if found != 1 {
        return Err(Error::Misfit { patch: patch.name.clone(), file, found });
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
    fn one_place_is_edited_and_only_one() {
        let dir = tempfile::tempdir().unwrap();
        let patch = &table().patches[0];
        assert!(apply(patch, dir.path()).unwrap_err().to_string().contains("nvidia/a.c"));
        fs::create_dir(dir.path().join("nvidia")).unwrap();
        let file = dir.path().join("nvidia/a.c");
        fs::write(&file, "r = f(x);\n").unwrap();
        apply(patch, dir.path()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "r = f(x, 0);\n");
        for (text, times) in [("r = f(x, 0);\n", "0 times"), ("f(x); f(x);\n", "2 times")] {
            fs::write(&file, text).unwrap();
            let error = apply(patch, dir.path()).unwrap_err().to_string();
            assert!(error.contains("four") && error.contains(times), "{error}");
            assert_eq!(fs::read_to_string(&file).unwrap(), text, "nothing is half edited");
        }
    }

    #[test]
    fn headers_and_versions_must_agree() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("include")).unwrap();
        let header = dir.path().join("include/f.h");
        let judged = |kernel: &str, text: &str| {
            fs::write(&header, text).unwrap();
            check(&table(), &"550.1".parse().unwrap(), &kernel.parse().unwrap(), dir.path())
        };
        judged("6.12.107", "int f(int x, int y);").unwrap();
        judged("6.12.95", "int f(int x);").unwrap();
        for (kernel, text) in [("6.12.107", "int f(int x);"), ("6.1.200", "int f(int x, int y);")] {
            let error = judged(kernel, text).unwrap_err().to_string();
            for words in ["four", kernel, "include/f.h", "correct the patch's kernels"] {
                assert!(error.contains(words), "{error}");
            }
        }
        // A driver that the patch is not for needs no evidence.
        fs::remove_file(&header).unwrap();
        check(&table(), &"535.1".parse().unwrap(), &"6.12.107".parse().unwrap(), dir.path()).unwrap();
    }
}
