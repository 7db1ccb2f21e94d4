//! Reaps exited child processes.

use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

/// Maximum number of processes reaped per loop iteration, so that thousands of exited orphans do
/// not delay other events.
const TURN: usize = 256;

/// The state of the reaper.
#[derive(Debug, Default)]
pub(super) struct Children {
    /// Whether exited processes may be left to reap.
    more: bool,
    /// Number of reaped orphans.
    orphans: u64,
}

/// A batch of reaped processes.
#[derive(Debug, Default)]
pub(super) struct Reaped {
    /// The process ids and exit statuses.
    pub(super) ended: Vec<(Pid, WaitStatus)>,
    /// Whether PID 1 has no child left (`ECHILD`).
    pub(super) none_left: bool,
}

impl Children {
    /// Returns whether exited processes may be left to reap.
    pub(super) fn more(&self) -> bool {
        self.more
    }

    /// Reaps a batch of exited processes.
    pub(super) fn reap(&mut self) -> Reaped {
        let mut reaped = Reaped::default();
        self.more = true;
        for _ in 0..TURN {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(ended)) => reaped.ended.push(ended),
                Err(rustix::io::Errno::INTR) => {}
                result => {
                    self.more = false;
                    reaped.none_left = result.is_err();
                    break;
                }
            }
        }
        reaped
    }

    /// Counts a reaped process that no component started.
    pub(super) fn count_orphan(&mut self) {
        self.orphans += 1;
    }

    /// Returns one line with the number of reaped orphans; `None` if there were none.
    pub(super) fn orphans(&self) -> Option<String> {
        (self.orphans > 0).then(|| format!("{} orphaned processes were reaped", self.orphans))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphans_are_counted() {
        let mut children = Children::default();
        assert_eq!((children.orphans(), children.more()), (None, false));
        children.count_orphan();
        children.count_orphan();
        assert_eq!(children.orphans().as_deref(), Some("2 orphaned processes were reaped"));
    }
}
