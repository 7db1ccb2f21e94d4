//! Further processes, signals, and ends.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use firstlight_agent_api::agent::ExecProcessRequest;
use firstlight_agent_api::oci;
use firstlight_runtime::Call;
use ttrpc::Code;

use crate::agent::Agent;
use crate::capabilities::Held;
use crate::container::Container;
use crate::create::winsize;
use crate::error::{Error, Result};
use crate::process::{Ends, Process};
use crate::remove::PATIENCE;
use crate::runtime::borrow;
use crate::{adapt, bundle, convert, work};

/// How long what an ended process wrote can still be read after its code was
/// fetched. Shims read to the end before they fetch it; others read meanwhile.
const LINGER: Duration = Duration::from_secs(10);

/// What "kill the container" means as a signal.
const SIGKILL: u32 = 9;

/// The code of a process that never ran; nobody gets to see it.
const NEVER_RAN: i32 = 255;

impl Agent {
    /// Runs a further process in a container.
    ///
    /// # Errors
    /// The name is taken, the container does not run, or the program cannot be run.
    pub async fn exec_process(self: &Arc<Self>, request: ExecProcessRequest) -> Result<()> {
        let container = self.container(&request.container_id)?;
        let message = request.process.as_ref().ok_or_else(|| Error::invalid("EINVAL: no process"))?;
        let mut process = convert::process(message).map_err(|error| Error::invalid(error.to_string()))?;
        if message.Capabilities.is_none() {
            process.set_capabilities(container.capabilities.clone());
        }
        // The record said what when its container was made.
        let _ = Held::of_self().narrow(&mut process);
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
                    Err(error) => Err(agent.end_unreachable(&container, &name, &made, error).await),
                },
                Err(error) => {
                    made.close().await;
                    container.forget(&name, &made);
                    // Whoever waits for everything in the container waits for this one too.
                    made.ended(NEVER_RAN);
                    Err(error)
                }
            }
        };
        work::whole_or_undone(job, move |()| async move {
            let (agent, container, name) = undoing;
            let call = Call::Signal { container: container.id.clone(), exec: name.clone(), signal: 9 };
            let _ = agent.runtime.call(call, &[]).await;
            let _ = agent.wait(&container, &name).await;
        })
        .await
    }

    /// Kills a process that runs and whose terminal cannot be used, and forgets
    /// it. One that does not end stays known: it can be waited for.
    async fn end_unreachable(&self, container: &Container, name: &str, made: &Arc<Process>, mut error: Error) -> Error {
        let call = Call::Signal { container: container.id.clone(), exec: name.to_owned(), signal: 9 };
        // An error: it has ended by itself, or the runtime has, and with that everything.
        let _ = self.runtime.call(call, &[]).await;
        if tokio::time::timeout(PATIENCE, made.wait()).await.is_ok() {
            made.close().await;
            container.forget(name, made);
        } else {
            let seconds = PATIENCE.as_secs();
            error.message = format!("{}; process {name} has not ended {seconds} s after SIGKILL", error.message);
        }
        error
    }

    /// Has the runtime make it; its terminal's master.
    async fn run(
        &self,
        container: &Arc<Container>,
        name: &str,
        made: &Process,
        mut process: oci_spec::runtime::Process,
        file: &std::path::Path,
        terminal: bool,
    ) -> Result<Option<OwnedFd>> {
        adapt::set_home(process.env_mut().get_or_insert_default());
        bundle::write(file, &process)?;
        let ends = if terminal { Ends(Vec::new()) } else { made.pipes(self.config.pipe_size).await? };
        let call =
            Call::Exec { container: container.id.clone(), exec: name.to_owned(), process: file.to_owned(), terminal };
        let (_, master) = self.runtime.call(call, &borrow(&ends.0)).await?;
        Ok(master)
    }

    /// Sends a signal. `SIGKILL` to the container itself kills everything in
    /// it; every other signal goes to one process. A process that has ended
    /// and whose code nobody has fetched takes every signal.
    ///
    /// # Errors
    /// There is no such container or process, or no such signal.
    pub async fn signal_process(&self, id: &str, exec: &str, signal: u32) -> Result<()> {
        let container = self.container(id)?;
        let call = if exec.is_empty() && signal == SIGKILL {
            Call::Kill { container: container.id.clone() }
        } else {
            let process = container.process(exec)?;
            if process.code().is_some() {
                return Ok(());
            }
            let wrong = |_| Error::invalid(format!("{signal} is not the number of a signal"));
            let signal = i32::try_from(signal).map_err(wrong)?;
            Call::Signal { container: container.id.clone(), exec: container.name(exec).to_owned(), signal }
        };
        match self.runtime.call(call, &[]).await {
            // It ended between our look and the runtime's.
            Err(error) if error.code == Code::NOT_FOUND => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Waits for a process and fetches its code, which can be done once.
    ///
    /// # Errors
    /// `NOT_FOUND`: it never was, or its code was fetched.
    pub async fn wait_process(self: &Arc<Self>, id: &str, exec: &str) -> Result<i32> {
        let container = self.container(id)?;
        self.wait(&container, exec).await
    }

    async fn wait(&self, container: &Arc<Container>, exec: &str) -> Result<i32> {
        let process = container.process(exec)?;
        let code = process.wait().await;
        // No wait from here on: a caller that goes away has either not fetched the code or got it.
        container.fetched(exec, &process);
        let (container, exec) = (Arc::clone(container), exec.to_owned());
        tokio::spawn(async move {
            process.stdin.close().await;
            // Thousands may end in ten seconds: only what can still be read is kept so long.
            process.stdout.close_if_spent();
            process.stderr.close_if_spent();
            let read = async {
                process.stdout.told().await;
                process.stderr.told().await;
            };
            let _ = tokio::time::timeout(LINGER, read).await;
            process.close().await;
            container.forget(&exec, &process);
        });
        Ok(code)
    }

    /// Changes the size of a process's terminal.
    ///
    /// # Errors
    /// There is no such process, or it has no terminal.
    pub fn resize(&self, id: &str, exec: &str, rows: u32, columns: u32) -> Result<()> {
        let process = self.container(id)?.process(exec)?;
        let size = oci::Box { Height: rows, Width: columns, ..Default::default() };
        let wrong = || Error::invalid(format!("{columns} x {rows} is no size of a terminal"));
        process.resize(winsize(&size).ok_or_else(wrong)?)
    }

    /// Writes to a process's standard input; nothing means its end.
    ///
    /// # Errors
    /// There is no such process, or it takes no more input.
    pub async fn write_stdin(&self, id: &str, exec: &str, data: Vec<u8>) -> Result<()> {
        let process = self.container(id)?.process(exec)?;
        if data.is_empty() {
            process.stdin.close().await;
            return Ok(());
        }
        // To the end even if the caller is gone: half a write would garble what follows.
        work::whole(async move { process.stdin.write(&data).await }).await
    }
}
