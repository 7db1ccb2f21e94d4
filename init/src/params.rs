//! The kernel parameters that PID 1 takes, as a table.

use std::fmt::Write as _;
use std::time::Duration;

use firstlight_cmdline::CommandLine;

use crate::attach::Policy;

/// What happens when a required unit fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// Stop in order and power off: the host sees the VM end.
    #[default]
    PowerOff,
    /// Stop in order and boot again.
    Reboot,
    /// Keep the VM as it is, for whoever looks at it.
    Hold,
    /// Keep the VM and open `/bin/sh` on the console, if the image has one.
    Debug,
}

impl OnFailure {
    /// The word on the command line and in the record.
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

/// What happens when the agent ends by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AgentRestart {
    /// It is started again, with growing pauses.
    #[default]
    Restart,
    /// The VM is powered off.
    PowerOff,
}

/// What decides the mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ModeChoice {
    /// What is on the PCI bus.
    #[default]
    Auto,
    /// No GPU is touched.
    Cpu,
    /// GPUs are attached.
    Gpu,
}

/// A parameter of a kernel module, as `modprobe` takes it from the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleParam {
    /// The module, with `_` for `-`.
    pub module: String,
    /// `name=value`, or `name` for a flag.
    pub setting: String,
}

/// A parameter that could not be used. The boot goes on without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// The parameter as written.
    pub param: String,
    /// What is wrong with it and what was meant, perhaps.
    pub text: String,
}

/// Everything that the command line says to PID 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// How GPUs are attached.
    pub attach: Policy,
    /// How long one attach may take.
    pub attach_deadline: Duration,
    /// What decides the mode.
    pub mode: ModeChoice,
    /// What happens when a required unit fails.
    pub on_failure: OnFailure,
    /// What happens when the agent ends.
    pub agent_restart: AgentRestart,
    /// Whether modules and settings are locked once the boot needs them no more.
    pub lockdown: bool,
    /// For modules that are loaded.
    pub modules: Vec<ModuleParam>,
    /// What could not be used.
    pub complaints: Vec<Complaint>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            attach: Policy::default(),
            attach_deadline: Duration::from_secs(120),
            mode: ModeChoice::default(),
            on_failure: OnFailure::default(),
            agent_restart: AgentRestart::default(),
            lockdown: true,
            modules: Vec::new(),
            complaints: Vec::new(),
        }
    }
}

/// One parameter.
#[derive(Debug, Clone, Copy)]
pub struct ParamSpec {
    /// Its name.
    pub name: &'static str,
    /// The values it takes.
    pub values: &'static str,
    /// The value it has when it is not given.
    pub default: &'static str,
    /// What it does.
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

/// All parameters of PID 1.
pub const PARAMS: &[ParamSpec] = &[
    ParamSpec {
        name: "firstlight.agent-restart",
        values: "`restart`, `poweroff`",
        default: "restart",
        effect: "what happens when the agent ends by itself: start it again (pauses of 100 ms, doubling; after 5 times \
                 in 60 s the failure policy) or power off",
        set: |params, value| {
            let choices = [("restart", AgentRestart::Restart), ("poweroff", AgentRestart::PowerOff)];
            choose(&mut params.agent_restart, value, &choices)
        },
    },
    ParamSpec {
        name: "firstlight.attach",
        values: "`parallel`, `serial`, `auto`",
        default: "auto",
        effect: "how GPUs are attached: all at once, one after the other, or all at once and those that fail once more \
                 one after the other",
        set: |params, value| {
            let choices = [("parallel", Policy::Parallel), ("serial", Policy::Serial), ("auto", Policy::Auto)];
            choose(&mut params.attach, value, &choices)
        },
    },
    ParamSpec {
        name: "firstlight.attach-deadline",
        values: "a duration: `90s`, `1500ms`",
        default: "120s",
        effect: "how long one attach may take before its GPU is given up; the attach itself is never interrupted",
        set: |params, value| {
            duration(value).is_some_and(|time| {
                params.attach_deadline = time;
                true
            })
        },
    },
    ParamSpec {
        name: "firstlight.lockdown",
        values: "`on`, `off`",
        default: "on",
        effect: "whether module loading and other doors into the kernel are closed after the last module is loaded",
        set: |params, value| choose(&mut params.lockdown, value, &[("on", true), ("off", false)]),
    },
    ParamSpec {
        name: "firstlight.mode",
        values: "`auto`, `cpu`, `gpu`",
        default: "auto",
        effect: "what kind of guest this is: decided by what is on the PCI bus, or as said here",
        set: |params, value| {
            let choices = [("auto", ModeChoice::Auto), ("cpu", ModeChoice::Cpu), ("gpu", ModeChoice::Gpu)];
            choose(&mut params.mode, value, &choices)
        },
    },
    ParamSpec {
        name: "firstlight.on-failure",
        values: "`poweroff`, `reboot`, `hold`, `debug`",
        default: "poweroff",
        effect: "what happens when a required unit fails; `hold` keeps the VM, `debug` also opens `/bin/sh` on the \
                 console if the image has one",
        set: |params, value| {
            let all = [OnFailure::PowerOff, OnFailure::Reboot, OnFailure::Hold, OnFailure::Debug];
            choose(&mut params.on_failure, value, &all.map(|choice| (choice.word(), choice)))
        },
    },
];

/// Prefix of parameters that are handed to `nvidia.ko`.
const NVIDIA: &str = "firstlight.nvidia.";

/// Prefix of parameters that are read by the agent.
const AGENT: &str = "firstlight.agent.";

/// A duration as people write it: a whole number and `ms` or `s`; 1 ms to 1 h.
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

fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).all(|(a, b)| a == b || (is_dash(a) && is_dash(b)))
}

fn is_dash(byte: u8) -> bool {
    matches!(byte, b'-' | b'_')
}

impl Params {
    /// Takes the command line. Never fails: what cannot be used is in
    /// [`Params::complaints`], and the default stands.
    #[must_use]
    pub fn from_command_line(line: &CommandLine) -> Self {
        let mut params = Self::default();
        for param in line.iter() {
            let Some((module, rest)) = param.key.split_once('.') else { continue };
            let setting = |name: &str| match &param.value {
                Some(value) => format!("{name}={}", quoted(value)),
                None => name.to_owned(),
            };
            if module != "firstlight" {
                params.modules.push(ModuleParam { module: module.replace('-', "_"), setting: setting(rest) });
            } else if let Some(name) = param.key.strip_prefix(NVIDIA) {
                params.modules.push(ModuleParam { module: "nvidia".to_owned(), setting: setting(name) });
            } else if !param.key.starts_with(AGENT) {
                params.take(&param.key, param.value.as_deref());
            }
        }
        params
    }

    fn take(&mut self, key: &str, value: Option<&str>) {
        let text = match PARAMS.iter().find(|spec| same(spec.name, key)) {
            None => format!("there is no such parameter{}; it is ignored", suggestion(key)),
            Some(spec) if (spec.set)(self, value.unwrap_or_default()) => return,
            Some(spec) => {
                let given = value.map_or_else(|| "no value".to_owned(), |value| format!("{value:?}"));
                format!("takes {}, not {given}; {} is used", spec.values.replace('`', ""), spec.default)
            }
        };
        self.complaints.push(Complaint { param: key.to_owned(), text });
    }

    /// The parameter string for a module, as `finit_module` takes it.
    #[must_use]
    pub fn for_module(&self, module: &str) -> String {
        let mine = self.modules.iter().filter(|param| same(&param.module, module));
        mine.map(|param| param.setting.as_str()).collect::<Vec<_>>().join(" ")
    }
}

/// The kernel splits a module's parameters at blanks outside quotes.
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

/// How many letters have to be changed, added or dropped to make `b` of `a`.
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

/// The table as Markdown, for the documentation.
#[must_use]
pub fn print() -> String {
    let mut text = String::from("| parameter | values | default | effect |\n|---|---|---|---|\n");
    for ParamSpec { name, values, default, effect, .. } in PARAMS {
        // Writing into a string cannot fail.
        let _ = writeln!(text, "| `{name}` | {values} | `{default}` | {effect} |");
    }
    let _ = writeln!(text, "| `{NVIDIA}NAME` | any | | handed to the module `nvidia` as `NAME`, e.g. `NVreg_...` |");
    let _ = writeln!(text, "| `{AGENT}NAME` | | | left to the agent |");
    let _ = writeln!(text, "| `MODULE.NAME` | any | | handed to `MODULE` as `NAME` when PID 1 loads it |");
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
    fn known_parameters_are_taken() {
        let params = params(
            "quiet console=ttyS0 firstlight.attach=serial firstlight.attach_deadline=1500ms firstlight.mode=cpu \
             firstlight.on-failure=hold firstlight.agent-restart=poweroff firstlight.lockdown=off firstlight.agent.log=1",
        );
        assert_eq!(params.complaints, []);
        assert_eq!(params.attach, Policy::Serial);
        assert_eq!(params.attach_deadline, Duration::from_millis(1500));
        assert_eq!(params.mode, ModeChoice::Cpu);
        assert_eq!(params.on_failure, OnFailure::Hold);
        assert_eq!(params.agent_restart, AgentRestart::PowerOff);
        assert!(!params.lockdown);
    }

    #[test]
    fn the_defaults_are_those_of_the_table() {
        let mut changed = Params {
            attach: Policy::Serial,
            attach_deadline: Duration::from_secs(1),
            mode: ModeChoice::Cpu,
            on_failure: OnFailure::Hold,
            agent_restart: AgentRestart::PowerOff,
            lockdown: false,
            ..Params::default()
        };
        for spec in PARAMS {
            assert!((spec.set)(&mut changed, spec.default), "{}", spec.name);
        }
        assert_eq!(changed, Params::default());
        assert!(PARAMS.is_sorted_by_key(|spec| spec.name));
    }

    #[test]
    fn unknown_names_and_bad_values_are_complaints_with_a_suggestion() {
        let params = params("firstlight.atach=serial firstlight.attach=now firstlight.zzzzzzzzzzzz firstlight.mode");
        let texts: Vec<&str> = params.complaints.iter().map(|complaint| complaint.text.as_str()).collect();
        assert_eq!(texts[0], "there is no such parameter; did you mean firstlight.attach?; it is ignored");
        assert_eq!(texts[1], "takes parallel, serial, auto, not \"now\"; auto is used");
        assert_eq!(texts[2], "there is no such parameter; it is ignored");
        assert_eq!(texts[3], "takes auto, cpu, gpu, not no value; auto is used");
        assert_eq!(params.attach, Policy::Auto);
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
    fn module_parameters_go_to_their_module() {
        let params = params(
            "nvidia.NVreg_A=1 firstlight.nvidia.NVreg_B=\"x y\" nvidia-uvm.uvm_c=2 nvidia_uvm.d 8250.nr_uarts=1 nvidiax.e=1",
        );
        assert_eq!(params.for_module("nvidia"), "NVreg_A=1 NVreg_B=\"x y\"");
        assert_eq!(params.for_module("nvidia-uvm"), "uvm_c=2 d");
        assert_eq!(params.complaints, []);
    }

    #[test]
    fn the_printed_table_has_every_parameter() {
        let text = print();
        assert!(PARAMS.iter().all(|spec| text.contains(&format!("| `{}` |", spec.name))));
        assert_eq!(text.lines().count(), PARAMS.len() + 5);
        assert!(text.lines().all(|line| line.matches('|').count() == 5), "{text}");
    }

    proptest! {
        #[test]
        fn any_command_line_is_taken(text in "(firstlight[.a-z=-]{0,20} ?|\\PC{0,20}){0,5}") {
            let _ = params(&text);
        }
    }
}
