//! What scenarios share that speak to the agent as a shim does.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use firstlight::agent::{Agent, Output, SHARED_TAG};
use firstlight::container;
use firstlight_agent_api::agent::{CreateContainerRequest, Device as Request};
use firstlight_agent_api::oci::LinuxDevice;
use firstlight_boot_record::{BootRecord, State};
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;
use firstlight_oci::Image;
use firstlight_vm::{Device, Share, Vm};
use tempfile::TempDir;
use tokio::time::timeout;
use ttrpc::context::with_duration;

/// For one call; the guest's own deadlines are shorter.
pub(crate) const CALL: Duration = Duration::from_secs(90);

/// MiB of a disk without a file system.
pub(crate) const SIZE: u32 = 16;

/// The host's files of one guest.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn make() -> Self {
        let files = Self(tempfile::Builder::new().prefix("firstlight-disks-").tempdir().unwrap());
        fs::create_dir(files.shared()).unwrap();
        files
    }

    /// What the guest sees as its shared directory.
    pub(crate) fn shared(&self) -> PathBuf {
        self.0.path().join("shared")
    }

    /// A file of the host alone.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A disk that begins with its name.
    pub(crate) fn disk(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, format!("{name}\n")).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(u64::from(SIZE) << 20).unwrap();
        path
    }

    /// A guest of the image `variant` with these devices and the shared directory.
    pub(crate) fn scenario(&self, variant: &str, hardware: Vec<Device>) -> Scenario {
        self.scenario_of(lab().variant(variant).unwrap().initrd, hardware)
    }

    /// The same, of an image that is there.
    pub(crate) fn scenario_of(&self, initrd: PathBuf, hardware: Vec<Device>) -> Scenario {
        let initrd = Some(initrd);
        let shares = vec![Share { tag: SHARED_TAG.into(), dir: self.shared() }];
        Scenario::guest(Guest { hardware, shares, initrd, ..Guest::default() })
    }

    /// A request for a container that runs `script`; `devices` by type, id or node, and path.
    pub(crate) fn request(&self, id: &str, script: &str, devices: &[(&str, &str, &str)]) -> CreateContainerRequest {
        let image = Image::open(&lab().busybox_image).unwrap();
        let root = self.shared().join(id).join("rootfs");
        fs::create_dir_all(&root).unwrap();
        image.unpack(&root).unwrap();
        let command = ["/bin/sh", "-c", script].map(str::to_owned);
        let mut spec = container::spec(id, &image, &command, &[]);
        let mut request = CreateContainerRequest { container_id: id.into(), ..Default::default() };
        for (at, (kind, name, path)) in devices.iter().enumerate() {
            let mut device = Request { type_: (*kind).into(), container_path: (*path).into(), ..Default::default() };
            match *kind {
                "nvdimm" | "mmioblk" => device.vm_path = (*name).into(),
                "vfio-pci" | "vfio-pci-gk" => device.options = vec![(*name).into()],
                _ => device.id = (*name).into(),
            }
            request.devices.push(device);
            // The host's numbers, which mean something else in the guest.
            spec.Linux.mut_or_insert_default().Devices.push(LinuxDevice {
                Path: (*path).into(),
                Type: if kind.starts_with("vfio") { "c" } else { "b" }.into(),
                Major: 8,
                Minor: i64::try_from(at).unwrap() * 16,
                ..Default::default()
            });
        }
        request.OCI = Some(spec).into();
        request
    }
}

/// An agent without a sandbox, in a guest whose boot is over: its modules are in.
pub(crate) async fn booted(vm: &Vm) -> Agent {
    let booted = |record: &BootRecord| matches!(record.state, State::Ready | State::Degraded);
    let seen = timeout(Duration::from_secs(90), vm.console().wait_for(booted)).await;
    assert!(seen.is_ok_and(|seen| seen), "the guest has booted:\n{}", vm.console_tail());
    Agent::new(vm.connect(1024, Duration::from_secs(30)).await.unwrap(), CALL)
}

/// An agent with a sandbox, in such a guest.
pub(crate) async fn ready(vm: &Vm) -> Agent {
    let agent = booted(vm).await;
    agent.create_sandbox("sandbox").await.unwrap();
    agent
}

/// Why it was refused.
pub(crate) async fn refused(agent: &Agent, request: &CreateContainerRequest) -> String {
    let error = agent.calls().create_container(with_duration(CALL), request).await.unwrap_err();
    error.to_string()
}

/// Makes and starts a container.
pub(crate) async fn started(agent: &Agent, request: &CreateContainerRequest) {
    agent.calls().create_container(with_duration(CALL), request).await.unwrap();
    agent.start_container(&request.container_id).await.unwrap();
}

/// What a container that was started writes to its end.
pub(crate) async fn ended(agent: &Agent, id: &str) -> String {
    let output = agent.read_all(id, Output::Stdout).await.unwrap();
    agent.wait(id).await.unwrap();
    agent.remove_container(id).await.unwrap();
    output
}

/// What a container writes from its making to its end.
pub(crate) async fn output(agent: &Agent, request: &CreateContainerRequest) -> String {
    started(agent, request).await;
    ended(agent, &request.container_id).await
}
