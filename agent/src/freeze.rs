//! PauseContainer and ResumeContainer: the freezer of cgroup v2.

use std::fs;
use std::io::{Read, Seek};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::Agent;
use crate::container::Freezer;
use crate::error::{Error, Result};
use crate::work;

/// How long the kernel may take to stop every process. One in the middle of
/// something that cannot be interrupted keeps it waiting.
const PATIENCE: Duration = Duration::from_secs(5);

/// Freezes or thaws a resource group and waits until it is.
///
/// # Errors
/// The kernel refuses, or takes longer than `patience`.
fn set(cgroup: &Path, freeze: bool, patience: Duration) -> Result<()> {
    let begin = Instant::now();
    let digit = if freeze { "1" } else { "0" };
    let wrong = |file: &str, error: std::io::Error| Error::internal(format!("{digit:?} to {file}: {error}"));
    fs::write(cgroup.join("cgroup.freeze"), digit).map_err(|error| wrong("cgroup.freeze", error))?;
    let mut events = fs::File::open(cgroup.join("cgroup.events")).map_err(|error| wrong("cgroup.events", error))?;
    let wanted = format!("frozen {digit}");
    let mut text = String::new();
    loop {
        text.clear();
        events
            .rewind()
            .and_then(|()| events.read_to_string(&mut text))
            .map_err(|error| wrong("cgroup.events", error))?;
        if text.lines().any(|line| line == wanted) {
            return Ok(());
        }
        let left = patience.saturating_sub(begin.elapsed());
        if left.is_zero() {
            let seconds = patience.as_secs();
            let message = format!("cgroup.events does not say {wanted:?} after {seconds} s; is a process in a device?");
            return Err(Error::new(ttrpc::Code::DEADLINE_EXCEEDED, message));
        }
        // The file tells of changes as an exception.
        let _ = poll(&mut [PollFd::new(&events, PollFlags::PRI)], Timespec::try_from(left).ok().as_ref());
    }
}

impl Agent {
    /// Stops every process of a container where it is.
    ///
    /// # Errors
    /// The container does not run or is paused, or its processes do not stop
    /// in time; then they go on.
    pub async fn pause_container(self: &Arc<Self>, id: &str) -> Result<()> {
        self.freeze(id, true).await
    }

    /// Lets a paused container go on.
    ///
    /// # Errors
    /// The container is not paused, or the kernel refuses.
    pub async fn resume_container(self: &Arc<Self>, id: &str) -> Result<()> {
        self.freeze(id, false).await
    }

    async fn freeze(self: &Arc<Self>, id: &str, freeze: bool) -> Result<()> {
        let container = self.container(id)?;
        let (before, after) = if freeze { (Freezer::Off, Freezer::On) } else { (Freezer::On, Freezer::Off) };
        container.switch(before, Freezer::Changing)?;
        work::whole(async move {
            let dir = container.cgroup.clone();
            let result = work::blocking(move || {
                let done = set(&dir, freeze, PATIENCE);
                if done.is_err() && freeze {
                    let _ = set(&dir, false, PATIENCE);
                }
                done
            })
            .await;
            // Nobody else leaves that state.
            let _ = container.switch(Freezer::Changing, if result.is_ok() { after } else { before });
            let what = if freeze { "pause" } else { "resume" };
            result.map_err(|error| error.during(&format!("cannot {what} container {}", container.id)))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_for_the_kernel_and_not_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let error = set(dir.path(), true, Duration::ZERO).unwrap_err();
        assert!(error.message.contains("cgroup.events"), "{error}");
        let events = dir.path().join("cgroup.events");
        fs::write(&events, "populated 1\nfrozen 0\n").unwrap();
        let error = set(dir.path(), true, Duration::ZERO).unwrap_err();
        assert_eq!(error.code, ttrpc::Code::DEADLINE_EXCEEDED);
        assert_eq!(fs::read_to_string(dir.path().join("cgroup.freeze")).unwrap(), "1");
        fs::write(&events, "populated 1\nfrozen 1\n").unwrap();
        set(dir.path(), true, Duration::ZERO).unwrap();
    }
}
