//! CPU affinity of calls.
//!
//! A call is a chain of processes, each of which waits for the next: the worker, libcontainer's helper, the
//! container's init process. Spread over CPUs, each link costs the wake-up time of an idle CPU, which in a guest
//! is more than the work itself. So a call that is alone is pinned to the CPU where it began. Concurrent calls
//! are left to the scheduler, and a container's program always gets the full affinity.

use std::fs;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The list of online CPUs.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// The CPUs that the runtime may use.
#[derive(Debug)]
pub(crate) struct CpuAffinity {
    /// `None` if there is only one.
    allowed: Option<CpuSet>,
}

impl CpuAffinity {
    /// Returns the affinity of this process.
    pub(crate) fn current() -> Self {
        let online = fs::read_to_string(ONLINE).map(|list| count(&list)).unwrap_or_default();
        let allowed = sched_getaffinity(None).ok().filter(|allowed| allowed.count() > 1);
        Self { allowed: allowed.map(|allowed| if allowed.count() >= online { all() } else { allowed }) }
    }

    /// Returns the CPUs that this process may use, if more than one.
    pub(crate) fn allowed(&self) -> Option<CpuSet> {
        self.allowed
    }

    /// Pins this process, its future children, and `other` to the current CPU. Returns whether it succeeded.
    pub(crate) fn pin(&self, other: Option<Pid>) -> bool {
        let cpu = sched_getcpu();
        // A CPU set cannot represent a number beyond its size.
        if self.allowed.is_none() || cpu >= CpuSet::MAX_CPU {
            return false;
        }
        let mut here = CpuSet::new();
        here.set(cpu);
        let other = other.is_none_or(|pid| sched_setaffinity(Some(pid), &here).is_ok());
        other && sched_setaffinity(None, &here).is_ok()
    }
}

/// Moves this process to another CPU: the process that it pinned to this one is about to wake and needs it.
pub(crate) fn move_away(allowed: &CpuSet) -> std::io::Result<()> {
    let mut others = *allowed;
    let cpu = sched_getcpu();
    if cpu < CpuSet::MAX_CPU {
        others.unset(cpu);
    }
    // Fails without another CPU; then the process stays.
    let _ = sched_setaffinity(None, &others);
    set(allowed)
}

/// Sets the affinity of this process.
pub(crate) fn set(allowed: &CpuSet) -> std::io::Result<()> {
    Ok(sched_setaffinity(None, allowed)?)
}

/// Sets the affinity of another process.
pub(crate) fn set_for_process(pid: i32, allowed: &CpuSet) -> std::io::Result<()> {
    let pid = Pid::from_raw(pid).ok_or(rustix::io::Errno::SRCH)?;
    Ok(sched_setaffinity(Some(pid), allowed)?)
}

/// Returns the set of all CPUs, including those hotplugged later.
fn all() -> CpuSet {
    let mut set = CpuSet::new();
    for cpu in 0..CpuSet::MAX_CPU {
        set.set(cpu);
    }
    set
}

/// Returns the number of CPUs in a list such as `0-3,7`.
fn count(list: &str) -> u32 {
    let numbers = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        Some(last.checked_sub(first)?.saturating_add(1))
    });
    numbers.fold(0, u32::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_counted() {
        for (list, number) in
            [("0\n", 1), ("0-3\n", 4), ("0-3,7", 5), ("", 0), ("x,2-1,5", 1), ("0-4294967295", u32::MAX)]
        {
            assert_eq!(count(list), number, "{list:?}");
        }
    }

    #[test]
    fn pinned_thread_uses_one_cpu_until_it_is_unpinned() {
        // A separate thread, because affinity is per thread.
        std::thread::spawn(|| {
            let before = sched_getaffinity(None).unwrap();
            let processors = CpuAffinity::current();
            let Some(allowed) = processors.allowed() else {
                assert!(before.count() == 1 && !processors.pin(None), "only with a single CPU");
                return;
            };
            assert!(processors.pin(None));
            assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
            set(&allowed).unwrap();
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        })
        .join()
        .unwrap();
    }
}
