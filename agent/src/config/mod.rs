//! Configuration of the agent by the kernel command line and the environment.
//!
//! Every `agent.*` parameter of Kata's agent is a row of [`TABLE`], including ignored ones with the
//! reason. An invalid value leaves the default and is logged: the agent must start.

mod ignored;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use firstlight_cmdline::CommandLine;
use log::LevelFilter;

pub use table::{Effect, Parameter, TABLE, print};

/// The agent's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Listen address: `vsock://CID:PORT`, `unix://PATH` or `tcp://HOST:PORT`.
    pub address: String,
    /// Log level. Low by default, as consoles of virtual machines are slow.
    pub log: LevelFilter,
    /// Timeout of the wait for GPUs.
    pub cdi_timeout: Duration,
    /// Timeout of the wait for a hot-plugged device.
    pub hotplug_timeout: Duration,
    /// Whether the variable `VISIBLE_CDI_DEVICES` of a container grants devices.
    pub visible_cdi_devices: bool,
    /// Capacity of container processes' pipes, bytes; the kernel's default if `None`.
    pub pipe_size: Option<usize>,
    /// The vsock port of the log.
    pub log_port: Option<u32>,
    /// Whether the debug console is enabled.
    pub console: bool,
    /// The vsock port of the debug console.
    pub console_port: Option<u32>,
    /// PID 1's control socket; `None` without Firstlight's PID 1.
    pub control: Option<PathBuf>,
    /// Path of the policy, in place of the image's own.
    pub policy: Option<PathBuf>,
    /// Unusable settings, one line each.
    pub warnings: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            // The address that shims connect to.
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
            warnings: Vec::new(),
        }
    }
}

/// Environment variables that override parameters of the command line. Later ones take precedence.
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

    /// Parses a command line and an environment.
    pub fn of(line: &CommandLine, environment: impl Fn(&str) -> Option<String>) -> Self {
        let mut config = Self::default();
        for param in line.iter().filter(|param| param.key.starts_with("agent.")) {
            config.apply(&param.key, &param.key, param.value.as_deref());
        }
        for (variable, name) in ENVIRONMENT {
            if let Some(value) = environment(variable).filter(|value| !value.is_empty()) {
                config.apply(variable, name, Some(&value));
            }
        }
        if config.console && config.console_port.is_none() {
            config.warnings.push(
                "agent.debug_console has no effect without agent.debug_console_vport=1026: the console of the VM \
                 carries the boot record"
                    .to_owned(),
            );
        }
        let path = |name| environment(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        config.control = path("FIRSTLIGHT_CONTROL");
        config.policy = path("KATA_AGENT_POLICY_FILE");
        config
    }

    /// Applies one setting; `source` names it in warnings.
    fn apply(&mut self, source: &str, name: &str, value: Option<&str>) {
        let Some(parameter) = TABLE.iter().find(|parameter| parameter.is(name)) else {
            self.warnings.push(format!("{source}: unknown parameter, ignored"));
            return;
        };
        let Effect::Does(_, set) = parameter.effect else { return };
        if !set(self, value) {
            let given = value.map_or_else(|| "no value".to_owned(), |value| format!("{value:?}"));
            let values = parameter.values.replace('`', "");
            self.warnings.push(format!("{source} must be {values}, not {given}; ignored"));
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
    fn empty_command_line_gives_defaults() {
        let config = of("quiet console=hvc0");
        assert_eq!(config, Config::default());
        assert_eq!(config.address, "vsock://-1:1024");
        assert_eq!((config.cdi_timeout.as_secs(), config.hotplug_timeout.as_secs()), (100, 3));
        assert_eq!((config.log, config.control), (LevelFilter::Error, None));
    }

    #[test]
    fn every_parameter_is_parsed() {
        let config = of("agent.log=debug agent.server_addr=tcp://x agent.cdi_timeout=7 agent.hotplug_timeout=9 \
             agent.container_pipe_size=65536 agent.log_vport=1025 agent.debug_console agent.debug_console_vport=1026");
        assert_eq!(config.warnings, [""; 0]);
        let seconds = Duration::from_secs;
        assert_eq!((config.address.as_str(), config.log), ("tcp://x", LevelFilter::Debug));
        assert_eq!((config.cdi_timeout, config.hotplug_timeout), (seconds(7), seconds(9)));
        assert_eq!((config.pipe_size, config.log_port), (Some(65536), Some(1025)));
        assert_eq!((config.console, config.console_port), (true, Some(1026)));
    }

    #[test]
    fn environment_overrides_the_command_line() {
        let line = CommandLine::parse("agent.log=debug agent.server_addr=tcp://x");
        let config = Config::of(&line, |name| Some(format!("/{name}")));
        assert_eq!(config.address, "/AGENT_ADDR");
        assert_eq!(config.control, Some("/FIRSTLIGHT_CONTROL".into()));
        assert!(config.warnings[0].starts_with("KATA_AGENT_LOG_LEVEL must be"), "{:?}", config.warnings);
        let kata = |name: &str| (name == "KATA_AGENT_SERVER_ADDR").then(|| "unix:///k".to_owned());
        assert_eq!(Config::of(&line, kata).address, "unix:///k");
    }

    #[test]
    fn invalid_values_leave_the_defaults_and_are_reported() {
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
        assert_eq!(config.warnings.len(), bad.len(), "{:#?}", config.warnings);
        for (warning, bad) in config.warnings.iter().zip(bad) {
            let name = bad.split('=').next().unwrap();
            assert!(warning.starts_with(name), "{warning}");
        }
        assert_eq!(Config { warnings: Vec::new(), ..config }, Config::default());
    }

    #[test]
    fn debug_console_without_port_is_reported() {
        let config = of("agent.debug_console");
        assert!(config.warnings[0].contains("agent.debug_console_vport=1026"), "{:?}", config.warnings);
    }

    proptest! {
        #[test]
        fn any_command_line_is_parsed_without_panic(text in "(agent[._a-z]{0,20}=?[0-9a-z]{0,12} ?|\\PC{0,20}){0,5}") {
            let _ = of(&text);
        }
    }
}
