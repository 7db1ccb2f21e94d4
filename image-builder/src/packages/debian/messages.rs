//! Extracts errors from the output of apt, and suggests the next step.

use std::path::Path;

use super::keyring::Keyring;

/// A task of apt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Refresh the package lists.
    Refresh,
    /// Look up a package in the lists.
    LookUp,
    /// Resolve dependencies.
    Resolve,
    /// Download package files.
    Download,
}

impl Task {
    /// Returns the task as text for a message.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Refresh => "refresh the package lists",
            Self::LookUp => "look up packages",
            Self::Resolve => "resolve dependencies",
            Self::Download => "download packages",
        }
    }

    /// Returns the next step for an error message of apt, beginning with a semicolon;
    /// empty if there is none.
    pub(super) fn advice(self, message: &str, tree: &Path, keyring: &Keyring) -> String {
        match self {
            _ if message.contains(DISK_FULL) => format!("; free space on the disk of {} and retry", tree.display()),
            Self::Refresh if NO_KEY.iter().any(|text| message.contains(text)) => format!(
                "; the signing key is not in {}: set FIRSTLIGHT_DEBIAN_MIRROR to another mirror, or FIRSTLIGHT_DEBIAN_KEYRING \
                 to the keys of this mirror",
                keyring.file()
            ),
            Self::Refresh if message.contains("not valid yet") => {
                format!("; check the clock of this machine; if it is correct, {OTHER_MIRROR}")
            }
            Self::Refresh => format!("; if it persists, {OTHER_MIRROR}"),
            Self::Download => format!("; retry with new package lists; if it persists, {OTHER_MIRROR}"),
            Self::LookUp | Self::Resolve => String::new(),
        }
    }
}

/// Texts for a missing key in messages of gpgv and sqv.
const NO_KEY: &[&str] = &["NO_PUBKEY", "Missing key"];
/// The text of `ENOSPC`.
const DISK_FULL: &str = "No space left on device";
const OTHER_MIRROR: &str = "set FIRSTLIGHT_DEBIAN_MIRROR to another mirror";
/// Maximum number of lines in a message: apt prints the cause first.
const MAX_LINES: usize = 4;

/// Returns the errors and the signature warnings in the output of apt, or all of it if there are none.
pub(super) fn errors(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let all: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // apt 3 writes `Error:` instead of `E:`.
    let is_error = |line: &&&str| {
        let signature = line.contains("GPG error") || line.contains("OpenPGP");
        signature || ["E: ", "Error: "].iter().any(|word| line.starts_with(word))
    };
    let errors: Vec<&str> = all.iter().filter(is_error).copied().collect();
    let mut lines = if errors.is_empty() { all } else { errors };
    lines.truncate(MAX_LINES);
    if lines.is_empty() { "no error message".to_owned() } else { lines.join(" / ").trim_end_matches('.').to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_signature_warnings_are_extracted() {
        let mismatch = b"W: skipping\nE: Failed to fetch a  Hash Sum mismatch\n   Hashes of expected file:\n    - SHA256:aa\n   \
            Hashes of received file:\n    - SHA256:bb\n   Last modification reported: x\nE: Unable to fetch some archives\n";
        assert_eq!(errors(mismatch), "E: Failed to fetch a  Hash Sum mismatch / E: Unable to fetch some archives");
        let unsigned = b"W: GPG error: b: NO_PUBKEY 1\nE: not signed\n";
        assert_eq!(errors(unsigned), "W: GPG error: b: NO_PUBKEY 1 / E: not signed");
        let newer = b"Warning: OpenPGP signature verification failed: Missing key 1\nNotice: x\nError: not signed.\n";
        assert_eq!(errors(newer), "Warning: OpenPGP signature verification failed: Missing key 1 / Error: not signed");
        assert_eq!(errors(b"one\n\n two\n"), "one / two");
        assert_eq!(errors(b" \n"), "no error message");
    }
}
