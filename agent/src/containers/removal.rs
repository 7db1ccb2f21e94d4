//! Removal of containers.

use std::sync::Arc;
use std::time::Duration;

use firstlight_runtime::Call;
use tokio::time::Instant;
use ttrpc::Code;

use super::names::ContainerNames;
use crate::container::{Container, Phase};
use crate::error::{Error, Result};
use crate::oom::Oom;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::{background, bundle, storage};

/// Time for killed processes to exit if the caller sets no timeout. One that waits for a device can
/// take long, and nothing can speed it up.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval after which SIGKILL is repeated for processes that have not exited.
const KILL_INTERVAL: Duration = Duration::from_millis(250);

/// Kills containers and releases their resources.
#[derive(Debug)]
pub(super) struct Removal {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) runtime: Arc<Runtime>,
    pub(super) storages: Arc<storage::Table>,
    pub(super) names: Arc<ContainerNames>,
    pub(super) oom: Arc<Oom>,
}

impl Removal {
    /// Kills all processes of a container, waits until they have exited, and releases its
    /// resources.
    ///
    /// # Errors
    /// It is being created or removed, or its processes do not exit; then it stays and can be
    /// removed again.
    pub(super) async fn remove(&self, container: &Arc<Container>, exit_timeout: Duration) -> Result<()> {
        let before = container.advance(&[Phase::Created, Phase::Started], Phase::Removing)?;
        self.kill_and_clear(container, exit_timeout, before).await
    }

    /// Removes a container whose creation failed after its process was created.
    ///
    /// # Errors
    /// As [`remove`](Self::remove); then it stays in the phase `Created`.
    pub(super) async fn undo(&self, container: &Arc<Container>) -> Result<()> {
        container.advance(&[Phase::Creating], Phase::Removing)?;
        self.kill_and_clear(container, KILL_TIMEOUT, Phase::Created).await
    }

    /// `before` is the phase to restore if its processes do not exit.
    async fn kill_and_clear(&self, container: &Arc<Container>, exit_timeout: Duration, before: Phase) -> Result<()> {
        let result = self.kill(container, exit_timeout).await;
        if result.is_err() {
            // Its storages are released all the same; surviving processes keep the mounts of their
            // own namespace.
            self.storages.remove_all(container.take_storages()).await;
            let _ = container.advance(&[Phase::Removing], before);
            return result;
        }
        self.clear(container).await;
        Ok(())
    }

    async fn kill(&self, container: &Arc<Container>, exit_timeout: Duration) -> Result<()> {
        self.kill_processes(container, exit_timeout).await?;
        // The files that count the last OOM kills are about to be removed.
        self.oom.scan();
        let id = || container.id.clone();
        match self.runtime.call(Call::Delete { container: id() }, &[]).await {
            // Removed from the runtime; a poststop hook failed.
            Err(error) if self.runtime.call(Call::Kill { container: id() }, &[]).await.is_err() => {
                self.clear(container).await;
                Err(error)
            }
            result => result.map(|_| ()),
        }
    }

    /// Kills processes until all known ones have exited. Others, if any, are left to the runtime.
    async fn kill_processes(&self, container: &Arc<Container>, exit_timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + exit_timeout;
        while container.processes().iter().any(|process| process.code().is_none()) {
            self.runtime.call(Call::Kill { container: container.id.clone() }, &[]).await?;
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
                    let (id, seconds) = (&container.id, exit_timeout.as_secs());
                    let message =
                        format!("ETIME: processes of container {id} have not exited {seconds} s after SIGKILL");
                    return Err(Error::new(Code::INTERNAL, message));
                }
            }
        }
        Ok(())
    }

    /// Releases the resources of a container that does not run: streams, bundle, storages, id. The
    /// id last: it must not be reused before.
    pub(super) async fn clear(&self, container: &Arc<Container>) {
        self.oom.forget(&container.id);
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
            self.storages.remove_all(storages).await;
        }
        self.names.forget(&container.id);
        self.sandbox.forget(container);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_runtime::{Answer, Calls, failure, run, runtime};
    use crate::hotplug::Hotplug;
    use crate::paths::Paths;
    use crate::process::Process;
    use firstlight_runtime::{Done, FailureKind};
    use std::collections::HashMap;
    use std::path::Path;

    fn removal(root: &Path, answer: impl FnMut(&Call) -> Answer + Send + 'static) -> Removal {
        let paths = Paths::below(root);
        let hotplug = Hotplug::new(&paths, Duration::ZERO);
        Removal {
            sandbox: Arc::default(),
            runtime: runtime(answer),
            storages: Arc::new(storage::Table::new(paths, hotplug)),
            names: Arc::default(),
            oom: Arc::default(),
        }
    }

    /// Registers a container with a bundle below `root`.
    fn register(removal: &Removal, root: &Path) -> Arc<Container> {
        let first = Arc::new(Process::new(false));
        let container = Arc::new(Container::new("c1", root.join("c1"), root.join("group"), None, first));
        bundle::create(&container.bundle, &mut oci_spec::runtime::Spec::default()).unwrap();
        removal.sandbox.add(&container).unwrap();
        removal.names.add("c1", &HashMap::new());
        container
    }

    fn kill() -> Call {
        Call::Kill { container: "c1".into() }
    }

    fn delete() -> Call {
        Call::Delete { container: "c1".into() }
    }

    #[test]
    fn removed_container_leaves_neither_bundle_nor_name_nor_id() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let calls = Calls::default();
            let recorder = calls.clone();
            let removal = removal(root.path(), move |call| {
                recorder.add(call);
                Ok(Done::default())
            });
            let container = register(&removal, root.path());
            let error = removal.remove(&container, Duration::ZERO).await.unwrap_err();
            assert!(error.message.contains("Creating"), "{error}");
            container.advance(&[Phase::Creating], Phase::Started).unwrap();
            container.ended("", 0);
            removal.remove(&container, Duration::ZERO).await.unwrap();
            assert_eq!(calls.take(), [delete()], "nothing is left to kill");
            assert!(!container.bundle.exists() && !removal.sandbox.has(&container));
            assert_eq!(removal.names.find("c1"), None);
        });
    }

    #[test]
    fn container_whose_processes_do_not_exit_stays_and_can_be_removed_later() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let removal = removal(root.path(), |_| Ok(Done::default()));
            let container = register(&removal, root.path());
            container.advance(&[Phase::Creating], Phase::Started).unwrap();
            let error = removal.remove(&container, Duration::ZERO).await.unwrap_err();
            assert!(error.message.contains("ETIME"), "{error}");
            assert_eq!((container.phase(), removal.sandbox.has(&container)), (Phase::Started, true));
            assert!(container.bundle.exists());
            container.ended("", 137);
            removal.remove(&container, Duration::ZERO).await.unwrap();
            assert!(!removal.sandbox.has(&container));
        });
    }

    #[test]
    fn failed_undo_leaves_a_container_that_can_be_removed() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let removal = removal(root.path(), |_| failure(FailureKind::Internal, "no kill"));
            let container = register(&removal, root.path());
            assert_eq!(removal.undo(&container).await.unwrap_err().message, "no kill");
            assert_eq!(container.phase(), Phase::Created);
        });
    }

    #[test]
    fn failed_poststop_hook_is_reported_after_the_container_was_removed() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let removal = removal(root.path(), |call| match call {
                Call::Delete { .. } => failure(FailureKind::Internal, "poststop hook failed"),
                _ => failure(FailureKind::NotFound, "no such container"),
            });
            let container = register(&removal, root.path());
            container.advance(&[Phase::Creating], Phase::Started).unwrap();
            container.ended("", 0);
            let error = removal.remove(&container, Duration::ZERO).await.unwrap_err();
            assert_eq!(error.message, "poststop hook failed");
            assert!(!container.bundle.exists() && !removal.sandbox.has(&container));
        });
    }

    #[test]
    fn kill_is_repeated_until_the_processes_have_exited() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let calls = Calls::default();
            let recorder = calls.clone();
            let removal = removal(root.path(), move |call| {
                recorder.add(call);
                Ok(Done::default())
            });
            let container = register(&removal, root.path());
            container.advance(&[Phase::Creating], Phase::Started).unwrap();
            let exit = async {
                tokio::time::sleep(KILL_INTERVAL + KILL_INTERVAL / 2).await;
                container.ended("", 137);
            };
            let (removed, ()) = tokio::join!(removal.remove(&container, KILL_TIMEOUT), exit);
            removed.unwrap();
            assert_eq!(calls.take(), [kill(), kill(), delete()]);
        });
    }
}
