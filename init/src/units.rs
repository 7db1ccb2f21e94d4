//! The boot plan.

use std::time::Duration;

use firstlight_boot_record::Severity::{Degraded, Optional, Required};

use crate::daemons::table::daemon_spec;
use crate::plan::{After, UnitSpec};
use crate::unit_id::{DaemonId, UnitId};

const fn seconds(count: u64) -> Option<Duration> {
    Some(Duration::from_secs(count))
}

/// Returns the unit of a daemon, from the daemon's table entry.
const fn daemon(id: DaemonId) -> UnitSpec<UnitId> {
    let spec = daemon_spec(id);
    UnitSpec {
        id: UnitId::Daemon(id),
        per: None,
        needs: spec.needs,
        after: After::These(spec.after),
        // The daemon's lifecycle has a deadline for each start.
        deadline: None,
        severity: spec.severity,
        about: spec.about,
        hint: spec.hint,
    }
}

/// The boot plan. The order of the table decides only between units that can start at the same
/// time.
pub const PLAN: &[UnitSpec<UnitId>] = &[
    UnitSpec {
        id: UnitId::Mounts,
        per: None,
        needs: &[],
        after: After::These(&[]),
        deadline: seconds(10),
        severity: Required,
        about: "makes the root a mount that containers can pivot from; mounts /proc, /sys, /dev, /run, /tmp, cgroups",
        hint: "look in the kernel log for file systems that this kernel lacks",
    },
    UnitSpec {
        id: UnitId::CommandLine,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[]),
        deadline: seconds(5),
        severity: Degraded,
        about: "parses the firstlight.* kernel parameters; fails if one is unknown or invalid",
        hint: "is /proc mounted?",
    },
    UnitSpec {
        id: UnitId::Vsock,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[]),
        deadline: seconds(30),
        severity: Degraded,
        about: "loads the virtio transport of vsock, over which the host connects to the agent, unless it is built in",
        hint: "look for virtio in the kernel log: the host's vsock device may not answer",
    },
    UnitSpec {
        id: UnitId::ContainerModules,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::CommandLine, UnitId::Agent]),
        // The driver takes seconds to initialise a ConnectX, and a guest may have a dozen.
        deadline: seconds(120),
        severity: Optional,
        about: "loads modules of file systems, virtio and the packet filter that the image has, and the drivers of all devices on the bus except GPUs",
        hint: "the last lines of the kernel log name the module that hangs in its init function",
    },
    UnitSpec {
        id: UnitId::Agent,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::CommandLine, UnitId::Vsock]),
        deadline: seconds(60),
        severity: Required,
        about: "starts the agent; ready when it listens. Does not wait for GPUs",
        hint: "the agent did not report that it listens: its log lines are above; agent.log=debug logs more",
    },
    UnitSpec {
        id: UnitId::Extensions,
        per: None,
        needs: &[UnitId::Mounts],
        // After the agent: its first response must not wait for disks.
        after: After::These(&[UnitId::CommandLine, UnitId::Agent]),
        // Includes at most 10 s of waiting for the disks.
        deadline: seconds(30),
        // A guest must not run without a requested extension.
        severity: Required,
        about: "mounts the disks of kata.extension.NAME.verity_params, verified by dm-verity, at \
                /run/kata-extensions/NAME",
        hint: "a disk does not answer: the host's storage",
    },
    UnitSpec {
        id: UnitId::ExtensionDisks,
        per: None,
        needs: &[UnitId::Mounts],
        // The disks' drivers are loaded by these units.
        after: After::These(&[UnitId::CommandLine, UnitId::ContainerModules, UnitId::Extensions]),
        deadline: seconds(10),
        severity: Required,
        about: "fails if a disk has the serial number extension-NAME and the kernel command line does not request the extension",
        hint: "a read of a disk's serial number hangs: the host's storage",
    },
    UnitSpec {
        id: UnitId::PciScan,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[]),
        deadline: seconds(10),
        severity: Degraded,
        about: "lists the functions on the PCI bus",
        hint: "a function on the bus does not answer configuration reads: the host's vfio log",
    },
    UnitSpec {
        id: UnitId::Mode,
        per: None,
        needs: &[UnitId::PciScan],
        after: After::These(&[UnitId::CommandLine]),
        deadline: seconds(5),
        severity: Degraded,
        about: "decides the guest mode by rules over the scan, or by firstlight.mode",
        hint: "this unit only computes: the guest has no processor time",
    },
    UnitSpec {
        id: UnitId::State,
        per: None,
        needs: &[UnitId::Mode],
        // Loads the driver of the disk and ext4.
        after: After::These(&[UnitId::ContainerModules]),
        deadline: seconds(30),
        severity: Degraded,
        about: "in a service VM, mounts the disk with the serial number firstlight-state at /var/lib/firstlight, or a tmpfs without one",
        hint: "the disk does not answer: look in the kernel log, and at the host's file behind it",
    },
    UnitSpec {
        id: UnitId::NvidiaModules,
        per: None,
        needs: &[UnitId::Mode],
        // Loading the driver keeps processors and buses busy for tens of milliseconds, and an
        // attach takes seconds; the agent's first response must not depend on the number of GPUs.
        // The driver may be in an extension.
        after: After::These(&[UnitId::Agent, UnitId::Extensions]),
        deadline: seconds(120),
        severity: Degraded,
        about: "loads nvidia and nvidia-uvm",
        hint: "the driver hangs in its init function: NVRM lines in the kernel log, the host's vfio log",
    },
    UnitSpec {
        id: UnitId::Nodes,
        per: None,
        needs: &[UnitId::NvidiaModules],
        after: After::These(&[]),
        deadline: seconds(10),
        severity: Degraded,
        about: "creates the driver's device nodes",
        hint: "the driver does not answer reads of /proc/driver/nvidia",
    },
    UnitSpec {
        id: UnitId::GpuAttachTemplate,
        per: Some(UnitId::PciScan),
        needs: &[UnitId::Nodes],
        after: After::These(&[UnitId::PciScan]),
        deadline: None,
        severity: Degraded,
        about: "opens the GPU, waits for the driver, and keeps it open; firstlight.attach and firstlight.attach-deadline",
        hint: "the host's vfio log; firstlight.attach=serial, if no serial attempt has failed",
    },
    UnitSpec {
        id: UnitId::GpuSettings,
        per: None,
        needs: &[UnitId::Nodes],
        // NVML attaches GPUs itself when it is initialised, so the attach units must have ended.
        after: After::These(&[UnitId::GpuAttachTemplate]),
        // The supervisor applies firstlight.gpu-settings-deadline to the run.
        deadline: None,
        severity: Degraded,
        about: "applies firstlight.mig and firstlight.gpu-*; a GPU with requested settings is ready afterwards",
        hint: "the detail has the GPU and the step in progress; firstlight-gpu-settings check prints the supported settings",
    },
    UnitSpec {
        id: UnitId::Cdi,
        per: None,
        needs: &[UnitId::Nodes],
        after: After::These(&[UnitId::GpuAttachTemplate, UnitId::GpuSettings]),
        deadline: seconds(5),
        severity: Degraded,
        about: "checks the CDI file, which is written each time a GPU becomes ready",
        hint: "is /run full? the driver's capabilities below /proc/driver/nvidia/capabilities",
    },
    UnitSpec {
        id: UnitId::Cgroup2,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::Agent]),
        deadline: seconds(5),
        severity: Degraded,
        about: "enables all controllers for the cgroups of containers",
        hint: "boot with cgroup_no_v1=all; does the kernel have cgroup v2?",
    },
    UnitSpec {
        id: UnitId::Sysctl,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::Agent]),
        deadline: seconds(5),
        severity: Degraded,
        about: "writes kernel settings",
        hint: "a write to /proc/sys hangs: look in the kernel log",
    },
    UnitSpec {
        id: UnitId::Loopback,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::Agent]),
        deadline: seconds(5),
        severity: Degraded,
        about: "brings lo up",
        hint: "netlink does not answer: look in the kernel log",
    },
    UnitSpec {
        id: UnitId::LaterMounts,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::Agent]),
        deadline: seconds(10),
        severity: Optional,
        about: "mounts securityfs, bpf, mqueue and hugetlbfs if the kernel has them, and writable tmpfs on those directories that the image has",
        hint: "look in the kernel log for the file system that hangs",
    },
    UnitSpec {
        id: UnitId::ReadOnlyRoot,
        per: None,
        needs: &[UnitId::Mounts],
        // LaterMounts may create mount points on the root.
        after: After::These(&[UnitId::CommandLine, UnitId::Agent, UnitId::LaterMounts]),
        deadline: seconds(5),
        severity: Degraded,
        about: "remounts the root file system read-only; firstlight.root",
        hint: "a change of the root's mount hangs: look in the kernel log",
    },
    UnitSpec {
        id: UnitId::Lockdown,
        per: None,
        needs: &[UnitId::Mounts],
        // LaterMounts mounts securityfs, which has the kernel's lockdown file.
        after: After::These(&[
            UnitId::CommandLine,
            UnitId::Vsock,
            UnitId::Extensions,
            UnitId::ContainerModules,
            UnitId::NvidiaModules,
            UnitId::Agent,
            UnitId::LaterMounts,
        ]),
        deadline: seconds(5),
        severity: Degraded,
        about: "locks module loading, kexec, BPF and kernel addresses, and the kernel against root; firstlight.lockdown, \
                firstlight.kernel-lockdown",
        hint: "a write to /proc/sys or securityfs hangs: look in the kernel log",
    },
    UnitSpec {
        id: UnitId::DevLog,
        per: None,
        needs: &[UnitId::Mounts],
        after: After::These(&[UnitId::CommandLine, UnitId::Agent]),
        deadline: seconds(5),
        severity: Degraded,
        about: "creates /dev/log, to which daemons write by syslog(3)",
        hint: "PID 1's main loop is blocked: look in the kernel log",
    },
    daemon(DaemonId::Persistenced),
    daemon(DaemonId::Nvlsm),
    daemon(DaemonId::FabricManager),
    daemon(DaemonId::Partitiond),
    daemon(DaemonId::Imex),
    daemon(DaemonId::HostEngine),
    daemon(DaemonId::DcgmExporter),
    UnitSpec {
        id: UnitId::BootDone,
        per: None,
        needs: &[],
        after: After::AllOthers,
        deadline: seconds(5),
        severity: Degraded,
        about: "reports that all other units have ended",
        hint: "the guest has no processor time",
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::check;

    #[test]
    fn plan_is_valid_and_has_each_unit_once() {
        let graph = check(PLAN).unwrap();
        assert_eq!(graph.nodes().len(), PLAN.len());
        for (at, unit) in PLAN.iter().enumerate() {
            assert!(PLAN[..at].iter().all(|other| other.id != unit.id), "{}", unit.id);
        }
    }

    #[test]
    fn agent_does_not_wait_for_gpus() {
        let graph = check(PLAN).unwrap();
        let at = |id: UnitId| graph.nodes().iter().position(|node| node.id == id).unwrap();
        let mut seen = vec![at(UnitId::Agent)];
        let mut next = 0;
        while let Some(unit) = seen.get(next).copied() {
            next += 1;
            seen.extend(graph.nodes()[unit].needs.iter().chain(&graph.nodes()[unit].after));
        }
        for id in [
            UnitId::Extensions,
            UnitId::PciScan,
            UnitId::Mode,
            UnitId::NvidiaModules,
            UnitId::Nodes,
            UnitId::GpuAttachTemplate,
            UnitId::GpuSettings,
            UnitId::Cdi,
        ] {
            assert!(!seen.contains(&at(id)), "the agent waits for {id}");
        }
    }

    #[test]
    fn every_daemon_has_a_unit() {
        let daemons = PLAN.iter().filter(|unit| matches!(unit.id, UnitId::Daemon(_)));
        assert_eq!(daemons.count(), DaemonId::ALL.len());
    }

    #[test]
    fn syslog_socket_precedes_daemons() {
        let graph = check(PLAN).unwrap();
        let log = graph.nodes().iter().position(|node| node.id == UnitId::DevLog).unwrap();
        for (unit, node) in PLAN.iter().zip(graph.nodes()) {
            let is_daemon = matches!(unit.id, UnitId::Daemon(_));
            assert!(!is_daemon || node.after.contains(&log), "{}", unit.id);
        }
    }

    #[test]
    fn module_loading_is_locked_after_all_units_that_load_modules() {
        let graph = check(PLAN).unwrap();
        let at = |id: UnitId| graph.nodes().iter().position(|node| node.id == id).unwrap();
        let loaders =
            [UnitId::Vsock, UnitId::Extensions, UnitId::ContainerModules, UnitId::NvidiaModules, UnitId::LaterMounts];
        for id in loaders {
            assert!(graph.nodes()[at(UnitId::Lockdown)].after.contains(&at(id)), "{id}");
        }
    }
}
