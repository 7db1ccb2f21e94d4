//! A daemon's cgroup (v2): it contains all processes of the daemon, whatever it
//! forks or daemonises.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

/// The parent cgroup of all daemons.
pub const PARENT: &str = "/sys/fs/cgroup/firstlight";

/// One cgroup.
#[derive(Debug)]
pub struct Cgroup {
    dir: PathBuf,
    directory: File,
}

impl Cgroup {
    /// Creates the cgroup. Each start has a new one: kernels from 6.14 on kill
    /// any process that is forked from outside into a cgroup that was ever killed.
    ///
    /// # Errors
    /// It cannot be created; the text has its path.
    pub fn make(parent: &Path, name: &str) -> Result<Self, String> {
        let dir = parent.join(name);
        // It exists if the previous instance's exit was missed.
        let _ = fs::remove_dir(&dir);
        let directory = fs::create_dir_all(&dir).and_then(|()| File::open(&dir));
        let directory = directory.map_err(|error| format!("failed to create the cgroup {}: {error}", dir.display()))?;
        Ok(Self { dir, directory })
    }

    /// Returns the path of `cgroup.events`, which changes when the last process exits.
    #[must_use]
    pub fn events(&self) -> PathBuf {
        self.dir.join("cgroup.events")
    }

    /// Returns whether a process is left. Counts as populated if unreadable: no instance is better than two.
    #[must_use]
    pub fn populated(&self) -> bool {
        let text = fs::read_to_string(self.events()).unwrap_or_default();
        !text.lines().any(|line| line == "populated 0")
    }

    /// Returns its processes.
    #[must_use]
    pub fn processes(&self) -> Vec<Pid> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw)).collect()
    }

    /// Sends SIGTERM to all processes.
    pub fn terminate(&self) {
        for pid in self.processes() {
            // An exited process is reported by `cgroup.events`.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Kills all processes, including those being forked.
    ///
    /// # Errors
    /// The kernel has no `cgroup.kill` (older than 5.14); each process was killed individually.
    pub fn kill(&self) -> io::Result<()> {
        let killed = fs::write(self.dir.join("cgroup.kill"), "1");
        if killed.is_err() {
            for pid in self.processes() {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        killed
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // If not empty it stays, and the next start finds it by name.
        let _ = fs::remove_dir(&self.dir);
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}
