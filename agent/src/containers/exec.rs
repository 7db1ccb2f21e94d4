//! ExecProcess.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use firstlight_agent_api::agent::ExecProcessRequest;
use firstlight_runtime::Call;

use super::processes::{Processes, wait};
use super::removal::KILL_TIMEOUT;
use crate::capabilities::CapabilitySet;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::process::{PipeEnds, Process};
use crate::runtime::{Runtime, borrow};
use crate::{background, bundle, convert, oci_config};

/// Exit code of a process that was never started; not visible to callers.
const NOT_STARTED: i32 = 255;

/// A registered exec process.
#[derive(Debug, Clone)]
struct Exec {
    container: Arc<Container>,
    name: String,
    process: Arc<Process>,
}

impl Processes {
    /// Runs an exec process in a container. If the caller disconnects meanwhile, it is killed.
    ///
    /// # Errors
    /// The exec id exists, the container does not run, or the program cannot be started.
    pub async fn exec(&self, request: ExecProcessRequest) -> Result<()> {
        let container = self.sandbox.container(&request.container_id)?;
        let message = request.process.as_ref().ok_or_else(|| Error::invalid("EINVAL: no process"))?;
        let mut process = convert::process(message).map_err(|error| Error::invalid(error.to_string()))?;
        if message.Capabilities.is_none() {
            process.set_capabilities(container.capabilities.clone());
        }
        // Reported in the boot record when the container was created.
        let _ = CapabilitySet::own().restrict(&mut process);
        container.functions.translate(&mut process);
        let name = request.exec_id;
        let made = Arc::new(Process::new(process.terminal().unwrap_or(false)));
        let number = container.add(&name, &made)?;

        let exec = Exec { container, name, process: made };
        let (runtime, pipe_size, undoing) = (Arc::clone(&self.runtime), self.pipe_size, exec.clone());
        let undo_runtime = Arc::clone(&runtime);
        let job = async move {
            let file = exec.container.bundle.join(format!("exec-{number}.json"));
            let result = exec.run(&runtime, pipe_size, process, &file).await;
            let _ = std::fs::remove_file(&file);
            match result {
                Ok(master) => match exec.process.attach(master).await {
                    Ok(()) => Ok(()),
                    Err(error) => Err(exec.kill_without_terminal(&runtime, error).await),
                },
                Err(error) => {
                    exec.process.close().await;
                    exec.container.forget(&exec.name, &exec.process);
                    // Removal of the container waits for every registered process.
                    exec.process.ended(NOT_STARTED);
                    Err(error)
                }
            }
        };
        background::to_completion_or_undo(job, move |()| async move {
            undoing.kill(&undo_runtime).await;
            let _ = wait(&undoing.container, &undoing.name).await;
        })
        .await
    }
}

impl Exec {
    /// Asks the runtime to start it; returns its terminal's master.
    async fn run(
        &self,
        runtime: &Runtime,
        pipe_size: Option<usize>,
        mut process: oci_spec::runtime::Process,
        file: &Path,
    ) -> Result<Option<OwnedFd>> {
        oci_config::set_home(process.env_mut().get_or_insert_default());
        bundle::write(file, &process)?;
        let terminal = process.terminal().unwrap_or(false);
        let ends = if terminal { PipeEnds(Vec::new()) } else { self.process.create_pipes(pipe_size).await? };
        let (container, exec) = (self.container.id.clone(), self.name.clone());
        let call = Call::Exec { container, exec, process: file.to_owned(), terminal };
        let (_, master) = runtime.call(call, &borrow(&ends.0)).await?;
        Ok(master)
    }

    /// Kills it. An error means that it has exited, or the runtime with all processes.
    async fn kill(&self, runtime: &Runtime) {
        let call = Call::Signal { container: self.container.id.clone(), exec: self.name.clone(), signal: 9 };
        let _ = runtime.call(call, &[]).await;
    }

    /// Kills it after its terminal could not be set up, and unregisters it. One that does not exit
    /// stays registered: it can be waited for.
    async fn kill_without_terminal(&self, runtime: &Runtime, mut error: Error) -> Error {
        self.kill(runtime).await;
        if tokio::time::timeout(KILL_TIMEOUT, self.process.wait()).await.is_ok() {
            self.process.close().await;
            self.container.forget(&self.name, &self.process);
        } else {
            let (name, seconds) = (&self.name, KILL_TIMEOUT.as_secs());
            error.message = format!("{}; process {name} has not exited {seconds} s after SIGKILL", error.message);
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::Phase;
    use crate::fake_runtime::{Answer, failure, run, runtime};
    use crate::sandbox::Sandbox;
    use firstlight_agent_api::oci;
    use firstlight_runtime::{Done, FailureKind};
    use std::sync::mpsc;
    use std::time::Duration;

    /// Returns the component with a started container whose bundle is `bundle`.
    fn processes(
        bundle: &Path,
        answer: impl FnMut(&Call) -> Answer + Send + 'static,
    ) -> (Arc<Processes>, Arc<Container>) {
        let sandbox = Arc::new(Sandbox::default());
        let first = Arc::new(Process::new(false));
        let container = Arc::new(Container::new("c1", bundle.to_owned(), "/g".into(), None, first));
        container.advance(&[Phase::Creating], Phase::Started).unwrap();
        sandbox.add(&container).unwrap();
        (Processes::new(&sandbox, &runtime(answer), None), container)
    }

    fn request(terminal: bool) -> ExecProcessRequest {
        let mut process = oci::Process::new();
        process.Args = vec!["/bin/true".into()];
        process.Cwd = "/".into();
        process.Terminal = terminal;
        let (container_id, exec_id) = ("c1".into(), "e".into());
        ExecProcessRequest { container_id, exec_id, process: Some(process).into(), ..Default::default() }
    }

    #[test]
    fn process_is_registered_and_its_file_removed_after_the_start() {
        run(async {
            let bundle = tempfile::tempdir().unwrap();
            let (processes, container) = processes(bundle.path(), |call| {
                let Call::Exec { exec, process, terminal: false, .. } = call else { panic!("{call:?}") };
                assert_eq!(exec, "e");
                assert!(std::fs::read_to_string(process).unwrap().contains("/bin/true"));
                Ok(Done::default())
            });
            processes.exec(request(false)).await.unwrap();
            assert_eq!(std::fs::read_dir(bundle.path()).unwrap().count(), 0);
            assert_eq!(processes.exec(request(false)).await.unwrap_err().code, ttrpc::Code::ALREADY_EXISTS);
            container.ended("e", 3);
            assert_eq!(processes.wait("c1", "e").await, Ok(3));
        });
    }

    #[test]
    fn exec_id_is_reusable_after_a_failed_start() {
        run(async {
            let bundle = tempfile::tempdir().unwrap();
            let (processes, container) = processes(bundle.path(), |_| failure(FailureKind::Invalid, "no such program"));
            for _ in 0..2 {
                assert_eq!(processes.exec(request(false)).await.unwrap_err().message, "no such program");
                assert!(container.process("e").is_err());
            }
            assert_eq!(std::fs::read_dir(bundle.path()).unwrap().count(), 0);
        });
    }

    #[test]
    fn process_without_the_requested_terminal_is_killed_and_unregistered() {
        run(async {
            let bundle = tempfile::tempdir().unwrap();
            let (signalled, mut killed) = tokio::sync::mpsc::unbounded_channel();
            // The reply to Exec carries no terminal.
            let (processes, container) = processes(bundle.path(), move |call| {
                if let Call::Signal { exec, signal: 9, .. } = call {
                    signalled.send(exec.clone()).unwrap();
                }
                Ok(Done::default())
            });
            let exit = async {
                let exec = killed.recv().await.unwrap();
                container.ended(&exec, 137);
            };
            let (result, ()) = tokio::join!(processes.exec(request(true)), exit);
            assert!(result.unwrap_err().message.contains("failed to set up the terminal"));
            assert!(container.process("e").is_err());
        });
    }

    #[test]
    fn process_whose_caller_disconnects_during_the_start_is_killed() {
        run(async {
            let bundle = tempfile::tempdir().unwrap();
            let (go, gone) = mpsc::channel();
            let (signalled, mut killed) = tokio::sync::mpsc::unbounded_channel();
            let (processes, container) = processes(bundle.path(), move |call| {
                match call {
                    Call::Exec { .. } => gone.recv().unwrap(),
                    Call::Signal { exec, signal: 9, .. } => signalled.send(exec.clone()).unwrap(),
                    other => panic!("{other:?}"),
                }
                Ok(Done::default())
            });
            let caller = tokio::time::timeout(Duration::from_millis(50), processes.exec(request(false)));
            assert!(caller.await.is_err());
            assert!(container.process("e").is_ok(), "the start is in progress");
            go.send(()).unwrap();
            assert_eq!(killed.recv().await.unwrap(), "e");
            container.ended("e", 137);
            while container.process("e").is_ok() {
                tokio::task::yield_now().await;
            }
        });
    }
}
