//! The policy that requests are judged by, if there is one.
//!
//! The image may bring one, and `SetPolicy` may replace it; without either,
//! everything is allowed, and no thread and no process exist for it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::config::Config;
use crate::paths::Paths;

#[cfg(feature = "agent-policy")]
mod gate;

#[cfg(feature = "agent-policy")]
pub use gate::Gate;

/// The longest policy, bytes.
const MAX: u64 = 16 * 1024 * 1024;

/// What the agent does where it was built without an engine: nothing, as long as no policy asks for one.
#[cfg(not(feature = "agent-policy"))]
#[derive(Debug, Default)]
pub struct Gate {}

#[cfg(not(feature = "agent-policy"))]
impl Gate {
    /// Refuses a policy: it could not be obeyed.
    ///
    /// # Errors
    /// Always.
    #[expect(clippy::unused_async, reason = "as the one with an engine")]
    async fn open(_: String) -> io::Result<Self> {
        Err(io::Error::other("this agent was built without agent-policy; remove the file or build with it"))
    }
}

/// Puts the image's policy in force, if it brings one.
///
/// # Errors
/// It brings one that cannot be used: then nothing may be served.
pub async fn from_image(config: &Config, paths: &Paths) -> io::Result<Gate> {
    let path = config.policy.as_deref().unwrap_or(&paths.policy);
    let named = |error: io::Error| io::Error::new(error.kind(), format!("policy {}: {error}", path.display()));
    match text(path) {
        // A file that somebody has asked for by name must be there.
        Err(error) if error.kind() == io::ErrorKind::NotFound && config.policy.is_none() => Ok(Gate::default()),
        Err(error) => Err(named(error)),
        Ok(text) => Gate::open(text).await.map_err(named),
    }
}

fn text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX {
        return Err(io::Error::other(format!("longer than {MAX} bytes")));
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
    fn only_a_file_that_nobody_asked_for_may_be_absent() {
        let root = tempfile::tempdir().unwrap();
        let mut config = Config::of(&CommandLine::default(), |_| None);
        assert!(opened(&config, root.path()).is_ok());
        config.policy = Some(root.path().join("none.rego"));
        let error = opened(&config, root.path()).unwrap_err().to_string();
        assert!(error.contains("none.rego: No such file"), "{error}");
    }

    #[test]
    fn a_policy_that_cannot_be_read_is_told_by_its_name() {
        let root = tempfile::tempdir().unwrap();
        let config = Config::of(&CommandLine::default(), |_| None);
        let path = Paths::below(root.path()).policy;
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        let error = opened(&config, root.path()).unwrap_err().to_string();
        assert!(error.contains("default-policy.rego: ") && error.contains("UTF-8"), "{error}");
    }
}
