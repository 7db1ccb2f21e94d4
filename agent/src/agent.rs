//! The sandbox: the agent's state and its lookup tables.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firstlight_agent_api::agent::CreateSandboxRequest;
use firstlight_runtime::Call;
use oci_spec::runtime::Hooks;
use ttrpc::Code;

use crate::config::Config;
use crate::container::Container;
use crate::control::Control;
use crate::copy::FileCopies;
use crate::error::{Error, Result};
use crate::gpu::Source;
use crate::guest::online::MemoryWatcher;
use crate::hotplug::Hotplug;
use crate::idle::Idle;
use crate::network;
use crate::oci_config::SharedNamespaces;
use crate::oom::Oom;
use crate::paths::Paths;
use crate::runtime::Runtime;
use crate::{background, dns, hooks, modules, storage};

/// The agent. Every lock is held briefly, never across an await.
#[derive(Debug)]
pub struct Agent {
    /// Configuration.
    pub config: Config,
    /// Paths of directories and files.
    pub paths: Paths,
    /// Client of the runtime process.
    pub runtime: Arc<Runtime>,
    /// Connection to PID 1; `None` without a guest init.
    pub control: Option<Arc<Control>>,
    /// Source of GPU state: PID 1 or CDI files.
    pub gpus: Source,
    /// Waits for hot-plugged devices other than GPUs.
    pub hotplug: Hotplug,
    /// Whether newly plugged memory is brought online.
    pub memory: MemoryWatcher,
    /// OOM kills per container.
    pub oom: Oom,
    /// Mounted storages.
    pub storages: storage::Table,
    /// Names of containers within their pod.
    pub names: storage::ContainerNames,
    /// CopyFile transfers in progress.
    pub copies: FileCopies,
    /// Serialises network changes.
    pub network: network::ChangeLock,
    /// Returns free memory when the agent is idle.
    pub idle: Idle,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sandbox: Sandbox,
    containers: BTreeMap<String, Arc<Container>>,
    first: Option<String>,
    hooks: Arc<Hooks>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Sandbox {
    #[default]
    None,
    Creating,
    Created,
    Destroyed,
}

fn destroyed() -> Error {
    Error::new(Code::FAILED_PRECONDITION, "the sandbox is being destroyed")
}

impl Agent {
    /// Creates an agent without a sandbox.
    #[must_use]
    pub fn new(
        config: Config,
        paths: Paths,
        runtime: Arc<Runtime>,
        control: Option<Arc<Control>>,
        gpus: Source,
    ) -> Arc<Self> {
        let state = Mutex::new(State::default());
        let (oom, names) = (Oom::default(), storage::ContainerNames::default());
        let hotplug = Hotplug::new(&paths, config.hotplug_timeout);
        let storages = storage::Table::new(paths.clone(), hotplug.clone());
        Arc::new(Self {
            config,
            paths,
            runtime,
            control,
            gpus,
            hotplug,
            memory: MemoryWatcher::default(),
            oom,
            storages,
            names,
            copies: FileCopies::default(),
            network: network::ChangeLock::default(),
            idle: Idle::default(),
            state,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event to the boot record, if PID 1 is connected.
    pub fn event(&self, what: &str, object: &str, detail: &str) {
        if let Some(control) = &self.control {
            control.event(what, object, detail);
        }
    }

    /// Creates the sandbox. A second call fails before any change.
    ///
    /// # Errors
    /// A sandbox exists, or a part of it cannot be created (then there is none), or DestroySandbox
    /// was called in the meantime (then it stays destroyed).
    pub async fn create_sandbox(self: &Arc<Self>, request: CreateSandboxRequest) -> Result<()> {
        {
            let mut state = self.state();
            if state.sandbox != Sandbox::None {
                return Err(Error::exists(format!(
                    "a sandbox already exists ({:?}); a guest has exactly one",
                    state.sandbox
                )));
            }
            state.sandbox = Sandbox::Creating;
        }
        let result = self.build_sandbox(&request).await;
        let mut state = self.state();
        if state.sandbox != Sandbox::Creating {
            return result.and_then(|()| Err(destroyed()));
        }
        state.sandbox = if result.is_ok() { Sandbox::Created } else { Sandbox::None };
        result
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
            Ok(hooks) => self.state().hooks = Arc::new(hooks),
            Err(error) => log::warn!("guest_hook_path: {error}"),
        }
    }

    /// Returns the guest's own hooks, which are added to every container.
    #[must_use]
    pub fn guest_hooks(&self) -> Arc<Hooks> {
        Arc::clone(&self.state().hooks)
    }

    /// Returns the namespaces that a new container shares, including the PID namespace of the given
    /// descriptor. The paths are valid while that descriptor is open.
    #[must_use]
    pub fn shared_namespaces(&self, processes: Option<&OwnedFd>) -> SharedNamespaces {
        let created = self.state().sandbox == Sandbox::Created;
        let persistent = |kind: &str| Some(self.paths.namespaces.join(kind)).filter(|_| created);
        // /proc/PID and not /proc/self: the runtime process opens the path.
        let pid = processes.map(|fd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into());
        SharedNamespaces { ipc: persistent("ipc"), uts: persistent("uts"), pid }
    }

    /// Returns the sandbox's first container.
    #[must_use]
    pub fn first(&self) -> Option<Arc<Container>> {
        let state = self.state();
        state.first.as_ref().and_then(|id| state.containers.get(id)).cloned()
    }

    /// Returns a container.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`: no container has this id.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        self.state().containers.get(id).cloned().ok_or_else(|| Error::no_container(id))
    }

    /// Returns all containers.
    #[must_use]
    pub fn containers(&self) -> Vec<Arc<Container>> {
        self.state().containers.values().cloned().collect()
    }

    /// Checks that no container has this id.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`; the existing container is not changed.
    pub fn check_id_unused(&self, id: &str) -> Result<()> {
        if self.state().containers.contains_key(id) {
            return Err(Error::exists(format!("container {id} already exists; remove it first")));
        }
        Ok(())
    }

    /// Registers a container that is about to be created.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`, or the sandbox is being destroyed.
    pub fn add(&self, container: &Arc<Container>) -> Result<()> {
        self.check_id_unused(&container.id)?;
        let mut state = self.state();
        if state.sandbox == Sandbox::Destroyed {
            return Err(destroyed());
        }
        state.first.get_or_insert_with(|| container.id.clone());
        state.containers.insert(container.id.clone(), Arc::clone(container));
        Ok(())
    }

    /// Unregisters a container.
    pub fn forget(&self, container: &Container) {
        let mut state = self.state();
        state.containers.remove(&container.id);
        if state.first.as_deref() == Some(&container.id) {
            state.first = None;
        }
    }

    /// Records the exit of a process, as reported by the runtime.
    pub fn ended(&self, container: &str, name: &str, code: i32) {
        let Ok(found) = self.container(container) else { return };
        if name.is_empty() {
            self.event("container-exited", container, &format!("code {code}"));
        }
        found.ended(name, code);
    }

    /// Marks the sandbox as destroyed: no container can be added from now on. Returns `false` if it
    /// was already destroyed.
    #[must_use]
    pub fn destroy(&self) -> bool {
        std::mem::replace(&mut self.state().sandbox, Sandbox::Destroyed) != Sandbox::Destroyed
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::process::Process;
    use firstlight_runtime::{Done, Failure, FromRuntime, MAX_REQUEST, Request, receive, send};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    pub(crate) fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    pub(crate) fn container(id: &str) -> Arc<Container> {
        Arc::new(Container::new(id, "/b".into(), "/g".into(), None, Arc::new(Process::new(false))))
    }

    /// Creates an agent with paths below `root` and a runtime that replies with `answer`.
    pub(crate) fn agent(
        root: &Path,
        mut answer: impl FnMut(&Call) -> std::result::Result<Done, Failure> + Send + 'static,
    ) -> Arc<Agent> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        std::thread::spawn(move || {
            let mut buffer = vec![0; MAX_REQUEST];
            while let Ok((len @ 1.., _)) = receive(&theirs, &mut buffer) {
                let Request { id, call } = serde_json::from_slice(&buffer[..len]).unwrap();
                let reply = FromRuntime::Reply { id, result: answer(&call) };
                send(&theirs, &serde_json::to_vec(&reply).unwrap(), &[]).unwrap();
            }
        });
        let runtime = Runtime::new(ours).unwrap();
        let serving = Arc::clone(&runtime);
        tokio::spawn(async move { serving.serve(|_, _, _| {}).await });
        Agent::new(Config::default(), Paths::below(root), runtime, None, Source::Files)
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
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                agent.add(&container("c1")).unwrap();
                assert!(agent.destroy());
                let kind = firstlight_runtime::FailureKind::Internal;
                let failure = Failure { kind, message: "no namespaces".into() };
                go.send(if fails { Err(failure) } else { Ok(Done::default()) }).unwrap();
                let error = created.await.unwrap().unwrap_err();
                assert!(error.message.contains(if fails { "no namespaces" } else { "destroyed" }), "{error}");
                assert_eq!(agent.add(&container("c2")).unwrap_err().code, Code::FAILED_PRECONDITION);
                assert!(agent.create_sandbox(CreateSandboxRequest::new()).await.is_err());
                assert!(!agent.destroy(), "it was destroyed already");
            });
        }
    }
}
