//! Signals, input and exit codes of the containers' processes.

use std::sync::Arc;
use std::time::Duration;

use firstlight_agent_api::oci;
use firstlight_runtime::Call;
use ttrpc::Code;

use crate::background;
use crate::container::Container;
use crate::convert::winsize;
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;

/// How long output can still be read after the exit code was fetched. Shims read to the end before
/// they fetch it; other clients read in parallel.
const OUTPUT_RETENTION: Duration = Duration::from_secs(10);

/// The signal that means "kill the container".
const SIGKILL: u32 = 9;

/// Creates exec processes, and serves requests that concern one process.
#[derive(Debug)]
pub struct Processes {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) runtime: Arc<Runtime>,
    /// Capacity of pipes, bytes; the kernel's default if `None`.
    pub(super) pipe_size: Option<usize>,
}

impl Processes {
    /// Creates the component.
    #[must_use]
    pub fn new(sandbox: &Arc<Sandbox>, runtime: &Arc<Runtime>, pipe_size: Option<usize>) -> Arc<Self> {
        Arc::new(Self { sandbox: Arc::clone(sandbox), runtime: Arc::clone(runtime), pipe_size })
    }

    /// Sends a signal. `SIGKILL` to the container itself kills all its processes; every other
    /// signal goes to one process. A signal to a process that has exited and whose exit code has
    /// not been fetched succeeds.
    ///
    /// # Errors
    /// The container or process does not exist, or the signal number is invalid.
    pub async fn signal(&self, id: &str, exec: &str, signal: u32) -> Result<()> {
        let container = self.sandbox.container(id)?;
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
    pub async fn wait(&self, id: &str, exec: &str) -> Result<i32> {
        wait(&self.sandbox.container(id)?, exec).await
    }

    /// Resizes a process's terminal.
    ///
    /// # Errors
    /// The process does not exist or has no terminal.
    pub fn resize(&self, id: &str, exec: &str, rows: u32, columns: u32) -> Result<()> {
        let process = self.sandbox.container(id)?.process(exec)?;
        let size = oci::Box { Height: rows, Width: columns, ..Default::default() };
        let wrong = || Error::invalid(format!("{columns} x {rows} is not a valid terminal size"));
        process.resize(winsize(&size).ok_or_else(wrong)?)
    }

    /// Writes to a process's standard input; empty data closes it.
    ///
    /// # Errors
    /// The process does not exist, or its standard input is closed.
    pub async fn write_stdin(&self, id: &str, exec: &str, data: Vec<u8>) -> Result<()> {
        let process = self.sandbox.container(id)?.process(exec)?;
        if data.is_empty() {
            process.stdin.close().await;
            return Ok(());
        }
        // Completed even if the caller disconnects: a partial write would corrupt the input.
        background::to_completion(async move { process.stdin.write(&data).await }).await
    }

    /// Reads a process's standard output, also after its exit code was fetched.
    ///
    /// # Errors
    /// The process does not exist, or its output was read to the end.
    pub async fn read_stdout(&self, id: &str, exec: &str, len: usize) -> Result<Vec<u8>> {
        let process = self.sandbox.container(id)?.readable(exec)?;
        process.stdout.read(len).await
    }

    /// Reads a process's standard error, also after its exit code was fetched.
    ///
    /// # Errors
    /// The process does not exist, or its output was read to the end.
    pub async fn read_stderr(&self, id: &str, exec: &str, len: usize) -> Result<Vec<u8>> {
        let process = self.sandbox.container(id)?.readable(exec)?;
        process.stderr.read(len).await
    }
}

/// Waits for a process of a container, fetches its exit code, and closes its streams later.
pub(super) async fn wait(container: &Arc<Container>, exec: &str) -> Result<i32> {
    let process = container.process(exec)?;
    let code = process.wait().await;
    // No await from here on: a disconnected caller has either not fetched the code or received it.
    container.mark_fetched(exec, &process);
    let (container, exec) = (Arc::clone(container), exec.to_owned());
    tokio::spawn(async move {
        process.stdin.close().await;
        // Thousands may exit within the retention time: only streams that can still be read stay
        // open.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::tests::container;
    use crate::fake_runtime::{Answer, Calls, failure, run, runtime};
    use firstlight_runtime::{Done, FailureKind};

    /// Returns the component with one container, and the calls that its runtime receives.
    fn processes(answer: fn() -> Answer) -> (Arc<Processes>, Arc<Container>, Calls) {
        let (sandbox, calls) = (Arc::new(Sandbox::default()), Calls::default());
        let recorder = calls.clone();
        let runtime = runtime(move |call| {
            recorder.add(call);
            answer()
        });
        let c1 = container("c1");
        sandbox.add(&c1).unwrap();
        (Processes::new(&sandbox, &runtime, None), c1, calls)
    }

    #[test]
    fn only_sigkill_to_the_container_kills_all_its_processes() {
        run(async {
            let (processes, _c1, calls) = processes(|| Ok(Done::default()));
            processes.signal("c1", "", 9).await.unwrap();
            processes.signal("c1", "c1", 9).await.unwrap();
            processes.signal("c1", "", 15).await.unwrap();
            let one = |signal| Call::Signal { container: "c1".into(), exec: String::new(), signal };
            assert_eq!(calls.take(), [Call::Kill { container: "c1".into() }, one(9), one(15)]);
        });
    }

    #[test]
    fn signal_to_an_exited_process_succeeds_and_to_an_unknown_one_fails() {
        run(async {
            let (processes, c1, calls) = processes(|| failure(FailureKind::NotFound, "no such process"));
            processes.signal("c1", "", 15).await.unwrap();
            assert_eq!(calls.take().len(), 1, "the runtime reaped it first");
            assert_eq!(processes.signal("c1", "e", 15).await.unwrap_err().code, Code::NOT_FOUND);
            assert_eq!(processes.signal("c2", "", 15).await.unwrap_err().code, Code::INVALID_ARGUMENT);
            assert_eq!(processes.signal("c1", "", u32::MAX).await.unwrap_err().code, Code::INVALID_ARGUMENT);
            c1.ended("", 0);
            processes.signal("c1", "", 15).await.unwrap();
            assert!(calls.take().is_empty(), "its exit is known");
        });
    }

    #[test]
    fn failed_signal_is_reported() {
        run(async {
            let (processes, _c1, _) = processes(|| failure(FailureKind::Internal, "no kill"));
            assert_eq!(processes.signal("c1", "", 15).await.unwrap_err().message, "no kill");
        });
    }

    #[test]
    fn exit_code_is_fetched_once_and_a_dropped_wait_does_not_fetch_it() {
        run(async {
            let (processes, c1, _) = processes(|| Ok(Done::default()));
            let dropped = tokio::time::timeout(Duration::from_millis(10), processes.wait("c1", ""));
            assert!(dropped.await.is_err());
            c1.ended("", 7);
            assert_eq!(processes.wait("c1", "").await, Ok(7));
            assert_eq!(processes.wait("c1", "").await.unwrap_err().code, Code::NOT_FOUND);
        });
    }

    #[test]
    fn process_without_terminal_cannot_be_resized() {
        run(async {
            let (processes, _c1, _) = processes(|| Ok(Done::default()));
            assert_eq!(processes.resize("c1", "", 24, 80).unwrap_err().code, Code::UNAVAILABLE);
            assert!(processes.resize("c1", "", 0, 80).unwrap_err().message.contains("80 x 0"));
        });
    }
}
