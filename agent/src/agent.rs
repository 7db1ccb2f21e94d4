//! The agent: the composition of its components, and the calls that combine several of them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firstlight_agent_api::agent::CreateSandboxRequest;
use firstlight_init_control::ToInit;
use firstlight_runtime::Call;

use crate::boot_events::BootEvents;
use crate::config::Config;
use crate::containers::{Containers, Dependencies, Processes};
use crate::control::Control;
use crate::copy::FileCopies;
use crate::error::Result;
use crate::gpu::Source;
use crate::guest::online::CpusAndMemory;
use crate::hotplug::Hotplug;
use crate::metrics::Metrics;
use crate::network::Network;
use crate::oom::Oom;
use crate::paths::Paths;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::swap::Swap;
use crate::{background, dns, hooks, modules, storage};

/// Time for the reply to DestroySandbox to be sent before this process is terminated.
const REPLY_GRACE: Duration = Duration::from_millis(100);

/// The agent. Each component has only what it needs; the ttrpc service hands calls to them.
#[derive(Debug)]
pub struct Agent {
    runtime: Arc<Runtime>,
    /// Connection to PID 1; `None` without a guest init.
    control: Option<Arc<Control>>,
    /// Paths of directories and files, for calls without a component.
    pub(crate) paths: Paths,
    /// State of the sandbox.
    pub(crate) sandbox: Arc<Sandbox>,
    /// Creates, starts and removes containers.
    pub(crate) containers: Arc<Containers>,
    /// Processes of containers.
    pub(crate) processes: Arc<Processes>,
    /// OOM kills per container.
    pub(crate) oom: Arc<Oom>,
    /// Mounted storages.
    pub(crate) storages: Arc<storage::Table>,
    /// CopyFile transfers in progress.
    pub(crate) copies: Arc<FileCopies>,
    /// The guest's network.
    pub(crate) network: Network,
    /// Swap on disks and files of the host.
    pub(crate) swap: Swap,
    /// Hot-plugged CPUs and memory.
    pub(crate) cpus_and_memory: CpusAndMemory,
    /// Metrics of agent and guest.
    pub(crate) metrics: Metrics,
}

impl Agent {
    /// Creates an agent without a sandbox.
    #[must_use]
    pub fn new(
        config: &Config,
        paths: Paths,
        runtime: Arc<Runtime>,
        control: Option<Arc<Control>>,
        gpus: Source,
    ) -> Arc<Self> {
        let hotplug = Hotplug::new(&paths, config.hotplug_timeout);
        let storages = Arc::new(storage::Table::new(paths.clone(), hotplug.clone()));
        let (sandbox, oom): (Arc<Sandbox>, Arc<Oom>) = (Arc::default(), Arc::default());
        let events = control.as_ref().map_or_else(BootEvents::default, |control| control.events());
        let metrics = Metrics::new(&paths, &gpus);
        let network = Network::new(&paths, &hotplug);
        let swap = Swap::new(&paths, &hotplug);
        let uses = Dependencies {
            sandbox: Arc::clone(&sandbox),
            runtime: Arc::clone(&runtime),
            storages: Arc::clone(&storages),
            oom: Arc::clone(&oom),
            hotplug,
            gpus,
            events,
        };
        Arc::new(Self {
            containers: Containers::new(config, &paths, uses),
            processes: Processes::new(&sandbox, &runtime, config.pipe_size),
            copies: Arc::default(),
            cpus_and_memory: CpusAndMemory::new(&paths, &sandbox),
            runtime,
            control,
            paths,
            sandbox,
            oom,
            storages,
            network,
            swap,
            metrics,
        })
    }

    /// Creates the sandbox. A second call fails before any change.
    ///
    /// # Errors
    /// A sandbox exists, or a part of it cannot be created (then there is none), or DestroySandbox
    /// was called in the meantime (then it stays destroyed).
    pub async fn create_sandbox(self: &Arc<Self>, request: CreateSandboxRequest) -> Result<()> {
        let agent = Arc::clone(self);
        background::to_completion(async move {
            agent.sandbox.begin_creation()?;
            let result = agent.build_sandbox(&request).await;
            agent.sandbox.finish_creation(result)
        })
        .await
    }

    async fn build_sandbox(&self, request: &CreateSandboxRequest) -> Result<()> {
        modules::load(self.control.as_deref(), &self.paths.sysfs, &request.kernel_modules).await?;
        self.load_guest_hooks(Path::new(&request.guest_hook_path)).await;
        let (dir, hostname) = (self.paths.namespaces.clone(), request.hostname.clone());
        self.runtime.call(Call::Namespaces { dir, hostname }, &[]).await?;
        // The sandbox's reference is never released, so these storages stay mounted until the guest
        // ends.
        let made = self.storages.add_all(request.storages.clone()).await?;
        let written = dns::write(&self.paths, &request.dns);
        if written.is_err() {
            self.storages.remove_all(made).await;
        }
        written
    }

    /// Loads the guest's own hooks. A missing directory means no hooks: the same configuration is
    /// used for images with and without hooks.
    async fn load_guest_hooks(&self, dir: &Path) {
        if dir == Path::new("") {
            return;
        }
        let path = self.paths.root.join(dir.strip_prefix("/").unwrap_or(dir));
        match background::blocking(move || hooks::scan(&path)).await {
            Ok(hooks) => self.sandbox.set_hooks(hooks),
            Err(error) => log::warn!("guest_hook_path: {error}"),
        }
    }

    /// Removes every container, and then powers off the guest, or exits if the agent runs without
    /// PID 1.
    ///
    /// Idempotent: a second call does nothing.
    ///
    /// # Errors
    /// A container cannot be removed; the guest powers off in that case too.
    pub async fn destroy_sandbox(&self) -> Result<()> {
        if !self.sandbox.destroy() {
            return Ok(());
        }
        let (containers, control) = (Arc::clone(&self.containers), self.control.clone());
        background::to_completion(async move {
            let result = containers.remove_all().await;
            // PID 1 terminates this process at once, so the reply is sent first.
            tokio::spawn(async move {
                tokio::time::sleep(REPLY_GRACE).await;
                match control {
                    Some(control) => control.send(ToInit::PowerOff { reason: "DestroySandbox".to_owned() }),
                    None => std::process::exit(0),
                }
            });
            result
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::tests::container;
    use crate::fake_runtime::{Answer, failure, run, runtime};
    use firstlight_runtime::{Done, FailureKind};
    use ttrpc::Code;

    /// Creates an agent with paths below `root` and a runtime that replies with `answer`.
    fn agent(root: &Path, answer: impl FnMut(&Call) -> Answer + Send + 'static) -> Arc<Agent> {
        Agent::new(&Config::default(), Paths::below(root), runtime(answer), None, Source::Files)
    }

    #[test]
    fn sandbox_destroyed_during_creation_stays_destroyed() {
        use std::sync::mpsc::channel;
        for fails in [false, true] {
            run(async {
                let dir = tempfile::tempdir().unwrap();
                let (begun, beginning) = channel();
                let (go, gone) = channel();
                let agent = agent(dir.path(), move |call| {
                    assert!(matches!(call, Call::Namespaces { .. }), "{call:?}");
                    begun.send(()).unwrap();
                    gone.recv().unwrap()
                });
                let creating = Arc::clone(&agent);
                let created = tokio::spawn(async move { creating.create_sandbox(CreateSandboxRequest::new()).await });
                while beginning.try_recv().is_err() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                agent.sandbox.add(&container("c1")).unwrap();
                assert!(agent.sandbox.destroy());
                let failed = failure(FailureKind::Internal, "no namespaces");
                go.send(if fails { failed } else { Ok(Done::default()) }).unwrap();
                let error = created.await.unwrap().unwrap_err();
                assert!(error.message.contains(if fails { "no namespaces" } else { "destroyed" }), "{error}");
                assert_eq!(agent.sandbox.add(&container("c2")).unwrap_err().code, Code::FAILED_PRECONDITION);
                assert!(agent.create_sandbox(CreateSandboxRequest::new()).await.is_err());
                assert!(!agent.sandbox.destroy(), "it was destroyed already");
            });
        }
    }

    #[test]
    fn sandbox_is_created_even_if_its_caller_disconnects() {
        run(async {
            let dir = tempfile::tempdir().unwrap();
            let (go, gone) = std::sync::mpsc::channel::<()>();
            let agent = agent(dir.path(), move |_| {
                gone.recv().unwrap();
                Ok(Done::default())
            });
            let caller = agent.create_sandbox(CreateSandboxRequest::new());
            assert!(tokio::time::timeout(Duration::from_millis(50), caller).await.is_err());
            assert!(!agent.sandbox.is_created());
            go.send(()).unwrap();
            while !agent.sandbox.is_created() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }

    #[test]
    fn missing_hook_directory_is_no_error_and_hooks_are_loaded() {
        use std::os::unix::fs::PermissionsExt;
        run(async {
            let dir = tempfile::tempdir().unwrap();
            let agent = agent(dir.path(), |_| Ok(Done::default()));
            agent.load_guest_hooks(Path::new("")).await;
            agent.load_guest_hooks(Path::new("/opt/hooks")).await;
            assert!(agent.sandbox.hooks().poststop().is_none());
            let file = dir.path().join("opt/hooks/poststop/clean");
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
            agent.load_guest_hooks(Path::new("/opt/hooks")).await;
            assert_eq!(agent.sandbox.hooks().poststop().as_ref().map(Vec::len), Some(1));
        });
    }
}
