//! The kernel parameters of PID 1, as a table.

use std::fmt::Write as _;
use std::time::Duration;

use firstlight_boot_record::{LEVELS, Level};
use firstlight_cmdline::CommandLine;
use firstlight_gpu_settings_protocol::{PerGpu, Ready, RequestedSettings};
use firstlight_verity::extension;

use crate::attach::Policy;
use crate::daemons::table::DaemonSwitches;
use crate::extensions::request::ExtensionRequests as Extensions;
use crate::mode::{GUEST_MODES, ModeChoice, OnUnsupportedTopology};
use crate::unit_id::UnitId;
use crate::units::PLAN;

/// The reaction to the failure of a required unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// Shut down and power off: the host sees the end of the VM.
    #[default]
    PowerOff,
    /// Shut down and reboot.
    Reboot,
    /// Keep the VM running for inspection.
    Hold,
    /// Keep the VM and open `/bin/sh` on the console, if the image has one.
    Debug,
}

impl OnFailure {
    /// Returns the value as it is written on the command line and in the boot record.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::PowerOff => "poweroff",
            Self::Reboot => "reboot",
            Self::Hold => "hold",
            Self::Debug => "debug",
        }
    }
}

/// The reaction to an exit of the agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AgentRestart {
    /// Restart the agent, with increasing delays.
    #[default]
    Restart,
    /// Power off the VM.
    PowerOff,
}

/// A parameter of a kernel module, in the form in which `modprobe` reads it from the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleParam {
    /// The module's name, with `_` for `-`.
    pub module: String,
    /// `name=value`, or `name` for a flag.
    pub setting: String,
}

/// An error of a parameter. The boot continues without the parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// The parameter's name as written.
    pub param: String,
    /// The error, possibly with a suggestion.
    pub text: String,
}

/// The parameters of PID 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// The order in which GPUs are attached.
    pub attach: Policy,
    /// The longest time that an attach may show no progress: an interrupt of the GPU, or the
    /// driver's answer for another GPU.
    pub attach_deadline: Duration,
    /// The longest time that an attach may take, with or without progress.
    pub attach_limit: Duration,
    /// Whether this is a guest under confidential computing; `None`: decided by the processor's
    /// flags.
    pub confidential: Option<bool>,
    /// Whether the first GPU may be added after the boot.
    pub gpu_hotplug: bool,
    /// Deadlines of units that replace those of the plan.
    pub deadlines: Vec<(UnitId, Duration)>,
    /// Settings that are applied to attached GPUs.
    pub settings: RequestedSettings,
    /// The deadline of a settings run, for all of its GPUs together.
    pub settings_deadline: Duration,
    /// Number of IMEX channels that get a device node.
    pub imex_channels: u32,
    /// The requested mode.
    pub mode: ModeChoice,
    /// The reaction to an unsupported device topology.
    pub on_unsupported_topology: OnUnsupportedTopology,
    /// The reaction to the failure of a required unit.
    pub on_failure: OnFailure,
    /// The reaction to an exit of the agent.
    pub agent_restart: AgentRestart,
    /// The stage of kernel lockdown: `none`, `integrity` or `confidentiality`.
    pub kernel_lockdown: &'static str,
    /// Whether the root file system stays writable.
    pub root_writable: bool,
    /// Whether module loading and kernel interfaces are locked when the boot no longer needs them.
    pub lockdown: bool,
    /// The least severe level of log lines that are forwarded.
    pub log: Level,
    /// The daemons that are enabled by a parameter.
    pub daemons: DaemonSwitches,
    /// The serial number of the baseboard whose fabric this guest manages, for the partition daemon.
    pub baseboard_serial: Option<String>,
    /// The shutdown deadline.
    pub shutdown_deadline: Duration,
    /// Verified extension disks to mount.
    pub extensions: Extensions,
    /// Parameters of kernel modules.
    pub modules: Vec<ModuleParam>,
    /// Modules that are not loaded for a device or by another alias (`modprobe.blacklist=`).
    pub blacklist: Vec<String>,
    /// Modules that the kernel rejects in any case (`module_blacklist=`).
    pub forbidden: Vec<String>,
    /// Errors of parameters.
    pub complaints: Vec<Complaint>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            attach: Policy::default(),
            attach_deadline: Duration::from_secs(120),
            attach_limit: Duration::from_secs(600),
            confidential: None,
            gpu_hotplug: false,
            deadlines: Vec::new(),
            settings: RequestedSettings::default(),
            settings_deadline: Duration::from_secs(60),
            imex_channels: 1,
            mode: ModeChoice::default(),
            on_unsupported_topology: OnUnsupportedTopology::default(),
            on_failure: OnFailure::default(),
            agent_restart: AgentRestart::default(),
            kernel_lockdown: "integrity",
            root_writable: false,
            lockdown: true,
            log: Level::Info,
            daemons: DaemonSwitches::default(),
            baseboard_serial: None,
            shutdown_deadline: Duration::from_secs(30),
            extensions: Extensions::default(),
            modules: Vec::new(),
            blacklist: Vec::new(),
            forbidden: Vec::new(),
            complaints: Vec::new(),
        }
    }
}

/// The specification of a parameter.
#[derive(Debug, Clone, Copy)]
pub struct ParamSpec {
    /// The name.
    pub name: &'static str,
    /// The accepted values, as text for the documentation.
    pub values: &'static str,
    /// The default, as text.
    pub default: &'static str,
    /// The effect, as text.
    pub effect: &'static str,
    set: fn(&mut Params, &str) -> bool,
}

fn choose<T: Copy>(slot: &mut T, value: &str, choices: &[(&str, T)]) -> bool {
    match choices.iter().find(|(word, _)| *word == value) {
        Some((_, choice)) => {
            *slot = *choice;
            true
        }
        None => false,
    }
}

/// Sets a per-GPU setting; see [`firstlight_gpu_settings_protocol`] for the grammar.
fn per_gpu<T: std::str::FromStr>(slot: &mut PerGpu<T>, value: &str) -> bool {
    PerGpu::parse(value).is_some_and(|setting| {
        *slot = setting;
        true
    })
}

const SWITCH: &[(&str, bool)] = &[("on", true), ("off", false)];

/// All parameters of PID 1.
pub const PARAMS: &[ParamSpec] = &[
    ParamSpec {
        name: "firstlight.agent-restart",
        values: "`restart`, `poweroff`",
        default: "restart",
        effect: "reaction to an exit of the agent: restart it (delay of 100 ms, doubled each time; after 5 restarts in 60 s the failure policy applies) or power off",
        set: |params, value| {
            let choices = [("restart", AgentRestart::Restart), ("poweroff", AgentRestart::PowerOff)];
            choose(&mut params.agent_restart, value, &choices)
        },
    },
    ParamSpec {
        name: "firstlight.attach",
        values: "`parallel`, `serial`, `auto`",
        default: "auto",
        effect: "order in which GPUs are attached: in parallel, serially, or in parallel with a serial retry of those that failed; under confidential computing `auto` is `serial`, because the driver serialises attaches there",
        set: |params, value| {
            let choices = [("parallel", Policy::Parallel), ("serial", Policy::Serial), ("auto", Policy::Auto)];
            choose(&mut params.attach, value, &choices)
        },
    },
    ParamSpec {
        name: "firstlight.attach-deadline",
        values: "a duration: `90s`, `1500ms`",
        default: "120s",
        effect: "maximum time of an attach without progress (an interrupt of the GPU, the driver's answer for another GPU); then the GPU counts as failed. The attach is not interrupted, and a GPU that becomes ready later is used",
        set: |params, value| set_time(&mut params.attach_deadline, value),
    },
    ParamSpec {
        name: "firstlight.attach-limit",
        values: "a duration: `90s`, `1500ms`",
        default: "600s",
        effect: "maximum duration of an attach, with or without progress; then the GPU counts as failed",
        set: |params, value| set_time(&mut params.attach_limit, value),
    },
    ParamSpec {
        name: "firstlight.baseboard-serial",
        values: "1 to 64 printable characters without spaces",
        default: "none",
        effect: "in a service VM, the serial number of the host's baseboard: fm-partitiond reads it and ignores a module map of another baseboard",
        set: |params, value| {
            let is_word = (1..=64).contains(&value.len()) && value.bytes().all(|byte| byte.is_ascii_graphic());
            params.baseboard_serial = Some(value.to_owned()).filter(|_| is_word && value != "none");
            is_word
        },
    },
    ParamSpec {
        name: "firstlight.confidential",
        values: "`auto`, `on`, `off`",
        default: "auto",
        effect: "whether this is a confidential guest; `auto`: decided by the processor's flags (`tdx_guest`, `sev_snp`, `sev_es`, `sev`)",
        set: |params, value| {
            choose(&mut params.confidential, value, &[("auto", None), ("on", Some(true)), ("off", Some(false))])
        },
    },
    ParamSpec {
        name: "firstlight.dcgm",
        values: "`on`, `off`",
        default: "off",
        effect: "whether DCGM's host engine and its exporter for Prometheus run",
        set: |params, value| choose(&mut params.daemons.dcgm, value, SWITCH),
    },
    ParamSpec {
        name: "firstlight.gpu-clocks",
        values: "by GPU: MHz, `lowest,highest` MHz, `default`, `keep`",
        default: "keep",
        effect: "locked graphics clocks: `1980`, `345,1980`, `all:1500;1:default`",
        set: |params, value| per_gpu(&mut params.settings.clocks, value),
    },
    ParamSpec {
        name: "firstlight.gpu-compute-mode",
        values: "by GPU: `default`, `exclusive-process`, `prohibited`, `keep`",
        default: "keep",
        effect: "compute mode: any number of processes may use the GPU, one at a time, none",
        set: |params, value| per_gpu(&mut params.settings.compute_mode, value),
    },
    ParamSpec {
        name: "firstlight.gpu-hotplug",
        values: "`on`, `off`",
        default: "off",
        effect: "whether the first GPU may be hotplugged after the boot: module loading is then not locked until the driver is loaded for it. If the driver is loaded, GPUs can be hotplugged with either value",
        set: |params, value| choose(&mut params.gpu_hotplug, value, SWITCH),
    },
    ParamSpec {
        name: "firstlight.gpu-memory-clock",
        values: "by GPU: MHz, `lowest,highest` MHz, `default`, `keep`",
        default: "keep",
        effect: "locked memory clock",
        set: |params, value| per_gpu(&mut params.settings.memory_clock, value),
    },
    ParamSpec {
        name: "firstlight.gpu-power-limit",
        values: "by GPU: watts, `default`, `keep`",
        default: "keep",
        effect: "power limit: `500`, `0-3:500;4-7:600`",
        set: |params, value| per_gpu(&mut params.settings.power_limit, value),
    },
    ParamSpec {
        name: "firstlight.gpu-ready",
        values: "`auto`, `yes`, `no`",
        default: "auto",
        effect: "whether the boot sets the GPUs' ready state, without which they accept no work under confidential computing: only if they wait for it, always, or never (because it is set after an attestation, for example)",
        set: |params, value| {
            let all = [("auto", Ready::Auto), ("yes", Ready::Yes), ("no", Ready::No)];
            choose(&mut params.settings.ready, value, &all)
        },
    },
    ParamSpec {
        name: "firstlight.gpu-settings-deadline",
        values: "a duration: `90s`, `1500ms`",
        default: "60s",
        effect: "maximum time to apply all GPU settings; then the program that applies them is killed",
        set: |params, value| set_time(&mut params.settings_deadline, value),
    },
    ParamSpec {
        name: "firstlight.imex",
        values: "`on`, `off`",
        default: "off",
        effect: "whether nvidia-imex runs, which lets GPUs of several guests share memory",
        set: |params, value| choose(&mut params.daemons.imex, value, SWITCH),
    },
    ParamSpec {
        name: "firstlight.imex-channels",
        values: "a whole number, `0` to `1048575`",
        default: "1",
        effect: "number of IMEX channels that get a device node, from channel 0 on, if the driver has as many",
        set: |params, value| {
            let digits = value.bytes().all(|byte| byte.is_ascii_digit());
            match value.parse() {
                Ok(count @ 0..=0xf_ffff) if digits => params.imex_channels = count,
                _ => return false,
            }
            true
        },
    },
    ParamSpec {
        name: "firstlight.kernel-lockdown",
        values: "`none`, `integrity`, `confidentiality`",
        default: "integrity",
        effect: "stage of kernel lockdown, if the kernel has it, with `firstlight.lockdown=on`: `integrity` blocks root from changing the kernel by `/dev/mem`, PCI configuration space, BARs in sysfs, ports, MSRs, kexec or unsigned modules; `confidentiality` also blocks reading kernel memory by BPF, perf or tracing",
        set: |params, value| {
            let all = ["none", "integrity", "confidentiality"];
            choose(&mut params.kernel_lockdown, value, &all.map(|word| (word, word)))
        },
    },
    ParamSpec {
        name: "firstlight.lockdown",
        values: "`on`, `off`",
        default: "on",
        effect: "whether module loading, kexec and other kernel interfaces are locked after the last module is loaded",
        set: |params, value| choose(&mut params.lockdown, value, SWITCH),
    },
    ParamSpec {
        name: "firstlight.log",
        values: "`emerg`, `alert`, `crit`, `err`, `warning`, `notice`, `info`, `debug`",
        default: "info",
        effect: "maximum level of log lines of daemons, `/dev/log` and the kernel log that are written to the console and the log port. Lines of the kernel itself, except the GPU driver's, are written from level warning on, unless this is `debug`; lines that the kernel prints on the console are not repeated there",
        set: |params, value| choose(&mut params.log, value, &LEVELS.map(|level| (level.as_str(), level))),
    },
    ParamSpec {
        name: "firstlight.mig",
        values: "by GPU: `off`, `on`, instances (`3g.71gb,4g.71gb`, `1g.18gb*7`, `1g.18gb+me`, `19*7`), `keep`",
        default: "keep",
        effect: "MIG layout: none, unchanged, or these instances by nvidia-smi's profile names or numbers, each with one compute instance: `0:3g.71gb,4g.71gb;1:off`. A GPU without the requested instances is not given to containers",
        set: |params, value| per_gpu(&mut params.settings.mig, value),
    },
    ParamSpec {
        name: "firstlight.mode",
        values: "`auto`, `cpu`, `gpu`, `gpu+fabric-nvl4`, `gpu+fabric-nvl5`, `service-vm-nvl4`, `service-vm-nvl5`",
        default: "auto",
        effect: "mode of the guest; `auto`: decided by the functions on the PCI bus. `gpu+fabric` manages the NVLink fabric for itself, a service VM for other guests; up to NVLink 4 the NVSwitches are PCI functions, NVLink 5 has management bridges",
        set: |params, value| {
            let kits = GUEST_MODES.iter().map(|guest_mode| (guest_mode.name, ModeChoice::Chosen(guest_mode)));
            let choices: Vec<_> = kits.chain([("auto", ModeChoice::Auto)]).collect();
            choose(&mut params.mode, value, &choices)
        },
    },
    ParamSpec {
        name: "firstlight.on-failure",
        values: "`poweroff`, `reboot`, `hold`, `debug`",
        default: "poweroff",
        effect: "reaction to the failure of a required unit; `hold` keeps the VM, `debug` also opens `/bin/sh` on the \
                 console if the image has one",
        set: |params, value| {
            let all = [OnFailure::PowerOff, OnFailure::Reboot, OnFailure::Hold, OnFailure::Debug];
            choose(&mut params.on_failure, value, &all.map(|choice| (choice.word(), choice)))
        },
    },
    ParamSpec {
        name: "firstlight.on-unsupported-topology",
        values: "`degrade`, `fail`",
        default: "degrade",
        effect: "reaction to devices on the PCI bus that are not a supported topology, or not the one that `firstlight.mode` requests: use the devices that can be used, or apply the failure policy",
        set: |params, value| {
            let all = [OnUnsupportedTopology::Degrade, OnUnsupportedTopology::Fail];
            choose(&mut params.on_unsupported_topology, value, &all.map(|choice| (choice.word(), choice)))
        },
    },
    ParamSpec {
        name: "firstlight.persistenced",
        values: "`on`, `off`",
        default: "off",
        effect: "whether nvidia-persistenced runs; PID 1 keeps attached GPUs initialised without it",
        set: |params, value| choose(&mut params.daemons.persistenced, value, SWITCH),
    },
    ParamSpec {
        name: "firstlight.root",
        values: "`ro`, `rw`",
        default: "ro",
        effect: "whether the root file system is writable after the boot; `/run`, `/tmp` and, if the image has them, `/var/log`, `/var/cache` and `/var/tmp` always are",
        set: |params, value| choose(&mut params.root_writable, value, &[("rw", true), ("ro", false)]),
    },
    ParamSpec {
        name: "firstlight.shutdown-deadline",
        values: "a duration: `90s`, `1500ms`",
        default: "30s",
        effect: "maximum duration of the shutdown; a stage that exceeds its share is reported and abandoned, and the VM powers off",
        set: |params, value| {
            duration(value).is_some_and(|time| {
                params.shutdown_deadline = time;
                true
            })
        },
    },
];

/// Prefix of parameters that are passed to `nvidia.ko`.
const NVIDIA: &str = "firstlight.nvidia.";

/// Prefix of deadlines of units.
const DEADLINE: &str = "firstlight.deadline.";

/// Prefix of parameters that are read by the agent.
const AGENT: &str = "firstlight.agent.";

/// Parses a duration: a whole number and `ms` or `s`; 1 ms to 1 h.
fn duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    let time = match &text[digits.len()..] {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        _ => return None,
    };
    (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&time).then_some(time)
}

fn set_time(slot: &mut Duration, value: &str) -> bool {
    duration(value).is_some_and(|time| {
        *slot = time;
        true
    })
}

fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).all(|(a, b)| a == b || (is_dash(a) && is_dash(b)))
}

fn is_dash(byte: u8) -> bool {
    matches!(byte, b'-' | b'_')
}

impl Params {
    /// Reads the parameters from a command line. Never fails: errors are in [`Params::complaints`],
    /// and the default applies.
    #[must_use]
    pub fn from_command_line(line: &CommandLine) -> Self {
        let mut params = Self::default();
        for param in line.iter() {
            let names = || param.value.iter().flat_map(|value| value.split(',')).filter(|name| !name.is_empty());
            if param.is("module_blacklist") {
                params.forbidden.extend(names().map(str::to_owned));
            } else if param.is("modprobe.blacklist") {
                params.blacklist.extend(names().map(str::to_owned));
            }
            if params.extensions.take(param) {
                continue;
            }
            let Some((module, rest)) = param.key.split_once('.') else { continue };
            let setting = |name: &str| match &param.value {
                Some(value) => format!("{name}={}", quoted(value)),
                None => name.to_owned(),
            };
            if module != "firstlight" {
                params.modules.push(ModuleParam { module: module.replace('-', "_"), setting: setting(rest) });
            } else if let Some(name) = param.key.strip_prefix(NVIDIA) {
                params.modules.push(ModuleParam { module: "nvidia".to_owned(), setting: setting(name) });
            } else if let Some(unit) = param.key.strip_prefix(DEADLINE) {
                params.take_deadline(unit, param.value.as_deref());
            } else if !param.key.starts_with(AGENT) {
                params.take(&param.key, param.value.as_deref());
            }
        }
        params
    }

    fn take(&mut self, key: &str, value: Option<&str>) {
        let text = match PARAMS.iter().find(|spec| same(spec.name, key)) {
            None => format!("unknown parameter{}; ignored", suggestion(key)),
            Some(spec) if (spec.set)(self, value.unwrap_or_default()) => return,
            Some(spec) => {
                let given = value.map_or_else(|| "no value".to_owned(), |value| format!("{value:?}"));
                format!("must be {}, not {given}; {} is used", spec.values.replace('`', ""), spec.default)
            }
        };
        self.complaints.push(Complaint { param: key.to_owned(), text });
    }

    fn take_deadline(&mut self, unit: &str, value: Option<&str>) {
        let known = PLAN.iter().find(|spec| spec.deadline.is_some() && same(spec.id.name(), unit));
        let text = match (known, value.and_then(duration)) {
            (Some(spec), Some(time)) => {
                self.deadlines.push((spec.id, time));
                return;
            }
            (Some(spec), None) => {
                let given = value.map_or_else(|| "no value".to_owned(), |value| format!("{value:?}"));
                format!(
                    "must be a duration (90s, 1500ms), not {given}; {:?} is used",
                    spec.deadline.unwrap_or_default()
                )
            }
            (None, _) => {
                let units: Vec<&str> =
                    PLAN.iter().filter(|spec| spec.deadline.is_some()).map(|spec| spec.id.name()).collect();
                format!("no unit of that name has a deadline; those that have one: {}", units.join(", "))
            }
        };
        self.complaints.push(Complaint { param: format!("{DEADLINE}{unit}"), text });
    }

    /// Returns the parameters of a module, in the form that `finit_module` takes.
    #[must_use]
    pub fn for_module(&self, module: &str) -> String {
        let mine = self.modules.iter().filter(|param| same(&param.module, module));
        mine.map(|param| param.setting.as_str()).collect::<Vec<_>>().join(" ")
    }
}

/// Quotes a value that contains a blank: the kernel splits module parameters at blanks outside
/// quotes.
fn quoted(value: &str) -> String {
    if value.contains(char::is_whitespace) { format!("\"{value}\"") } else { value.to_owned() }
}

fn suggestion(key: &str) -> String {
    let near = PARAMS.iter().map(|spec| (distance(spec.name, key), spec.name)).min();
    match near {
        Some((distance, name)) if distance <= 4 => format!("; did you mean {name}?"),
        _ => String::new(),
    }
}

/// Returns the Levenshtein distance of two names, in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

/// Prints the table as Markdown for the documentation.
#[must_use]
pub fn print() -> String {
    let mut text = String::from("| parameter | values | default | effect |\n|---|---|---|---|\n");
    for ParamSpec { name, values, default, effect, .. } in PARAMS {
        // Writing into a string cannot fail.
        let _ = writeln!(text, "| `{name}` | {values} | `{default}` | {effect} |");
    }
    let _ = writeln!(text, "| `{NVIDIA}NAME` | any | | handed to the module `nvidia` as `NAME`, e.g. `NVreg_...` |");
    let _ = writeln!(
        text,
        "| `{DEADLINE}UNIT` | a duration: `90s`, `1500ms` | the plan's | how long a unit of the boot plan may take \
         before it is reported as timed out |"
    );
    let _ = writeln!(text, "| `{AGENT}NAME` | | | left to the agent |");
    let _ = writeln!(
        text,
        "| `{}` | `root_hash=..,salt=..,data_blocks=N,data_block_size=4096,hash_block_size=4096` | | the disk with the \
         serial number `{}` is verified by dm-verity with these parameters and mounted at `{}/NAME`; NAME is 1 to {} of `a-z`, \
         `0-9`, `-` and `_` |",
        extension::parameter("NAME"),
        extension::serial("NAME"),
        extension::DIRECTORY,
        extension::MAX_NAME,
    );
    let _ = writeln!(
        text,
        "| `MODULE.NAME` | any | | passed to `MODULE` as `NAME` when PID 1 loads it, after the options of the image's `modprobe.d`, which it overrides |"
    );
    let _ = writeln!(
        text,
        "| `modprobe.blacklist` | names, with commas | | modules that PID 1 does not load for a device or an alias |"
    );
    let _ = writeln!(
        text,
        "| `module_blacklist` | names, with commas | | modules that the kernel rejects; PID 1 skips and reports them |"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(line: &str) -> Params {
        Params::from_command_line(&CommandLine::parse(line))
    }

    #[test]
    fn known_parameters_are_parsed() {
        let params = params(
            "quiet console=ttyS0 firstlight.attach=serial firstlight.attach_deadline=1500ms firstlight.mode=cpu \
             firstlight.on-failure=hold firstlight.agent-restart=poweroff firstlight.lockdown=off firstlight.agent.log=1",
        );
        assert_eq!(params.complaints, []);
        assert_eq!(params.attach, Policy::Serial);
        assert_eq!(params.attach_deadline, Duration::from_millis(1500));
        assert!(matches!(params.mode, ModeChoice::Chosen(guest_mode) if guest_mode.name == "cpu"));
        assert_eq!(params.on_failure, OnFailure::Hold);
        assert_eq!(params.agent_restart, AgentRestart::PowerOff);
        assert!(!params.lockdown);
    }

    #[test]
    fn defaults_equal_the_table() {
        let mut changed = Params {
            attach: Policy::Serial,
            attach_deadline: Duration::from_secs(1),
            attach_limit: Duration::from_secs(1),
            confidential: Some(true),
            mode: ModeChoice::Chosen(&GUEST_MODES[0]),
            on_unsupported_topology: OnUnsupportedTopology::Fail,
            on_failure: OnFailure::Hold,
            agent_restart: AgentRestart::PowerOff,
            kernel_lockdown: "none",
            root_writable: true,
            lockdown: false,
            log: Level::Error,
            daemons: DaemonSwitches { dcgm: true, imex: true, persistenced: true },
            gpu_hotplug: true,
            baseboard_serial: Some("S1".to_owned()),
            shutdown_deadline: Duration::from_secs(1),
            settings: RequestedSettings {
                mig: PerGpu::parse("off").unwrap(),
                ready: Ready::No,
                ..RequestedSettings::default()
            },
            settings_deadline: Duration::from_secs(1),
            ..Params::default()
        };
        for spec in PARAMS {
            assert!((spec.set)(&mut changed, spec.default), "{}", spec.name);
        }
        assert_eq!(changed, Params::default());
        assert!(PARAMS.is_sorted_by_key(|spec| spec.name));
    }

    #[test]
    fn deadlines_are_parsed_by_unit() {
        let line = "firstlight.deadline.modules-nvidia=5s firstlight.deadline.mounts_later=1500ms \
                    firstlight.deadline.agent=soon firstlight.deadline.gpu-attach=1s firstlight.deadline.agent";
        let params = params(line);
        let expected =
            [(UnitId::NvidiaModules, Duration::from_secs(5)), (UnitId::LaterMounts, Duration::from_millis(1500))];
        assert_eq!(params.deadlines, expected);
        let texts: Vec<&str> = params.complaints.iter().map(|complaint| complaint.text.as_str()).collect();
        assert_eq!(texts[0], "must be a duration (90s, 1500ms), not \"soon\"; 60s is used");
        assert!(texts[1].starts_with("no unit of that name has a deadline; those that have one: mounts, cmdline"));
        assert!(texts[2].contains("not no value; 60s is used"), "{}", texts[2]);
    }

    #[test]
    fn unknown_names_and_invalid_values_are_reported_with_a_suggestion() {
        let params = params("firstlight.atach=serial firstlight.attach=now firstlight.zzzzzzzzzzzz firstlight.mode");
        let texts: Vec<&str> = params.complaints.iter().map(|complaint| complaint.text.as_str()).collect();
        assert_eq!(texts[0], "unknown parameter; did you mean firstlight.attach?; ignored");
        assert_eq!(texts[1], "must be parallel, serial, auto, not \"now\"; auto is used");
        assert_eq!(texts[2], "unknown parameter; ignored");
        assert!(texts[3].starts_with("must be auto, cpu, gpu, gpu+fabric-nvl4"), "{}", texts[3]);
        assert!(texts[3].ends_with("service-vm-nvl5, not no value; auto is used"), "{}", texts[3]);
        assert_eq!(params.attach, Policy::Auto);
    }

    #[test]
    fn channels_are_an_integer() {
        for (line, count, good) in [
            ("firstlight.imex-channels=0", 0, true),
            ("firstlight.imex_channels=1048575", 1_048_575, true),
            ("firstlight.imex-channels=1048576", 1, false),
            ("firstlight.imex-channels=+2", 1, false),
            ("firstlight.imex-channels", 1, false),
        ] {
            let params = params(line);
            assert_eq!((params.imex_channels, params.complaints.is_empty()), (count, good), "{line}");
        }
    }

    #[test]
    fn gpu_settings_are_parsed_or_rejected_with_their_syntax() {
        let params = params(
            "firstlight.mig=0:3g.71gb,4g.71gb;1:off firstlight.gpu-power-limit=500 firstlight.gpu_clocks=345,1980 \
             firstlight.gpu-memory-clock=2619 firstlight.gpu-compute-mode=prohibited firstlight.gpu-ready=no \
             firstlight.gpu-settings-deadline=5s",
        );
        assert_eq!(params.complaints, []);
        let gpu = params.settings.of(1, "0000:02:00.0".parse().unwrap());
        let words =
            (gpu.mig.unwrap().to_string(), gpu.power_limit.unwrap().to_string(), gpu.clocks.unwrap().to_string());
        assert_eq!(words, ("off".to_owned(), "500".to_owned(), "345,1980".to_owned()));
        assert_eq!((params.settings.ready, params.settings_deadline), (Ready::No, Duration::from_secs(5)));
        let params = self::params("firstlight.gpu-power-limit=500W firstlight.mig=9x");
        let texts: Vec<&str> = params.complaints.iter().map(|complaint| complaint.text.as_str()).collect();
        assert_eq!(texts[0], "must be by GPU: watts, default, keep, not \"500W\"; keep is used");
        assert!(texts[1].starts_with("must be by GPU: off, on, instances (3g.71gb,4g.71gb, "), "{}", texts[1]);
        assert_eq!(params.settings, RequestedSettings::default());
    }

    #[test]
    fn durations_have_a_unit_and_bounds() {
        for (text, time) in [("1ms", 1), ("90s", 90_000), ("3600s", 3_600_000)] {
            assert_eq!(duration(text), Some(Duration::from_millis(time)), "{text}");
        }
        for text in
            ["", "s", "90", "0ms", "3601s", "-1s", "1.5s", "1 s", "99999999999999999999s", "18446744073709551615s"]
        {
            assert_eq!(duration(text), None, "{text}");
        }
    }

    #[test]
    fn module_parameters_are_assigned_to_their_module() {
        let params = params(
            "nvidia.NVreg_A=1 firstlight.nvidia.NVreg_B=\"x y\" nvidia-uvm.uvm_c=2 nvidia_uvm.d 8250.nr_uarts=1 nvidiax.e=1",
        );
        assert_eq!(params.for_module("nvidia"), "NVreg_A=1 NVreg_B=\"x y\"");
        assert_eq!(params.for_module("nvidia-uvm"), "uvm_c=2 d");
        let params = self::params("modprobe.blacklist=a,b-c modprobe.blacklist=d module-blacklist=e,,f");
        assert_eq!((params.blacklist.join(" "), params.forbidden.join(" ")), ("a b-c d".into(), "e f".into()));
        assert_eq!(params.complaints, []);
    }

    #[test]
    fn extension_parameters_are_no_module_parameters() {
        let params = params("kata.extension.gpu.verity_params=x kata.other=1");
        assert_eq!((params.extensions.requested.len(), params.extensions.rejected.len()), (0, 1));
        assert_eq!(params.modules.len(), 1, "{:?}", params.modules);
    }

    #[test]
    fn printed_table_has_every_parameter() {
        let text = print();
        assert!(PARAMS.iter().all(|spec| text.contains(&format!("| `{}` |", spec.name))));
        assert_eq!(text.lines().count(), PARAMS.len() + 9);
        assert!(text.lines().all(|line| line.matches('|').count() == 5), "{text}");
    }

    proptest! {
        #[test]
        fn arbitrary_command_line_does_not_panic(text in "(firstlight[.a-z=-]{0,20} ?|\\PC{0,20}){0,5}") {
            let _ = params(&text);
        }
    }
}
