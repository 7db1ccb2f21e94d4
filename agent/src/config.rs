//! What the agent is told by the kernel command line and the environment.

use std::path::PathBuf;
use std::time::Duration;

use firstlight_cmdline::CommandLine;
use log::LevelFilter;

/// Where shims expect the agent.
const DEFAULT_ADDRESS: &str = "vsock://-1:1024";

/// How long a container may wait for its GPUs.
const DEFAULT_CDI_TIMEOUT: Duration = Duration::from_secs(100);

/// The agent's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where to listen, as `vsock://CID:PORT`, `unix://PATH` or `tcp://HOST:PORT`.
    pub address: String,
    /// What is logged. Consoles of virtual machines are slow, so little.
    pub log: LevelFilter,
    /// The longest wait for GPUs.
    pub cdi_timeout: Duration,
    /// PID 1's socket; without one the agent works alone.
    pub control: Option<PathBuf>,
    /// The policy, in place of the image's own.
    pub policy: Option<PathBuf>,
}

impl Config {
    /// Reads the kernel command line and the environment.
    #[must_use]
    pub fn read() -> Self {
        let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
        Self::of(&CommandLine::parse(&line), |name| std::env::var(name).ok())
    }

    /// The settings for a command line and an environment. A value that cannot
    /// be read leaves the default: an agent that does not start helps nobody.
    pub fn of(line: &CommandLine, environment: impl Fn(&str) -> Option<String>) -> Self {
        let address = environment("AGENT_ADDR").or_else(|| line.value("agent.server_addr").map(str::to_owned));
        let seconds = line.value("agent.cdi_timeout").and_then(|text| text.parse().ok()).filter(|seconds| *seconds > 0);
        Self {
            address: address.filter(|address| !address.is_empty()).unwrap_or_else(|| DEFAULT_ADDRESS.to_owned()),
            log: line.value("agent.log").and_then(level).unwrap_or(LevelFilter::Error),
            cdi_timeout: seconds.map_or(DEFAULT_CDI_TIMEOUT, Duration::from_secs),
            control: environment("FIRSTLIGHT_CONTROL").filter(|path| !path.is_empty()).map(PathBuf::from),
            policy: environment("KATA_AGENT_POLICY_FILE").filter(|path| !path.is_empty()).map(PathBuf::from),
        }
    }
}

/// Kata's words for log levels.
fn level(word: &str) -> Option<LevelFilter> {
    Some(match word {
        "fatal" | "panic" | "critical" | "error" => LevelFilter::Error,
        "warn" | "warning" => LevelFilter::Warn,
        "info" => LevelFilter::Info,
        "debug" => LevelFilter::Debug,
        "trace" => LevelFilter::Trace,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_without_anything() {
        let config = Config::of(&CommandLine::default(), |_| None);
        assert_eq!(config.address, "vsock://-1:1024");
        assert_eq!(config.cdi_timeout, Duration::from_secs(100));
        assert_eq!((config.log, config.control), (LevelFilter::Error, None));
    }

    #[test]
    fn the_environment_beats_the_command_line() {
        let line = CommandLine::parse("agent.log=debug agent.server_addr=tcp://x agent.cdi_timeout=7");
        let config = Config::of(&line, |_| None);
        assert_eq!((config.address.as_str(), config.log), ("tcp://x", LevelFilter::Debug));
        assert_eq!(config.cdi_timeout, Duration::from_secs(7));
        let config = Config::of(&line, |name| Some(format!("/{name}")));
        assert_eq!(config.address, "/AGENT_ADDR");
        assert_eq!(config.control, Some("/FIRSTLIGHT_CONTROL".into()));
        assert_eq!(config.policy, Some("/KATA_AGENT_POLICY_FILE".into()));
    }

    #[test]
    fn nonsense_leaves_the_defaults() {
        let line = CommandLine::parse("agent.log=loud agent.cdi_timeout=soon agent.server_addr=");
        assert_eq!(Config::of(&line, |_| None), Config::of(&CommandLine::default(), |_| None));
    }
}
