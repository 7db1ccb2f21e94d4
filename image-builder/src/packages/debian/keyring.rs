//! Selects the keyring that verifies archive signatures: Debian's keys, or those
//! of another archive, such as a company's mirror that re-signs the release files.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image::digest;

use super::Error;

/// The variable that overrides Debian's keyring.
const OVERRIDE: &str = "FIRSTLIGHT_DEBIAN_KEYRING";
/// The public keys of the Debian archive.
const DEBIAN: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Characters that end a path in `sources.list`.
const SEPARATORS: &[char] = &[' ', '\t', '\n', '[', ']', ',', '#', '"', '\''];

/// A file of public keys, with which every suite is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keyring {
    file: String,
    /// Hash of the keys; `None` for Debian's keyring.
    id: Option<String>,
}

impl Keyring {
    /// Returns the keyring `$FIRSTLIGHT_DEBIAN_KEYRING`, or Debian's if unset.
    pub(super) fn of_environment() -> Result<Self, Error> {
        Self::of(std::env::var_os(OVERRIDE).filter(|value| !value.is_empty()))
    }

    fn of(value: Option<OsString>) -> Result<Self, Error> {
        let Some(value) = value else { return Ok(Self { file: DEBIAN.to_owned(), id: None }) };
        let invalid = |reason: &str| Error::BadKeyring { file: PathBuf::from(&value), reason: reason.to_owned() };
        let file = value.to_str().ok_or_else(|| invalid("the path is not UTF-8"))?;
        if !file.starts_with('/') {
            return Err(invalid("not an absolute path"));
        }
        if file.contains(SEPARATORS) {
            return Err(invalid("apt does not support spaces, brackets, commas, quotes or # in the path"));
        }
        let keys = fs::read(file).map_err(|error| invalid(&format!("cannot be read: {error}")))?;
        match keys.first() {
            None => Err(invalid("the file is empty")),
            _ if keys.starts_with(b"-----BEGIN") => {
                Err(invalid("the keys are ASCII-armored, convert them with gpg --dearmor"))
            }
            // The highest bit of the first byte of every OpenPGP packet is set.
            Some(first) if first & 0x80 == 0 => Err(invalid("not an OpenPGP keyring")),
            Some(_) => Ok(Self { file: file.to_owned(), id: Some(digest::of_bytes(&keys)[..16].to_owned()) }),
        }
    }

    /// Returns the path.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// Returns whether the file exists; an overriding one was read already.
    pub(super) fn exists(&self) -> bool {
        self.id.is_some() || Path::new(&self.file).exists()
    }

    /// Returns the directory name of the apt tree of a suite. Each keyring has its own
    /// trees, because dates of release files are comparable only if the same keys signed them.
    pub(super) fn tree_of(&self, suite: &str) -> String {
        self.id.as_ref().map_or_else(|| suite.to_owned(), |id| format!("{suite}-keys-{id}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_keys_then_different_trees() {
        let dir = tempfile::tempdir().unwrap();
        let keyring = |name: &str, bytes: &[u8]| {
            let file = dir.path().join(name);
            fs::write(&file, bytes).unwrap();
            Keyring::of(Some(file.into_os_string())).unwrap()
        };
        let debian = Keyring::of(None).unwrap();
        assert_eq!((debian.file(), debian.tree_of("sid").as_str()), (DEBIAN, "sid"));
        let (one, two, copy) = (keyring("1", b"\x99one"), keyring("2", b"\x99two"), keyring("3", b"\x99one"));
        assert!(one.tree_of("sid").starts_with("sid-keys-") && one.exists());
        assert_ne!(one.tree_of("sid"), two.tree_of("sid"));
        assert_eq!(one.tree_of("sid"), copy.tree_of("sid"), "the same keys in another file");
    }

    #[test]
    fn invalid_keyring_then_error_names_the_variable() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).into_os_string();
        fs::write(path("text"), "-----BEGIN PGP PUBLIC KEY BLOCK-----\n").unwrap();
        fs::write(path("kbx"), b"\0\0\0\x20\x01\x01\0\0KBXf").unwrap();
        fs::write(path("empty"), "").unwrap();
        for (value, reason) in [
            ("keys.gpg".into(), "absolute"),
            (path("none"), "No such file"),
            (path("a b"), "spaces"),
            (dir.path().into(), "directory"),
            (path("text"), "--dearmor"),
            (path("kbx"), "not an OpenPGP keyring"),
            (path("empty"), "empty"),
        ] {
            let error = Keyring::of(Some(value)).unwrap_err().to_string();
            assert!(error.contains(OVERRIDE) && error.contains(reason) && error.contains("gpg --export"), "{error}");
        }
    }
}
