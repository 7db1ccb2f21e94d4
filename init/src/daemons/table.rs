//! The table of daemons.

use std::fmt::Write as _;
use std::time::Duration;

use firstlight_boot_record::Severity;

use crate::mode::{Fabric, NvLinkGeneration};
use crate::unit_id::{DaemonId, UnitId};

/// One daemon.
#[derive(Debug)]
pub struct DaemonSpec {
    /// The name, also of its unit in the boot plan.
    pub name: &'static str,
    /// Paths of the program; the first that exists is used.
    pub programs: &'static [&'static str],
    /// The arguments.
    pub arguments: &'static [Arg],
    /// The user that it runs as.
    pub account: Account,
    /// What enables it.
    pub enabled_by: EnabledBy,
    /// Units that must have succeeded before it starts.
    pub needs: &'static [UnitId],
    /// Units that must have ended.
    pub after: &'static [UnitId],
    /// Its private directory and that directory's mode. Created before each start.
    pub dir: Option<(&'static str, u32)>,
    /// The configuration file that is generated for it.
    pub config: Option<Config>,
    /// The log file, for a daemon that does not log to its standard output.
    pub log: Option<&'static str>,
    /// How its readiness is detected.
    pub ready: Ready,
    /// The deadline for readiness, at each start.
    pub deadline: Duration,
    /// The severity of reaching its restart limit.
    pub severity: Severity,
    /// Overrides for a service VM.
    pub service: Option<Service>,
    /// Its purpose.
    pub about: &'static str,
    /// What to try when it does not become ready.
    pub hint: &'static str,
}

/// Overrides for a service VM, where tenants depend on the daemon.
#[derive(Debug)]
pub struct Service {
    /// See [`DaemonSpec::ready`].
    pub ready: Ready,
    /// See [`DaemonSpec::severity`].
    pub severity: Severity,
    /// Additional configuration settings; they override [`Config::settings`].
    pub settings: Settings,
}

/// A command-line argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arg {
    /// A literal.
    Word(&'static str),
    /// A file, resolved in the search roots; the literal path if it is in none of them.
    File(&'static str),
    /// An option and the account name, if the image has the account.
    Account(&'static str),
    /// An option and the GUID of the management port to the NVSwitches, on NVLink 5.
    Guid(&'static str),
    /// A literal, in a service VM, if the daemon was ready before and left this state file.
    Resume(&'static str, &'static str),
}

/// The user that a daemon runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Account {
    /// Root, which it requires.
    Root,
    /// It drops to this user itself, by [`Arg::Account`].
    Itself(&'static str),
    /// PID 1 starts it as this user.
    User(&'static str),
}

impl Account {
    /// Returns the user name, unless it is root.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Root => None,
            Self::Itself(name) | Self::User(name) => Some(name),
        }
    }
}

/// The kernel parameters that enable daemons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DaemonSwitches {
    /// `firstlight.dcgm`: whether DCGM's host engine and exporter run.
    pub dcgm: bool,
    /// `firstlight.imex`: whether memory is shared with GPUs of other guests.
    pub imex: bool,
    /// `firstlight.persistenced`: whether `nvidia-persistenced` runs.
    pub persistenced: bool,
}

/// The condition that enables a daemon.
#[derive(Debug, Clone, Copy)]
pub enum EnabledBy {
    /// This kernel parameter is `on`.
    Parameter(&'static str, fn(DaemonSwitches) -> bool),
    /// The guest manages an NVLink fabric.
    Fabric,
    /// The guest manages an NVLink 5 fabric, whose switches are behind InfiniBand bridges.
    Fabric5,
    /// The guest is a service VM, which shares a fabric among other guests.
    Service,
}

/// How readiness is detected. Never by the daemon's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// The started process exits with status 0 after forking the daemon.
    Exit,
    /// It accepts connections on this Unix socket.
    Unix(&'static str),
    /// It accepts connections on this port of the loopback interface.
    Tcp(u16),
}

/// Keys and values of a configuration file.
pub type Settings = &'static [(&'static str, &'static str)];

/// A configuration file that is generated from the image's.
#[derive(Debug)]
pub struct Config {
    /// Paths of the image's file; the first that exists is used.
    pub from: &'static [&'static str],
    /// The generated file, which the daemon reads.
    pub to: &'static str,
    /// Settings that are written into it.
    pub settings: Settings,
}

/// The guest's properties that decide which daemons run and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DaemonContext {
    /// The fabric that this guest manages.
    pub fabric: Option<Fabric>,
}

impl DaemonContext {
    /// Returns whether this is a service VM.
    #[must_use]
    pub fn is_service(self) -> bool {
        self.fabric.is_some_and(|fabric| fabric.shared)
    }
}

impl DaemonSpec {
    /// Returns why the daemon is disabled in this guest; `None` if it is enabled.
    #[must_use]
    pub fn disabled_reason(&self, switches: DaemonSwitches, context: DaemonContext) -> Option<String> {
        match (self.enabled_by, context.fabric) {
            (EnabledBy::Parameter(_, on), _) if on(switches) => None,
            (EnabledBy::Parameter(name, _), _) => Some(format!("{name}=off")),
            (EnabledBy::Fabric, Some(_))
            | (EnabledBy::Fabric5, Some(Fabric { generation: NvLinkGeneration::NvLink5, .. })) => None,
            (EnabledBy::Service, _) if context.is_service() => None,
            (EnabledBy::Service, _) => Some("this guest is not a service VM".to_owned()),
            (EnabledBy::Fabric, None) | (EnabledBy::Fabric5, _) => {
                Some("this guest does not manage such a fabric".to_owned())
            }
        }
    }

    fn service(&self, context: DaemonContext) -> Option<&Service> {
        self.service.as_ref().filter(|_| context.is_service())
    }

    /// Returns how readiness is detected in this guest.
    #[must_use]
    pub fn ready_in(&self, context: DaemonContext) -> Ready {
        self.service(context).map_or(self.ready, |service| service.ready)
    }

    /// Returns the severity of reaching the restart limit in this guest.
    #[must_use]
    pub fn severity_in(&self, context: DaemonContext) -> Severity {
        self.service(context).map_or(self.severity, |service| service.severity)
    }

    /// Returns the configuration settings for this guest, each key once.
    #[must_use]
    pub fn settings_in(&self, context: DaemonContext) -> Vec<(&'static str, &'static str)> {
        let first = self.service(context).map(|service| service.settings).unwrap_or_default();
        let general = self.config.as_ref().map(|config| config.settings).unwrap_or_default();
        let mut all = first.to_vec();
        all.extend(general.iter().filter(|(key, _)| !first.iter().any(|(other, _)| other == key)));
        all
    }
}

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Sockets of the fabric manager and the subnet manager.
const FABRIC_DIRECTORY: &str = "/run/nvidia-fabricmanager";

/// The daemons in start order.
pub const DAEMONS: &[DaemonSpec] = &[
    DaemonSpec {
        name: DaemonId::Persistenced.name(),
        programs: &["/usr/bin/nvidia-persistenced"],
        arguments: &[Arg::Account("--user"), Arg::Word("--persistence-mode")],
        account: Account::Itself("nvidia-persistenced"),
        enabled_by: EnabledBy::Parameter("firstlight.persistenced", |switches| switches.persistenced),
        needs: &[UnitId::Nodes],
        after: &[UnitId::DevLog, UnitId::GpuAttachTemplate, UnitId::GpuSettings],
        dir: Some(("/run/nvidia-persistenced", 0o755)),
        config: None,
        log: None,
        // The first process exits when the daemon is initialised.
        ready: Ready::Exit,
        deadline: seconds(60),
        severity: Severity::Optional,
        service: None,
        about: "keeps GPUs initialised, as PID 1's own descriptors do; for programs that use its socket",
        hint: "boot without firstlight.persistenced: PID 1 keeps attached GPUs initialised without it",
    },
    DaemonSpec {
        name: DaemonId::Nvlsm.name(),
        programs: &["/usr/sbin/nvlsm", "/opt/nvidia/nvlsm/sbin/nvlsm"],
        arguments: &[
            Arg::Word("-F"),
            Arg::File("/usr/share/nvidia/nvlsm/nvlsm.conf"),
            Arg::Guid("-g"),
            Arg::Word("-f"),
            Arg::Word("stdout"),
        ],
        account: Account::Root,
        enabled_by: EnabledBy::Fabric5,
        needs: &[UnitId::Mode],
        // The drivers of the management bridges are loaded by PCI id in `modules`.
        after: &[UnitId::DevLog, UnitId::ContainerModules, UnitId::NvidiaModules, UnitId::Nodes],
        dir: Some((FABRIC_DIRECTORY, 0o700)),
        config: None,
        log: None,
        // The socket that the fabric manager connects to.
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
        name: DaemonId::FabricManager.name(),
        programs: &["/usr/bin/nv-fabricmanager"],
        arguments: &[
            Arg::Word("-c"),
            Arg::Word("/run/fabricmanager.cfg"),
            Arg::Guid("-g"),
            Arg::Resume("--restart", "/run/nvidia-fabricmanager/fabricmanager.state"),
        ],
        account: Account::Root,
        enabled_by: EnabledBy::Fabric,
        needs: &[UnitId::Mode],
        after: &[
            UnitId::DevLog,
            UnitId::NvidiaModules,
            UnitId::Nodes,
            UnitId::GpuAttachTemplate,
            UnitId::Daemon(DaemonId::Nvlsm),
        ],
        dir: Some((FABRIC_DIRECTORY, 0o700)),
        config: Some(Config {
            from: &["/usr/share/nvidia/nvswitch/fabricmanager.cfg"],
            to: "/run/fabricmanager.cfg",
            settings: &[
                ("FABRIC_MODE", "0"),
                ("FABRIC_MODE_RESTART", "0"),
                // The first process exits when the fabric is set up: the only readiness signal in this mode.
                ("DAEMONIZE", "1"),
                ("FM_STAY_RESIDENT_ON_FAILURES", "0"),
                ("STATE_FILE_NAME", "/run/nvidia-fabricmanager/fabricmanager.state"),
                // Containers share the guest's network: sockets that only root can reach, no TCP port.
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
        about: "sets up the NVLink fabric; in a service VM, partitions it for tenants",
        hint: "check that driver, fabric manager and libraries in the image have one version and that the guest has all NVSwitches",
    },
    DaemonSpec {
        name: DaemonId::Partitiond.name(),
        programs: &["/usr/bin/fm-partitiond"],
        arguments: &[
            Arg::Word("--fabric-manager"),
            Arg::Word("unix:/run/nvidia-fabricmanager/socket"),
            // For clients on the host.
            Arg::Word("--listen-vsock"),
            Arg::Word("1030"),
            Arg::Word("--init-socket"),
            Arg::Word("/run/firstlight/control.sock"),
        ],
        account: Account::Root,
        enabled_by: EnabledBy::Service,
        needs: &[UnitId::Mode, UnitId::State],
        // It also answers requests while the fabric manager is not running, with that as the error.
        after: &[UnitId::DevLog, UnitId::Vsock, UnitId::Daemon(DaemonId::FabricManager)],
        // Shared with PID 1's control socket.
        dir: Some(("/run/firstlight", 0o700)),
        config: None,
        log: None,
        ready: Ready::Unix("/run/firstlight/fabric.sock"),
        deadline: seconds(30),
        // Without it no partition can be activated, but active ones stay: no reason to power off.
        severity: Severity::Degraded,
        service: None,
        about: "the only endpoint to the fabric of a service VM: activates partitions and records their owners (fmctl)",
        hint: "see its log lines and its journal in /var/lib/firstlight; libnvfm.so.1 must be in the image",
    },
    DaemonSpec {
        name: DaemonId::Imex.name(),
        programs: &["/usr/bin/nvidia-imex"],
        arguments: &[Arg::Word("-c"), Arg::Word("/run/imex.cfg")],
        account: Account::Root,
        enabled_by: EnabledBy::Parameter("firstlight.imex", |switches| switches.imex),
        needs: &[UnitId::Nodes],
        after: &[UnitId::DevLog, UnitId::GpuAttachTemplate, UnitId::Daemon(DaemonId::FabricManager), UnitId::Loopback],
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
        about: "memory shared by GPUs of several guests (IMEX)",
        hint: "check /etc/nvidia-imex in the image: config.cfg and the nodes that it names",
    },
    DaemonSpec {
        name: DaemonId::HostEngine.name(),
        programs: &["/usr/bin/nv-hostengine"],
        arguments: &[
            Arg::Word("--no-daemon"),
            // Not a TCP port: containers share the guest's network, and it does not authenticate clients.
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
        enabled_by: EnabledBy::Parameter("firstlight.dcgm", |switches| switches.dcgm),
        needs: &[UnitId::Nodes],
        after: &[
            UnitId::DevLog,
            UnitId::GpuAttachTemplate,
            UnitId::GpuSettings,
            UnitId::Daemon(DaemonId::FabricManager),
        ],
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
        name: DaemonId::DcgmExporter.name(),
        programs: &["/usr/bin/dcgm-exporter"],
        arguments: &[
            Arg::Word("-f"),
            Arg::Word("/etc/dcgm-exporter/default-counters.csv"),
            Arg::Word("-a"),
            Arg::Word(":9400"),
        ],
        account: Account::User("nvidia-dcgm"),
        enabled_by: EnabledBy::Parameter("firstlight.dcgm", |switches| switches.dcgm),
        needs: &[UnitId::Nodes],
        after: &[UnitId::DevLog, UnitId::GpuAttachTemplate, UnitId::Daemon(DaemonId::HostEngine), UnitId::Loopback],
        dir: None,
        config: None,
        log: None,
        ready: Ready::Tcp(9400),
        deadline: seconds(60),
        severity: Severity::Optional,
        service: None,
        about: "DCGM telemetry for Prometheus, on port 9400",
        hint: "check /etc/dcgm-exporter/default-counters.csv in the image and that no other process listens on port 9400",
    },
];

/// Returns the table entry of a daemon.
#[must_use]
pub const fn daemon_spec(id: DaemonId) -> &'static DaemonSpec {
    // The table is in the order of the enum; a test compares the names.
    &DAEMONS[id as usize]
}

/// Prints the table as Markdown for the documentation.
#[must_use]
pub fn print() -> String {
    let mut text =
        String::from("| daemon | enabled by | program | runs as | ready when | start deadline | purpose |\n");
    text.push_str("|---|---|---|---|---|---|---|\n");
    let ready_when = |ready: Ready| match ready {
        Ready::Exit => "its first process exits with status 0".to_owned(),
        Ready::Unix(path) => format!("it accepts connections on `{path}`"),
        Ready::Tcp(port) => format!("it accepts connections on port {port}"),
    };
    for spec in DAEMONS {
        let enabled_by = match spec.enabled_by {
            EnabledBy::Parameter(name, _) => format!("`{name}=on`"),
            EnabledBy::Fabric => "modes with a fabric".to_owned(),
            EnabledBy::Fabric5 => "modes with an NVLink 5 fabric".to_owned(),
            EnabledBy::Service => "service VM modes".to_owned(),
        };
        let mut ready = ready_when(spec.ready);
        if let Some(service) = spec.service.as_ref().filter(|service| service.ready != spec.ready) {
            ready = format!("{ready}; in a service VM {}", ready_when(service.ready));
        }
        let (program, account) = (spec.programs.join("` or `"), spec.account.name().unwrap_or("root"));
        // Writing into a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {enabled_by} | `{program}` | `{account}` | {ready} | {:?} | {} |",
            spec.name, spec.deadline, spec.about
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(generation: NvLinkGeneration, shared: bool) -> DaemonContext {
        DaemonContext { fabric: Some(Fabric { generation, shared }) }
    }

    fn enabled(switches: DaemonSwitches, context: DaemonContext) -> Vec<&'static str> {
        DAEMONS.iter().filter(|spec| spec.disabled_reason(switches, context).is_none()).map(|spec| spec.name).collect()
    }

    #[test]
    fn daemon_is_enabled_only_by_its_mode_or_parameter() {
        let none = DaemonSwitches::default();
        assert!(enabled(none, DaemonContext::default()).is_empty());
        assert_eq!(enabled(none, context(NvLinkGeneration::NvLink4, false)), ["fabricmanager"]);
        assert_eq!(enabled(none, context(NvLinkGeneration::NvLink5, true)), ["nvlsm", "fabricmanager", "partitiond"]);
        assert_eq!(enabled(none, context(NvLinkGeneration::NvLink4, true)), ["fabricmanager", "partitiond"]);
        let dcgm = DaemonSwitches { dcgm: true, ..none };
        assert_eq!(enabled(dcgm, DaemonContext::default()), ["hostengine", "dcgm-exporter"]);
        let rest = DaemonSwitches { imex: true, persistenced: true, ..none };
        assert_eq!(enabled(rest, DaemonContext::default()), ["persistenced", "imex"]);
        let text = DAEMONS[0].disabled_reason(none, DaemonContext::default()).unwrap();
        assert_eq!(text, "firstlight.persistenced=off");
    }

    #[test]
    fn service_vm_shares_fabric_and_requires_fabric_manager() {
        let spec = daemon_spec(DaemonId::FabricManager);
        let (pass, service) = (context(NvLinkGeneration::NvLink4, false), context(NvLinkGeneration::NvLink4, true));
        let value = |context, key: &str| {
            let settings = spec.settings_in(context);
            let mut values = settings.iter().filter(|(name, _)| *name == key).map(|(_, value)| *value);
            let value = values.next().unwrap();
            assert_eq!(values.next(), None, "{key} is set twice");
            value
        };
        assert_eq!((value(pass, "FABRIC_MODE"), value(pass, "DAEMONIZE")), ("0", "1"));
        assert_eq!((value(service, "FABRIC_MODE"), value(service, "DAEMONIZE")), ("1", "0"));
        assert_eq!(value(service, "LOG_FILE_NAME"), "", "empty means standard error");
        assert_eq!(spec.ready_in(pass), Ready::Exit);
        assert!(
            matches!(spec.ready_in(service), Ready::Unix(path) if path == value(service, "FM_CMD_UNIX_SOCKET_PATH"))
        );
        assert_eq!((spec.severity_in(pass), spec.severity_in(service)), (Severity::Degraded, Severity::Required));
    }

    #[test]
    fn entries_are_in_the_order_of_their_ids() {
        assert_eq!(DAEMONS.len(), DaemonId::ALL.len());
        for id in DaemonId::ALL {
            assert_eq!(daemon_spec(id).name, id.name());
        }
    }

    #[test]
    fn sockets_are_in_private_directories() {
        for spec in DAEMONS {
            let all = [Some(spec.ready), spec.service.as_ref().map(|service| service.ready)];
            for ready in all.into_iter().flatten() {
                let Ready::Unix(path) = ready else { continue };
                let (dir, mode) = spec.dir.unwrap();
                assert!(path.starts_with(&format!("{dir}/")), "{path}");
                assert_eq!(mode & 0o077, 0, "{dir}: only root may connect");
            }
        }
    }

    #[test]
    fn printed_table_has_every_daemon() {
        let text = print();
        assert!(DAEMONS.iter().all(|spec| text.contains(&format!("| {} |", spec.name))));
        assert!(text.lines().all(|line| line.matches('|').count() == 8), "{text}");
        assert!(!DAEMONS.iter().any(|spec| spec.hint.is_empty() || spec.programs.is_empty()));
    }
}
