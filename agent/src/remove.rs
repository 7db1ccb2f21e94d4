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
use crate::{bundle, work};

/// How long killed processes may take to end when the caller sets no time. One
/// that waits for a device can take long, and nothing can hurry it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// When to kill again what has not ended.
const AGAIN: Duration = Duration::from_millis(250);

/// How long the reply to DestroySandbox has to get out before this process is ended.
const FAREWELL: Duration = Duration::from_millis(100);

/// Kills everything in a container, waits until it has ended, and takes away
/// what was made for it.
///
/// # Errors
/// It is being made or removed, or its processes do not end; then it stays and
/// can be removed again.
pub(crate) async fn remove(agent: &Agent, container: &Arc<Container>, patience: Duration) -> Result<()> {
    let before = container.advance(&[Phase::Created, Phase::Started], Phase::Removing)?;
    end_and_clear(agent, container, patience, before).await
}

/// Takes back a container whose process is there and whose making failed after that.
///
/// # Errors
/// As [`remove`]; then it stays as one that was made.
pub(crate) async fn undo(agent: &Agent, container: &Arc<Container>) -> Result<()> {
    container.advance(&[Phase::Creating], Phase::Removing)?;
    end_and_clear(agent, container, PATIENCE, Phase::Created).await
}

/// `before` is what it is again if its processes do not end.
async fn end_and_clear(agent: &Agent, container: &Arc<Container>, patience: Duration, before: Phase) -> Result<()> {
    let result = end(agent, container, patience).await;
    if result.is_err() {
        // What is mounted for it is not left behind; processes that live on keep
        // what their own namespace has.
        agent.storages.remove_all(container.take_storages()).await;
        let _ = container.advance(&[Phase::Removing], before);
        return result;
    }
    clear(agent, container).await;
    Ok(())
}

async fn end(agent: &Agent, container: &Arc<Container>, patience: Duration) -> Result<()> {
    let id = || container.id.clone();
    let deadline = Instant::now() + patience;
    // If all have ended, there is nothing to kill but strays, which the runtime sees.
    while container.processes().iter().any(|process| process.code().is_none()) {
        agent.runtime.call(Call::Kill { container: id() }, &[]).await?;
        let all = async {
            for process in container.processes() {
                process.wait().await;
            }
        };
        // One that was about to enter the container is in it only now.
        match tokio::time::timeout_at(deadline.min(Instant::now() + AGAIN), all).await {
            Ok(()) => break,
            Err(_) if Instant::now() < deadline => {}
            Err(_) => {
                let seconds = patience.as_secs();
                let message =
                    format!("ETIME: processes of container {} have not ended {seconds} s after SIGKILL", container.id);
                return Err(Error::new(Code::INTERNAL, message));
            }
        }
    }
    // The last kills for want of memory are counted in files that are about to go.
    agent.oom.look();
    match agent.runtime.call(Call::Delete { container: id() }, &[]).await {
        // It is gone from the runtime: a hook of its end failed.
        Err(error) if agent.runtime.call(Call::Kill { container: id() }, &[]).await.is_err() => {
            clear(agent, container).await;
            Err(error)
        }
        result => result.map(|_| ()),
    }
}

/// Takes away what was made for a container that does not run: streams,
/// bundle, storages, name. The name last, so that it cannot be taken before.
pub(crate) async fn clear(agent: &Agent, container: &Arc<Container>) {
    agent.oom.forget(&container.id);
    for process in container.processes() {
        process.close().await;
    }
    let (dir, storages) = (container.bundle.clone(), container.take_storages());
    if storages.is_empty() {
        bundle::remove(&dir);
    } else {
        let removed = work::blocking(move || {
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
    /// Removes a container; `timeout` 0 leaves the time to us.
    ///
    /// # Errors
    /// See [`remove`]; or there is no such container.
    pub async fn remove_container(self: &Arc<Self>, id: &str, timeout: u32) -> Result<()> {
        let container = self.container(id)?;
        let patience = if timeout == 0 { PATIENCE } else { Duration::from_secs(timeout.into()) };
        let agent = Arc::clone(self);
        work::whole(async move { remove(&agent, &container, patience).await }).await
    }

    /// Removes every container, and then ends the guest, or the agent if it works alone.
    ///
    /// A second call finds nothing to do.
    ///
    /// # Errors
    /// A container cannot be removed; the guest ends in that case too.
    pub async fn destroy_sandbox(self: &Arc<Self>) -> Result<()> {
        if !self.destroy() {
            return Ok(());
        }
        let agent = Arc::clone(self);
        work::whole(async move {
            let mut result = Ok(());
            for container in agent.containers() {
                let removed = remove(&agent, &container, PATIENCE).await;
                result = result.and(removed);
            }
            // PID 1 ends this process at once: the answer goes first.
            tokio::spawn(async move {
                tokio::time::sleep(FAREWELL).await;
                match &agent.control {
                    Some(control) => control.say(ToInit::PowerOff { reason: "DestroySandbox".to_owned() }),
                    None => std::process::exit(0),
                }
            });
            result
        })
        .await
    }
}
