//! The boot plan.

use std::time::Duration;

use firstlight_boot_record::Severity::{Degraded, Optional, Required};

use crate::daemons::table::DAEMONS;
use crate::plan::UnitSpec;

/// What a unit runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Root mount, first mounts, `/run/firstlight`.
    Mounts,
    /// Kernel parameters.
    CommandLine,
    /// Transport to the host.
    Vsock,
    /// Verified disks beside the root.
    Extensions,
    /// Disks that are none of these, and say so.
    ExtensionDisks,
    /// What containers' files and networks are made of.
    ContainerModules,
    /// The agent.
    Agent,
    /// What is on the bus.
    PciScan,
    /// What kind of guest this is.
    Mode,
    /// What a service VM keeps.
    State,
    /// The GPU driver.
    NvidiaModules,
    /// Its device nodes.
    Nodes,
    /// One GPU.
    GpuAttach,
    /// Clocks, power, MIG.
    GpuSettings,
    /// What containers are given.
    Cdi,
    /// Controllers of the root cgroup.
    Cgroup2,
    /// Kernel settings.
    Sysctl,
    /// `lo`.
    Loopback,
    /// File systems that a kernel may lack.
    LaterMounts,
    /// No more writing to the root.
    ReadOnlyRoot,
    /// No more modules.
    Lockdown,
    /// `/dev/log`.
    DevLog,
    /// A daemon, by its place in the table of daemons.
    Daemon(usize),
    /// The last unit.
    BootDone,
}

impl Action {
    /// Returns whether the unit runs at low priority: no client waits for these,
    /// while the host waits for the agent's first answer.
    #[must_use]
    pub fn yields(self) -> bool {
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

const fn seconds(count: u64) -> Option<Duration> {
    Some(Duration::from_secs(count))
}

/// The unit of a daemon. What it needs and what its failure means is in the daemons' table.
const fn daemon(at: usize) -> UnitSpec<Action> {
    let spec = &DAEMONS[at];
    UnitSpec {
        name: spec.name,
        per: None,
        needs: spec.needs,
        after: spec.after,
        // Its life watches each start's.
        deadline: None,
        severity: spec.severity,
        action: Action::Daemon(at),
        about: spec.about,
        hint: spec.hint,
    }
}

/// The boot plan. Order is only the tie-break among startable units.
pub const PLAN: &[UnitSpec<Action>] = &[
    UnitSpec {
        name: "mounts",
        per: None,
        needs: &[],
        after: &[],
        deadline: seconds(10),
        severity: Required,
        action: Action::Mounts,
        about: "makes the root a mount that containers can pivot from; mounts /proc, /sys, /dev, /run, /tmp, cgroups",
        hint: "look in the kernel log for file systems that this kernel lacks",
    },
    UnitSpec {
        name: "cmdline",
        per: None,
        needs: &["mounts"],
        after: &[],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::CommandLine,
        about: "takes the firstlight.* kernel parameters; fails if one is unknown or has a bad value",
        hint: "is /proc mounted?",
    },
    UnitSpec {
        name: "vsock",
        per: None,
        needs: &["mounts"],
        after: &[],
        deadline: seconds(30),
        severity: Degraded,
        action: Action::Vsock,
        about: "loads the virtio transport of vsock, by which the host reaches the agent, unless it is built in",
        hint: "look for virtio in the kernel log: the host's vsock device may not answer",
    },
    UnitSpec {
        name: "modules",
        per: None,
        needs: &["mounts"],
        after: &["cmdline", "agent"],
        // A ConnectX takes seconds to start, and a guest may have a dozen.
        deadline: seconds(120),
        severity: Optional,
        action: Action::ContainerModules,
        about: "loads file systems, virtio drivers and parts of the packet filter, those of them that the image has as modules, and the drivers of the devices on the bus but for GPUs",
        hint: "the last lines of the kernel log say which module hangs in its start",
    },
    UnitSpec {
        name: "agent",
        per: None,
        needs: &["mounts"],
        after: &["cmdline", "vsock"],
        deadline: seconds(60),
        severity: Required,
        action: Action::Agent,
        about: "starts the agent; ready when it listens. It waits for no GPU",
        hint: "the agent did not say that it listens: its own lines are above; agent.log=debug has more",
    },
    UnitSpec {
        name: "extensions",
        per: None,
        needs: &["mounts"],
        // As the driver's load: the agent's first answer does not wait for disks.
        after: &["cmdline", "agent"],
        // Its disks have ten seconds of that.
        deadline: seconds(30),
        // A guest must not run without a requested extension.
        severity: Required,
        action: Action::Extensions,
        about: "mounts the disks that kata.extension.NAME.verity_params names, checked by dm-verity, at \
                /run/kata-extensions/NAME",
        hint: "a disk does not answer: the host's storage",
    },
    UnitSpec {
        name: "extension-disks",
        per: None,
        needs: &["mounts"],
        // Their drivers are loaded by then.
        after: &["cmdline", "modules", "extensions"],
        deadline: seconds(10),
        severity: Required,
        action: Action::ExtensionDisks,
        about: "refuses a disk that says it is an extension, by the serial number extension-NAME, and that the kernel \
                command line does not name",
        hint: "a read of a disk's serial number hangs: the host's storage",
    },
    UnitSpec {
        name: "pci-scan",
        per: None,
        needs: &["mounts"],
        after: &[],
        deadline: seconds(10),
        severity: Degraded,
        action: Action::PciScan,
        about: "lists the functions on the PCI bus",
        hint: "a function on the bus does not answer configuration reads: the host's vfio log",
    },
    UnitSpec {
        name: "mode",
        per: None,
        needs: &["pci-scan"],
        after: &["cmdline"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Mode,
        about: "decides what kind of guest this is, by rules over the scan or firstlight.mode",
        hint: "this unit only computes: the guest has no processor time",
    },
    UnitSpec {
        name: "state",
        per: None,
        needs: &["mode"],
        // The disk's driver and its file system.
        after: &["modules"],
        deadline: seconds(30),
        severity: Degraded,
        action: Action::State,
        about: "in a service VM, mounts the disk with the serial number firstlight-state at /var/lib/firstlight; memory where \
                there is none",
        hint: "the disk does not answer: look in the kernel log, and at the host's file behind it",
    },
    UnitSpec {
        name: "modules-nvidia",
        per: None,
        needs: &["mode"],
        // The driver's load keeps processors and buses busy for tens of
        // milliseconds; the agent's first answer must not depend on how many
        // GPUs there are, and an attach takes seconds. The driver may be in an extension.
        after: &["agent", "extensions"],
        deadline: seconds(120),
        severity: Degraded,
        action: Action::NvidiaModules,
        about: "loads nvidia and nvidia-uvm",
        hint: "the driver hangs in its start: NVRM lines in the kernel log, the host's vfio log",
    },
    UnitSpec {
        name: "nodes",
        per: None,
        needs: &["modules-nvidia"],
        after: &[],
        deadline: seconds(10),
        severity: Degraded,
        action: Action::Nodes,
        about: "makes the driver's device nodes",
        hint: "the driver does not answer reads of /proc/driver/nvidia",
    },
    UnitSpec {
        name: "gpu-attach",
        per: Some("pci-scan"),
        needs: &["nodes"],
        after: &["pci-scan"],
        deadline: None,
        severity: Degraded,
        action: Action::GpuAttach,
        about: "opens the GPU, waits for the driver, and keeps it open; firstlight.attach and firstlight.attach-deadline",
        hint: "firstlight.attach=serial; the host's vfio log",
    },
    UnitSpec {
        name: "gpu-settings",
        per: None,
        needs: &["nodes"],
        // The library that does it attaches GPUs by itself, which is not its business.
        after: &["gpu-attach"],
        // Its run watches it.
        deadline: None,
        severity: Degraded,
        action: Action::GpuSettings,
        about: "sets what firstlight.mig and firstlight.gpu-* ask for; a GPU of which something is asked is ready after it",
        hint: "the GPU and the step that had begun are in the detail; firstlight-gpu-settings check shows what it takes",
    },
    UnitSpec {
        name: "cdi",
        per: None,
        needs: &["nodes"],
        after: &["gpu-attach", "gpu-settings"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Cdi,
        about: "checks the CDI file, which is written each time a GPU becomes ready",
        hint: "is /run full? the driver's capabilities below /proc/driver/nvidia/capabilities",
    },
    UnitSpec {
        name: "cgroup2",
        per: None,
        needs: &["mounts"],
        after: &["agent"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Cgroup2,
        about: "enables all controllers for the cgroups of containers",
        hint: "boot with cgroup_no_v1=all; does the kernel have cgroup v2?",
    },
    UnitSpec {
        name: "sysctl",
        per: None,
        needs: &["mounts"],
        after: &["agent"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Sysctl,
        about: "writes kernel settings",
        hint: "a write to /proc/sys hangs: look in the kernel log",
    },
    UnitSpec {
        name: "loopback",
        per: None,
        needs: &["mounts"],
        after: &["agent"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Loopback,
        about: "brings lo up",
        hint: "netlink does not answer: look in the kernel log",
    },
    UnitSpec {
        name: "mounts-later",
        per: None,
        needs: &["mounts"],
        after: &["agent"],
        deadline: seconds(10),
        severity: Optional,
        action: Action::LaterMounts,
        about: "mounts securityfs, bpf, mqueue and hugetlbfs where the kernel has them, and scratch space where the image \
                has directories for it",
        hint: "look in the kernel log for the file system that hangs",
    },
    UnitSpec {
        name: "root",
        per: None,
        needs: &["mounts"],
        // They may have to make what they mount on.
        after: &["cmdline", "agent", "mounts-later"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::ReadOnlyRoot,
        about: "makes the root file system read-only; firstlight.root",
        hint: "a change of the root's mount hangs: look in the kernel log",
    },
    UnitSpec {
        name: "lockdown",
        per: None,
        needs: &["mounts"],
        // The kernel's own lockdown is in securityfs.
        after: &["cmdline", "vsock", "extensions", "modules", "modules-nvidia", "agent", "mounts-later"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Lockdown,
        about: "locks module loading, kexec, BPF and kernel addresses, and the kernel against root; firstlight.lockdown, \
                firstlight.kernel-lockdown",
        hint: "a write to /proc/sys or securityfs hangs: look in the kernel log",
    },
    UnitSpec {
        name: "syslog",
        per: None,
        needs: &["mounts"],
        after: &["cmdline", "agent"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::DevLog,
        about: "makes /dev/log, to which daemons write by syslog(3)",
        hint: "PID 1's main loop is blocked: look in the kernel log",
    },
    daemon(0),
    daemon(1),
    daemon(2),
    daemon(3),
    daemon(4),
    daemon(5),
    daemon(6),
    UnitSpec {
        name: "boot-done",
        per: None,
        needs: &[],
        after: &["*"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::BootDone,
        about: "says that everything else has ended",
        hint: "the guest has no processor time",
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::check;

    #[test]
    fn the_plan_makes_sense_and_each_action_is_there_once() {
        let graph = check(PLAN).unwrap();
        assert_eq!(graph.nodes().len(), PLAN.len());
        for (at, unit) in PLAN.iter().enumerate() {
            assert!(PLAN[..at].iter().all(|other| other.action != unit.action), "{}", unit.name);
        }
    }

    #[test]
    fn the_agent_waits_for_no_gpu() {
        let graph = check(PLAN).unwrap();
        let at = |name: &str| graph.nodes().iter().position(|node| node.name == name).unwrap();
        let mut seen = vec![at("agent")];
        let mut next = 0;
        while let Some(unit) = seen.get(next).copied() {
            next += 1;
            seen.extend(graph.nodes()[unit].needs.iter().chain(&graph.nodes()[unit].after));
        }
        for name in ["extensions", "pci-scan", "mode", "modules-nvidia", "nodes", "gpu-attach", "gpu-settings", "cdi"] {
            assert!(!seen.contains(&at(name)), "the agent waits for {name}");
        }
    }

    #[test]
    fn each_daemon_is_a_unit() {
        let daemons = PLAN.iter().filter(|unit| matches!(unit.action, Action::Daemon(_)));
        assert_eq!(daemons.count(), DAEMONS.len());
    }

    #[test]
    fn daemons_find_their_log() {
        let graph = check(PLAN).unwrap();
        let log = graph.nodes().iter().position(|node| node.name == "syslog").unwrap();
        for (unit, node) in PLAN.iter().zip(graph.nodes()) {
            let is_daemon = matches!(unit.action, Action::Daemon(_));
            assert!(!is_daemon || node.after.contains(&log), "{}", unit.name);
        }
    }

    #[test]
    fn modules_are_locked_after_every_unit_that_loads_some() {
        let graph = check(PLAN).unwrap();
        let at = |name: &str| graph.nodes().iter().position(|node| node.name == name).unwrap();
        for name in ["vsock", "extensions", "modules", "modules-nvidia", "mounts-later"] {
            assert!(graph.nodes()[at("lockdown")].after.contains(&at(name)), "{name}");
        }
    }
}
