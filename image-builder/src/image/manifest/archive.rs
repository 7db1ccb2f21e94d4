//! `[[archive]]`: files that Debian does not package, from an archive that
//! the user supplies.

use serde::Deserialize;

use super::{Check, Error};
use crate::packages::store::is_hash;

/// `[[archive]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Archive {
    /// Its name in records and SBOMs.
    pub name: String,
    /// The version of its contents.
    pub version: String,
    /// Path of the archive, relative to the manifest's directory: tar, tar.gz
    /// or tar.xz.
    pub path: String,
    /// Its required SHA-256.
    pub sha256: String,
    /// Its licence: an SPDX identifier or a name.
    pub licence: String,
    /// What it is for, and where to get it.
    pub reason: String,
    /// The files to add.
    pub files: Vec<Part>,
}

/// Files of an archive and their target directory.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// A path in the archive; `*` and `?` match within a path component.
    /// It must match.
    pub from: String,
    /// Target directory.
    pub into: String,
}

impl Archive {
    /// Replaces variables and checks every value.
    pub(super) fn resolve(&mut self, check: &Check<'_>) -> Result<(), Error> {
        check.name("archive.name", &self.name)?;
        let key = |field: &str| format!("archive[{}].{field}", self.name);
        for (field, text) in [("licence", &self.licence), ("reason", &self.reason)] {
            if text.trim().is_empty() || text.contains(char::is_control) {
                return Err(check.wrong(
                    &key(field),
                    text,
                    "one line of text is needed: it is copied into records and SBOMs",
                ));
            }
        }
        // A missing variable here means that the user lacks the archive.
        let add_reason = |error: Error| match error {
            Error::Value { file, key, value, what } => {
                let what = format!("{what}; you must supply the archive: {}", self.reason);
                Error::Value { file, key, value, what }
            }
            other => other,
        };
        let (version_key, path_key, hash_key) = (key("version"), key("path"), key("sha256"));
        check.expand(&version_key, &mut self.version).map_err(add_reason)?;
        check.source(&path_key, &mut self.path).map_err(add_reason)?;
        check.expand(&hash_key, &mut self.sha256).map_err(add_reason)?;
        check.name(&version_key, &self.version)?;
        if !is_hash(&self.sha256) {
            return Err(check.wrong(
                &hash_key,
                &self.sha256,
                "a SHA-256 is 64 digits of 0-9 and a-f: sha256sum prints it",
            ));
        }
        let (files_key, into_key) = (key("files"), key("files.into"));
        if self.files.is_empty() {
            return Err(check.wrong(&files_key, "[]", "list the files to add and their target directories"));
        }
        for Part { from, into } in &mut self.files {
            let invalid = from.is_empty() || from.starts_with('/') || from.split('/').any(|part| part == "..");
            if invalid || glob::Pattern::new(from).is_err() {
                return Err(check.wrong(&files_key, from, "a path in an archive has no leading / and no .."));
            }
            check.place(&into_key, into)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Manifest, Variables};
    use std::path::Path;

    fn parse(change: (&str, &str)) -> Result<Manifest, String> {
        let text = format!(
            "[image]\nname = \"x\"\nformat = \"initramfs\"\n[kernel]\npackage = \"k\"\nsuite = \"sid\"\n\
             [[archive]]\nname = \"tool\"\nversion = \"1.2\"\npath = \"${{TOOL}}\"\nsha256 = \"{}\"\nlicence = \"Own\"\n\
             reason = \"ask the vendor\"\nfiles = [{{ from = \"*/bin/tool\", into = \"/usr/bin\" }}]\n",
            "ab".repeat(32)
        );
        assert!(text.contains(change.0));
        let variables = Variables::from([("TOOL".to_owned(), "tool.tar".to_owned())]);
        let text = text.replace(change.0, change.1);
        Manifest::parse(&text, Path::new("dir/m.toml"), &variables).map_err(|error| error.to_string())
    }

    #[test]
    fn invalid_archive_entry_is_refused_by_key() {
        let archive = &parse(("Own", "Own")).unwrap().archives[0];
        assert_eq!((archive.path.as_str(), archive.files[0].into.as_str()), ("dir/tool.tar", "usr/bin"));
        for (from, to, words) in [
            ("${TOOL}", "${OTHER}", ["--set OTHER=", "ask the vendor"]),
            ("abab", "xyz", ["archive[tool].sha256", "sha256sum"]),
            ("\"Own\"", "\"\"", ["archive[tool].licence", "SBOMs"]),
            ("ask the vendor", "a\\nb", ["archive[tool].reason", "one line"]),
            ("*/bin", "../bin", ["archive[tool].files", "no .."]),
            ("*/bin", "/bin", ["archive[tool].files", "no leading /"]),
            ("\"/usr/bin\"", "\"usr\"", ["archive[tool].files.into", "begins with /"]),
            ("\"1.2\"", "\"1/2\"", ["archive[tool].version", "letters"]),
            ("\"tool\"", "\"../x\"", ["archive.name", "letters"]),
        ] {
            let error = parse((from, to)).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
        }
    }
}
