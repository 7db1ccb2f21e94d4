//! The manager's configuration file: `KEY=VALUE` lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::board::Policy;

/// Keys of the real manager that have no effect here.
const IGNORED: &[&str] = &[
    "ABORT_CUDA_JOBS_ON_FM_EXIT",
    "BIND_INTERFACE_IP",
    "DATABASE_PATH",
    "FABRIC_PARTITION_DEFINITION_FILE",
    "FM_SM_IPC_INTERFACE",
    "FM_SM_MGMT_PORT_GUID",
    "LOG_APPEND_TO_LOG",
    "LOG_FILE_MAX_SIZE",
    "LOG_LEVEL",
    "LOG_USE_SYSLOG",
    "PARTITION_RAIL_POLICY",
    "SHARED_PARTITION_DEFINITION_FILE",
    "STARTING_TCP_PORT",
    "TOPOLOGY_FILE_PATH",
    "TRUNK_LINK_FAILURE_MODE",
];

/// An invalid file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{0}: {1}")]
    Read(PathBuf, #[source] std::io::Error),
    /// Not `KEY=VALUE`.
    #[error("line {0}: {1:?} is not KEY=VALUE without spaces")]
    Line(usize, String),
    /// An unknown key.
    #[error("line {0}: no key {1}")]
    Key(usize, String),
    /// A duplicate key.
    #[error("line {0}: {1} appears twice")]
    Twice(usize, String),
    /// An invalid value.
    #[error("{0}={1}: {2}")]
    Value(&'static str, String, &'static str),
}

/// The address of the command socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String, u16),
}

/// The configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `FABRIC_MODE`: 0, 1 (shared) or 2.
    pub mode: u8,
    /// `FABRIC_MODE_RESTART`.
    pub restart: bool,
    /// `STATE_FILE_NAME`.
    pub state_file: PathBuf,
    /// `FM_CMD_UNIX_SOCKET_PATH`, or else `FM_CMD_BIND_INTERFACE` and `FM_CMD_PORT_NUMBER`.
    pub address: Address,
    /// `UNIX_SOCKET_PATH`: for the manager's own components; clients can connect, but calls fail.
    pub internal: Option<PathBuf>,
    /// `FM_STAY_RESIDENT_ON_FAILURES`.
    pub resident: bool,
    /// `LOG_FILE_NAME`; none: standard error.
    pub log: Option<PathBuf>,
    /// `ACCESS_LINK_FAILURE_MODE` and `NVSWITCH_FAILURE_MODE`.
    pub policy: Policy,
}

impl Config {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or is invalid.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read(path.to_owned(), error))?;
        Self::parse(&text)
    }

    /// Parses the file's text.
    ///
    /// # Errors
    /// The first invalid line or value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let values = Values::parse(text)?;
        if values.number("DAEMONIZE", 1, 1)? != 0 {
            let why = "the stand-in stays in the foreground; say DAEMONIZE=0";
            return Err(ConfigError::Value("DAEMONIZE", values.text("DAEMONIZE").unwrap_or("1").to_owned(), why));
        }
        let path = |key| values.text(key).filter(|path| !path.is_empty()).map(PathBuf::from);
        let host = values.text("FM_CMD_BIND_INTERFACE").unwrap_or("127.0.0.1").to_owned();
        let port = values.number("FM_CMD_PORT_NUMBER", 6666, u16::MAX)?;
        let flag = |key| values.number(key, 0, 1).map(|value| value == 1);
        Ok(Self {
            mode: u8::try_from(values.number("FABRIC_MODE", 0, 2)?).unwrap_or_default(),
            restart: flag("FABRIC_MODE_RESTART")?,
            state_file: path("STATE_FILE_NAME").unwrap_or_else(|| "/tmp/fabricmanager.state".into()),
            address: path("FM_CMD_UNIX_SOCKET_PATH").map_or(Address::Tcp(host, port), Address::Unix),
            internal: path("UNIX_SOCKET_PATH"),
            resident: flag("FM_STAY_RESIDENT_ON_FAILURES")?,
            log: path("LOG_FILE_NAME"),
            policy: Policy {
                keep_with_failed_links: flag("ACCESS_LINK_FAILURE_MODE")?,
                keep_with_failed_switches: flag("NVSWITCH_FAILURE_MODE")?,
            },
        })
    }
}

const KEYS: &[&str] = &[
    "ACCESS_LINK_FAILURE_MODE",
    "DAEMONIZE",
    "FABRIC_MODE",
    "FABRIC_MODE_RESTART",
    "FM_CMD_BIND_INTERFACE",
    "FM_CMD_PORT_NUMBER",
    "FM_CMD_UNIX_SOCKET_PATH",
    "FM_STAY_RESIDENT_ON_FAILURES",
    "LOG_FILE_NAME",
    "NVSWITCH_FAILURE_MODE",
    "STATE_FILE_NAME",
    "UNIX_SOCKET_PATH",
];

struct Values<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Values<'a> {
    fn parse(text: &'a str) -> Result<Self, ConfigError> {
        let mut values = BTreeMap::new();
        for (at, line) in text.lines().enumerate() {
            let (at, line) = (at + 1, line.trim_end());
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let spaced = |part: &str| part.trim() != part;
            let Some((key, value)) = line.split_once('=').filter(|(key, value)| !spaced(key) && !spaced(value)) else {
                return Err(ConfigError::Line(at, line.to_owned()));
            };
            if !KEYS.contains(&key) && !IGNORED.contains(&key) {
                return Err(ConfigError::Key(at, key.to_owned()));
            }
            if values.insert(key, value).is_some() {
                return Err(ConfigError::Twice(at, key.to_owned()));
            }
        }
        Ok(Self(values))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.0.get(key).copied()
    }

    fn number(&self, key: &'static str, default: u16, most: u16) -> Result<u16, ConfigError> {
        let Some(text) = self.text(key) else { return Ok(default) };
        let wrong = |why| ConfigError::Value(key, text.to_owned(), why);
        let number = text.parse().map_err(|_| wrong("not a number"))?;
        if number <= most { Ok(number) } else { Err(wrong("too large")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendor_style_configuration_is_parsed() {
        let text = "# Fabric Manager\n\nFABRIC_MODE=1\nFABRIC_MODE_RESTART=0\nDAEMONIZE=0\nLOG_FILE_NAME=\n\
                    STATE_FILE_NAME=/var/lib/fm/state\nFM_CMD_UNIX_SOCKET_PATH=/run/fm/socket\nLOG_LEVEL=4\n\
                    UNIX_SOCKET_PATH=/run/fm/internal\nFM_STAY_RESIDENT_ON_FAILURES=1\n";
        let config = Config::parse(text).unwrap();
        assert_eq!((config.mode, config.restart, config.resident, &config.log), (1, false, true, &None));
        assert_eq!(config.address, Address::Unix("/run/fm/socket".into()));
        assert_eq!(config.internal, Some("/run/fm/internal".into()));

        let config = Config::parse("DAEMONIZE=0\nFABRIC_MODE_RESTART=1\n").unwrap();
        assert_eq!((config.mode, config.restart), (0, true), "one key is the beginning of the other");
        assert_eq!(config.address, Address::Tcp("127.0.0.1".into(), 6666));
        assert_eq!(config.state_file, Path::new("/tmp/fabricmanager.state"));
    }

    #[test]
    fn invalid_configuration_is_reported() {
        for (text, error) in [
            ("", "DAEMONIZE=1: the stand-in stays"),
            ("DAEMONIZE=1", "say DAEMONIZE=0"),
            ("DAEMONIZE=0\nFABRIC_MODE=3", "FABRIC_MODE=3: too large"),
            ("DAEMONIZE=0\nFABRIC_MODE=one", "not a number"),
            ("DAEMONIZE=0\nFM_CMD_PORT_NUMBER=66666", "FM_CMD_PORT_NUMBER=66666"),
            ("FABRIC_MODE = 1", "line 1"),
            ("nonsense", "is not KEY=VALUE"),
            ("FABRIC_MOD=1", "no key FABRIC_MOD"),
            ("DAEMONIZE=0\nDAEMONIZE=0", "line 2: DAEMONIZE appears twice"),
        ] {
            let said = Config::parse(text).unwrap_err().to_string();
            assert!(said.contains(error), "{text:?}: {said}");
        }
    }
}
