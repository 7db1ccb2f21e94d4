//! `[[archive]]`: files that no package of Debian has, from an archive that
//! whoever builds the image supplies.

use serde::Deserialize;

use super::{Check, Error};
use crate::store::is_hash;

/// `[[archive]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Archive {
    /// What it is called in records and bills.
    pub name: String,
    /// The version of what is in it.
    pub version: String,
    /// The archive, relative to the manifest's directory: tar, also packed with
    /// gzip or xz.
    pub path: String,
    /// Its hash: nothing else is taken.
    pub sha256: String,
    /// Under which licence it comes: an identifier of SPDX, or a name.
    pub licence: String,
    /// What it is for, and where it is had.
    pub reason: String,
    /// What of it.
    pub files: Vec<Part>,
}

/// Files of an archive, and where they go.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// A path as the archive has it, in which `*` and `?` match within a name.
    /// It has to match something.
    pub from: String,
    /// The directory that it goes into.
    pub into: String,
}

impl Archive {
    /// Replaces variables and checks every value.
    pub(super) fn settle(&mut self, check: &Check<'_>) -> Result<(), Error> {
        check.name("archive.name", &self.name)?;
        let key = |field: &str| format!("archive[{}].{field}", self.name);
        for (field, text) in [("licence", &self.licence), ("reason", &self.reason)] {
            if text.trim().is_empty() || text.contains(char::is_control) {
                return Err(check.wrong(
                    &key(field),
                    text,
                    "one line of text is needed: it goes into records and bills",
                ));
            }
        }
        // Who lacks a variable here lacks the archive.
        let wanted = |error: Error| match error {
            Error::Value { file, key, value, what } => {
                let what = format!("{what}. The archive is supplied by you: {}", self.reason);
                Error::Value { file, key, value, what }
            }
            other => other,
        };
        let (version_key, path_key, hash_key) = (key("version"), key("path"), key("sha256"));
        check.expand(&version_key, &mut self.version).map_err(wanted)?;
        check.source(&path_key, &mut self.path).map_err(wanted)?;
        check.expand(&hash_key, &mut self.sha256).map_err(wanted)?;
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
            return Err(check.wrong(&files_key, "[]", "say which files are wanted, and where they go"));
        }
        for Part { from, into } in &mut self.files {
            let odd = from.is_empty() || from.starts_with('/') || from.split('/').any(|part| part == "..");
            if odd || glob::Pattern::new(from).is_err() {
                return Err(check.wrong(&files_key, from, "a path in an archive has no / in front and no .."));
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
    fn an_archive_is_settled_or_refused_by_key() {
        let archive = &parse(("Own", "Own")).unwrap().archives[0];
        assert_eq!((archive.path.as_str(), archive.files[0].into.as_str()), ("dir/tool.tar", "usr/bin"));
        for (from, to, words) in [
            ("${TOOL}", "${OTHER}", ["--set OTHER=", "ask the vendor"]),
            ("abab", "xyz", ["archive[tool].sha256", "sha256sum"]),
            ("\"Own\"", "\"\"", ["archive[tool].licence", "bills"]),
            ("ask the vendor", "a\\nb", ["archive[tool].reason", "one line"]),
            ("*/bin", "../bin", ["archive[tool].files", "no .."]),
            ("*/bin", "/bin", ["archive[tool].files", "no / in front"]),
            ("\"/usr/bin\"", "\"usr\"", ["archive[tool].files.into", "begins with /"]),
            ("\"1.2\"", "\"1/2\"", ["archive[tool].version", "letters"]),
            ("\"tool\"", "\"../x\"", ["archive.name", "letters"]),
        ] {
            let error = parse((from, to)).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
        }
    }
}
