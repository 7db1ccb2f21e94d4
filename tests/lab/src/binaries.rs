//! Builds our own programs with their release profiles.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The target of everything that runs in a guest.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Packages of the guest, one static program each.
const GUEST_PACKAGES: &[&str] = &["firstlight-init", "firstlight-agent"];

/// Environment of guest builds: no interpreter, packed relocations (a tenth of a
/// page per thousand, which the C library reads at start-up), and static C
/// libraries.
const GUEST_ENVIRONMENT: &[(&str, &str)] = &[
    (
        "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
        "-C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs",
    ),
    ("LIBSECCOMP_LINK_TYPE", "static"),
    ("LIBSECCOMP_LIB_PATH", "/usr/lib/x86_64-linux-gnu"),
];

/// cargo profile of the guest's programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// The release profile: small programs, slow to compile.
    Shipped,
    /// The development profile: fast to compile.
    Development,
}

impl Profile {
    /// Returns its name in `Cargo.toml`.
    fn name(self) -> &'static str {
        match self {
            Self::Shipped => "guest",
            Self::Development => "guest-dev",
        }
    }
}

/// Errors of building a program.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// cargo could not be started.
    #[error("build: failed to start cargo: {0}")]
    Spawn(#[source] std::io::Error),
    /// cargo failed.
    #[error("build: `cargo {0}` failed, see above")]
    Failed(String),
    /// cargo succeeded but reported no such program.
    #[error("build: `cargo {0}` reported no program {1}")]
    NotReported(String, &'static str),
    /// cargo succeeded but the file does not exist.
    #[error("build: cargo created no {0}")]
    Missing(PathBuf),
}

/// Paths of the built programs.
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
    cargo_output(workspace, arguments, environment).map(drop)
}

/// Runs cargo and returns its standard output. Its messages go to standard error, except for the `Finished` line.
fn cargo_output(workspace: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Result<Vec<u8>, BuildError> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(workspace).args(arguments).envs(environment.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(BuildError::Spawn)?;
    let messages = child.stderr.take().map(|messages| {
        std::thread::spawn(move || {
            let lines = BufReader::new(messages).lines().map_while(Result::ok);
            lines.filter(|line| !line.trim_start().starts_with("Finished ")).for_each(|line| eprintln!("{line}"));
        })
    });
    let output = child.wait_with_output().map_err(BuildError::Spawn)?;
    if let Some(messages) = messages {
        // A failure of this thread only loses lines.
        let _ = messages.join();
    }
    if output.status.success() { Ok(output.stdout) } else { Err(BuildError::Failed(arguments.join(" "))) }
}

fn existing(path: PathBuf) -> Result<PathBuf, BuildError> {
    if path.is_file() { Ok(path) } else { Err(BuildError::Missing(path)) }
}

fn build_static(workspace: &Path, package: &str, profile: Profile) -> Result<(), BuildError> {
    let arguments = ["build", "--locked", "--package", package, "--profile", profile.name(), "--target", TARGET];
    cargo(workspace, &arguments, GUEST_ENVIRONMENT)
}

/// Builds `firstlight-gpu-settings`, which opens NVML and is therefore linked dynamically to this machine's C library.
///
/// # Errors
/// cargo cannot be started or fails; its messages are on standard error.
pub fn gpu_settings(workspace: &Path) -> Result<PathBuf, BuildError> {
    build_dynamic(workspace, "firstlight-gpu-settings", "firstlight-gpu-settings")
}

/// Builds a program that opens libraries at run time: dynamically linked, with the profile `guest`.
fn build_dynamic(workspace: &Path, package: &str, program: &str) -> Result<PathBuf, BuildError> {
    cargo(workspace, &["build", "--locked", "--package", package, "--profile", "guest"], &[])?;
    existing(target().join("guest").join(program))
}

/// The programs of a service VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePrograms {
    /// The partition daemon, which opens libnvfm.
    pub partitiond: PathBuf,
    /// Its command-line client, static.
    pub fmctl: PathBuf,
}

impl ServicePrograms {
    /// Builds them.
    ///
    /// # Errors
    /// cargo cannot be started or fails; its messages are on standard error.
    pub fn build(workspace: &Path) -> Result<Self, BuildError> {
        let partitiond = build_dynamic(workspace, "firstlight-partitiond", "fm-partitiond")?;
        Ok(Self { partitiond, fmctl: static_program(workspace, "firstlight-fmctl", "fmctl")? })
    }
}

/// Stand-ins for NVIDIA's fabric manager and its library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricStandIns {
    /// The fabric manager's stand-in.
    pub manager: PathBuf,
    /// libnvfm's stand-in.
    pub library: PathBuf,
}

impl FabricStandIns {
    /// Builds them.
    ///
    /// # Errors
    /// cargo cannot be started or fails; its messages are on standard error.
    pub fn build(workspace: &Path) -> Result<Self, BuildError> {
        cargo(workspace, &["build", "--locked", "--package", "firstlight-fake-fm", "--bin", "fake-fm"], &[])?;
        cargo(workspace, &["build", "--locked", "--package", "firstlight-stand-in-nvfm", "--lib"], &[])?;
        let built = target().join("debug");
        Ok(Self { manager: existing(built.join("fake-fm"))?, library: existing(built.join("libnvfm.so"))? })
    }
}

/// Builds the host's command, `firstlight`.
///
/// # Errors
/// cargo cannot be started or fails; its messages are on standard error.
pub fn host_command(workspace: &Path) -> Result<PathBuf, BuildError> {
    cargo(workspace, &["build", "--locked", "--package", "firstlight"], &[])?;
    existing(target().join("debug/firstlight"))
}

/// Returns the directory of the static programs.
fn guest_dir(profile: Profile) -> PathBuf {
    target().join(TARGET).join(profile.name())
}

/// Builds one package as a static program with the profile `guest` and returns its path.
///
/// # Errors
/// cargo cannot be started or fails; its messages are on standard error.
pub fn static_program(workspace: &Path, package: &str, program: &str) -> Result<PathBuf, BuildError> {
    build_static(workspace, package, Profile::Shipped)?;
    existing(guest_dir(Profile::Shipped).join(program))
}

impl Binaries {
    /// Builds the programs.
    ///
    /// # Errors
    /// cargo cannot be started or fails; its messages are on standard error.
    pub fn build(workspace: &Path, profile: Profile) -> Result<Self, BuildError> {
        for package in GUEST_PACKAGES {
            // Separate commands: cargo unifies the features of packages that it builds together.
            build_static(workspace, package, profile)?;
        }
        cargo(workspace, &["build", "--locked", "--package", "firstlight-synthetic-gpu"], &[])?;
        Self::built(profile)
    }

    /// Returns the programs that [`Binaries::build`] has built before.
    ///
    /// # Errors
    /// A program is missing.
    pub fn built(profile: Profile) -> Result<Self, BuildError> {
        let (target, guest) = (target(), guest_dir(profile));
        Ok(Self {
            init: existing(guest.join("firstlight-init"))?,
            agent: existing(guest.join("firstlight-agent"))?,
            synthetic_gpu: existing(target.join("debug/synthetic-gpu"))?,
        })
    }
}

/// Builds the agent's benchmark, static like the agent.
///
/// # Errors
/// cargo cannot be started or fails; its messages are on standard error.
pub fn agent_bench(workspace: &Path) -> Result<PathBuf, BuildError> {
    let package = "firstlight-agent-bench";
    static_program(workspace, package, "agent-bench")
}

/// The agent's tests with real containers, to be run in a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTests {
    /// The test program, static. It runs the agent at the path in `FIRSTLIGHT_AGENT`.
    pub program: PathBuf,
}

/// Not the profile `guest`: cargo builds the agent together with its tests, with
/// the features of both, and would overwrite the agent that ships.
const AGENT_TESTS: &[&str] = &[
    "test",
    "--locked",
    "--package",
    "firstlight-agent",
    "--features",
    "real",
    "--test",
    "real",
    "--target",
    TARGET,
    "--no-run",
    "--message-format=json-render-diagnostics",
];

impl AgentTests {
    /// Builds the test program.
    ///
    /// # Errors
    /// cargo cannot be started or fails; its messages are on standard error.
    pub fn build(workspace: &Path) -> Result<Self, BuildError> {
        let messages = cargo_output(workspace, AGENT_TESTS, GUEST_ENVIRONMENT)?;
        let name = "real";
        let program = executable(&messages, "test", name);
        let program = program.ok_or_else(|| BuildError::NotReported(AGENT_TESTS.join(" "), name)).and_then(existing)?;
        Ok(Self { program })
    }
}

/// A JSON message of cargo about an artifact; other messages are ignored.
#[derive(serde::Deserialize)]
struct Message {
    target: Target,
    executable: PathBuf,
}

#[derive(serde::Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

/// Returns the executable that cargo's messages report.
fn executable(messages: &[u8], kind: &str, name: &str) -> Option<PathBuf> {
    let mut artifacts = messages.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let is_it = |message: &Message| message.target.name == name && message.target.kind.iter().any(|it| it == kind);
    artifacts.find(is_it).map(|message| message.executable)
}

/// Returns the workspace's root.
#[must_use]
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// Returns cargo's target directory.
#[must_use]
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_is_selected_by_kind_and_name() {
        let messages = br#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"real"},"executable":null}
not json
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"firstlight-agent"},"executable":"/t/firstlight-agent"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"real"},"executable":"/t/deps/real-1"}
{"reason":"build-finished","success":true}
"#;
        assert_eq!(executable(messages, "test", "real"), Some("/t/deps/real-1".into()));
        assert_eq!(executable(messages, "bin", "firstlight-agent"), Some("/t/firstlight-agent".into()));
        assert_eq!(executable(messages, "bin", "real"), None);
    }
}
