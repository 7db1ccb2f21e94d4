//! The sandbox: everything the agent has made, and who may find what.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firstlight_agent_api::agent::CreateSandboxRequest;
use firstlight_runtime::Call;
use oci_spec::runtime::Hooks;
use ttrpc::Code;

use crate::adapt::Shared;
use crate::config::Config;
use crate::container::Container;
use crate::control::Control;
use crate::copy::Copies;
use crate::error::{Error, Result};
use crate::gpu::Source;
use crate::hotplug::Hotplug;
use crate::network;
use crate::oom::Oom;
use crate::paths::Paths;
use crate::runtime::Runtime;
use crate::{dns, hooks, modules, storage, work};

/// The agent. Everything is behind locks that are held for moments.
#[derive(Debug)]
pub struct Agent {
    /// Its settings.
    pub config: Config,
    /// Its folders.
    pub paths: Paths,
    /// Who makes containers.
    pub runtime: Arc<Runtime>,
    /// PID 1, unless the agent works alone.
    pub control: Option<Arc<Control>>,
    /// Where GPUs come from.
    pub gpus: Source,
    /// Finds other devices.
    pub hotplug: Hotplug,
    /// Who was killed for want of memory.
    pub oom: Oom,
    /// What is mounted for containers.
    pub storages: storage::Table,
    /// Names of containers in their pod.
    pub names: storage::Names,
    /// Files that the host is putting into the guest.
    pub copies: Copies,
    /// Whose turn it is to change the network.
    pub network: network::Turn,
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

impl Agent {
    /// An agent without a sandbox.
    #[must_use]
    pub fn new(
        config: Config,
        paths: Paths,
        runtime: Arc<Runtime>,
        control: Option<Arc<Control>>,
        gpus: Source,
    ) -> Arc<Self> {
        let state = Mutex::new(State::default());
        let (oom, names) = (Oom::default(), storage::Names::default());
        let hotplug = Hotplug::new(&paths, config.hotplug_timeout);
        let storages = storage::Table::new(paths.clone(), hotplug.clone());
        Arc::new(Self {
            config,
            paths,
            runtime,
            control,
            gpus,
            hotplug,
            oom,
            storages,
            names,
            copies: Copies::default(),
            network: network::Turn::default(),
            state,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an event into the boot record, if there is one.
    pub fn event(&self, what: &str, object: &str, detail: &str) {
        if let Some(control) = &self.control {
            control.event(what, object, detail);
        }
    }

    /// Makes the sandbox. A second call is refused before it touches anything.
    ///
    /// # Errors
    /// There is a sandbox, or a part of it cannot be made; then there is none.
    pub async fn create_sandbox(self: &Arc<Self>, request: CreateSandboxRequest) -> Result<()> {
        {
            let mut state = self.state();
            if state.sandbox != Sandbox::None {
                return Err(Error::exists(format!("a sandbox exists ({:?}); one guest has one", state.sandbox)));
            }
            state.sandbox = Sandbox::Creating;
        }
        let result = self.build_sandbox(&request).await;
        self.state().sandbox = if result.is_ok() { Sandbox::Created } else { Sandbox::None };
        result
    }

    async fn build_sandbox(&self, request: &CreateSandboxRequest) -> Result<()> {
        modules::load(self.control.as_deref(), &self.paths.sysfs, &request.kernel_modules).await?;
        self.hooks(Path::new(&request.guest_hook_path)).await;
        let (folder, hostname) = (self.paths.namespaces.clone(), request.hostname.clone());
        self.runtime.call(Call::Namespaces { folder, hostname }, &[]).await?;
        // The sandbox is a user that never leaves, so they stay until the guest ends.
        let made = self.storages.add_all(request.storages.clone()).await?;
        let written = dns::write(&self.paths, &request.dns);
        if written.is_err() {
            self.storages.remove_all(made).await;
        }
        written
    }

    /// Notes the guest's own hooks. A folder that is not there has none: the same
    /// configuration is used with images that bring hooks and images that do not.
    async fn hooks(&self, folder: &Path) {
        if folder == Path::new("") {
            return;
        }
        let path = self.paths.root.join(folder.strip_prefix("/").unwrap_or(folder));
        match work::blocking(move || hooks::scan(&path)).await {
            Ok(hooks) => self.state().hooks = Arc::new(hooks),
            Err(error) => log::warn!("guest_hook_path: {error}"),
        }
    }

    /// The guest's own hooks, which every container gets.
    #[must_use]
    pub fn guest_hooks(&self) -> Arc<Hooks> {
        Arc::clone(&self.state().hooks)
    }

    /// The namespaces that a new container shares.
    #[must_use]
    pub fn shared(&self, pid: bool) -> Shared {
        let state = self.state();
        let created = state.sandbox == Sandbox::Created;
        let kept = |kind: &str| Some(self.paths.namespaces.join(kind)).filter(|_| created);
        let first = state.first.as_ref().and_then(|id| state.containers.get(id)).and_then(|first| first.pid());
        let pid = first.filter(|_| pid).map(|pid| format!("/proc/{pid}/ns/pid").into());
        Shared { ipc: kept("ipc"), uts: kept("uts"), pid }
    }

    /// A container.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`: there is none of that name.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        self.state().containers.get(id).cloned().ok_or_else(|| Error::no_container(id))
    }

    /// Every container.
    #[must_use]
    pub fn containers(&self) -> Vec<Arc<Container>> {
        self.state().containers.values().cloned().collect()
    }

    /// Whether the name of a new container is free.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`; whoever has the name is not touched.
    pub fn free(&self, id: &str) -> Result<()> {
        if self.state().containers.contains_key(id) {
            return Err(Error::exists(format!("container {id} exists; remove it first")));
        }
        Ok(())
    }

    /// Adds a container that is about to be made.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`, or the sandbox is being destroyed.
    pub fn add(&self, container: &Arc<Container>) -> Result<()> {
        self.free(&container.id)?;
        let mut state = self.state();
        if state.sandbox == Sandbox::Destroyed {
            return Err(Error::new(Code::FAILED_PRECONDITION, "the sandbox is being destroyed"));
        }
        state.first.get_or_insert_with(|| container.id.clone());
        state.containers.insert(container.id.clone(), Arc::clone(container));
        Ok(())
    }

    /// Forgets a container.
    pub fn forget(&self, container: &Container) {
        let mut state = self.state();
        state.containers.remove(&container.id);
        if state.first.as_deref() == Some(&container.id) {
            state.first = None;
        }
    }

    /// Notes the end of a process, as the runtime tells it.
    pub fn ended(&self, container: &str, name: &str, code: i32) {
        let Ok(found) = self.container(container) else { return };
        if name.is_empty() {
            self.event("container-exited", container, &format!("code {code}"));
        }
        found.ended(name, code);
    }

    /// Marks the sandbox as going away; nothing new is made from now on.
    /// `false`: it is going away already.
    #[must_use]
    pub fn destroy(&self) -> bool {
        std::mem::replace(&mut self.state().sandbox, Sandbox::Destroyed) != Sandbox::Destroyed
    }
}
