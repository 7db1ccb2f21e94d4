//! The runtime's child processes and their exit codes.

use std::collections::BTreeMap;

use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

/// The name of a process that the agent knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) container: String,
    /// Empty for a container's init process.
    pub(crate) exec: String,
}

/// Running processes by pid. An entry exists from the report of the worker that created the process until the
/// process is reaped, so its pid is never a reused one. The exit of a process that ended before the report is
/// kept in `unclaimed`.
#[derive(Debug, Default)]
pub(crate) struct Children {
    by_pid: BTreeMap<i32, Name>,
    unclaimed: Vec<Unclaimed>,
}

/// The exit of a process that has no name, or not yet.
#[derive(Debug)]
struct Unclaimed {
    pid: i32,
    code: i32,
    /// Calls from this number on began after the exit, so they did not create the process.
    before: u64,
}

impl Children {
    /// Registers a process that call number `call` created; returns its exit code if it has already exited.
    pub(crate) fn claim(&mut self, pid: i32, call: u64, container: &str, exec: &str) -> Option<i32> {
        if let Some(at) = self.unclaimed.iter().position(|end| end.pid == pid && call < end.before) {
            return Some(self.unclaimed.swap_remove(at).code);
        }
        self.by_pid.insert(pid, Name { container: container.to_owned(), exec: exec.to_owned() });
        None
    }

    /// Returns the pid of a process that has not been reaped.
    pub(crate) fn pid(&self, container: &str, exec: &str) -> Option<i32> {
        self.by_pid.iter().find(|(_, name)| name.container == container && name.exec == exec).map(|(pid, _)| *pid)
    }

    /// Whether any process of the container has not been reaped.
    pub(crate) fn any(&self, container: &str) -> bool {
        self.by_pid.values().any(|name| name.container == container)
    }

    /// Reaps every child that has exited. `oldest` is the oldest call in flight, which has not reported its
    /// process yet; `next` is the next call to start. Children without a name are mostly helpers; they must not
    /// stay zombies, because a zombie in a container's pid namespace keeps the namespace from terminating.
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

    /// Returns every pid, for the shutdown.
    pub(crate) fn pids(&self) -> impl Iterator<Item = Pid> {
        self.by_pid.keys().filter_map(|pid| Pid::from_raw(*pid))
    }
}

/// Returns the exit code by the convention of shells and shims; `None` if the process was only stopped.
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
    fn exit_codes_follow_the_shell_convention() {
        assert_eq!(ended("exit 3"), Some(3));
        assert_eq!(ended("kill -9 $$"), Some(137));
    }

    #[test]
    fn process_is_found_by_container_and_exec_id() {
        let mut children = Children::default();
        children.claim(10, 1, "a", "");
        children.claim(11, 1, "a", "e");
        assert_eq!(children.pid("a", ""), Some(10));
        assert_eq!(children.pid("a", "e"), Some(11));
        assert_eq!(children.pid("b", ""), None);
        assert!(children.any("a") && !children.any("b"));
    }

    #[test]
    fn exit_before_registration_is_kept_and_a_reused_pid_is_not_mistaken_for_it() {
        let mut children = Children::default();
        let end = |children: &mut Children| children.unclaimed.push(Unclaimed { pid: 7, code: 3, before: 5 });
        end(&mut children);
        assert_eq!(
            children.claim(7, 5, "later", ""),
            None,
            "the call began after that exit: another process with the same pid"
        );
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
