//! Whose signatures count: Debian's keys, or those of an archive of somebody's own.
//!
//! A company's mirror may be signed anew with the company's key.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image::digest;

use super::Error;

/// Overrides Debian's own keys.
const OVERRIDE: &str = "FIRSTLIGHT_DEBIAN_KEYRING";
/// The public keys of the Debian archive.
const DEBIAN: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// What would end the path in apt's list of sources.
const SEPARATORS: &[char] = &[' ', '\t', '\n', '[', ']', ',', '#', '"', '\''];

/// A file of public keys; every suite is verified with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keyring {
    file: String,
    /// Which keys they are, unless they are Debian's.
    id: Option<String>,
}

impl Keyring {
    /// `$FIRSTLIGHT_DEBIAN_KEYRING`, else Debian's own keys.
    pub(super) fn of_environment() -> Result<Self, Error> {
        Self::of(std::env::var_os(OVERRIDE).filter(|value| !value.is_empty()))
    }

    fn of(value: Option<OsString>) -> Result<Self, Error> {
        let Some(value) = value else { return Ok(Self { file: DEBIAN.to_owned(), id: None }) };
        let bad = |why: &str| Error::BadKeyring { file: PathBuf::from(&value), why: why.to_owned() };
        let file = value.to_str().ok_or_else(|| bad("its name is no text"))?;
        if !file.starts_with('/') {
            return Err(bad("it is no absolute path"));
        }
        if file.contains(SEPARATORS) {
            return Err(bad("apt takes no such name: it may have no spaces, brackets, commas, quotes and no #"));
        }
        let keys = fs::read(file).map_err(|error| bad(&format!("it cannot be read: {error}")))?;
        match keys.first() {
            None => Err(bad("it is empty")),
            _ if keys.starts_with(b"-----BEGIN") => {
                Err(bad("it is in text form, and gpg --dearmor makes a keyring of it"))
            }
            // Every packet of OpenPGP begins so.
            Some(first) if first & 0x80 == 0 => Err(bad("it is no keyring")),
            Some(_) => Ok(Self { file: file.to_owned(), id: Some(digest::of_bytes(&keys)[..16].to_owned()) }),
        }
    }

    /// Where it is.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// Whether Debian's keys are installed; others have been read already.
    pub(super) fn is_there(&self) -> bool {
        self.id.is_some() || Path::new(&self.file).exists()
    }

    /// What the tree of a suite is called: dates of release files compare only
    /// among those that the same keys have signed.
    pub(super) fn tree_of(&self, suite: &str) -> String {
        self.id.as_ref().map_or_else(|| suite.to_owned(), |id| format!("{suite}-keys-{id}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_keys_have_other_trees() {
        let dir = tempfile::tempdir().unwrap();
        let keyring = |name: &str, bytes: &[u8]| {
            let file = dir.path().join(name);
            fs::write(&file, bytes).unwrap();
            Keyring::of(Some(file.into_os_string())).unwrap()
        };
        let debian = Keyring::of(None).unwrap();
        assert_eq!((debian.file(), debian.tree_of("sid").as_str()), (DEBIAN, "sid"));
        let (one, two, copy) = (keyring("1", b"\x99one"), keyring("2", b"\x99two"), keyring("3", b"\x99one"));
        assert!(one.tree_of("sid").starts_with("sid-keys-") && one.is_there());
        assert_ne!(one.tree_of("sid"), two.tree_of("sid"));
        assert_eq!(one.tree_of("sid"), copy.tree_of("sid"), "the same keys at another place");
    }

    #[test]
    fn what_is_no_keyring_is_refused_with_the_variables_name() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name).into_os_string();
        fs::write(place("text"), "-----BEGIN PGP PUBLIC KEY BLOCK-----\n").unwrap();
        fs::write(place("kbx"), b"\0\0\0\x20\x01\x01\0\0KBXf").unwrap();
        fs::write(place("empty"), "").unwrap();
        for (value, why) in [
            ("keys.gpg".into(), "absolute"),
            (place("none"), "No such file"),
            (place("a b"), "spaces"),
            (dir.path().into(), "directory"),
            (place("text"), "--dearmor"),
            (place("kbx"), "no keyring"),
            (place("empty"), "empty"),
        ] {
            let error = Keyring::of(Some(value)).unwrap_err().to_string();
            assert!(error.contains(OVERRIDE) && error.contains(why) && error.contains("gpg --export"), "{error}");
        }
    }
}
