//! Typed ids of units and daemons. Names are only for output: the boot record, the console, error
//! messages and the documentation.

use std::fmt;

use firstlight_pci::Address;

/// A daemon that PID 1 supervises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DaemonId {
    /// `persistenced`.
    Persistenced,
    /// `nvlsm`.
    Nvlsm,
    /// `fabricmanager`.
    FabricManager,
    /// `partitiond`.
    Partitiond,
    /// `imex`.
    Imex,
    /// `hostengine`.
    HostEngine,
    /// `dcgm-exporter`.
    DcgmExporter,
}

impl DaemonId {
    /// All daemons, in start order.
    pub const ALL: [Self; 7] = [
        Self::Persistenced,
        Self::Nvlsm,
        Self::FabricManager,
        Self::Partitiond,
        Self::Imex,
        Self::HostEngine,
        Self::DcgmExporter,
    ];

    /// Returns the daemon's name, which is also the name of its unit.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Persistenced => "persistenced",
            Self::Nvlsm => "nvlsm",
            Self::FabricManager => "fabricmanager",
            Self::Partitiond => "partitiond",
            Self::Imex => "imex",
            Self::HostEngine => "hostengine",
            Self::DcgmExporter => "dcgm-exporter",
        }
    }
}

/// A unit of the boot plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnitId {
    /// Root mount, first mounts, `/run/firstlight`.
    Mounts,
    /// The kernel command line.
    CommandLine,
    /// The vsock transport to the host.
    Vsock,
    /// Modules of file systems, networks and devices.
    ContainerModules,
    /// The agent.
    Agent,
    /// Verified disks beside the root.
    Extensions,
    /// Rejection of extension disks that were not requested.
    ExtensionDisks,
    /// The scan of the PCI bus.
    PciScan,
    /// The mode of the guest.
    Mode,
    /// The state disk of a service VM.
    State,
    /// The load of the GPU driver.
    NvidiaModules,
    /// The GPU driver's device nodes.
    Nodes,
    /// The template of the attach units; as a dependency, all of them.
    GpuAttachTemplate,
    /// The attach of one GPU.
    GpuAttach(Address),
    /// Clocks, power limits, MIG.
    GpuSettings,
    /// The check of the CDI files.
    Cdi,
    /// The controllers of the root cgroup.
    Cgroup2,
    /// Sysctl settings.
    Sysctl,
    /// The loopback interface `lo`.
    Loopback,
    /// File systems that a kernel may lack.
    LaterMounts,
    /// The read-only remount of the root.
    ReadOnlyRoot,
    /// The lock of module loading and kernel interfaces.
    Lockdown,
    /// The socket `/dev/log`.
    DevLog,
    /// A daemon.
    Daemon(DaemonId),
    /// The last unit, which starts when all others have ended.
    BootDone,
}

impl UnitId {
    /// Returns the unit's name in the plan; an instance has the name of its template.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mounts => "mounts",
            Self::CommandLine => "cmdline",
            Self::Vsock => "vsock",
            Self::ContainerModules => "modules",
            Self::Agent => "agent",
            Self::Extensions => "extensions",
            Self::ExtensionDisks => "extension-disks",
            Self::PciScan => "pci-scan",
            Self::Mode => "mode",
            Self::State => "state",
            Self::NvidiaModules => "modules-nvidia",
            Self::Nodes => "nodes",
            Self::GpuAttachTemplate | Self::GpuAttach(_) => "gpu-attach",
            Self::GpuSettings => "gpu-settings",
            Self::Cdi => "cdi",
            Self::Cgroup2 => "cgroup2",
            Self::Sysctl => "sysctl",
            Self::Loopback => "loopback",
            Self::LaterMounts => "mounts-later",
            Self::ReadOnlyRoot => "root",
            Self::Lockdown => "lockdown",
            Self::DevLog => "syslog",
            Self::Daemon(daemon) => daemon.name(),
            Self::BootDone => "boot-done",
        }
    }

    /// Returns the PCI address of the GPU that the unit attaches.
    #[must_use]
    pub fn gpu(self) -> Option<Address> {
        match self {
            Self::GpuAttach(pci) => Some(pci),
            _ => None,
        }
    }

    /// Returns whether the unit ends when its process is ready, instead of when the action returns.
    #[must_use]
    pub fn is_service(self) -> bool {
        matches!(self, Self::Agent | Self::Daemon(_))
    }

    /// Returns whether the unit runs at low priority: no client waits for these units, while the
    /// host waits for the agent's first response.
    #[must_use]
    pub fn runs_at_low_priority(self) -> bool {
        matches!(
            self,
            Self::ContainerModules
                | Self::ExtensionDisks
                | Self::Cgroup2
                | Self::Sysctl
                | Self::Loopback
                | Self::LaterMounts
                | Self::ReadOnlyRoot
                | Self::Lockdown
        )
    }
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GpuAttach(pci) => write!(f, "{}[{pci}]", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_is_printed_with_its_object() {
        let pci: Address = "0000:0a:00.0".parse().unwrap();
        assert_eq!(UnitId::GpuAttach(pci).to_string(), "gpu-attach[0000:0a:00.0]");
        assert_eq!(UnitId::GpuAttachTemplate.to_string(), "gpu-attach");
        assert_eq!((UnitId::GpuAttach(pci).gpu(), UnitId::Nodes.gpu()), (Some(pci), None));
    }

    #[test]
    fn daemon_unit_has_the_name_of_its_daemon() {
        for daemon in DaemonId::ALL {
            assert_eq!(UnitId::Daemon(daemon).to_string(), daemon.name());
        }
        assert_eq!(UnitId::NvidiaModules.to_string(), "modules-nvidia");
    }
}
