//! PauseContainer and ResumeContainer: the freezer of cgroup v2.

use std::fs;
use std::io::{Read, Seek};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::background;
use crate::container::{Container, Freezer};
use crate::error::{Error, Result};

/// Timeout for the kernel to freeze all processes. A process in uninterruptible sleep delays it.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);

/// Freezes or thaws a cgroup and waits for completion.
///
/// # Errors
/// The write fails, or takes longer than `timeout`.
fn set(cgroup: &Path, freeze: bool, timeout: Duration) -> Result<()> {
    let begin = Instant::now();
    let digit = if freeze { "1" } else { "0" };
    let wrong = |file: &str, error: std::io::Error| Error::internal(format!("{digit:?} to {file}: {error}"));
    fs::write(cgroup.join("cgroup.freeze"), digit).map_err(|error| wrong("cgroup.freeze", error))?;
    let mut events = fs::File::open(cgroup.join("cgroup.events")).map_err(|error| wrong("cgroup.events", error))?;
    let expected = format!("frozen {digit}");
    let mut text = String::new();
    loop {
        text.clear();
        events
            .rewind()
            .and_then(|()| events.read_to_string(&mut text))
            .map_err(|error| wrong("cgroup.events", error))?;
        if text.lines().any(|line| line == expected) {
            return Ok(());
        }
        let left = timeout.saturating_sub(begin.elapsed());
        if left.is_zero() {
            let seconds = timeout.as_secs();
            let message = format!(
                "cgroup.events has no {expected:?} after {seconds} s; a process may be in uninterruptible sleep"
            );
            return Err(Error::new(ttrpc::Code::DEADLINE_EXCEEDED, message));
        }
        // The kernel signals a change of the file by POLLPRI.
        let _ = poll(&mut [PollFd::new(&events, PollFlags::PRI)], Timespec::try_from(left).ok().as_ref());
    }
}

/// Freezes all processes of a container.
///
/// # Errors
/// The container does not run or is paused, or its processes do not freeze in time; then they are
/// thawed.
pub async fn pause(container: Arc<Container>) -> Result<()> {
    change(container, true).await
}

/// Thaws a paused container.
///
/// # Errors
/// The container is not paused, or the write fails.
pub async fn resume(container: Arc<Container>) -> Result<()> {
    change(container, false).await
}

async fn change(container: Arc<Container>, freeze: bool) -> Result<()> {
    let (before, after) = if freeze { (Freezer::Off, Freezer::On) } else { (Freezer::On, Freezer::Off) };
    container.set_freezer(before, Freezer::Changing)?;
    background::to_completion(async move {
        let dir = container.cgroup.clone();
        let result = background::blocking(move || {
            let done = set(&dir, freeze, FREEZE_TIMEOUT);
            if done.is_err() && freeze {
                let _ = set(&dir, false, FREEZE_TIMEOUT);
            }
            done
        })
        .await;
        // Only this task leaves the state `Changing`.
        let _ = container.set_freezer(Freezer::Changing, if result.is_ok() { after } else { before });
        let what = if freeze { "pause" } else { "resume" };
        result.map_err(|error| error.during(&format!("failed to {what} container {}", container.id)))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::Phase;
    use crate::fake_runtime::run;
    use crate::process::Process;

    #[test]
    fn freeze_waits_for_the_kernel_until_the_timeout() {
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

    #[test]
    fn failed_freeze_leaves_the_container_running() {
        run(async {
            let dir = tempfile::tempdir().unwrap();
            let first = Arc::new(Process::new(false));
            let container = Arc::new(Container::new("c1", "/b".into(), dir.path().into(), None, first));
            let error = resume(Arc::clone(&container)).await.unwrap_err();
            assert!(error.message.contains("is not paused"), "{error}");
            container.advance(&[Phase::Creating], Phase::Started).unwrap();
            // Without cgroup.events.
            let error = pause(Arc::clone(&container)).await.unwrap_err();
            assert!(error.message.contains("failed to pause container c1: \"1\" to cgroup.events"), "{error}");
            assert_eq!(fs::read_to_string(dir.path().join("cgroup.freeze")).unwrap(), "0", "thawed");
            fs::write(dir.path().join("cgroup.events"), "frozen 1\n").unwrap();
            pause(Arc::clone(&container)).await.unwrap();
            assert!(pause(container).await.unwrap_err().message.contains("is paused"));
        });
    }
}
