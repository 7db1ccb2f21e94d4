//! CreateContainer.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use firstlight_agent_api::agent::{CreateContainerRequest, SharedMount, Storage};
use firstlight_runtime::Call;
use oci_spec::runtime::Spec;
use rustix::termios::Winsize;

use super::early_cgroup::EarlyCgroup;
use super::initramfs::root_is_initramfs;
use super::removal::KILL_TIMEOUT;
use super::{Containers, configuration, id, shared_mounts};
use crate::container::{Container, Phase};
use crate::devices::Functions;
use crate::error::{Error, Result};
use crate::process::{PipeEnds, Process};
use crate::runtime::borrow;
use crate::{background, bundle, convert, devices};

/// What is created after all devices are ready.
#[derive(Debug)]
struct Job {
    id: String,
    spec: Spec,
    functions: Functions,
    /// Whether it shares the PID namespace of the sandbox's first container.
    shares_processes: bool,
    /// The initial size of its terminal.
    size: Option<Winsize>,
    storages: Vec<Storage>,
    shared_mounts: Vec<SharedMount>,
}

impl Containers {
    /// Creates a container. Nothing is created until its GPUs are ready, so a caller that
    /// disconnects before has no effect; if it disconnects later, the container is removed again.
    ///
    /// # Errors
    /// The request is invalid, a GPU failed or is not ready in time, or a step failed; then all
    /// previous steps are undone.
    pub async fn create(self: &Arc<Self>, request: CreateContainerRequest, timeout: Option<Duration>) -> Result<()> {
        let job = self.prepare(request, timeout).await?;
        let (containers, undoing) = (Arc::clone(self), Arc::clone(self));
        let job = async move { containers.create_from(job).await };
        background::to_completion_or_undo(job, move |container: Arc<Container>| async move {
            log::warn!("container {}: caller disconnected during creation; removing it", container.id);
            if let Err(error) = undoing.removal.remove(&container, KILL_TIMEOUT).await {
                log::error!("container {}: {error}", container.id);
            }
        })
        .await
        .map(|_| ())
    }

    /// Checks the request and waits for its devices; creates nothing.
    async fn prepare(&self, request: CreateContainerRequest, timeout: Option<Duration>) -> Result<Job> {
        id::check(&request.container_id)?;
        self.sandbox.check_id_unused(&request.container_id)?;
        let message = request.OCI.as_ref().ok_or_else(|| Error::invalid("EINVAL: no OCI configuration"))?;
        shared_mounts::check(&request.shared_mounts)?;
        let mut spec = convert::spec(message).map_err(|error| Error::invalid(error.to_string()))?;
        let provided = self.devices.provide(&request, message, &mut spec, timeout).await?;
        for warning in provided.warnings {
            self.warn(&request.container_id, &warning);
        }
        let process = message.Process.as_ref().filter(|process| process.Terminal);
        let size = process.and_then(|process| process.ConsoleSize.as_ref()).and_then(convert::winsize);
        Ok(Job {
            spec,
            functions: provided.functions,
            shares_processes: request.sandbox_pidns,
            size,
            id: request.container_id,
            storages: request.storages,
            shared_mounts: request.shared_mounts,
        })
    }

    fn warn(&self, id: &str, warning: &str) {
        log::warn!("container {id}: {warning}");
        self.events.add("container-warning", id, warning);
    }

    async fn create_from(&self, mut job: Job) -> Result<Arc<Container>> {
        // Stays open until the container is created.
        let pid_namespace = if job.shares_processes { self.first_processes.pid_namespace().await? } else { None };
        let (container, first) = self.register(&mut job, pid_namespace.as_ref())?;
        let early_cgroup = EarlyCgroup::start(&container.cgroup);
        let created = self.create_process(&container, &first, job.storages, job.spec).await;
        early_cgroup.finish(created.is_ok()).await;
        let master = match created {
            Ok(master) => master,
            Err(error) => {
                self.removal.clear(&container).await;
                return Err(error);
            }
        };
        match self.finish_creation(&container, &first, &job.shared_mounts, master, job.size).await {
            Ok(()) => {
                self.events.add("container-created", &container.id, "");
                Ok(container)
            }
            Err(mut error) => {
                if let Err(left) = self.removal.undo(&container).await {
                    error.message = format!("{}; failed to remove the container: {left}", error.message);
                }
                Err(error)
            }
        }
    }

    /// Completes the configuration, and registers the container and its first process.
    fn register(&self, job: &mut Job, pid_namespace: Option<&OwnedFd>) -> Result<(Arc<Container>, Arc<Process>)> {
        let Job { id, spec, functions, .. } = job;
        let persistent = Some(self.paths.namespaces.as_path()).filter(|_| self.sandbox.is_created());
        let shared = configuration::shared_namespaces(persistent, pid_namespace);
        let completed = configuration::complete(id, spec, &self.sandbox.hooks(), &shared)?;
        for warning in completed.warnings {
            self.warn(id, &warning);
        }
        let process = spec.process().clone().unwrap_or_default();
        let first = Arc::new(Process::new(process.terminal().unwrap_or(false)));
        let cgroup = self.paths.cgroups.join(completed.cgroup);
        let capabilities = process.capabilities().clone();
        let container = Container::new(id, self.paths.bundle(id), cgroup, capabilities, Arc::clone(&first));
        let container = Arc::new(container.with_functions(std::mem::take(functions)));
        self.sandbox.add(&container)?;
        self.names.add(id, spec.annotations().as_ref().unwrap_or(&Default::default()));
        Ok((container, first))
    }

    /// Performs all steps up to the container's process, which blocks until StartContainer; returns
    /// its terminal's master.
    async fn create_process(
        &self,
        container: &Arc<Container>,
        first: &Process,
        storages: Vec<Storage>,
        mut spec: Spec,
    ) -> Result<Option<OwnedFd>> {
        let terminal = spec.process().as_ref().and_then(|process| process.terminal()).unwrap_or(false);
        let root = spec.root().as_ref().map(|root| root.path().clone());
        let root = root.ok_or_else(|| Error::invalid("OCI configuration: Root is missing"))?;
        let devices = devices::rules(&spec)?;
        container.set_storages(self.storages.add_all(storages).await?);
        let hooks = spec.hooks().is_some();
        bundle::create(&container.bundle, &mut spec)?;
        let ends = if terminal { PipeEnds(Vec::new()) } else { first.create_pipes(self.pipe_size).await? };
        let call = Call::Create {
            container: container.id.clone(),
            bundle: container.bundle.clone(),
            cgroup: container.cgroup.clone(),
            root: container.bundle.join(root),
            devices,
            terminal,
            no_pivot: root_is_initramfs(),
            hooks,
        };
        let (done, master) = self.runtime.call(call, &borrow(&ends.0)).await?;
        container.set_pid(done.pid);
        Ok(master)
    }

    /// Performs the steps that need the container's process.
    async fn finish_creation(
        &self,
        container: &Arc<Container>,
        first: &Process,
        mounts: &[SharedMount],
        master: Option<OwnedFd>,
        size: Option<Winsize>,
    ) -> Result<()> {
        first.attach(master).await?;
        // Its program has not started. Set from here, because the container's seccomp filter is
        // loaded by now.
        if let Some(size) = size {
            first.resize(size)?;
        }
        self.shared_mounts.create(mounts, container).await?;
        container.advance(&[Phase::Creating], Phase::Created).map(|_| ())
    }
}
