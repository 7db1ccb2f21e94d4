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

/// Processes that run, by process id. A process is in here from the moment its
/// maker has told of it until it is reaped, so an id in here is never another
/// process's. One that ended before its maker could tell waits among the
/// unclaimed.
#[derive(Debug, Default)]
pub(crate) struct Children {
    by_pid: BTreeMap<i32, Name>,
    unclaimed: Vec<Unclaimed>,
}

/// The end of a process that has no name, perhaps not yet.
#[derive(Debug)]
struct Unclaimed {
    pid: i32,
    code: i32,
    /// Calls from this number on began after the end, so it is not of their making.
    before: u64,
}

impl Children {
    /// Names a process that call number `call` has made; returns its code if it has ended already.
    pub(crate) fn claim(&mut self, pid: i32, call: u64, container: &str, exec: &str) -> Option<i32> {
        if let Some(at) = self.unclaimed.iter().position(|end| end.pid == pid && call < end.before) {
            return Some(self.unclaimed.swap_remove(at).code);
        }
        self.by_pid.insert(pid, Name { container: container.to_owned(), exec: exec.to_owned() });
        None
    }

    /// The process id of a process that has not been reaped.
    pub(crate) fn pid(&self, container: &str, exec: &str) -> Option<i32> {
        self.by_pid.iter().find(|(_, name)| name.container == container && name.exec == exec).map(|(pid, _)| *pid)
    }

    /// Whether any process of the container has not been reaped.
    pub(crate) fn any(&self, container: &str) -> bool {
        self.by_pid.values().any(|name| name.container == container)
    }

    /// Reaps every child that has ended. `oldest` is the oldest call that has
    /// not told yet what it made, `next` the one that will begin next. Those
    /// without a name are mostly helpers; they only must not stay zombies,
    /// because a zombie in a container's process namespace keeps the container
    /// from ending.
    pub(crate) fn reap(&mut self, oldest: Option<u64>, next: u64) -> Vec<(Name, i32)> {
        let mut ended = Vec::new();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let pid = pid.as_raw_nonzero().get();
            match (self.by_pid.remove(&pid), code(status)) {
                (Some(name), Some(code)) => ended.push((name, code)),
                (None, Some(code)) => self.unclaimed.push(Unclaimed { pid, code, before: next }),
                (_, None) => {}
            }
        }
        self.unclaimed.retain(|end| oldest.is_some_and(|oldest| oldest < end.before));
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
        children.claim(10, 1, "a", "");
        children.claim(11, 1, "a", "e");
        assert_eq!(children.pid("a", ""), Some(10));
        assert_eq!(children.pid("a", "e"), Some(11));
        assert_eq!(children.pid("b", ""), None);
        assert!(children.any("a") && !children.any("b"));
    }

    #[test]
    fn an_end_before_the_name_is_not_lost_and_a_reused_id_is_no_end() {
        let mut children = Children::default();
        let end = |children: &mut Children| children.unclaimed.push(Unclaimed { pid: 7, code: 3, before: 5 });
        end(&mut children);
        assert_eq!(children.claim(7, 5, "later", ""), None, "it began after that end: another process of that id");
        assert_eq!(children.claim(7, 4, "c", ""), Some(3));
        end(&mut children);
        // No call that could claim it is left.
        children.reap(Some(5), 6);
        assert!(children.unclaimed.is_empty());
        end(&mut children);
        children.reap(None, 6);
        assert!(children.unclaimed.is_empty());
    }
}
