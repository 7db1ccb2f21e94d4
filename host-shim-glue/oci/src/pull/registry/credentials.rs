//! Who we are to registries: docker's own file.
//!
//! Names and passwords in base64, as `docker login` writes them where no
//! helper is set. Helpers are programs; a builder of images starts none that a
//! file in somebody's home names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::super::error::{Error, input, io_error};
use super::super::limits;

/// Docker's configuration, or none.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    file: Option<PathBuf>,
}

/// A name and a password, as a header has them.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Basic(String);

impl Basic {
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

const STEP: &str = "read the credentials";
const LOG_IN: &str =
    "give a file with a name and a password by DOCKER_CONFIG: docker login writes one where no helper is set";

/// Keys of docker's file are hosts, or addresses of former times.
fn host_of(key: &str) -> &str {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let host = key.split('/').next().unwrap_or(key);
    if host == "index.docker.io" { "docker.io" } else { host }
}

impl Credentials {
    /// `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`.
    #[must_use]
    pub fn of_user() -> Self {
        Self::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let dir = variable("DOCKER_CONFIG").map(PathBuf::from);
        let dir = dir.or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".docker")));
        Self { file: dir.map(|dir| dir.join("config.json")) }
    }

    /// Of this file.
    #[must_use]
    pub fn of_file(file: impl Into<PathBuf>) -> Self {
        Self { file: Some(file.into()) }
    }

    /// Where they are, for messages.
    pub(crate) fn place(&self) -> String {
        self.file
            .as_ref()
            .map_or("no file, as neither DOCKER_CONFIG nor HOME is set".to_owned(), |file| file.display().to_string())
    }

    /// For this host; none if the file has nothing about it.
    pub(crate) fn of(&self, host: &str) -> Result<Option<Basic>, Error> {
        let Some(path) = &self.file else { return Ok(None) };
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(io_error("open", path))?,
        };
        let mut bytes = Vec::new();
        file.take(limits::CONFIG + 1).read_to_end(&mut bytes).map_err(io_error("read", path))?;
        let wrong = |why: String, next| input(self.place(), STEP, why, next);
        if bytes.len() as u64 > limits::CONFIG {
            return Err(wrong(format!("more than {} bytes", limits::CONFIG), LOG_IN));
        }
        // The message of the parser could show a password.
        let config: Config = serde_json::from_slice(&bytes)
            .map_err(|error| wrong(format!("line {}: no configuration of docker", error.line()), LOG_IN))?;
        config.of(host).map_err(|why| wrong(why, LOG_IN))
    }
}

impl Config {
    fn of(&self, host: &str) -> Result<Option<Basic>, String> {
        let host = host_of(host);
        let helper = |name: &str| {
            format!("those of {host} are in the helper docker-credential-{}, which is not run", name.escape_debug())
        };
        if let Some((_, name)) = self.cred_helpers.iter().find(|(key, _)| host_of(key) == host) {
            return Err(helper(name));
        }
        let Some((_, entry)) = self.auths.iter().find(|(key, _)| host_of(key) == host) else { return Ok(None) };
        let full = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if full(&entry.identitytoken) || full(&entry.registrytoken) {
            return Err(format!("those of {host} are a token of an identity provider, which is not supported"));
        }
        match (entry.auth.as_deref().filter(|auth| !auth.is_empty()), &self.creds_store) {
            (Some(auth), _) => {
                basic(auth).map(Some).ok_or_else(|| format!("those of {host} are no name and password in base64"))
            }
            (None, Some(name)) => Err(helper(name)),
            (None, None) => Ok(None),
        }
    }
}

fn basic(auth: &str) -> Option<Basic> {
    let plain = STANDARD.decode(auth.trim()).ok()?;
    let text = std::str::from_utf8(&plain).ok()?;
    let (name, password) = text.trim_end_matches('\0').split_once(':')?;
    (!name.is_empty()).then(|| Basic(STANDARD.encode(format!("{name}:{password}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: &str, host: &str) -> Result<Option<Basic>, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, config).unwrap();
        Credentials::of_file(file).of(host).map_err(|error| error.to_string())
    }

    #[test]
    fn passwords_are_found_by_host() {
        let auth = STANDARD.encode("me:se:cret");
        let config = format!(
            r#"{{"auths":{{"https://index.docker.io/v1/":{{"auth":"{auth}"}},"r.io:5000":{{"auth":"{auth}"}}}}}}"#
        );
        for host in ["docker.io", "r.io:5000"] {
            assert_eq!(of(&config, host).unwrap(), Some(Basic(auth.clone())), "{host}");
        }
        for host in ["r.io", "evil-r.io:5000", "io"] {
            assert_eq!(of(&config, host).unwrap(), None, "{host}");
        }
        assert_eq!(format!("{:?}", Basic(auth)), "Basic(..)");
        assert_eq!(Credentials::of_file("/none/config.json").of("r.io").unwrap(), None);
        assert_eq!(Credentials::default().of("r.io").unwrap(), None);
    }

    #[test]
    fn helpers_and_nonsense_are_refused_by_name() {
        for (config, said) in [
            (r#"{"credHelpers":{"r.io":"ecr-login"}}"#, "docker-credential-ecr-login"),
            (r#"{"credsStore":"desktop","auths":{"r.io":{}}}"#, "docker-credential-desktop"),
            (r#"{"auths":{"r.io":{"identitytoken":"x"}}}"#, "identity provider"),
            (r#"{"auths":{"r.io":{"auth":"%%%"}}}"#, "no name and password"),
            (r#"{"auths":{"r.io":{"auth":"bm9uZQ=="}}}"#, "no name and password"),
            ("{\"auths\":{\"r.io\":{\"auth\":\n\"geheim", "line 2"),
        ] {
            let error = of(config, "r.io").unwrap_err();
            assert!(
                error.contains(said) && error.contains("config.json") && error.contains("DOCKER_CONFIG"),
                "{error}"
            );
            assert!(!error.contains("geheim"), "{error}");
        }
        // A store that has nothing about this host is no reason to refuse.
        assert_eq!(of(r#"{"credsStore":"desktop","auths":{"other.io":{}}}"#, "r.io").unwrap(), None);
    }

    #[test]
    fn the_file_follows_the_variables() {
        let place = |pairs: &[(&str, &str)]| {
            let pairs = pairs.to_vec();
            let find =
                move |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
            Credentials::from_variables(find).place()
        };
        assert_eq!(place(&[("HOME", "/h"), ("DOCKER_CONFIG", "/d")]), "/d/config.json");
        assert_eq!(place(&[("HOME", "/h")]), "/h/.docker/config.json");
        assert!(place(&[]).contains("neither DOCKER_CONFIG nor HOME"));
    }
}
