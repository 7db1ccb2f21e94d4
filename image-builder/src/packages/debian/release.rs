//! Reads a suite's signed release file.
//!
//! apt has verified its signature and refuses one that is past its `Valid-Until`. This module
//! adds the fingerprints of the signing keys, which are recorded in the lock, and
//! refuses a release file that is older than one seen before.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use firstlight_image::digest;

use super::Error;
use super::keyring::Keyring;
use crate::cache::{self, io_error};
use crate::packages::date::seconds;
use crate::packages::lock::Release;

/// Returns a field of the first paragraph of a clear-signed file.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let signed = text.split("\n\n").nth(1)?;
    signed.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Returns the path of the release file among a tree's package lists.
fn file_of(lists: &Path, suite: &str) -> Result<PathBuf, Error> {
    let missing = || Error::NoRelease { suite: suite.to_owned(), dir: lists.to_owned() };
    let entries = fs::read_dir(lists).map_err(io_error("list", lists))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|path| path.to_string_lossy().ends_with("_InRelease"));
    found.sort();
    found.pop().ok_or_else(missing)
}

/// Reads the release file of a tree.
pub(super) fn read(tree: &Path, suite: &str, keyring: &Keyring) -> Result<Release, Error> {
    let file = file_of(&tree.join("lists"), suite)?;
    let text = fs::read_to_string(&file).map_err(io_error("read", &file))?;
    let invalid = |what: &str| Error::BadRelease { suite: suite.to_owned(), what: what.to_owned() };
    let date = field(&text, "Date").ok_or_else(|| invalid("the field Date is missing"))?;
    Ok(Release {
        name: suite.to_owned(),
        date: date.to_owned(),
        valid_until: field(&text, "Valid-Until").map(str::to_owned),
        sha256: digest::of_bytes(text.as_bytes()),
        signed_by: signers(&file, suite, keyring)?,
    })
}

/// Verifies the signatures with the keyring and returns the fingerprints of the signing keys.
fn signers(file: &Path, suite: &str, keyring: &Keyring) -> Result<Vec<String>, Error> {
    let output = Command::new("gpgv")
        .args(["--status-fd", "1", "--keyring", keyring.file()])
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Start { program: "gpgv", source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut fingerprints: Vec<String> = text.lines().filter_map(valid_signature).collect();
    fingerprints.sort();
    if fingerprints.is_empty() {
        let what = format!("no valid signature by a key of {}", keyring.file());
        return Err(Error::BadRelease { suite: suite.to_owned(), what });
    }
    Ok(fingerprints)
}

/// Parses `[GNUPG:] VALIDSIG FINGERPRINT DATE ... PRIMARY-FINGERPRINT` to the last field.
fn valid_signature(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    let fingerprint = (words.next()? == "[GNUPG:]" && words.next()? == "VALIDSIG").then(|| words.next_back())??;
    (fingerprint.len() >= 40 && fingerprint.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then(|| fingerprint.to_owned())
}

/// Records the newest date of a suite and refuses an older one. Otherwise a
/// man in the middle could serve old but validly signed lists with vulnerable
/// packages.
pub(super) fn refuse_older(tree: &Path, release: &Release) -> Result<(), Error> {
    let invalid = |what: String| Error::BadRelease { suite: release.name.clone(), what };
    let now = seconds(&release.date).ok_or_else(|| invalid(format!("invalid Date {:?}", release.date)))?;
    let file = tree.join("newest-release");
    let seen = fs::read_to_string(&file).ok();
    if let Some(seen) = seen.as_deref().map(str::trim)
        && let Some(before) = seconds(seen)
    {
        if now < before {
            return Err(Error::RolledBack {
                suite: release.name.clone(),
                seen: seen.to_owned(),
                now: release.date.clone(),
                file,
            });
        }
        if now == before {
            return Ok(());
        }
    }
    Ok(cache::write_atomically(&file, format!("{}\n", release.date).as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIGNED: &str = "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nOrigin: Debian\nSuite: testing\n\
        Date: Sat, 14 Nov 2026 09:57:18 UTC\nValid-Until: Sat, 21 Nov 2026 09:57:18 UTC\nSHA256:\n aa 1 Date: x\n\
        -----BEGIN PGP SIGNATURE-----\n\nDate: Sat, 14 Nov 2099 09:57:18 UTC\n";

    #[test]
    fn only_signed_fields_are_read() {
        assert_eq!(field(SIGNED, "Date"), Some("Sat, 14 Nov 2026 09:57:18 UTC"));
        assert_eq!(field(SIGNED, "Valid-Until"), Some("Sat, 21 Nov 2026 09:57:18 UTC"));
        assert_eq!(field(SIGNED, "Codename"), None);
        assert_eq!(field("Date: x\n", "Date"), None, "unsigned fields are ignored");
        let fingerprint = "A".repeat(40);
        let line = format!("[GNUPG:] VALIDSIG {fingerprint} 2026-11-14 1 0 4 0 1 10 01 {}", "B".repeat(40));
        assert_eq!(valid_signature(&line), Some("B".repeat(40)));
        assert_eq!(valid_signature(&format!("[GNUPG:] BADSIG {fingerprint} x")), None);
    }

    #[test]
    fn older_release_then_error_and_newer_one_is_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let release = |date: &str| Release {
            name: "sid".into(),
            date: date.into(),
            valid_until: None,
            sha256: String::new(),
            signed_by: Vec::new(),
        };
        let (old, new) = (release("Sat, 14 Nov 2026 09:57:18 UTC"), release("Sat, 14 Nov 2026 09:57:19 UTC"));
        refuse_older(dir.path(), &old).unwrap();
        refuse_older(dir.path(), &old).unwrap();
        refuse_older(dir.path(), &new).unwrap();
        let error = refuse_older(dir.path(), &old).unwrap_err();
        assert!(matches!(error, Error::RolledBack { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("sid") && text.contains(":18") && text.contains(":19") && text.contains("newest-release")
        );
        refuse_older(dir.path(), &new).unwrap();
        assert!(matches!(refuse_older(dir.path(), &release("soon")), Err(Error::BadRelease { .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(?s).{0,200}", date in "[A-Za-z]{3}, [0-9]{1,6} [A-Z][a-z]{2} [0-9]{1,20} [0-9:]{1,12} UTC") {
            let _ = (seconds(&text), seconds(&date), field(&text, "Date"), valid_signature(&text));
        }
    }
}
