//! The state file for a restart: version, baseboard and GPUs. It does not contain the active partitions: the list has
//! to be sent.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use firstlight_partitions::known::KnownBaseboard;
use serde::{Deserialize, Serialize};

/// A file that a restart rejects, or that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// It cannot be written.
    #[error("failed to write the state file {0}: {1}")]
    Write(String, #[source] std::io::Error),
    /// There is none, or it cannot be read.
    #[error("restart: failed to read the state file {0}: {1}")]
    Read(String, #[source] std::io::Error),
    /// It is corrupt.
    #[error("restart: the state file {0} is corrupt: {1}")]
    Corrupt(String, #[source] serde_json::Error),
    /// Written by another manager, or on another baseboard.
    #[error("restart: the state file {path} is of {found}, this is {expected}")]
    Other {
        /// The file.
        path: String,
        /// Its content.
        found: String,
        /// The expected content.
        expected: String,
    },
}

/// The file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateFile {
    version: String,
    table: String,
    gpus: Vec<u32>,
}

impl StateFile {
    /// Returns this manager's content.
    #[must_use]
    pub fn new(version: &str, known: &KnownBaseboard) -> Self {
        let gpus = known.table().gpus().ids().collect();
        Self { version: version.to_owned(), table: known.name.to_owned(), gpus }
    }

    fn named(&self) -> String {
        format!("version {} on {}", self.version, self.table)
    }

    /// Writes it atomically.
    ///
    /// # Errors
    /// The directory is not there or cannot be written to.
    pub fn write(&self, path: &Path) -> Result<(), StateFileError> {
        let failed = |error| StateFileError::Write(path.display().to_string(), error);
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let mut file = File::create(&beside).map_err(failed)?;
        serde_json::to_writer(&file, self).map_err(|error| failed(error.into()))?;
        file.write_all(b"\n").and_then(|()| file.sync_all()).map_err(failed)?;
        std::fs::rename(&beside, path).map_err(failed)
    }

    /// Checks that the file has this manager's content.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self, path: &Path) -> Result<(), StateFileError> {
        let name = || path.display().to_string();
        let text = std::fs::read(path).map_err(|error| StateFileError::Read(name(), error))?;
        let found: Self = serde_json::from_slice(&text).map_err(|error| StateFileError::Corrupt(name(), error))?;
        if found == *self {
            return Ok(());
        }
        Err(StateFileError::Other { path: name(), found: found.named(), expected: self.named() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_partitions::known;

    #[test]
    fn restart_requires_a_matching_state_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let ours = StateFile::new("610.43.02", &known::H100);
        let refusal = |file: &StateFile| file.check(&path).unwrap_err().to_string();
        assert!(refusal(&ours).contains("failed to read"));
        ours.write(&path).unwrap();
        ours.check(&path).unwrap();
        assert!(refusal(&StateFile::new("575.57.08", &known::H100)).contains("version 610.43.02 on h100, this is"));
        assert!(refusal(&StateFile::new("610.43.02", &known::B200)).contains("version 610.43.02 on b200"));
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert!(refusal(&ours).contains("corrupt"));
        assert!(ours.write(&dir.path().join("none/state")).is_err());
    }
}
