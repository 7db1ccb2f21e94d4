//! Options that the real manager does not have: a JSON file that the environment variable `FAKE_FM` names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use firstlight_partitions::PartitionId;
use firstlight_partitions::known::KnownBaseboard;
use serde::{Deserialize, Serialize};

use crate::board::Failed;
use crate::codes::{self, Family};

/// The environment variable.
pub const VARIABLE: &str = "FAKE_FM";

/// An invalid file.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// It cannot be read.
    #[error("FAKE_FM={0}: {1}")]
    Read(PathBuf, #[source] std::io::Error),
    /// It is invalid JSON.
    #[error("FAKE_FM={0}: {1}")]
    Json(PathBuf, #[source] serde_json::Error),
    /// There is no such baseboard.
    #[error("FAKE_FM: no table {0}; known: h100, b200, a100-8, a100-16, hgx-2")]
    Table(String),
}

/// The defaults are a working manager of an H100.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// The baseboard, by the name of its known table.
    pub table: String,
    /// The generation whose codes are used; `None`: that of the baseboard.
    pub codes: Option<Family>,
    /// Delay before it listens.
    pub listen_ms: u64,
    /// Delay between listening and being ready.
    pub start_ms: u64,
    /// Latency of lists.
    pub list_ms: u64,
    /// Latency of activations; that of the real one is not published.
    pub activate_ms: u64,
    /// Latency of deactivations.
    pub deactivate_ms: u64,
    /// Window for the list after a restart.
    pub restart_window_ms: u64,
    /// The code for an unexpected list of active partitions.
    pub unexpected_list_code: i32,
    /// The manager's version.
    pub version: String,
    /// The driver's; none: the same.
    pub driver_version: Option<String>,
    /// The start fails with this line.
    pub start_fails: Option<String>,
    /// The socket for tests.
    pub control: Option<PathBuf>,
    /// The log of calls, appended to.
    pub log: Option<PathBuf>,
    /// Failed devices.
    pub failed: Failed,
    /// Partitions with a running virtual machine when it starts.
    pub tenants: BTreeSet<PartitionId>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            table: "h100".to_owned(),
            codes: None,
            listen_ms: 0,
            start_ms: 50,
            list_ms: 2,
            activate_ms: 200,
            deactivate_ms: 200,
            restart_window_ms: 60_000,
            unexpected_list_code: codes::NOT_SUPPORTED,
            version: "610.43.02".to_owned(),
            driver_version: None,
            start_fails: None,
            control: None,
            log: None,
            failed: Failed::default(),
            tenants: BTreeSet::new(),
        }
    }
}

impl Scenario {
    /// Reads the file of the environment variable.
    ///
    /// # Errors
    /// The file cannot be read or used.
    pub fn from_environment() -> Result<Self, ScenarioError> {
        std::env::var_os(VARIABLE).map_or_else(|| Ok(Self::default()), |path| Self::read(Path::new(&path)))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read or used.
    pub fn read(path: &Path) -> Result<Self, ScenarioError> {
        let text = std::fs::read(path).map_err(|error| ScenarioError::Read(path.to_owned(), error))?;
        serde_json::from_slice(&text).map_err(|error| ScenarioError::Json(path.to_owned(), error))
    }

    /// Returns the baseboard.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn known(&self) -> Result<&'static KnownBaseboard, ScenarioError> {
        KnownBaseboard::by_name(&self.table).ok_or_else(|| ScenarioError::Table(self.table.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenario_fields_have_defaults_and_unknown_ones_are_refused() {
        assert_eq!(serde_json::from_str::<Scenario>("{}").unwrap(), Scenario::default());
        let some = r#"{"table": "b200", "codes": "nvl4", "activate_ms": 0, "failed": {"links": [[1, 2]]}}"#;
        let some: Scenario = serde_json::from_str(some).unwrap();
        assert_eq!((some.activate_ms, some.list_ms), (0, 2));
        assert_eq!((some.codes, some.known().unwrap().name), (Some(Family::Nvl4), "b200"));
        let again = serde_json::from_str::<Scenario>(&serde_json::to_string(&some).unwrap()).unwrap();
        assert_eq!(again, some);
        for wrong in [r#"{"activate": 1}"#, r#"{"failed": {"fans": []}}"#, r#"{"codes": "nvl6"}"#] {
            assert!(serde_json::from_str::<Scenario>(wrong).is_err(), "{wrong}");
        }
        let none = Scenario { table: "h200".into(), ..Scenario::default() };
        assert!(none.known().unwrap_err().to_string().contains("no table h200"));
    }
}
