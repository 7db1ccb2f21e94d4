//! Who the runtime's children are, and how they ended.

use std::collections::BTreeMap;

use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

/// A process that the agent knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) container: String,
    /// Empty for a container's first process.
    pub(crate) exec: String,
}

/// Processes that run, by process id. A process is in here from its making
/// until it is reaped, so an id in here is never another process's.
#[derive(Debug, Default)]
pub(crate) struct Children {
    by_pid: BTreeMap<i32, Name>,
}

impl Children {
    pub(crate) fn insert(&mut self, pid: i32, container: &str, exec: &str) {
        self.by_pid.insert(pid, Name { container: container.to_owned(), exec: exec.to_owned() });
    }

    /// The process id of a process that has not been reaped.
    pub(crate) fn pid(&self, container: &str, exec: &str) -> Option<i32> {
        self.by_pid.iter().find(|(_, name)| name.container == container && name.exec == exec).map(|(pid, _)| *pid)
    }

    /// Whether any process of the container has not been reaped.
    pub(crate) fn any(&self, container: &str) -> bool {
        self.by_pid.values().any(|name| name.container == container)
    }

    /// Reaps every child that has ended. Those without a name are helpers of a
    /// call that failed; they only must not stay zombies, because a zombie in a
    /// container's process namespace keeps the container from ending.
    pub(crate) fn reap(&mut self) -> Vec<(Name, i32)> {
        let mut ended = Vec::new();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if let (Some(name), Some(code)) = (self.by_pid.remove(&pid.as_raw_nonzero().get()), code(status)) {
                ended.push((name, code));
            }
        }
        ended
    }

    /// Every process id, for the end.
    pub(crate) fn pids(&self) -> impl Iterator<Item = Pid> {
        self.by_pid.keys().filter_map(|pid| Pid::from_raw(*pid))
    }
}

/// The code that shells and shims use; `None` while the process only stopped.
fn code(status: WaitStatus) -> Option<i32> {
    status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::zombie_processes, reason = "waited for by the code under test")]
    fn ended(script: &str) -> Option<i32> {
        let child = std::process::Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let (_, status) = rustix::process::waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        code(status)
    }

    #[test]
    fn codes_are_the_shells() {
        assert_eq!(ended("exit 3"), Some(3));
        assert_eq!(ended("kill -9 $$"), Some(137));
    }

    #[test]
    fn a_process_is_found_by_both_names() {
        let mut children = Children::default();
        children.insert(10, "a", "");
        children.insert(11, "a", "e");
        assert_eq!(children.pid("a", ""), Some(10));
        assert_eq!(children.pid("a", "e"), Some(11));
        assert_eq!(children.pid("b", ""), None);
        assert!(children.any("a") && !children.any("b"));
    }
}
