//! Capabilities that nobody here can have.
//!
//! PID 1 keeps `CAP_SYS_MODULE` for itself, and a privileged container's
//! configuration lists every capability that its maker knows. The kernel
//! refuses a process that wants one which its parent has not, so what the agent
//! itself cannot have is taken off such lists. Alone on a machine, as root, the
//! agent has them all.

use std::collections::HashSet;
use std::sync::OnceLock;

use oci_spec::runtime::{Capability, LinuxCapabilities, Process};

/// Capabilities as the kernel numbers them, a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held(u64);

impl Held {
    /// What this process can hand on, which it never changes.
    #[must_use]
    pub fn of_self() -> Self {
        static HELD: OnceLock<Held> = OnceLock::new();
        *HELD.get_or_init(|| Self::parse(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()))
    }

    /// If it cannot be read, everything: the kernel still refuses.
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

    /// Takes off a process's lists what is not held; the names of that.
    pub fn narrow(self, process: &mut Process) -> Vec<String> {
        let Some(asked) = process.capabilities().clone() else { return Vec::new() };
        let mut taken = HashSet::new();
        let mut rest = |set: &Option<HashSet<Capability>>| {
            set.as_ref().map(|set| {
                let (held, lost): (HashSet<_>, HashSet<_>) = set.iter().copied().partition(|one| self.has(*one));
                taken.extend(lost);
                held
            })
        };
        let mut narrow = LinuxCapabilities::default();
        narrow
            .set_bounding(rest(asked.bounding()))
            .set_effective(rest(asked.effective()))
            .set_inheritable(rest(asked.inheritable()))
            .set_permitted(rest(asked.permitted()))
            .set_ambient(rest(asked.ambient()));
        if taken.is_empty() {
            return Vec::new();
        }
        process.set_capabilities(Some(narrow));
        let mut names: Vec<String> = taken.iter().map(|one| format!("CAP_{one}")).collect();
        names.sort();
        names
    }
}

/// The kernel's number of a capability (`linux/capability.h`).
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

    fn held(permitted: u64, bounding: u64) -> Held {
        Held::parse(&format!("Name:\tagent\nCapPrm:\t{permitted:016x}\nCapBnd:\t{bounding:016x}\n"))
    }

    #[test]
    fn what_the_agent_cannot_have_is_taken_off_every_list() {
        let all = [Capability::SysModule, Capability::SysAdmin, Capability::Chown];
        let mut asked = process(&all);
        let no_module = !(1 << 16);
        assert_eq!(held(no_module, u64::MAX).narrow(&mut asked), ["CAP_SYS_MODULE"]);
        assert_eq!(asked, process(&all[1..]));
        assert_eq!(held(u64::MAX, no_module).narrow(&mut asked), [""; 0], "it is gone");
        assert_eq!(asked, process(&all[1..]));
        assert_eq!(held(0, u64::MAX).narrow(&mut asked), ["CAP_CHOWN", "CAP_SYS_ADMIN"]);
        assert_eq!(asked, process(&[]));
    }

    #[test]
    fn who_has_everything_or_cannot_be_asked_takes_nothing() {
        let mut asked = process(&[Capability::SysModule]);
        assert_eq!(held(u64::MAX, u64::MAX).narrow(&mut asked), [""; 0]);
        for unreadable in ["", "CapPrm: x\nCapBnd: 0\n", "CapPrm:\t0\n"] {
            assert_eq!(Held::parse(unreadable).narrow(&mut asked), [""; 0]);
        }
        assert_eq!(asked, process(&[Capability::SysModule]));
        assert_eq!(Held(u64::MAX).narrow(&mut Process::default()), [""; 0]);
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        assert_eq!((Held::of_self(), status.contains("CapBnd:")), (Held::parse(&status), true));
    }

    #[test]
    fn numbers_are_the_kernels() {
        for (capability, bit) in
            [(Capability::SysModule, 16), (Capability::Setfcap, 31), (Capability::CheckpointRestore, 40)]
        {
            assert!(Held(1 << bit).has(capability) && !Held(!(1 << bit)).has(capability));
        }
    }
}
