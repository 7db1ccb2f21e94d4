//! What apt says when it fails, and what to try next.

use std::path::Path;

use super::keyring::Keyring;

/// What was wanted of apt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// New package lists.
    Refresh,
    /// A look at the lists.
    LookUp,
    /// What packages need.
    Resolve,
    /// Packages' files.
    Download,
}

impl Task {
    /// As part of a message.
    pub(super) fn phrase(self) -> &'static str {
        match self {
            Self::Refresh => "refresh the package lists",
            Self::LookUp => "look up packages",
            Self::Resolve => "resolve dependencies",
            Self::Download => "download packages",
        }
    }

    /// The next thing to try, behind what apt said.
    pub(super) fn advice(self, said: &str, tree: &Path, keyring: &Keyring) -> String {
        match self {
            _ if said.contains(FULL) => format!("; make room on the disk of {} and run again", tree.display()),
            Self::Refresh if NO_KEY.iter().any(|words| said.contains(words)) => format!(
                "; that key is not in {}: set FIRSTLIGHT_DEBIAN_MIRROR to another mirror, or FIRSTLIGHT_DEBIAN_KEYRING \
                 to the keys of this one",
                keyring.file()
            ),
            Self::Refresh if said.contains("not valid yet") => {
                format!("; is this machine's clock right? If it is, {OTHER_MIRROR}")
            }
            Self::Refresh => format!("; if it stays so, {OTHER_MIRROR}"),
            Self::Download => format!("; run again for fresh package lists; if it stays so, {OTHER_MIRROR}"),
            Self::LookUp | Self::Resolve => String::new(),
        }
    }
}

/// gpgv's words, and sqv's.
const NO_KEY: &[&str] = &["NO_PUBKEY", "Missing key"];
/// The system's words.
const FULL: &str = "No space left on device";
const OTHER_MIRROR: &str = "set FIRSTLIGHT_DEBIAN_MIRROR to another mirror";
/// Lines that are kept of a message: apt begins with the cause.
const MOST_LINES: usize = 4;

/// The errors in what apt printed, and what it says of signatures; all of it where there are none.
pub(super) fn errors(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let all: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // Since version 3 with whole words.
    let is_error = |line: &&&str| {
        let signature = line.contains("GPG error") || line.contains("OpenPGP");
        signature || ["E: ", "Error: "].iter().any(|word| line.starts_with(word))
    };
    let errors: Vec<&str> = all.iter().filter(is_error).copied().collect();
    let mut some = if errors.is_empty() { all } else { errors };
    some.truncate(MOST_LINES);
    if some.is_empty() { "it printed no message".to_owned() } else { some.join(" / ").trim_end_matches('.').to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_of_a_message_is_kept() {
        let mismatch = b"W: skipping\nE: Failed to fetch a  Hash Sum mismatch\n   Hashes of expected file:\n    - SHA256:aa\n   \
            Hashes of received file:\n    - SHA256:bb\n   Last modification reported: x\nE: Unable to fetch some archives\n";
        assert_eq!(errors(mismatch), "E: Failed to fetch a  Hash Sum mismatch / E: Unable to fetch some archives");
        let unsigned = b"W: GPG error: b: NO_PUBKEY 1\nE: not signed\n";
        assert_eq!(errors(unsigned), "W: GPG error: b: NO_PUBKEY 1 / E: not signed");
        let newer = b"Warning: OpenPGP signature verification failed: Missing key 1\nNotice: x\nError: not signed.\n";
        assert_eq!(errors(newer), "Warning: OpenPGP signature verification failed: Missing key 1 / Error: not signed");
        assert_eq!(errors(b"one\n\n two\n"), "one / two");
        assert_eq!(errors(b" \n"), "it printed no message");
    }
}
