//! The boot plan.

use std::time::Duration;

use firstlight_boot_record::Severity::{Degraded, Optional, Required};

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
    /// What containers' files and networks are made of.
    ContainerModules,
    /// The agent.
    Agent,
    /// What is on the bus.
    PciScan,
    /// What kind of guest this is.
    Mode,
    /// The GPU driver.
    NvidiaModules,
    /// Its device nodes.
    Nodes,
    /// One GPU.
    GpuAttach,
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
    /// No more modules.
    Lockdown,
    /// The last unit.
    BootDone,
}

impl Action {
    /// Whether the processor has better things to do: nobody waits for these,
    /// while the host is waiting for the agent's first answer.
    #[must_use]
    pub fn yields(self) -> bool {
        matches!(
            self,
            Self::ContainerModules | Self::Cgroup2 | Self::Sysctl | Self::Loopback | Self::LaterMounts | Self::Lockdown
        )
    }
}

const fn seconds(count: u64) -> Option<Duration> {
    Some(Duration::from_secs(count))
}

/// The table. Order decides only who goes first among those that may.
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
    },
    UnitSpec {
        name: "modules",
        per: None,
        needs: &["mounts"],
        after: &["cmdline", "agent"],
        deadline: seconds(30),
        severity: Optional,
        action: Action::ContainerModules,
        about: "loads file systems and virtio drivers that containers use, those of them that the image has as modules",
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
    },
    UnitSpec {
        name: "modules-nvidia",
        per: None,
        needs: &["mode"],
        // The driver's load keeps processors and buses busy for tens of
        // milliseconds; the agent's first answer must not depend on how many
        // GPUs there are, and an attach takes seconds.
        after: &["agent"],
        deadline: seconds(120),
        severity: Degraded,
        action: Action::NvidiaModules,
        about: "loads nvidia and nvidia-uvm",
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
    },
    UnitSpec {
        name: "cdi",
        per: None,
        needs: &["nodes"],
        after: &["gpu-attach"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Cdi,
        about: "checks the CDI file, which is written each time a GPU becomes ready",
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
    },
    UnitSpec {
        name: "mounts-later",
        per: None,
        needs: &["mounts"],
        after: &["agent"],
        deadline: seconds(10),
        severity: Optional,
        action: Action::LaterMounts,
        about: "mounts securityfs, bpf, mqueue and hugetlbfs where the kernel has them",
    },
    UnitSpec {
        name: "lockdown",
        per: None,
        needs: &["mounts"],
        after: &["cmdline", "vsock", "modules", "modules-nvidia", "agent"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::Lockdown,
        about: "locks module loading, kexec, BPF and kernel addresses; firstlight.lockdown",
    },
    UnitSpec {
        name: "boot-done",
        per: None,
        needs: &[],
        after: &["*"],
        deadline: seconds(5),
        severity: Degraded,
        action: Action::BootDone,
        about: "says that everything else has ended",
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
        for name in ["pci-scan", "mode", "modules-nvidia", "nodes", "gpu-attach", "cdi"] {
            assert!(!seen.contains(&at(name)), "the agent waits for {name}");
        }
    }

    #[test]
    fn modules_are_locked_after_every_unit_that_loads_some() {
        let graph = check(PLAN).unwrap();
        let at = |name: &str| graph.nodes().iter().position(|node| node.name == name).unwrap();
        for name in ["vsock", "modules", "modules-nvidia"] {
            assert!(graph.nodes()[at("lockdown")].after.contains(&at(name)), "{name}");
        }
    }
}
