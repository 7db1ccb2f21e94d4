//! Recipes of kernels built from source: a source package and fragments.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::config::{self, RequestedConfig};

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The recipe or a fragment could not be read.
    #[error("kernel recipe: failed to read {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The recipe is not TOML, or has unknown or missing keys.
    #[error("failed to parse kernel recipe {}", file.display())]
    Parse {
        /// The recipe.
        file: PathBuf,
        /// The parser's error, with line and column.
        source: Box<toml::de::Error>,
    },
    /// The name is invalid in a kernel release or a file name.
    #[error("kernel recipe {}: invalid name = {name:?}: use lower-case letters, digits and -", file.display())]
    Name {
        /// The recipe.
        file: PathBuf,
        /// The name.
        name: String,
    },
    /// A fragment is invalid, or fragments conflict.
    #[error(transparent)]
    Fragments(#[from] config::Error),
}

/// A kernel built from Debian's source, configured by fragments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// Suffix of the kernel's release: `6.12.95-firstlight-NAME`.
    pub name: String,
    /// Debian's source package.
    pub source: String,
    /// The suite of the package.
    pub suite: String,
    /// The values that the fragments request.
    pub requested: RequestedConfig,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    source: String,
    suite: String,
    fragments: Vec<PathBuf>,
}

impl Recipe {
    /// Reads the recipe at `file` and its fragments, whose paths are relative to it.
    ///
    /// # Errors
    /// A file cannot be read or is invalid; names the file, and the line if there is one.
    pub fn read(file: &Path) -> Result<Self, Error> {
        let read =
            |file: &Path| fs::read_to_string(file).map_err(|source| Error::Read { file: file.to_owned(), source });
        let text: Text = toml::from_str(&read(file)?)
            .map_err(|source| Error::Parse { file: file.to_owned(), source: Box::new(source) })?;
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if text.name.is_empty() || text.name.len() > 32 || !text.name.bytes().all(plain) {
            return Err(Error::Name { file: file.to_owned(), name: text.name });
        }
        let dir = file.parent().unwrap_or(Path::new(""));
        let mut requested = RequestedConfig::default();
        for fragment in &text.fragments {
            let fragment = dir.join(fragment);
            requested.add(&fragment, &read(&fragment)?)?;
        }
        Ok(Self { name: text.name, source: text.source, suite: text.suite, requested })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(text: &str) -> Result<Recipe, Error> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("net.config"), "CONFIG_NET=y\n").unwrap();
        let file = dir.path().join("lab.toml");
        fs::write(&file, text).unwrap();
        Recipe::read(&file)
    }

    #[test]
    fn fragment_paths_are_relative_to_recipe() {
        let text = "name = \"lab\"\nsource = \"linux-source-6.12\"\nsuite = \"sid\"\nfragments = [\"net.config\"]\n";
        let recipe = recipe(text).unwrap();
        assert_eq!((recipe.name.as_str(), recipe.requested.text().as_str()), ("lab", "CONFIG_NET=y\n"));
    }

    #[test]
    fn error_names_the_cause() {
        for (text, word) in [
            ("name = \"Lab\"\nsource = \"s\"\nsuite = \"sid\"\nfragments = []", "lower-case"),
            ("name = \"lab\"\nsource = \"s\"\nsuite = \"sid\"\nfragments = [\"none.config\"]", "none.config"),
            ("name = \"lab\"", "lab.toml"),
        ] {
            let error = recipe(text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn recipes_in_repository_are_valid() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel-configs");
        let mut seen = 0;
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "toml") {
                assert!(!Recipe::read(&entry.path()).unwrap().requested.is_empty());
                seen += 1;
            }
        }
        assert!(seen > 0, "no recipe in {}", dir.display());
    }
}
