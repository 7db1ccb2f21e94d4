//! CreateContainer and StartContainer.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use firstlight_agent_api::agent::{CreateContainerRequest, SharedMount, Storage};
use firstlight_runtime::Call;
use oci_spec::runtime::Spec;
use rustix::termios::Winsize;

use crate::agent::Agent;
use crate::capabilities::CapabilitySet;
use crate::container::{Container, Phase};
use crate::devices::Functions;
use crate::early_cgroup::EarlyCgroup;
use crate::error::{Error, Result};
use crate::process::{PipeEnds, Process};
use crate::runtime::borrow;
use crate::{background, bundle, convert, devices, gpu, hooks, oci_config, remove, storage};

/// Part of the caller's timeout that is reserved for the error to reach it.
const REPLY_MARGIN: Duration = Duration::from_millis(200);

/// Names of directories beside the bundles, not valid as ids.
const RESERVED: &[&str] = &["shared", "sandbox"];

/// Checks that a container id is safe as a path component.
fn check_id(id: &str) -> Result<()> {
    let first = id.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    let rest = id.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c));
    if first && rest && (2..=255).contains(&id.len()) && !RESERVED.contains(&id) {
        return Ok(());
    }
    let id: String = id.chars().take(80).collect();
    Err(Error::invalid(format!(
        "container id {id:?} is invalid: use 2 to 255 letters, digits, '_', '.', '-', the first a letter or digit; not {RESERVED:?})"
    )))
}

impl Agent {
    /// Creates a container. Nothing is created until its GPUs are ready, so a caller that
    /// disconnects before has no effect; if it disconnects later, the container is removed again.
    ///
    /// # Errors
    /// The request is invalid, a GPU failed or is not ready in time, or a step failed; then all
    /// previous steps are undone.
    pub async fn create_container(
        self: &Arc<Self>,
        request: CreateContainerRequest,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let id = request.container_id.clone();
        check_id(&id)?;
        self.check_id_unused(&id)?;
        let message = request.OCI.as_ref().ok_or_else(|| Error::invalid("EINVAL: no OCI configuration"))?;
        storage::check_shared(&request.shared_mounts)?;
        let mut spec = convert::spec(message).map_err(|error| Error::invalid(error.to_string()))?;
        let attached = devices::attach(&self.hotplug, &self.paths, &request.devices, &mut spec).await;
        let functions = attached.map_err(|error| error.during(&format!("container {id}")))?;
        let input = gpu::RequestInput {
            annotations: &message.Annotations,
            devices: &request.devices,
            environment: message.Process.as_ref().map_or(&[], |process| &process.Env),
            environment_grants: self.config.visible_cdi_devices,
        };
        let devices = gpu::requested_devices(input, &self.paths.sysfs)?;
        let ready = timeout.map_or(self.config.cdi_timeout, |timeout| {
            self.config.cdi_timeout.min(timeout.saturating_sub(REPLY_MARGIN))
        });
        let timeouts = gpu::Timeouts { ready, plugged: self.config.hotplug_timeout.min(ready) };
        let injected = self.gpus.inject_devices(&mut spec, &devices, timeouts, &self.paths).await;
        for warning in injected.map_err(|error| error.during(&format!("container {id}")))? {
            log::warn!("container {id}: {warning}");
            self.event("container-warning", &id, &warning);
        }

        let agent = Arc::clone(self);
        let undoing = Arc::clone(self);
        let process = request.OCI.Process.as_ref().filter(|process| process.Terminal);
        let size = process.and_then(|process| process.ConsoleSize.as_ref()).and_then(winsize);
        let job = async move { agent.create_from_spec(request, spec, functions, size).await };
        background::to_completion_or_undo(job, move |container: Arc<Container>| async move {
            log::warn!("container {}: caller disconnected during creation; removing it", container.id);
            if let Err(error) = remove::remove(&undoing, &container, remove::KILL_TIMEOUT).await {
                log::error!("container {}: {error}", container.id);
            }
        })
        .await
        .map(|_| ())
    }

    async fn create_from_spec(
        self: Arc<Self>,
        mut request: CreateContainerRequest,
        mut spec: Spec,
        functions: Functions,
        size: Option<Winsize>,
    ) -> Result<Arc<Container>> {
        let id = request.container_id.as_str();
        let internal = |error: oci_spec::OciSpecError| Error::internal(error.to_string());
        for why in devices::allow(&mut spec).map_err(internal)? {
            log::warn!("container {id}: device {why} and is denied");
        }
        hooks::append(&mut spec, &self.guest_hooks());
        // Stays open until the container is created.
        let processes = if request.sandbox_pidns { self.process_namespace().await? } else { None };
        oci_config::namespaces(&mut spec, &self.shared_namespaces(processes.as_ref()))?;
        let cgroup = {
            let linux = spec.linux_mut().get_or_insert_default();
            let cgroup = oci_config::cgroup(linux.cgroups_path().as_deref().unwrap_or("".as_ref()), id)?;
            linux.set_cgroups_path(Some(cgroup.clone()));
            self.paths.cgroups.join(cgroup.strip_prefix("/").unwrap_or(&cgroup))
        };
        if let Some(process) = spec.process_mut() {
            let removed = CapabilitySet::own().restrict(process);
            if !removed.is_empty() {
                let warning =
                    format!("capabilities {} are not granted: the agent does not have them", removed.join(", "));
                log::warn!("container {id}: {warning}");
                self.event("container-warning", id, &warning);
            }
        }
        let process = spec.process().clone().unwrap_or_default();
        let terminal = process.terminal().unwrap_or(false);
        let first = Arc::new(Process::new(terminal));
        let capabilities = process.capabilities().clone();
        let container = Container::new(id, self.paths.bundle(id), cgroup, capabilities, Arc::clone(&first));
        let container = Arc::new(container.with_functions(functions));
        self.add(&container)?;
        self.names.add(id, spec.annotations().as_ref().unwrap_or(&Default::default()));
        let storages = std::mem::take(&mut request.storages);
        let early_cgroup = EarlyCgroup::start(&container.cgroup);
        let created = self.create_process(&container, &first, storages, spec, terminal).await;
        early_cgroup.finish(created.is_ok()).await;
        let master = match created {
            Ok(master) => master,
            Err(error) => {
                remove::clear(&self, &container).await;
                return Err(error);
            }
        };
        match self.finish_creation(&container, &first, &request.shared_mounts, master, size).await {
            Ok(()) => {
                self.event("container-created", &container.id, "");
                Ok(container)
            }
            Err(mut error) => {
                if let Err(left) = remove::undo(&self, &container).await {
                    error.message = format!("{}; failed to remove the container: {left}", error.message);
                }
                Err(error)
            }
        }
    }

    /// Performs all steps up to the container's process, which blocks until StartContainer; returns
    /// its terminal's master.
    async fn create_process(
        &self,
        container: &Arc<Container>,
        first: &Process,
        storages: Vec<Storage>,
        mut spec: Spec,
        terminal: bool,
    ) -> Result<Option<OwnedFd>> {
        let root = spec.root().as_ref().map(|root| root.path().clone());
        let root = root.ok_or_else(|| Error::invalid("OCI configuration: Root is missing"))?;
        let devices = devices::rules(&spec)?;
        container.set_storages(self.storages.add_all(storages).await?);
        let hooks = spec.hooks().is_some();
        bundle::create(&container.bundle, &mut spec)?;
        let ends = if terminal { PipeEnds(Vec::new()) } else { first.create_pipes(self.config.pipe_size).await? };
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
        self.create_shared_mounts(mounts, container).await?;
        container.advance(&[Phase::Creating], Phase::Created).map(|_| ())
    }

    /// Starts a container's program.
    ///
    /// # Errors
    /// The container does not exist, or is started already.
    pub async fn start_container(self: &Arc<Self>, id: &str) -> Result<()> {
        let container = self.container(id)?;
        container.advance(&[Phase::Created], Phase::Started)?;
        self.oom.watch(&container.id, &container.cgroup);
        let agent = Arc::clone(self);
        background::to_completion(async move {
            let call = Call::Start { container: container.id.clone() };
            match agent.runtime.call(call, &[]).await {
                Ok(_) => {
                    agent.event("container-started", &container.id, "");
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
}

/// Converts the size of a terminal; a size with a zero is none.
pub(crate) fn winsize(size: &firstlight_agent_api::oci::Box) -> Option<Winsize> {
    let rows = u16::try_from(size.Height).ok().filter(|rows| *rows > 0)?;
    let columns = u16::try_from(size.Width).ok().filter(|columns| *columns > 0)?;
    Some(Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })
}

/// `pivot_root` fails if the root mount has no parent, like the kernel's first root. PID 1 mounts
/// the guest's root on top of it before it starts this process, so the answer is constant.
fn root_is_initramfs() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    let read = || std::fs::read_to_string("/proc/self/mountinfo").is_ok_and(|table| without_parent(&table));
    *ANSWER.get_or_init(read)
}

/// Returns whether the topmost mount of `/` is its own parent.
fn without_parent(mountinfo: &str) -> bool {
    let fields = |line: &str| line.split(' ').take(5).map(str::to_owned).collect::<Vec<_>>();
    let top = mountinfo.lines().map(fields).rfind(|fields| fields.get(4).is_some_and(|target| target == "/"));
    top.is_some_and(|fields| fields[0] == fields[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_that_are_not_plain_names_are_rejected() {
        for good in ["a1", "0b", "k8s_pause.1-x", &"x".repeat(255)] {
            check_id(good).unwrap();
        }
        for bad in ["", "a", ".a", "-a", "a/b", "../a", "a b", "ä1", "shared", &"x".repeat(256)] {
            assert!(check_id(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn initramfs_root_is_detected() {
        assert!(without_parent("1 1 0:1 / / rw - rootfs rootfs rw\n22 1 0:2 / /proc rw - proc proc rw\n"));
        assert!(!without_parent("1 1 0:1 / / rw - rootfs rootfs rw\n30 1 0:9 / / rw - tmpfs tmpfs rw\n"));
        assert!(!without_parent("29 1 0:2 / / rw,relatime - rootfs none rw\n31 29 0:20 / /proc rw - proc proc rw\n"));
        assert!(!without_parent("24 1 254:0 / / ro shared:1 - erofs /dev/vda ro\n"));
        assert!(!without_parent(""));
    }

    #[test]
    fn invalid_terminal_sizes_are_none() {
        let size = |height, width| {
            winsize(&firstlight_agent_api::oci::Box { Height: height, Width: width, ..Default::default() })
        };
        assert_eq!(size(24, 80).map(|size| (size.ws_row, size.ws_col)), Some((24, 80)));
        assert!(size(0, 80).is_none() && size(24, 70_000).is_none());
    }

    proptest! {
        #[test]
        fn accepted_id_is_one_path_component(id in "\\PC{0,20}") {
            if check_id(&id).is_ok() {
                let path = std::path::Path::new("/x").join(&id);
                prop_assert_eq!(path.parent(), Some(std::path::Path::new("/x")));
                prop_assert!(id != "." && id != "..");
            }
        }
    }
}
