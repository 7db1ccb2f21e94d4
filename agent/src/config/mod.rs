//! What the agent is told by the kernel command line and the environment.
//!
//! Every `agent.*` parameter that Kata's agent knows is a row of [`TABLE`],
//! also those that are ignored, with the reason. A value that makes no sense
//! leaves the default and is a complaint in the log: an agent that does not
//! start helps nobody.

mod ignored;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use firstlight_cmdline::CommandLine;
use log::LevelFilter;

pub use table::{Effect, Parameter, TABLE, print};

/// The agent's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where to listen, as `vsock://CID:PORT`, `unix://PATH` or `tcp://HOST:PORT`.
    pub address: String,
    /// What is logged. Consoles of virtual machines are slow, so little.
    pub log: LevelFilter,
    /// The longest wait for GPUs.
    pub cdi_timeout: Duration,
    /// The longest wait for a device that the host has just plugged in.
    pub hotplug_timeout: Duration,
    /// Whether the variable `VISIBLE_CDI_DEVICES` of a container grants devices.
    pub visible_cdi_devices: bool,
    /// Bytes that a pipe of a container's process holds; the kernel's own size if `None`.
    pub pipe_size: Option<usize>,
    /// The vsock port on which the log can be read.
    pub log_port: Option<u32>,
    /// Whether whoever reaches the console's port gets a shell.
    pub console: bool,
    /// The vsock port of the debug console.
    pub console_port: Option<u32>,
    /// PID 1's socket; without one the agent works alone.
    pub control: Option<PathBuf>,
    /// The policy, in place of the image's own.
    pub policy: Option<PathBuf>,
    /// What was said and could not be used, one line each.
    pub complaints: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            // Where shims expect the agent.
            address: "vsock://-1:1024".to_owned(),
            log: LevelFilter::Error,
            cdi_timeout: Duration::from_secs(100),
            hotplug_timeout: Duration::from_secs(3),
            visible_cdi_devices: false,
            pipe_size: None,
            log_port: None,
            console: false,
            console_port: None,
            control: None,
            policy: None,
            complaints: Vec::new(),
        }
    }
}

/// Variables that beat the command line, and the parameter that each is. The later one wins.
const ENVIRONMENT: &[(&str, &str)] = &[
    ("KATA_AGENT_LOG_LEVEL", "agent.log"),
    ("KATA_AGENT_SERVER_ADDR", "agent.server_addr"),
    ("AGENT_ADDR", "agent.server_addr"),
];

impl Config {
    /// Reads the kernel command line and the environment.
    #[must_use]
    pub fn read() -> Self {
        let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
        Self::of(&CommandLine::parse(&line), |name| std::env::var(name).ok())
    }

    /// The settings for a command line and an environment.
    pub fn of(line: &CommandLine, environment: impl Fn(&str) -> Option<String>) -> Self {
        let mut config = Self::default();
        for param in line.iter().filter(|param| param.key.starts_with("agent.")) {
            config.take(&param.key, &param.key, param.value.as_deref());
        }
        for (variable, name) in ENVIRONMENT {
            if let Some(value) = environment(variable).filter(|value| !value.is_empty()) {
                config.take(variable, name, Some(&value));
            }
        }
        if config.console && config.console_port.is_none() {
            config.complaints.push(
                "agent.debug_console: there is none without agent.debug_console_vport=1026: the console of the VM \
                 carries the boot record"
                    .to_owned(),
            );
        }
        let path = |name| environment(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        config.control = path("FIRSTLIGHT_CONTROL");
        config.policy = path("KATA_AGENT_POLICY_FILE");
        config
    }

    /// Takes one setting; `source` is what a complaint calls it.
    fn take(&mut self, source: &str, name: &str, value: Option<&str>) {
        let Some(parameter) = TABLE.iter().find(|parameter| parameter.is(name)) else {
            self.complaints.push(format!("{source}: there is no such parameter; it is ignored"));
            return;
        };
        let Effect::Does(_, set) = parameter.effect else { return };
        if !set(self, value) {
            let given = value.map_or_else(|| "no value".to_owned(), |value| format!("{value:?}"));
            let values = parameter.values.replace('`', "");
            self.complaints.push(format!("{source} takes {values}, not {given}; it is as if it had not been given"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(line: &str) -> Config {
        Config::of(&CommandLine::parse(line), |_| None)
    }

    #[test]
    fn defaults_without_anything() {
        let config = of("quiet console=hvc0");
        assert_eq!(config, Config::default());
        assert_eq!(config.address, "vsock://-1:1024");
        assert_eq!((config.cdi_timeout.as_secs(), config.hotplug_timeout.as_secs()), (100, 3));
        assert_eq!((config.log, config.control), (LevelFilter::Error, None));
    }

    #[test]
    fn every_parameter_is_taken() {
        let config = of("agent.log=debug agent.server_addr=tcp://x agent.cdi_timeout=7 agent.hotplug_timeout=9 \
             agent.container_pipe_size=65536 agent.log_vport=1025 agent.debug_console agent.debug_console_vport=1026");
        assert_eq!(config.complaints, [""; 0]);
        let seconds = Duration::from_secs;
        assert_eq!((config.address.as_str(), config.log), ("tcp://x", LevelFilter::Debug));
        assert_eq!((config.cdi_timeout, config.hotplug_timeout), (seconds(7), seconds(9)));
        assert_eq!((config.pipe_size, config.log_port), (Some(65536), Some(1025)));
        assert_eq!((config.console, config.console_port), (true, Some(1026)));
    }

    #[test]
    fn the_environment_beats_the_command_line() {
        let line = CommandLine::parse("agent.log=debug agent.server_addr=tcp://x");
        let config = Config::of(&line, |name| Some(format!("/{name}")));
        assert_eq!(config.address, "/AGENT_ADDR");
        assert_eq!(config.control, Some("/FIRSTLIGHT_CONTROL".into()));
        assert!(config.complaints[0].starts_with("KATA_AGENT_LOG_LEVEL takes"), "{:?}", config.complaints);
        let kata = |name: &str| (name == "KATA_AGENT_SERVER_ADDR").then(|| "unix:///k".to_owned());
        assert_eq!(Config::of(&line, kata).address, "unix:///k");
    }

    #[test]
    fn nonsense_leaves_the_defaults_and_is_complained_of() {
        let bad = [
            "agent.log=loud",
            "agent.log",
            "agent.cdi_timeout=soon",
            "agent.cdi_timeout=0",
            "agent.hotplug_timeout=-1",
            "agent.server_addr=",
            "agent.container_pipe_size=-4",
            "agent.log_vport=0",
            "agent.debug_console_vport=99999999999",
            "agent.debug_console=yes",
            "agent.unified_cgroup_hierarchy=1",
        ];
        let config = of(&bad.join(" "));
        assert_eq!(config.complaints.len(), bad.len(), "{:#?}", config.complaints);
        for (complaint, bad) in config.complaints.iter().zip(bad) {
            let name = bad.split('=').next().unwrap();
            assert!(complaint.starts_with(name), "{complaint}");
        }
        assert_eq!(Config { complaints: Vec::new(), ..config }, Config::default());
    }

    #[test]
    fn the_console_needs_its_port() {
        let config = of("agent.debug_console");
        assert!(config.complaints[0].contains("agent.debug_console_vport=1026"), "{:?}", config.complaints);
    }

    proptest! {
        #[test]
        fn any_command_line_is_taken(text in "(agent[._a-z]{0,20}=?[0-9a-z]{0,12} ?|\\PC{0,20}){0,5}") {
            let _ = of(&text);
        }
    }
}
