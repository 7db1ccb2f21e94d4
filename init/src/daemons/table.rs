//! Which daemons there are, as data.

use std::fmt::Write as _;
use std::time::Duration;

use firstlight_boot_record::Severity;

use crate::mode::{Fabric, Generation};
use crate::params::Params;

/// One daemon.
#[derive(Debug)]
pub struct DaemonSpec {
    /// Its name, which is its unit's in the boot plan.
    pub name: &'static str,
    /// Where its program is; the first that exists counts.
    pub programs: &'static [&'static str],
    /// Its arguments.
    pub arguments: &'static [Arg],
    /// The user that it runs as, if it needs not be root.
    pub account: Account,
    /// Who wants it.
    pub wanted: Wanted,
    /// Units that must have ended well before it starts.
    pub needs: &'static [&'static str],
    /// Units that must have ended.
    pub after: &'static [&'static str],
    /// The directory of its own, and its mode. Made before each start.
    pub dir: Option<(&'static str, u32)>,
    /// A configuration file that is made for it.
    pub config: Option<Config>,
    /// Where it writes its messages if not to its output.
    pub log: Option<&'static str>,
    /// How it is known to serve.
    pub ready: Ready,
    /// How long it may take to serve, at each start.
    pub deadline: Duration,
    /// What it means that it was given up.
    pub severity: Severity,
    /// What is different in a service VM.
    pub service: Option<Service>,
    /// What it is for.
    pub about: &'static str,
    /// What to try when it does not serve.
    pub hint: &'static str,
}

/// What is different in a service VM, where others depend on it.
#[derive(Debug)]
pub struct Service {
    /// See [`DaemonSpec::ready`].
    pub ready: Ready,
    /// See [`DaemonSpec::severity`].
    pub severity: Severity,
    /// Further settings of its configuration, which go before [`Config::settings`].
    pub settings: Settings,
}

/// A part of a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arg {
    /// This word.
    Word(&'static str),
    /// This file, wherever it is; the word where it is nowhere.
    File(&'static str),
    /// This option and the account's name, if the image has the account.
    Account(&'static str),
    /// This option and the GUID of the port that leads to the NVSwitches, where they are managed through one.
    Guid(&'static str),
    /// In a service VM this word, when it has served before and left this file.
    Again(&'static str, &'static str),
}

/// Who it runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Account {
    /// Root: it cannot do otherwise.
    Root,
    /// It becomes this user by itself when [`Arg::Account`] tells it to.
    Itself(&'static str),
    /// It is started as this user.
    User(&'static str),
}

impl Account {
    /// Its name, unless it is root.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Root => None,
            Self::Itself(name) | Self::User(name) => Some(name),
        }
    }
}

/// Who wants it.
#[derive(Debug, Clone, Copy)]
pub enum Wanted {
    /// Whoever sets this kernel parameter to `on`.
    Parameter(&'static str, fn(&Params) -> bool),
    /// A guest that manages an NVLink fabric.
    Fabric,
    /// A guest that manages one of the generation whose switches are behind InfiniBand bridges.
    Fabric5,
    /// A service VM, which shares a fabric out among other guests.
    Service,
}

/// How a daemon is known to serve. Never by what it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// The process that was started ends with status 0 and leaves the daemon behind.
    Exit,
    /// It takes connections at this Unix socket.
    Unix(&'static str),
    /// It takes connections at this port of the loopback interface.
    Tcp(u16),
}

/// Keys and values of a configuration file.
pub type Settings = &'static [(&'static str, &'static str)];

/// A configuration file that is made from the image's.
#[derive(Debug)]
pub struct Config {
    /// The image's; the first that exists counts.
    pub from: &'static [&'static str],
    /// The one that the daemon reads.
    pub to: &'static str,
    /// What is set in it.
    pub settings: Settings,
}

/// What decides who is wanted and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wish {
    /// The fabric that this guest manages.
    pub fabric: Option<Fabric>,
}

impl Wish {
    /// Whether this is a service VM.
    #[must_use]
    pub fn is_service(self) -> bool {
        self.fabric.is_some_and(|fabric| fabric.shared)
    }
}

impl DaemonSpec {
    /// Why it is not wanted here; `None` when it is.
    #[must_use]
    pub fn refusal(&self, params: &Params, wish: Wish) -> Option<String> {
        match (self.wanted, wish.fabric) {
            (Wanted::Parameter(_, on), _) if on(params) => None,
            (Wanted::Parameter(name, _), _) => Some(format!("{name}=off")),
            (Wanted::Fabric, Some(_)) | (Wanted::Fabric5, Some(Fabric { generation: Generation::NvLink5, .. })) => None,
            (Wanted::Service, _) if wish.is_service() => None,
            (Wanted::Service, _) => Some("this is no service VM".to_owned()),
            (Wanted::Fabric, None) | (Wanted::Fabric5, _) => Some("this guest manages no such fabric".to_owned()),
        }
    }

    fn service(&self, wish: Wish) -> Option<&Service> {
        self.service.as_ref().filter(|_| wish.is_service())
    }

    /// How it is known to serve here.
    #[must_use]
    pub fn ready_in(&self, wish: Wish) -> Ready {
        self.service(wish).map_or(self.ready, |service| service.ready)
    }

    /// What it means here that it was given up.
    #[must_use]
    pub fn severity_in(&self, wish: Wish) -> Severity {
        self.service(wish).map_or(self.severity, |service| service.severity)
    }

    /// What is set in its configuration here, each key once.
    #[must_use]
    pub fn settings_in(&self, wish: Wish) -> Vec<(&'static str, &'static str)> {
        let first = self.service(wish).map(|service| service.settings).unwrap_or_default();
        let general = self.config.as_ref().map(|config| config.settings).unwrap_or_default();
        let mut all = first.to_vec();
        all.extend(general.iter().filter(|(key, _)| !first.iter().any(|(other, _)| other == key)));
        all
    }
}

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Where fabric manager and subnet manager meet, and the partition daemon finds the former.
const FABRIC_DIRECTORY: &str = "/run/nvidia-fabricmanager";

/// The table, in the order in which they are started.
pub const DAEMONS: &[DaemonSpec] = &[
    DaemonSpec {
        name: "persistenced",
        programs: &["/usr/bin/nvidia-persistenced"],
        arguments: &[Arg::Account("--user"), Arg::Word("--persistence-mode")],
        account: Account::Itself("nvidia-persistenced"),
        wanted: Wanted::Parameter("firstlight.persistenced", |params| params.persistenced),
        needs: &["nodes"],
        after: &["syslog", "gpu-attach", "gpu-settings"],
        dir: Some(("/run/nvidia-persistenced", 0o755)),
        config: None,
        log: None,
        // Its first process ends when the daemon has set up all that it serves.
        ready: Ready::Exit,
        deadline: seconds(60),
        severity: Severity::Optional,
        service: None,
        about: "keeps GPUs initialised, as PID 1's own descriptors do; for programs that want its socket",
        hint: "leave firstlight.persistenced off: PID 1 keeps attached GPUs initialised without it",
    },
    DaemonSpec {
        name: "nvlsm",
        programs: &["/usr/sbin/nvlsm", "/opt/nvidia/nvlsm/sbin/nvlsm"],
        arguments: &[
            Arg::Word("-F"),
            Arg::File("/usr/share/nvidia/nvlsm/nvlsm.conf"),
            Arg::Guid("-g"),
            Arg::Word("-f"),
            Arg::Word("stdout"),
        ],
        account: Account::Root,
        wanted: Wanted::Fabric5,
        needs: &["mode"],
        // Its management bridges' drivers are loaded because the bridges are there.
        after: &["syslog", "modules", "modules-nvidia", "nodes"],
        dir: Some((FABRIC_DIRECTORY, 0o700)),
        config: None,
        log: None,
        // The socket that the fabric manager asks.
        ready: Ready::Unix("/run/nvidia-fabricmanager/fm_sm_ipc.socket"),
        deadline: seconds(60),
        severity: Severity::Degraded,
        service: Some(Service {
            ready: Ready::Unix("/run/nvidia-fabricmanager/fm_sm_ipc.socket"),
            severity: Severity::Required,
            settings: &[],
        }),
        about: "subnet manager of the NVLink fabric (NVLink 5)",
        hint: "check that the image has ib_umad and mlx5_ib and that the guest has all functions of the bridge to the NVSwitches",
    },
    DaemonSpec {
        name: "fabricmanager",
        programs: &["/usr/bin/nv-fabricmanager"],
        arguments: &[
            Arg::Word("-c"),
            Arg::Word("/run/fabricmanager.cfg"),
            Arg::Guid("-g"),
            Arg::Again("--restart", "/run/nvidia-fabricmanager/fabricmanager.state"),
        ],
        account: Account::Root,
        wanted: Wanted::Fabric,
        needs: &["mode"],
        after: &["syslog", "modules-nvidia", "nodes", "gpu-attach", "nvlsm"],
        dir: Some((FABRIC_DIRECTORY, 0o700)),
        config: Some(Config {
            from: &["/usr/share/nvidia/nvswitch/fabricmanager.cfg"],
            to: "/run/fabricmanager.cfg",
            settings: &[
                ("FABRIC_MODE", "0"),
                ("FABRIC_MODE_RESTART", "0"),
                // Its first process ends when the fabric is set up, which nothing else tells.
                ("DAEMONIZE", "1"),
                ("FM_STAY_RESIDENT_ON_FAILURES", "0"),
                ("STATE_FILE_NAME", "/run/nvidia-fabricmanager/fabricmanager.state"),
                // Containers share the guest's network: no port, but sockets that only root reaches.
                ("FM_CMD_UNIX_SOCKET_PATH", "/run/nvidia-fabricmanager/socket"),
                ("UNIX_SOCKET_PATH", "/run/nvidia-fabricmanager/internal.socket"),
                ("LOG_USE_SYSLOG", "0"),
                ("LOG_FILE_NAME", "/run/nvidia-fabricmanager/fabricmanager.log"),
                ("LOG_FILE_MAX_SIZE", "1"),
            ],
        }),
        log: Some("/run/nvidia-fabricmanager/fabricmanager.log"),
        ready: Ready::Exit,
        deadline: seconds(120),
        severity: Severity::Degraded,
        service: Some(Service {
            ready: Ready::Unix("/run/nvidia-fabricmanager/socket"),
            severity: Severity::Required,
            settings: &[("FABRIC_MODE", "1"), ("DAEMONIZE", "0"), ("LOG_FILE_NAME", "")],
        }),
        about: "sets up the NVLink fabric; in a service VM it shares it out among tenants",
        hint: "check that driver, fabric manager and libraries in the image are of one version and that the guest has all NVSwitches",
    },
    DaemonSpec {
        name: "partitiond",
        programs: &["/usr/bin/fm-partitiond"],
        arguments: &[
            Arg::Word("--fabric-manager"),
            Arg::Word("unix:/run/nvidia-fabricmanager/socket"),
            // The host's way to it.
            Arg::Word("--listen-vsock"),
            Arg::Word("1030"),
            Arg::Word("--init-socket"),
            Arg::Word("/run/firstlight/control.sock"),
        ],
        account: Account::Root,
        wanted: Wanted::Service,
        needs: &["mode", "state"],
        // It answers as well while there is no fabric manager, and says so.
        after: &["syslog", "vsock", "fabricmanager"],
        // Its socket is beside PID 1's own.
        dir: Some(("/run/firstlight", 0o700)),
        config: None,
        log: None,
        ready: Ready::Unix("/run/firstlight/fabric.sock"),
        deadline: seconds(30),
        // Without it nobody gets a partition, but who has one keeps it: that is no reason to end.
        severity: Severity::Degraded,
        service: None,
        about: "the only door to the fabric of a service VM: activates partitions, and remembers whose they are (fmctl)",
        hint: "look at its lines, and at /var/lib/firstlight, where its journal is; libnvfm.so.1 has to be in the image",
    },
    DaemonSpec {
        name: "imex",
        programs: &["/usr/bin/nvidia-imex"],
        arguments: &[Arg::Word("-c"), Arg::Word("/run/imex.cfg")],
        account: Account::Root,
        wanted: Wanted::Parameter("firstlight.imex", |params| params.imex),
        needs: &["nodes"],
        after: &["syslog", "gpu-attach", "fabricmanager", "loopback"],
        dir: Some(("/run/nvidia-imex", 0o700)),
        config: Some(Config {
            from: &["/etc/nvidia-imex/config.cfg"],
            to: "/run/imex.cfg",
            settings: &[("DAEMONIZE", "1"), ("LOG_FILE_NAME", "/run/nvidia-imex/imex.log"), ("LOG_FILE_MAX_SIZE", "1")],
        }),
        log: Some("/run/nvidia-imex/imex.log"),
        ready: Ready::Exit,
        deadline: seconds(60),
        severity: Severity::Degraded,
        service: None,
        about: "memory that GPUs of several guests share (IMEX)",
        hint: "check /etc/nvidia-imex in the image: config.cfg and the nodes that it names",
    },
    DaemonSpec {
        name: "hostengine",
        programs: &["/usr/bin/nv-hostengine"],
        arguments: &[
            Arg::Word("--no-daemon"),
            // Not a port: containers share the guest's network, and it asks nobody who they are.
            Arg::Word("--domain-socket"),
            Arg::Word("/run/nvidia-dcgm/socket"),
            Arg::Word("--pid"),
            Arg::Word("/run/nvidia-dcgm/pid"),
            Arg::Word("--log-filename"),
            Arg::Word("/run/nvidia-dcgm/hostengine.log"),
            Arg::Word("--home-dir"),
            Arg::Word("/run/nvidia-dcgm"),
            Arg::Account("--service-account"),
        ],
        account: Account::Itself("nvidia-dcgm"),
        wanted: Wanted::Parameter("firstlight.dcgm", |params| params.dcgm),
        needs: &["nodes"],
        after: &["syslog", "gpu-attach", "gpu-settings", "fabricmanager"],
        dir: Some(("/run/nvidia-dcgm", 0o700)),
        config: None,
        log: Some("/run/nvidia-dcgm/hostengine.log"),
        ready: Ready::Unix("/run/nvidia-dcgm/socket"),
        deadline: seconds(30),
        severity: Severity::Optional,
        service: None,
        about: "DCGM's host engine: health and telemetry of GPUs",
        hint: "check that the image has DCGM's libraries for this driver",
    },
    DaemonSpec {
        name: "dcgm-exporter",
        programs: &["/usr/bin/dcgm-exporter"],
        arguments: &[
            Arg::Word("-f"),
            Arg::Word("/etc/dcgm-exporter/default-counters.csv"),
            Arg::Word("-a"),
            Arg::Word(":9400"),
        ],
        account: Account::User("nvidia-dcgm"),
        wanted: Wanted::Parameter("firstlight.dcgm", |params| params.dcgm),
        needs: &["nodes"],
        after: &["syslog", "gpu-attach", "hostengine", "loopback"],
        dir: None,
        config: None,
        log: None,
        ready: Ready::Tcp(9400),
        deadline: seconds(60),
        severity: Severity::Optional,
        service: None,
        about: "DCGM's telemetry for Prometheus, at port 9400",
        hint: "check /etc/dcgm-exporter/default-counters.csv in the image and that nobody else listens at port 9400",
    },
];

/// The place of a daemon in [`DAEMONS`].
#[must_use]
pub fn find(name: &str) -> Option<usize> {
    DAEMONS.iter().position(|daemon| daemon.name == name)
}

/// The table as Markdown, for the documentation.
#[must_use]
pub fn print() -> String {
    let mut text =
        String::from("| daemon | wanted by | program | runs as | serves when | deadline of a start | is for |\n");
    text.push_str("|---|---|---|---|---|---|---|\n");
    let serves = |ready: Ready| match ready {
        Ready::Exit => "its first process has ended with status 0".to_owned(),
        Ready::Unix(path) => format!("it takes connections at `{path}`"),
        Ready::Tcp(port) => format!("it takes connections at port {port}"),
    };
    for spec in DAEMONS {
        let wanted = match spec.wanted {
            Wanted::Parameter(name, _) => format!("`{name}=on`"),
            Wanted::Fabric => "modes with a fabric".to_owned(),
            Wanted::Fabric5 => "modes with an NVLink 5 fabric".to_owned(),
            Wanted::Service => "modes of a service VM".to_owned(),
        };
        let mut ready = serves(spec.ready);
        if let Some(service) = spec.service.as_ref().filter(|service| service.ready != spec.ready) {
            ready = format!("{ready}; in a service VM {}", serves(service.ready));
        }
        let (program, account) = (spec.programs.join("` or `"), spec.account.name().unwrap_or("root"));
        // Writing into a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {wanted} | `{program}` | `{account}` | {ready} | {:?} | {} |",
            spec.name, spec.deadline, spec.about
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(generation: Generation, shared: bool) -> Wish {
        Wish { fabric: Some(Fabric { generation, shared }) }
    }

    fn wanted(params: &Params, wish: Wish) -> Vec<&'static str> {
        DAEMONS.iter().filter(|spec| spec.refusal(params, wish).is_none()).map(|spec| spec.name).collect()
    }

    #[test]
    fn each_is_wanted_by_its_mode_or_parameter_alone() {
        let none = Params::default();
        assert!(wanted(&none, Wish::default()).is_empty());
        assert_eq!(wanted(&none, wish(Generation::NvLink4, false)), ["fabricmanager"]);
        assert_eq!(wanted(&none, wish(Generation::NvLink5, true)), ["nvlsm", "fabricmanager", "partitiond"]);
        assert_eq!(wanted(&none, wish(Generation::NvLink4, true)), ["fabricmanager", "partitiond"]);
        let dcgm = Params { dcgm: true, ..Params::default() };
        assert_eq!(wanted(&dcgm, Wish::default()), ["hostengine", "dcgm-exporter"]);
        let rest = Params { imex: true, persistenced: true, ..Params::default() };
        assert_eq!(wanted(&rest, Wish::default()), ["persistenced", "imex"]);
        let text = DAEMONS[0].refusal(&none, Wish::default()).unwrap();
        assert_eq!(text, "firstlight.persistenced=off");
    }

    #[test]
    fn a_service_vm_shares_the_fabric_and_cannot_do_without_its_manager() {
        let spec = &DAEMONS[find("fabricmanager").unwrap()];
        let (pass, service) = (wish(Generation::NvLink4, false), wish(Generation::NvLink4, true));
        let value = |wish, key: &str| {
            let settings = spec.settings_in(wish);
            let mut values = settings.iter().filter(|(name, _)| *name == key).map(|(_, value)| *value);
            let value = values.next().unwrap();
            assert_eq!(values.next(), None, "{key} is set twice");
            value
        };
        assert_eq!((value(pass, "FABRIC_MODE"), value(pass, "DAEMONIZE")), ("0", "1"));
        assert_eq!((value(service, "FABRIC_MODE"), value(service, "DAEMONIZE")), ("1", "0"));
        assert_eq!(value(service, "LOG_FILE_NAME"), "", "that is its standard error");
        assert_eq!(spec.ready_in(pass), Ready::Exit);
        assert!(
            matches!(spec.ready_in(service), Ready::Unix(path) if path == value(service, "FM_CMD_UNIX_SOCKET_PATH"))
        );
        assert_eq!((spec.severity_in(pass), spec.severity_in(service)), (Severity::Degraded, Severity::Required));
    }

    #[test]
    fn sockets_are_in_the_daemons_own_directory() {
        for spec in DAEMONS {
            let all = [Some(spec.ready), spec.service.as_ref().map(|service| service.ready)];
            for ready in all.into_iter().flatten() {
                let Ready::Unix(path) = ready else { continue };
                let (dir, mode) = spec.dir.unwrap();
                assert!(path.starts_with(&format!("{dir}/")), "{path}");
                assert_eq!(mode & 0o077, 0, "{dir}: nobody else asks it");
            }
        }
    }

    #[test]
    fn the_printed_table_has_every_daemon() {
        let text = print();
        assert!(DAEMONS.iter().all(|spec| text.contains(&format!("| {} |", spec.name))));
        assert!(text.lines().all(|line| line.matches('|').count() == 8), "{text}");
        assert!(!DAEMONS.iter().any(|spec| spec.hint.is_empty() || spec.programs.is_empty()));
    }
}
