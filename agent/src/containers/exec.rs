//! Exec processes, signals, and waiting for exits.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use firstlight_agent_api::agent::ExecProcessRequest;
use firstlight_agent_api::oci;
use firstlight_runtime::Call;
use ttrpc::Code;

use crate::agent::Agent;
use crate::capabilities::CapabilitySet;
use crate::container::Container;
use crate::create::winsize;
use crate::error::{Error, Result};
use crate::process::{PipeEnds, Process};
use crate::remove::KILL_TIMEOUT;
use crate::runtime::borrow;
use crate::{background, bundle, convert, oci_config};

/// How long output can still be read after the exit code was fetched. Shims read to the end before
/// they fetch it; other clients read in parallel.
const OUTPUT_RETENTION: Duration = Duration::from_secs(10);

/// The signal that means "kill the container".
const SIGKILL: u32 = 9;

/// Exit code of a process that was never started; not visible to callers.
const NOT_STARTED: i32 = 255;

impl Agent {
    /// Runs an exec process in a container.
    ///
    /// # Errors
    /// The exec id exists, the container does not run, or the program cannot be started.
    pub async fn exec_process(self: &Arc<Self>, request: ExecProcessRequest) -> Result<()> {
        let container = self.container(&request.container_id)?;
        let message = request.process.as_ref().ok_or_else(|| Error::invalid("EINVAL: no process"))?;
        let mut process = convert::process(message).map_err(|error| Error::invalid(error.to_string()))?;
        if message.Capabilities.is_none() {
            process.set_capabilities(container.capabilities.clone());
        }
        // Reported in the boot record when the container was created.
        let _ = CapabilitySet::own().restrict(&mut process);
        container.functions.translate(&mut process);
        let terminal = process.terminal().unwrap_or(false);
        let name = request.exec_id;
        let made = Arc::new(Process::new(terminal));
        let number = container.add(&name, &made)?;

        let agent = Arc::clone(self);
        let undoing = (Arc::clone(self), Arc::clone(&container), name.clone());
        let job = async move {
            let file = container.bundle.join(format!("exec-{number}.json"));
            let result = agent.run(&container, &name, &made, process, &file, terminal).await;
            let _ = std::fs::remove_file(&file);
            match result {
                Ok(master) => match made.attach(master).await {
                    Ok(()) => Ok(()),
                    Err(error) => Err(agent.kill_without_terminal(&container, &name, &made, error).await),
                },
                Err(error) => {
                    made.close().await;
                    container.forget(&name, &made);
                    // Removal of the container waits for every registered process.
                    made.ended(NOT_STARTED);
                    Err(error)
                }
            }
        };
        background::to_completion_or_undo(job, move |()| async move {
            let (agent, container, name) = undoing;
            let call = Call::Signal { container: container.id.clone(), exec: name.clone(), signal: 9 };
            let _ = agent.runtime.call(call, &[]).await;
            let _ = agent.wait(&container, &name).await;
        })
        .await
    }

    /// Kills a running process whose terminal cannot be set up, and unregisters it. One that does
    /// not exit stays registered: it can be waited for.
    async fn kill_without_terminal(
        &self,
        container: &Container,
        name: &str,
        made: &Arc<Process>,
        mut error: Error,
    ) -> Error {
        let call = Call::Signal { container: container.id.clone(), exec: name.to_owned(), signal: 9 };
        // An error means that it has exited, or the runtime with all processes.
        let _ = self.runtime.call(call, &[]).await;
        if tokio::time::timeout(KILL_TIMEOUT, made.wait()).await.is_ok() {
            made.close().await;
            container.forget(name, made);
        } else {
            let seconds = KILL_TIMEOUT.as_secs();
            error.message = format!("{}; process {name} has not exited {seconds} s after SIGKILL", error.message);
        }
        error
    }

    /// Asks the runtime to start it; returns its terminal's master.
    async fn run(
        &self,
        container: &Arc<Container>,
        name: &str,
        made: &Process,
        mut process: oci_spec::runtime::Process,
        file: &std::path::Path,
        terminal: bool,
    ) -> Result<Option<OwnedFd>> {
        oci_config::set_home(process.env_mut().get_or_insert_default());
        bundle::write(file, &process)?;
        let ends = if terminal { PipeEnds(Vec::new()) } else { made.create_pipes(self.config.pipe_size).await? };
        let call =
            Call::Exec { container: container.id.clone(), exec: name.to_owned(), process: file.to_owned(), terminal };
        let (_, master) = self.runtime.call(call, &borrow(&ends.0)).await?;
        Ok(master)
    }

    /// Sends a signal. `SIGKILL` to the container itself kills all its processes; every other
    /// signal goes to one process. A signal to a process that has exited and whose exit code has
    /// not been fetched succeeds.
    ///
    /// # Errors
    /// The container or process does not exist, or the signal number is invalid.
    pub async fn signal_process(&self, id: &str, exec: &str, signal: u32) -> Result<()> {
        let container = self.container(id)?;
        let call = if exec.is_empty() && signal == SIGKILL {
            Call::Kill { container: container.id.clone() }
        } else {
            let process = container.process(exec)?;
            if process.code().is_some() {
                return Ok(());
            }
            let wrong = |_| Error::invalid(format!("{signal} is not a signal number"));
            let signal = i32::try_from(signal).map_err(wrong)?;
            Call::Signal { container: container.id.clone(), exec: container.name(exec).to_owned(), signal }
        };
        match self.runtime.call(call, &[]).await {
            // It exited between our check and the runtime's.
            Err(error) if error.code == Code::NOT_FOUND => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Waits for a process and fetches its exit code, which can be done once.
    ///
    /// # Errors
    /// `NOT_FOUND`: it never existed, or its exit code was fetched.
    pub async fn wait_process(self: &Arc<Self>, id: &str, exec: &str) -> Result<i32> {
        let container = self.container(id)?;
        self.wait(&container, exec).await
    }

    async fn wait(&self, container: &Arc<Container>, exec: &str) -> Result<i32> {
        let process = container.process(exec)?;
        let code = process.wait().await;
        // No await from here on: a disconnected caller has either not fetched the code or received
        // it.
        container.mark_fetched(exec, &process);
        let (container, exec) = (Arc::clone(container), exec.to_owned());
        tokio::spawn(async move {
            process.stdin.close().await;
            // Thousands may exit within the retention time: only streams that can still be read
            // stay open.
            process.stdout.close_if_drained();
            process.stderr.close_if_drained();
            let read = async {
                process.stdout.closed().await;
                process.stderr.closed().await;
            };
            let _ = tokio::time::timeout(OUTPUT_RETENTION, read).await;
            process.close().await;
            container.forget(&exec, &process);
        });
        Ok(code)
    }

    /// Resizes a process's terminal.
    ///
    /// # Errors
    /// The process does not exist or has no terminal.
    pub fn resize(&self, id: &str, exec: &str, rows: u32, columns: u32) -> Result<()> {
        let process = self.container(id)?.process(exec)?;
        let size = oci::Box { Height: rows, Width: columns, ..Default::default() };
        let wrong = || Error::invalid(format!("{columns} x {rows} is not a valid terminal size"));
        process.resize(winsize(&size).ok_or_else(wrong)?)
    }

    /// Writes to a process's standard input; empty data closes it.
    ///
    /// # Errors
    /// The process does not exist, or its standard input is closed.
    pub async fn write_stdin(&self, id: &str, exec: &str, data: Vec<u8>) -> Result<()> {
        let process = self.container(id)?.process(exec)?;
        if data.is_empty() {
            process.stdin.close().await;
            return Ok(());
        }
        // Completed even if the caller disconnects: a partial write would corrupt the input.
        background::to_completion(async move { process.stdin.write(&data).await }).await
    }
}
