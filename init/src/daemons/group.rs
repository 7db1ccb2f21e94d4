//! A daemon's resource group (cgroup v2): the daemon as a whole, whatever it
//! forks and however it hides from its parent.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

/// Where the groups of daemons are.
pub const PARENT: &str = "/sys/fs/cgroup/firstlight";

/// One group.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    directory: File,
}

impl Group {
    /// Makes the group. Each start has a new one: kernels from 6.14 on kill
    /// whatever is forked from outside into a group that was ever killed.
    ///
    /// # Errors
    /// It cannot be made; the text says where.
    pub fn make(parent: &Path, name: &str) -> Result<Self, String> {
        let dir = parent.join(name);
        // It is there after an end that we did not see.
        let _ = fs::remove_dir(&dir);
        let directory = fs::create_dir_all(&dir).and_then(|()| File::open(&dir));
        let directory =
            directory.map_err(|error| format!("cannot make the resource group {}: {error}", dir.display()))?;
        Ok(Self { dir, directory })
    }

    /// The file that changes when the last process is gone.
    #[must_use]
    pub fn events(&self) -> PathBuf {
        self.dir.join("cgroup.events")
    }

    /// Whether a process of it is left. One that cannot be read counts as one that has some: rather none than two.
    #[must_use]
    pub fn populated(&self) -> bool {
        let text = fs::read_to_string(self.events()).unwrap_or_default();
        !text.lines().any(|line| line == "populated 0")
    }

    /// Its processes.
    #[must_use]
    pub fn processes(&self) -> Vec<Pid> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw)).collect()
    }

    /// Asks all processes to end.
    pub fn terminate(&self) {
        for pid in self.processes() {
            // One that is gone is told by the group.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Kills all processes, those that are being forked included.
    ///
    /// # Errors
    /// The kernel has no `cgroup.kill` (it is older than 5.14); each process was killed by itself.
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

impl Drop for Group {
    fn drop(&mut self) {
        // One that is not empty stays, and is found by its name.
        let _ = fs::remove_dir(&self.dir);
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}
