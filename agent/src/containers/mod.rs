//! The life cycle of containers and of their processes.
//!
//! [`Containers`] creates, starts and removes containers; [`Processes`] serves requests that
//! concern one process. The other files are parts of these, each with only what it needs:
//! [`freeze`] and [`update`] only a container.

mod configuration;
mod create;
mod devices;
mod early_cgroup;
mod exec;
mod first_process;
pub mod freeze;
mod id;
mod initramfs;
mod names;
mod processes;
mod removal;
mod shared_mounts;
pub mod update;

use std::sync::Arc;
use std::time::Duration;

use firstlight_runtime::Call;

use self::devices::DeviceProvider;
use self::first_process::FirstProcesses;
use self::names::ContainerNames;
pub use self::processes::Processes;
use self::removal::{KILL_TIMEOUT, Removal};
use self::shared_mounts::SharedMounts;
use crate::boot_events::BootEvents;
use crate::config::Config;
use crate::container::Phase;
use crate::error::Result;
use crate::gpu::Source;
use crate::hotplug::Hotplug;
use crate::oom::Oom;
use crate::paths::Paths;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::{background, storage};

/// Creates, starts and removes the containers of the sandbox.
#[derive(Debug)]
pub struct Containers {
    paths: Paths,
    /// Capacity of pipes, bytes; the kernel's default if `None`.
    pipe_size: Option<usize>,
    sandbox: Arc<Sandbox>,
    runtime: Arc<Runtime>,
    storages: Arc<storage::Table>,
    oom: Arc<Oom>,
    names: Arc<ContainerNames>,
    events: BootEvents,
    devices: DeviceProvider,
    first_processes: FirstProcesses,
    shared_mounts: SharedMounts,
    removal: Removal,
}

/// The components that [`Containers`] uses.
#[derive(Debug)]
pub struct Dependencies {
    /// Registers containers.
    pub sandbox: Arc<Sandbox>,
    /// Client of the runtime process.
    pub runtime: Arc<Runtime>,
    /// Mounted storages.
    pub storages: Arc<storage::Table>,
    /// OOM kills per container.
    pub oom: Arc<Oom>,
    /// Waits for hot-plugged devices other than GPUs.
    pub hotplug: Hotplug,
    /// Source of GPU state.
    pub gpus: Source,
    /// Receives events for the boot record.
    pub events: BootEvents,
}

impl Containers {
    /// Creates the component.
    #[must_use]
    pub fn new(config: &Config, paths: &Paths, uses: Dependencies) -> Arc<Self> {
        let Dependencies { sandbox, runtime, storages, oom, hotplug, gpus, events } = uses;
        let names = Arc::new(ContainerNames::default());
        let first_processes = FirstProcesses::new(&sandbox, &runtime);
        let removal = Removal {
            sandbox: Arc::clone(&sandbox),
            runtime: Arc::clone(&runtime),
            storages: Arc::clone(&storages),
            names: Arc::clone(&names),
            oom: Arc::clone(&oom),
        };
        Arc::new(Self {
            paths: paths.clone(),
            pipe_size: config.pipe_size,
            devices: DeviceProvider::new(config, paths, hotplug, gpus),
            shared_mounts: SharedMounts::new(&sandbox, &names, first_processes.clone()),
            sandbox,
            runtime,
            storages,
            oom,
            names,
            events,
            first_processes,
            removal,
        })
    }

    /// Starts a container's program.
    ///
    /// # Errors
    /// The container does not exist, or is started already.
    pub async fn start(self: &Arc<Self>, id: &str) -> Result<()> {
        let container = self.sandbox.container(id)?;
        container.advance(&[Phase::Created], Phase::Started)?;
        self.oom.watch(&container.id, &container.cgroup);
        let containers = Arc::clone(self);
        background::to_completion(async move {
            let call = Call::Start { container: container.id.clone() };
            match containers.runtime.call(call, &[]).await {
                Ok(_) => {
                    containers.events.add("container-started", &container.id, "");
                    Ok(())
                }
                Err(error) => {
                    // Has no effect if it is being removed.
                    let _ = container.advance(&[Phase::Started], Phase::Created);
                    Err(error)
                }
            }
        })
        .await
    }

    /// Records the exit of a process, as reported by the runtime.
    pub fn ended(&self, container: &str, name: &str, code: i32) {
        let Ok(found) = self.sandbox.container(container) else { return };
        if name.is_empty() {
            self.events.add("container-exited", container, &format!("code {code}"));
        }
        found.ended(name, code);
    }

    /// Kills a container and releases its resources. `timeout` is the time in seconds for its
    /// processes to exit; 0 means 30.
    ///
    /// # Errors
    /// The container does not exist, is being created or removed, or its processes do not exit;
    /// then it stays and can be removed again.
    pub async fn remove(self: &Arc<Self>, id: &str, timeout: u32) -> Result<()> {
        let container = self.sandbox.container(id)?;
        let exit_timeout = if timeout == 0 { KILL_TIMEOUT } else { Duration::from_secs(timeout.into()) };
        let containers = Arc::clone(self);
        background::to_completion(async move { containers.removal.remove(&container, exit_timeout).await }).await
    }

    /// Removes all containers.
    ///
    /// # Errors
    /// The first error; the other containers are removed all the same.
    pub async fn remove_all(&self) -> Result<()> {
        let mut result = Ok(());
        for container in self.sandbox.containers() {
            let removed = self.removal.remove(&container, KILL_TIMEOUT).await;
            result = result.and(removed);
        }
        result
    }
}

#[cfg(test)]
mod tests;
