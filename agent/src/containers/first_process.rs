//! Access to a container's first process by PID.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use firstlight_runtime::Call;
use rustix::fs::{Mode, OFlags};
use ttrpc::Code;

use crate::background;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;

/// Opens files of the containers' first processes.
#[derive(Debug, Clone)]
pub(super) struct FirstProcesses {
    sandbox: Arc<Sandbox>,
    runtime: Arc<Runtime>,
}

impl FirstProcesses {
    pub(super) fn new(sandbox: &Arc<Sandbox>, runtime: &Arc<Runtime>) -> Self {
        Self { sandbox: Arc::clone(sandbox), runtime: Arc::clone(runtime) }
    }

    /// Opens a /proc file or similar by the PID of a container's first process.
    ///
    /// Once that process is reaped, its PID may be reused. So the runtime, which alone reaps, is
    /// asked after the open: if it has not reaped the process by then, the PID was valid
    /// throughout.
    ///
    /// # Errors
    /// `NOT_FOUND`: the process has exited. Otherwise errors of `open`.
    pub(super) async fn open_by_pid<T: Send + 'static>(
        &self,
        container: &Arc<Container>,
        open: impl FnOnce(i32) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let ended = || Error::new(Code::NOT_FOUND, format!("container {} has exited", container.id));
        let pid = container.pid().ok_or_else(ended)?;
        let opened = background::blocking(move || open(pid)).await;
        // Signal 0 only checks that the process exists.
        let ask = Call::Signal { container: container.id.clone(), exec: String::new(), signal: 0 };
        match self.runtime.call(ask, &[]).await {
            Ok(_) => {}
            Err(error) if error.code == Code::NOT_FOUND => return Err(ended()),
            Err(error) => return Err(error),
        }
        // The reply concerns the current owner of the id, which may be a new container.
        if self.sandbox.has(container) { opened } else { Err(ended()) }
    }

    /// Returns the PID namespace that further containers of the sandbox may share: its first
    /// container's. `None` before the first container exists.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`: that container has exited, and its namespace with it.
    pub(super) async fn pid_namespace(&self) -> Result<Option<OwnedFd>> {
        let Some(first) = self.sandbox.first().filter(|first| first.pid().is_some()) else { return Ok(None) };
        let open = |pid| {
            let path = format!("/proc/{pid}/ns/pid");
            rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|error| Error::internal(format!("{path}: {error}")))
        };
        match self.open_by_pid(&first, open).await {
            Err(error) if error.code == Code::NOT_FOUND => {
                let message = format!("{}, and its PID namespace was requested; remove it first", error.message);
                Err(Error::new(Code::FAILED_PRECONDITION, message))
            }
            opened => opened.map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::tests::container;
    use crate::fake_runtime::{failure, run, runtime};
    use firstlight_runtime::{Done, FailureKind};

    #[test]
    fn file_opened_by_a_reused_pid_is_rejected() {
        run(async {
            let sandbox = Arc::new(Sandbox::default());
            let (reaped, reap) =
                (Arc::new(std::sync::atomic::AtomicBool::new(false)), std::sync::atomic::Ordering::SeqCst);
            let flag = Arc::clone(&reaped);
            let runtime = runtime(move |call| {
                let about_first = Call::Signal { container: "c1".into(), exec: String::new(), signal: 0 };
                assert_eq!(*call, about_first);
                if flag.load(reap) { failure(FailureKind::NotFound, "has exited") } else { Ok(Done::default()) }
            });
            let first_processes = FirstProcesses::new(&sandbox, &runtime);
            let first = container("c1");
            sandbox.add(&first).unwrap();
            assert!(first_processes.pid_namespace().await.unwrap().is_none(), "it is being created");
            // This process stands in for the container's first process, and later for the one that
            // reuses its PID.
            first.set_pid(i32::try_from(std::process::id()).ok());
            assert!(first_processes.pid_namespace().await.unwrap().is_some());
            let while_opening = Arc::clone(&reaped);
            let late = first_processes.open_by_pid(&first, move |_| {
                while_opening.store(true, reap);
                Ok(())
            });
            assert_eq!(late.await.unwrap_err().code, Code::NOT_FOUND);
            let error = first_processes.pid_namespace().await.unwrap_err();
            assert_eq!(error.code, Code::FAILED_PRECONDITION);
            assert!(error.message.contains("c1 has exited"), "{error}");
            // A new container with the same id: the reply concerns that one.
            reaped.store(false, reap);
            sandbox.forget(&first);
            sandbox.add(&container("c1")).unwrap();
            assert_eq!(first_processes.open_by_pid(&first, |_| Ok(())).await.unwrap_err().code, Code::NOT_FOUND);
        });
    }
}
