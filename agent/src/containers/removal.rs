//! RemoveContainer and DestroySandbox.

use std::sync::Arc;
use std::time::Duration;

use firstlight_init_control::ToInit;
use firstlight_runtime::Call;
use tokio::time::Instant;
use ttrpc::Code;

use crate::agent::Agent;
use crate::container::{Container, Phase};
use crate::error::{Error, Result};
use crate::{background, bundle};

/// Time for killed processes to exit if the caller sets no timeout. One that waits for a device can
/// take long, and nothing can speed it up.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval after which SIGKILL is repeated for processes that have not exited.
const KILL_INTERVAL: Duration = Duration::from_millis(250);

/// Time for the reply to DestroySandbox to be sent before this process is terminated.
const REPLY_GRACE: Duration = Duration::from_millis(100);

/// Kills all processes of a container, waits until they have exited, and releases its resources.
///
/// # Errors
/// It is being created or removed, or its processes do not exit; then it stays and can be removed
/// again.
pub(crate) async fn remove(agent: &Agent, container: &Arc<Container>, exit_timeout: Duration) -> Result<()> {
    let before = container.advance(&[Phase::Created, Phase::Started], Phase::Removing)?;
    kill_and_clear(agent, container, exit_timeout, before).await
}

/// Removes a container whose creation failed after its process was created.
///
/// # Errors
/// As [`remove`]; then it stays in the phase `Created`.
pub(crate) async fn undo(agent: &Agent, container: &Arc<Container>) -> Result<()> {
    container.advance(&[Phase::Creating], Phase::Removing)?;
    kill_and_clear(agent, container, KILL_TIMEOUT, Phase::Created).await
}

/// `before` is the phase to restore if its processes do not exit.
async fn kill_and_clear(
    agent: &Agent,
    container: &Arc<Container>,
    exit_timeout: Duration,
    before: Phase,
) -> Result<()> {
    let result = kill(agent, container, exit_timeout).await;
    if result.is_err() {
        // Its storages are released all the same; surviving processes keep the mounts of their own
        // namespace.
        agent.storages.remove_all(container.take_storages()).await;
        let _ = container.advance(&[Phase::Removing], before);
        return result;
    }
    clear(agent, container).await;
    Ok(())
}

async fn kill(agent: &Agent, container: &Arc<Container>, exit_timeout: Duration) -> Result<()> {
    let id = || container.id.clone();
    let deadline = Instant::now() + exit_timeout;
    // If all have exited, only stray processes are left, which the runtime handles.
    while container.processes().iter().any(|process| process.code().is_none()) {
        agent.runtime.call(Call::Kill { container: id() }, &[]).await?;
        let all = async {
            for process in container.processes() {
                process.wait().await;
            }
        };
        // A process that was about to enter the container may have entered after the last kill.
        match tokio::time::timeout_at(deadline.min(Instant::now() + KILL_INTERVAL), all).await {
            Ok(()) => break,
            Err(_) if Instant::now() < deadline => {}
            Err(_) => {
                let seconds = exit_timeout.as_secs();
                let message =
                    format!("ETIME: processes of container {} have not exited {seconds} s after SIGKILL", container.id);
                return Err(Error::new(Code::INTERNAL, message));
            }
        }
    }
    // The files that count the last OOM kills are about to be removed.
    agent.oom.scan();
    match agent.runtime.call(Call::Delete { container: id() }, &[]).await {
        // Removed from the runtime; a poststop hook failed.
        Err(error) if agent.runtime.call(Call::Kill { container: id() }, &[]).await.is_err() => {
            clear(agent, container).await;
            Err(error)
        }
        result => result.map(|_| ()),
    }
}

/// Releases the resources of a container that does not run: streams, bundle, storages, id. The id
/// last: it must not be reused before.
pub(crate) async fn clear(agent: &Agent, container: &Arc<Container>) {
    agent.oom.forget(&container.id);
    for process in container.processes() {
        process.close().await;
    }
    let (dir, storages) = (container.bundle.clone(), container.take_storages());
    if storages.is_empty() {
        bundle::remove(&dir);
    } else {
        let removed = background::blocking(move || {
            bundle::remove(&dir);
            Ok(())
        });
        let _ = removed.await;
        agent.storages.remove_all(storages).await;
    }
    agent.names.forget(&container.id);
    agent.forget(container);
}

impl Agent {
    /// Removes a container; `timeout` 0 means [`KILL_TIMEOUT`].
    ///
    /// # Errors
    /// See [`remove`]; or the container does not exist.
    pub async fn remove_container(self: &Arc<Self>, id: &str, timeout: u32) -> Result<()> {
        let container = self.container(id)?;
        let exit_timeout = if timeout == 0 { KILL_TIMEOUT } else { Duration::from_secs(timeout.into()) };
        let agent = Arc::clone(self);
        background::to_completion(async move { remove(&agent, &container, exit_timeout).await }).await
    }

    /// Removes every container, and then powers off the guest, or exits if the agent runs without
    /// PID 1.
    ///
    /// Idempotent: a second call does nothing.
    ///
    /// # Errors
    /// A container cannot be removed; the guest powers off in that case too.
    pub async fn destroy_sandbox(self: &Arc<Self>) -> Result<()> {
        if !self.destroy() {
            return Ok(());
        }
        let agent = Arc::clone(self);
        background::to_completion(async move {
            let mut result = Ok(());
            for container in agent.containers() {
                let removed = remove(&agent, &container, KILL_TIMEOUT).await;
                result = result.and(removed);
            }
            // PID 1 terminates this process at once, so the reply is sent first.
            tokio::spawn(async move {
                tokio::time::sleep(REPLY_GRACE).await;
                match &agent.control {
                    Some(control) => control.send(ToInit::PowerOff { reason: "DestroySandbox".to_owned() }),
                    None => std::process::exit(0),
                }
            });
            result
        })
        .await
    }
}
