//! Removes capabilities that the agent cannot grant.
//!
//! PID 1 drops `CAP_SYS_MODULE` before it starts the agent, and the configuration of a privileged
//! container lists every capability. The kernel rejects a process with capabilities that its parent
//! does not have, so capabilities that the agent does not have are removed. Without a guest, as
//! root, the agent has them all.

use std::collections::HashSet;
use std::sync::OnceLock;

use oci_spec::runtime::{Capability, LinuxCapabilities, Process};

/// A set of capabilities, one bit per kernel number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapabilitySet(u64);

impl CapabilitySet {
    /// Returns the capabilities that this process can pass on, which never change.
    #[must_use]
    pub fn own() -> Self {
        static OWN: OnceLock<CapabilitySet> = OnceLock::new();
        *OWN.get_or_init(|| Self::parse(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()))
    }

    /// All if it cannot be parsed: the kernel still rejects.
    fn parse(status: &str) -> Self {
        let set = |name: &str| {
            let text = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(text.trim(), 16).ok()
        };
        Self(set("CapPrm:").zip(set("CapBnd:")).map_or(u64::MAX, |(permitted, bounding)| permitted & bounding))
    }

    fn has(self, capability: Capability) -> bool {
        self.0 & (1 << number(capability)) != 0
    }

    /// Removes from a process's sets the capabilities that are not in this set; returns their
    /// names.
    pub fn restrict(self, process: &mut Process) -> Vec<String> {
        let Some(requested) = process.capabilities().clone() else { return Vec::new() };
        let mut removed = HashSet::new();
        let mut rest = |set: &Option<HashSet<Capability>>| {
            set.as_ref().map(|set| {
                let (held, lost): (HashSet<_>, HashSet<_>) = set.iter().copied().partition(|one| self.has(*one));
                removed.extend(lost);
                held
            })
        };
        let mut narrow = LinuxCapabilities::default();
        narrow
            .set_bounding(rest(requested.bounding()))
            .set_effective(rest(requested.effective()))
            .set_inheritable(rest(requested.inheritable()))
            .set_permitted(rest(requested.permitted()))
            .set_ambient(rest(requested.ambient()));
        if removed.is_empty() {
            return Vec::new();
        }
        process.set_capabilities(Some(narrow));
        let mut names: Vec<String> = removed.iter().map(|one| format!("CAP_{one}")).collect();
        names.sort();
        names
    }
}

/// Returns the kernel's number of a capability (`linux/capability.h`).
fn number(capability: Capability) -> u32 {
    match capability {
        Capability::Chown => 0,
        Capability::DacOverride => 1,
        Capability::DacReadSearch => 2,
        Capability::Fowner => 3,
        Capability::Fsetid => 4,
        Capability::Kill => 5,
        Capability::Setgid => 6,
        Capability::Setuid => 7,
        Capability::Setpcap => 8,
        Capability::LinuxImmutable => 9,
        Capability::NetBindService => 10,
        Capability::NetBroadcast => 11,
        Capability::NetAdmin => 12,
        Capability::NetRaw => 13,
        Capability::IpcLock => 14,
        Capability::IpcOwner => 15,
        Capability::SysModule => 16,
        Capability::SysRawio => 17,
        Capability::SysChroot => 18,
        Capability::SysPtrace => 19,
        Capability::SysPacct => 20,
        Capability::SysAdmin => 21,
        Capability::SysBoot => 22,
        Capability::SysNice => 23,
        Capability::SysResource => 24,
        Capability::SysTime => 25,
        Capability::SysTtyConfig => 26,
        Capability::Mknod => 27,
        Capability::Lease => 28,
        Capability::AuditWrite => 29,
        Capability::AuditControl => 30,
        Capability::Setfcap => 31,
        Capability::MacOverride => 32,
        Capability::MacAdmin => 33,
        Capability::Syslog => 34,
        Capability::WakeAlarm => 35,
        Capability::BlockSuspend => 36,
        Capability::AuditRead => 37,
        Capability::Perfmon => 38,
        Capability::Bpf => 39,
        Capability::CheckpointRestore => 40,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(all: &[Capability]) -> Process {
        let set = || Some(all.iter().copied().collect::<HashSet<_>>());
        let mut capabilities = LinuxCapabilities::default();
        capabilities
            .set_bounding(set())
            .set_effective(set())
            .set_permitted(set())
            .set_inheritable(set())
            .set_ambient(set());
        let mut process = Process::default();
        process.set_capabilities(Some(capabilities));
        process
    }

    fn held(permitted: u64, bounding: u64) -> CapabilitySet {
        CapabilitySet::parse(&format!("Name:\tagent\nCapPrm:\t{permitted:016x}\nCapBnd:\t{bounding:016x}\n"))
    }

    #[test]
    fn capability_that_the_agent_lacks_is_removed_from_every_set() {
        let all = [Capability::SysModule, Capability::SysAdmin, Capability::Chown];
        let mut requested = process(&all);
        let no_module = !(1 << 16);
        assert_eq!(held(no_module, u64::MAX).restrict(&mut requested), ["CAP_SYS_MODULE"]);
        assert_eq!(requested, process(&all[1..]));
        assert_eq!(held(u64::MAX, no_module).restrict(&mut requested), [""; 0], "it is gone");
        assert_eq!(requested, process(&all[1..]));
        assert_eq!(held(0, u64::MAX).restrict(&mut requested), ["CAP_CHOWN", "CAP_SYS_ADMIN"]);
        assert_eq!(requested, process(&[]));
    }

    #[test]
    fn full_or_unreadable_set_removes_nothing() {
        let mut requested = process(&[Capability::SysModule]);
        assert_eq!(held(u64::MAX, u64::MAX).restrict(&mut requested), [""; 0]);
        for unreadable in ["", "CapPrm: x\nCapBnd: 0\n", "CapPrm:\t0\n"] {
            assert_eq!(CapabilitySet::parse(unreadable).restrict(&mut requested), [""; 0]);
        }
        assert_eq!(requested, process(&[Capability::SysModule]));
        assert_eq!(CapabilitySet(u64::MAX).restrict(&mut Process::default()), [""; 0]);
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        assert_eq!((CapabilitySet::own(), status.contains("CapBnd:")), (CapabilitySet::parse(&status), true));
    }

    #[test]
    fn numbers_equal_the_kernels() {
        for (capability, bit) in
            [(Capability::SysModule, 16), (Capability::Setfcap, 31), (Capability::CheckpointRestore, 40)]
        {
            assert!(CapabilitySet(1 << bit).has(capability) && !CapabilitySet(!(1 << bit)).has(capability));
        }
    }
}
