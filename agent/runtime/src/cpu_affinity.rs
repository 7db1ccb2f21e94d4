//! On which processors a call is carried out.
//!
//! A call is a chain of processes, each of which waits for the next: the copy
//! of the runtime, libcontainer's helper, the container's first process. Spread
//! over processors each link costs the time that an idle one needs to wake,
//! which in a guest is more than the work itself. So a call that is alone stays
//! on the processor where it began. Calls at the same time are left to the
//! kernel, and a program of a container may always run where it likes.

use std::fs;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The list of processors that run.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// The processors that the runtime may use.
#[derive(Debug)]
pub(crate) struct CpuAffinity {
    /// Nothing if there is no choice to be made.
    allowed: Option<CpuSet>,
}

impl CpuAffinity {
    /// Those of this process.
    pub(crate) fn current() -> Self {
        let online = fs::read_to_string(ONLINE).map(|list| count(&list)).unwrap_or_default();
        let allowed = sched_getaffinity(None).ok().filter(|allowed| allowed.count() > 1);
        Self { allowed: allowed.map(|allowed| if allowed.count() >= online { all() } else { allowed }) }
    }

    /// Where this process may run, if there is a choice.
    pub(crate) fn allowed(&self) -> Option<CpuSet> {
        self.allowed
    }

    /// Keeps this process, those that it makes, and that other one on the
    /// processor where this one runs. Returns whether it was done.
    pub(crate) fn pin(&self, other: Option<Pid>) -> bool {
        let cpu = sched_getcpu();
        // A processor beyond what fits is not in the set.
        if self.allowed.is_none() || cpu >= CpuSet::MAX_CPU {
            return false;
        }
        let mut here = CpuSet::new();
        here.set(cpu);
        let other = other.is_none_or(|pid| sched_setaffinity(Some(pid), &here).is_ok());
        other && sched_setaffinity(None, &here).is_ok()
    }
}

/// Moves this process to another processor: what it leaves behind there is
/// about to be woken, and would find the place taken.
pub(crate) fn move_away(allowed: &CpuSet) -> std::io::Result<()> {
    let mut others = *allowed;
    let cpu = sched_getcpu();
    if cpu < CpuSet::MAX_CPU {
        others.unset(cpu);
    }
    // Without others to go to it stays.
    let _ = sched_setaffinity(None, &others);
    set(allowed)
}

/// Lets this process run where it may.
pub(crate) fn set(allowed: &CpuSet) -> std::io::Result<()> {
    Ok(sched_setaffinity(None, allowed)?)
}

/// Lets another process run where this one may.
pub(crate) fn set_for_process(pid: i32, allowed: &CpuSet) -> std::io::Result<()> {
    let pid = Pid::from_raw(pid).ok_or(rustix::io::Errno::SRCH)?;
    Ok(sched_setaffinity(Some(pid), allowed)?)
}

/// Every processor, also those that are plugged in later.
fn all() -> CpuSet {
    let mut set = CpuSet::new();
    for cpu in 0..CpuSet::MAX_CPU {
        set.set(cpu);
    }
    set
}

/// How many processors are in a list such as `0-3,7`.
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
    fn lists_are_counted() {
        for (list, number) in
            [("0\n", 1), ("0-3\n", 4), ("0-3,7", 5), ("", 0), ("x,2-1,5", 1), ("0-4294967295", u32::MAX)]
        {
            assert_eq!(count(list), number, "{list:?}");
        }
    }

    #[test]
    fn one_that_is_held_is_on_one_processor_until_it_is_let_go() {
        // A thread of its own: affinity is a thread's.
        std::thread::spawn(|| {
            let before = sched_getaffinity(None).unwrap();
            let processors = CpuAffinity::current();
            let Some(allowed) = processors.allowed() else {
                assert!(before.count() == 1 && !processors.pin(None), "only where there is no choice");
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
