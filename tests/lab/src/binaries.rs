//! Our own programs, built as they are shipped.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The target of everything that runs in a guest.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// One static binary per package.
const GUEST_PACKAGES: &[&str] = &["firstlight-init", "firstlight-agent"];

/// Set for guest builds: no interpreter, and C libraries from their archives.
const GUEST_ENVIRONMENT: &[(&str, &str)] = &[
    ("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", "-C target-feature=+crt-static"),
    ("LIBSECCOMP_LINK_TYPE", "static"),
    ("LIBSECCOMP_LIB_PATH", "/usr/lib/x86_64-linux-gnu"),
];

/// Why a program could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// cargo could not be started.
    #[error("build: cannot start cargo: {0}")]
    Spawn(#[source] std::io::Error),
    /// cargo said no.
    #[error("build: `cargo {0}` failed, see above")]
    Failed(String),
    /// cargo said yes and the file is not there.
    #[error("build: cargo made no {0}")]
    Missing(PathBuf),
}

/// Where the built programs are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binaries {
    /// PID 1.
    pub init: PathBuf,
    /// The agent and its container runtime.
    pub agent: PathBuf,
    /// The server of synthetic GPUs.
    pub synthetic_gpu: PathBuf,
}

fn cargo(workspace: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Result<(), BuildError> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(workspace).args(arguments).envs(environment.iter().copied());
    // A test's standard output is not the place for cargo's.
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let status = command.status().map_err(BuildError::Spawn)?;
    if status.success() { Ok(()) } else { Err(BuildError::Failed(arguments.join(" "))) }
}

fn existing(path: PathBuf) -> Result<PathBuf, BuildError> {
    if path.is_file() { Ok(path) } else { Err(BuildError::Missing(path)) }
}

impl Binaries {
    /// Builds what has changed; the guest's programs with the profile `guest`.
    ///
    /// # Errors
    /// cargo cannot be started or fails; its messages are on standard error.
    pub fn build(workspace: &Path) -> Result<Self, BuildError> {
        for package in GUEST_PACKAGES {
            // One at a time: built together, each would get the other's features.
            let arguments =
                ["build", "--quiet", "--locked", "--package", package, "--profile", "guest", "--target", TARGET];
            cargo(workspace, &arguments, GUEST_ENVIRONMENT)?;
        }
        cargo(workspace, &["build", "--quiet", "--locked", "--package", "firstlight-synthetic-gpu"], &[])?;
        let target = target();
        let guest = target.join(TARGET).join("guest");
        Ok(Self {
            init: existing(guest.join("firstlight-init"))?,
            agent: existing(guest.join("firstlight-agent"))?,
            synthetic_gpu: existing(target.join("debug/synthetic-gpu"))?,
        })
    }
}

/// The workspace's root, from any of its packages.
#[must_use]
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// cargo's target folder.
#[must_use]
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}
