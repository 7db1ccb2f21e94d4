//! Credentials for registries, from docker's configuration file.
//!
//! The file has user names and passwords in base64, as `docker login` writes them if no
//! credential helper is configured. Helpers are not supported: no program that a
//! configuration file names is executed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::super::error::{PullError, file_error, invalid};
use super::super::limits;

/// Docker's configuration file, or no credentials.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    file: Option<PathBuf>,
}

/// A user name and a password, encoded for the `Authorization` header.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Basic(String);

impl Basic {
    /// Returns the base64 text.
    pub(crate) fn encoded(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Basic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Basic(..)")
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: BTreeMap<String, Auth>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Auth {
    auth: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

const READ_CREDENTIALS: &str = "read the credentials";
const LOG_IN: &str = "set DOCKER_CONFIG to a directory whose config.json has a user name and a password: docker login writes it if no helper is configured";

/// Returns the host of a key, which is a host or, in old files, a URL.
fn host_of(key: &str) -> &str {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let host = key.split('/').next().unwrap_or(key);
    if host == "index.docker.io" { "docker.io" } else { host }
}

impl Credentials {
    /// Returns the credentials of the user: `$DOCKER_CONFIG/config.json`, else
    /// `~/.docker/config.json`.
    #[must_use]
    pub fn of_user() -> Self {
        Self::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let dir = variable("DOCKER_CONFIG").map(PathBuf::from);
        let dir = dir.or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".docker")));
        Self { file: dir.map(|dir| dir.join("config.json")) }
    }

    /// Returns the credentials of a file, which is read when a registry is used.
    #[must_use]
    pub fn of_file(file: impl Into<PathBuf>) -> Self {
        Self { file: Some(file.into()) }
    }

    /// Returns the file for messages.
    pub(crate) fn location(&self) -> String {
        self.file
            .as_ref()
            .map_or("no file, as neither DOCKER_CONFIG nor HOME is set".to_owned(), |file| file.display().to_string())
    }

    /// Reads the credentials of a host; `None` if the file has none.
    pub(crate) fn for_host(&self, host: &str) -> Result<Option<Basic>, PullError> {
        let Some(path) = &self.file else { return Ok(None) };
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(file_error("open", path))?,
        };
        let mut bytes = Vec::new();
        file.take(limits::CONFIG + 1).read_to_end(&mut bytes).map_err(file_error("read", path))?;
        let error = |reason: String| invalid(self.location(), READ_CREDENTIALS, reason, LOG_IN);
        if bytes.len() as u64 > limits::CONFIG {
            return Err(error(format!("it has more than {} bytes", limits::CONFIG)));
        }
        // Without the message of the parser, which could include a password.
        let config: Config = serde_json::from_slice(&bytes)
            .map_err(|cause| error(format!("line {}: invalid docker configuration", cause.line())))?;
        config.for_host(host).map_err(error)
    }
}

impl Config {
    fn for_host(&self, host: &str) -> Result<Option<Basic>, String> {
        let host = host_of(host);
        let helper = |name: &str| {
            format!("{host} uses the helper docker-credential-{}, which is not supported", name.escape_debug())
        };
        if let Some((_, name)) = self.cred_helpers.iter().find(|(key, _)| host_of(key) == host) {
            return Err(helper(name));
        }
        let Some((_, entry)) = self.auths.iter().find(|(key, _)| host_of(key) == host) else { return Ok(None) };
        let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if is_set(&entry.identitytoken) || is_set(&entry.registrytoken) {
            return Err(format!("{host} uses a token of an identity provider, which is not supported"));
        }
        match (entry.auth.as_deref().filter(|auth| !auth.is_empty()), &self.creds_store) {
            (Some(auth), _) => {
                parse_basic(auth).map(Some).ok_or_else(|| format!("{host} has no user name and password in base64"))
            }
            (None, Some(name)) => Err(helper(name)),
            (None, None) => Ok(None),
        }
    }
}

/// Decodes `base64(NAME:PASSWORD)`.
fn parse_basic(auth: &str) -> Option<Basic> {
    let decoded = STANDARD.decode(auth.trim()).ok()?;
    let text = std::str::from_utf8(&decoded).ok()?;
    let (name, password) = text.trim_end_matches('\0').split_once(':')?;
    (!name.is_empty()).then(|| Basic(STANDARD.encode(format!("{name}:{password}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(config: &str, host: &str) -> Result<Option<Basic>, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, config).unwrap();
        Credentials::of_file(file).for_host(host).map_err(|error| error.to_string())
    }

    #[test]
    fn credentials_are_found_by_host() {
        let auth = STANDARD.encode("me:se:cret");
        let config = format!(
            r#"{{"auths":{{"https://index.docker.io/v1/":{{"auth":"{auth}"}},"r.io:5000":{{"auth":"{auth}"}}}}}}"#
        );
        for host in ["docker.io", "r.io:5000"] {
            assert_eq!(credentials(&config, host).unwrap(), Some(Basic(auth.clone())), "{host}");
        }
        for host in ["r.io", "evil-r.io:5000", "io"] {
            assert_eq!(credentials(&config, host).unwrap(), None, "{host}");
        }
        assert_eq!(format!("{:?}", Basic(auth)), "Basic(..)");
        assert_eq!(Credentials::of_file("/none/config.json").for_host("r.io").unwrap(), None);
        assert_eq!(Credentials::default().for_host("r.io").unwrap(), None);
    }

    #[test]
    fn unsupported_or_malformed_credentials_are_refused() {
        for (config, expected) in [
            (r#"{"credHelpers":{"r.io":"ecr-login"}}"#, "docker-credential-ecr-login"),
            (r#"{"credsStore":"desktop","auths":{"r.io":{}}}"#, "docker-credential-desktop"),
            (r#"{"auths":{"r.io":{"identitytoken":"x"}}}"#, "identity provider"),
            (r#"{"auths":{"r.io":{"auth":"%%%"}}}"#, "no user name and password"),
            (r#"{"auths":{"r.io":{"auth":"bm9uZQ=="}}}"#, "no user name and password"),
            ("{\"auths\":{\"r.io\":{\"auth\":\n\"hunter2", "line 2"),
        ] {
            let error = credentials(config, "r.io").unwrap_err();
            assert!(
                error.contains(expected) && error.contains("config.json") && error.contains("DOCKER_CONFIG"),
                "{error}"
            );
            assert!(!error.contains("hunter2"), "{error}");
        }
        // A store without an entry for this host is not needed.
        assert_eq!(credentials(r#"{"credsStore":"desktop","auths":{"other.io":{}}}"#, "r.io").unwrap(), None);
    }

    #[test]
    fn file_follows_the_variables_in_order() {
        let location = |pairs: &[(&str, &str)]| {
            let pairs = pairs.to_vec();
            let find =
                move |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
            Credentials::from_variables(find).location()
        };
        assert_eq!(location(&[("HOME", "/h"), ("DOCKER_CONFIG", "/d")]), "/d/config.json");
        assert_eq!(location(&[("HOME", "/h")]), "/h/.docker/config.json");
        assert!(location(&[]).contains("neither DOCKER_CONFIG nor HOME"));
    }
}
