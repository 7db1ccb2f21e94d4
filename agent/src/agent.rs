//! The sandbox: everything the agent has made, and who may find what.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firstlight_agent_api::agent::{CreateSandboxRequest, Storage};
use firstlight_runtime::Call;
use ttrpc::Code;

use crate::adapt::Shared;
use crate::config::Config;
use crate::container::Container;
use crate::control::Control;
use crate::copy::Copies;
use crate::error::{Error, Result};
use crate::gpu::Source;
use crate::oom::Oom;
use crate::paths::Paths;
use crate::runtime::Runtime;
use crate::{dns, storage, work};

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
    /// Who was killed for want of memory.
    pub oom: Oom,
    /// Files that the host is putting into the guest.
    pub copies: Copies,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sandbox: Sandbox,
    containers: BTreeMap<String, Arc<Container>>,
    storages: BTreeMap<String, Use>,
    first: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Sandbox {
    #[default]
    None,
    Creating,
    Created,
    Destroyed,
}

/// How a storage is used.
#[derive(Debug, Default)]
struct Use {
    users: usize,
    /// Kept until the guest ends, whoever uses it.
    keep: bool,
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
        Arc::new(Self { config, paths, runtime, control, gpus, oom: Oom::default(), copies: Copies::default(), state })
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
        if let Some(module) = request.kernel_modules.first() {
            let message =
                format!("kernel module {}: modules are loaded at boot only, before the guest locks them", module.name);
            return Err(Error::new(Code::FAILED_PRECONDITION, message));
        }
        if !request.guest_hook_path.is_empty() {
            log::warn!("guest_hook_path {:?} is ignored: hooks of the guest are not run", request.guest_hook_path);
        }
        let (folder, hostname) = (self.paths.namespaces.clone(), request.hostname.clone());
        self.runtime.call(Call::Namespaces { folder, hostname }, &[]).await?;
        for storage in &request.storages {
            self.use_storage(storage.clone(), true).await?;
        }
        dns::write(&self.paths, &request.dns)
    }

    /// Makes a storage, or uses the one that is there.
    ///
    /// # Errors
    /// It cannot be made.
    pub async fn use_storage(&self, storage: Storage, keep: bool) -> Result<()> {
        let mount_point = storage.mount_point.clone();
        {
            let mut state = self.state();
            let entry = state.storages.entry(mount_point.clone()).or_default();
            entry.users += 1;
            entry.keep |= keep || storage.shared;
            if entry.users > 1 {
                return Ok(());
            }
        }
        let made = work::blocking(move || storage::add(&storage)).await;
        if made.is_err() {
            self.state().storages.remove(&mount_point);
        }
        made
    }

    /// Gives a use of a storage back; the last one unmounts it.
    pub fn drop_storage(&self, mount_point: &str) {
        let mut state = self.state();
        let Some(entry) = state.storages.get_mut(mount_point) else { return };
        entry.users = entry.users.saturating_sub(1);
        if entry.users == 0 && !entry.keep {
            state.storages.remove(mount_point);
            drop(state);
            storage::remove(mount_point);
        }
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
    pub fn ended(&self, container: &str, name: &str, code: i32, detail: &str) {
        if !detail.is_empty() {
            log::error!("container {container}: process {name:?} could not start: {detail}");
        }
        let Ok(found) = self.container(container) else { return };
        if name.is_empty() {
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            self.event("container-exited", container, &format!("code {code}{detail}"));
        }
        found.ended(name, code);
    }

    /// Marks the sandbox as going away; nothing new is made from now on.
    ///
    /// # Errors
    /// It is going away already.
    pub fn destroy(&self) -> Result<()> {
        let mut state = self.state();
        if state.sandbox == Sandbox::Destroyed {
            return Err(Error::internal("the sandbox is being destroyed already"));
        }
        state.sandbox = Sandbox::Destroyed;
        Ok(())
    }
}
