//! Table of the agent's kernel parameters.

use std::fmt::Write as _;
use std::time::Duration;

use log::LevelFilter;

use super::Config;
use super::ignored::{
    CDH, CONFIG_FILE, DEVMODE, GUEST_COMPONENTS, IMAGE_PULL, MEM_AGENT, PASSFD, PROXY, SECURE_STORAGE, TRACE,
};

/// Effect of a parameter.
#[derive(Debug, Clone, Copy)]
pub enum Effect {
    /// Description, and a setter that returns whether the value is valid.
    Does(&'static str, fn(&mut Config, Option<&str>) -> bool),
    /// None, with the reason.
    Ignored(&'static str),
}

/// One parameter.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// Name; a trailing `*` matches every name with that prefix.
    pub name: &'static str,
    /// Accepted values.
    pub values: &'static str,
    /// Default value.
    pub default: &'static str,
    /// Effect.
    pub effect: Effect,
}

impl Parameter {
    /// Returns whether a name matches; `-` and `_` are equivalent, as in the kernel.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        let folded = name.replace('-', "_");
        match self.name.strip_suffix('*') {
            Some(prefix) => folded.starts_with(prefix),
            None => folded == self.name,
        }
    }
}

const fn does(
    name: &'static str,
    values: &'static str,
    default: &'static str,
    effect: &'static str,
    set: fn(&mut Config, Option<&str>) -> bool,
) -> Parameter {
    Parameter { name, values, default, effect: Effect::Does(effect, set) }
}

const fn ignored(name: &'static str, why: &'static str) -> Parameter {
    Parameter { name, values: "any", default: "", effect: Effect::Ignored(why) }
}

const SECONDS: &str = "whole seconds, 1 or more";
const PORT: &str = "a vsock port, 1 or more";

/// All parameters, sorted by name.
pub const TABLE: &[Parameter] = &[
    ignored("agent.cdh_api_timeout", CDH),
    does("agent.cdi_timeout", SECONDS, "100", "timeout of CreateContainer's wait for GPUs", |config, value| {
        store(&mut config.cdi_timeout, value.and_then(seconds))
    }),
    ignored("agent.config_file", CONFIG_FILE),
    does(
        "agent.container_pipe_size",
        "bytes; `0` is the kernel's size",
        "0",
        "capacity of the pipes of a container's processes",
        |config, value| {
            let size = value.and_then(|text| text.parse::<usize>().ok()).filter(|size| *size <= MAX_PIPE);
            store(&mut config.pipe_size, size.map(|size| Some(size).filter(|size| *size > 0)))
        },
    ),
    does(
        "agent.debug_console",
        "a bare flag",
        "",
        "enables the debug console: each connection from the host to its port gets a root shell in the guest",
        |config, value| {
            config.console |= value.is_none();
            value.is_none()
        },
    ),
    does(
        "agent.debug_console_vport",
        PORT,
        "",
        "the port of the debug console; ignored without `agent.debug_console`",
        |config, value| store(&mut config.console_port, value.and_then(port).map(Some)),
    ),
    ignored("agent.devmode", DEVMODE),
    ignored("agent.guest_components_*", GUEST_COMPONENTS),
    does("agent.hotplug_timeout", SECONDS, "3", "timeout for a hot-plugged device to appear", |config, value| {
        store(&mut config.hotplug_timeout, value.and_then(seconds))
    }),
    ignored("agent.https_proxy", PROXY),
    ignored("agent.image_pull_timeout", IMAGE_PULL),
    ignored("agent.launch_process_timeout", GUEST_COMPONENTS),
    does(
        "agent.log",
        "`fatal`, `panic`, `critical`, `error`, `warn`, `warning`, `info`, `debug`, `trace`",
        "error",
        "level of the agent's log: in the kernel log, or on standard error outside a guest, and on the log port",
        |config, value| store(&mut config.log, value.and_then(level)),
    ),
    does(
        "agent.log_vport",
        PORT,
        "",
        "the port on which one client on the host reads the log, as lines of JSON",
        |config, value| store(&mut config.log_port, value.and_then(port).map(Some)),
    ),
    ignored("agent.mem_agent_*", MEM_AGENT),
    ignored("agent.no_proxy", PROXY),
    ignored("agent.passfd_listener_port", PASSFD),
    ignored("agent.secure_storage_integrity", SECURE_STORAGE),
    does(
        "agent.server_addr",
        "`vsock://CID:PORT`, `unix://PATH`, `tcp://HOST:PORT`",
        "vsock://-1:1024",
        "the agent's listen address",
        |config, value| store(&mut config.address, value.filter(|value| !value.is_empty()).map(str::to_owned)),
    ),
    ignored("agent.trace", TRACE),
    does(
        "agent.visible_cdi_devices",
        "`true`, `false`, a number (not `0` is true)",
        "false",
        "whether a container's variable `VISIBLE_CDI_DEVICES` grants devices",
        |config, value| store(&mut config.visible_cdi_devices, value.and_then(truth)),
    ),
];

/// Maximum of `F_SETPIPE_SZ`.
const MAX_PIPE: usize = 1 << 31;

fn store<T>(slot: &mut T, value: Option<T>) -> bool {
    match value {
        Some(value) => {
            *slot = value;
            true
        }
        None => false,
    }
}

fn seconds(text: &str) -> Option<Duration> {
    text.parse().ok().filter(|seconds| *seconds > 0).map(Duration::from_secs)
}

fn port(text: &str) -> Option<u32> {
    // The largest number is VMADDR_PORT_ANY.
    text.parse().ok().filter(|port| (1..u32::MAX).contains(port))
}

/// Parses a boolean as Kata's agent does.
fn truth(text: &str) -> Option<bool> {
    text.parse().ok().or_else(|| text.parse::<u64>().ok().map(|number| number != 0))
}

/// Parses a log level as Kata's agent does.
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

/// Returns the table as Markdown, for the documentation.
#[must_use]
pub fn print() -> String {
    let mut text = String::from("| parameter | values | default | effect |\n|---|---|---|---|\n");
    for Parameter { name, values, default, effect } in TABLE {
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        // Writing into a string cannot fail.
        let _ = match effect {
            Effect::Does(what, _) => writeln!(text, "| `{name}` | {values} | {default} | {what} |"),
            Effect::Ignored(why) => writeln!(text, "| `{name}` | {values} | {default} | **ignored**: {why} |"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_equal_those_of_the_table() {
        for parameter in TABLE {
            let Effect::Does(_, set) = parameter.effect else { continue };
            if parameter.default.is_empty() {
                continue;
            }
            let mut config = Config::default();
            assert!(set(&mut config, Some(parameter.default)), "{}", parameter.name);
            assert_eq!(config, Config::default(), "{}", parameter.name);
        }
        assert!(TABLE.is_sorted_by_key(|parameter| parameter.name));
    }

    #[test]
    fn visible_cdi_devices_is_off_by_default() {
        use firstlight_cmdline::CommandLine;
        let of = |text: &str| Config::of(&CommandLine::parse(text), |_| None);
        for yes in ["true", "1"] {
            assert!(of(&format!("agent.visible_cdi_devices={yes}")).visible_cdi_devices, "{yes}");
        }
        for no in ["", "agent.visible_cdi_devices", "agent.visible_cdi_devices=0", "agent.visible_cdi_devices=yes"] {
            assert!(!of(no).visible_cdi_devices, "{no}");
        }
    }

    #[test]
    fn names_match_with_dashes_and_by_prefix() {
        let parameter = |name: &str| TABLE.iter().find(|parameter| parameter.is(name)).map(|found| found.name);
        assert_eq!(parameter("agent.log-vport"), Some("agent.log_vport"));
        assert_eq!(parameter("agent.mem_agent_enable"), Some("agent.mem_agent_*"));
        assert_eq!(parameter("agent.log_"), None);
    }

    #[test]
    fn printed_table_marks_ignored_parameters() {
        let text = print();
        assert!(TABLE.iter().all(|parameter| text.contains(&format!("| `{}` |", parameter.name))));
        assert!(text.lines().all(|line| line.matches('|').count() == 5), "{text}");
        let ignored = TABLE.iter().filter(|parameter| matches!(parameter.effect, Effect::Ignored(_))).count();
        assert_eq!(text.matches("**ignored**: ").count(), ignored);
        assert!(ignored > 5);
    }
}
