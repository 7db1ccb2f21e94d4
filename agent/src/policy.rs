//! The Rego policy that authorises requests, if there is one.
//!
//! The image may contain one, and `SetPolicy` may replace it; without either, everything is
//! allowed, and no thread or process exists for it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::config::Config;
use crate::paths::Paths;

#[cfg(feature = "agent-policy")]
mod gate;

#[cfg(feature = "agent-policy")]
pub use gate::Gate;

/// Maximum size of a policy, bytes.
const MAX: u64 = 16 * 1024 * 1024;

/// Stub of an agent built without the policy engine: allows everything, unless there is a policy.
#[cfg(not(feature = "agent-policy"))]
#[derive(Debug, Default)]
pub struct Gate {}

#[cfg(not(feature = "agent-policy"))]
impl Gate {
    /// Rejects a policy, which could not be enforced.
    ///
    /// # Errors
    /// Always.
    #[expect(clippy::unused_async, reason = "as the one with an engine")]
    async fn open(_: String) -> io::Result<Self> {
        Err(io::Error::other("this agent was built without agent-policy; remove the file or build with it"))
    }
}

/// Loads the image's policy, if there is one.
///
/// # Errors
/// The policy is unusable: then nothing may be served.
pub async fn from_image(config: &Config, paths: &Paths) -> io::Result<Gate> {
    let path = config.policy.as_deref().unwrap_or(&paths.policy);
    let named = |error: io::Error| io::Error::new(error.kind(), format!("policy {}: {error}", path.display()));
    match text(path) {
        // A file requested by name must exist.
        Err(error) if error.kind() == io::ErrorKind::NotFound && config.policy.is_none() => Ok(Gate::default()),
        Err(error) => Err(named(error)),
        Ok(text) => Gate::open(text).await.map_err(named),
    }
}

fn text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX {
        return Err(io::Error::other(format!("exceeds {MAX} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_cmdline::CommandLine;

    fn opened(config: &Config, root: &Path) -> io::Result<Gate> {
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        executor.block_on(from_image(config, &Paths::below(root)))
    }

    #[test]
    fn only_the_default_policy_file_may_be_missing() {
        let root = tempfile::tempdir().unwrap();
        let mut config = Config::of(&CommandLine::default(), |_| None);
        assert!(opened(&config, root.path()).is_ok());
        config.policy = Some(root.path().join("none.rego"));
        let error = opened(&config, root.path()).unwrap_err().to_string();
        assert!(error.contains("none.rego: No such file"), "{error}");
    }

    #[test]
    fn unreadable_policy_is_reported_with_its_path() {
        let root = tempfile::tempdir().unwrap();
        let config = Config::of(&CommandLine::default(), |_| None);
        let path = Paths::below(root.path()).policy;
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        let error = opened(&config, root.path()).unwrap_err().to_string();
        assert!(error.contains("default-policy.rego: ") && error.contains("UTF-8"), "{error}");
    }
}
