//! Shared code of scenarios that call the agent as a shim does.

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

/// Timeout of one call; the guest's own deadlines are shorter.
pub(crate) const CALL: Duration = Duration::from_secs(90);

/// Size of a disk without a file system, MiB.
pub(crate) const SIZE: u32 = 16;

/// A temporary directory with one guest's disks and shared directory.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn make() -> Self {
        let files = Self(tempfile::Builder::new().prefix("firstlight-disks-").tempdir().unwrap());
        fs::create_dir(files.shared()).unwrap();
        files
    }

    /// Returns the directory that is shared with the guest.
    pub(crate) fn shared(&self) -> PathBuf {
        self.0.path().join("shared")
    }

    /// Returns the path of a file outside of the shared directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Creates a disk whose first line is its name.
    pub(crate) fn disk(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, format!("{name}\n")).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(u64::from(SIZE) << 20).unwrap();
        path
    }

    /// Returns a scenario of the image `variant` with these devices and the shared directory.
    pub(crate) fn scenario(&self, variant: &str, hardware: Vec<Device>) -> Scenario {
        self.scenario_of(lab().variant(variant).unwrap().initrd, hardware)
    }

    /// Like [`Files::scenario`], with an image that is already built.
    pub(crate) fn scenario_of(&self, initrd: PathBuf, hardware: Vec<Device>) -> Scenario {
        let initrd = Some(initrd);
        let shares = vec![Share { tag: SHARED_TAG.into(), dir: self.shared() }];
        Scenario::guest(Guest { hardware, shares, initrd, ..Guest::default() })
    }

    /// Returns a request for a container that runs `script`; `devices` are (type, id or node, path in the container).
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
            // The host's device numbers, which the agent must replace with the guest's.
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

/// Waits until the boot has ended, so that all modules are loaded; returns a client of the agent, without a sandbox.
pub(crate) async fn booted(vm: &Vm) -> Agent {
    let booted = |record: &BootRecord| matches!(record.state, State::Ready | State::Degraded);
    let seen = timeout(Duration::from_secs(90), vm.console().wait_for(booted)).await;
    assert!(seen.is_ok_and(|seen| seen), "the guest has booted:\n{}", vm.console_tail());
    Agent::new(vm.connect(1024, Duration::from_secs(30)).await.unwrap(), CALL)
}

/// Like [`booted`], and creates a sandbox.
pub(crate) async fn ready(vm: &Vm) -> Agent {
    let agent = booted(vm).await;
    agent.create_sandbox("sandbox").await.unwrap();
    agent
}

/// Creates a container, which must fail; returns the error.
pub(crate) async fn refused(agent: &Agent, request: &CreateContainerRequest) -> String {
    let error = agent.calls().create_container(with_duration(CALL), request).await.unwrap_err();
    error.to_string()
}

/// Creates and starts a container.
pub(crate) async fn started(agent: &Agent, request: &CreateContainerRequest) {
    agent.calls().create_container(with_duration(CALL), request).await.unwrap();
    agent.start_container(&request.container_id).await.unwrap();
}

/// Waits until a started container has exited and removes it; returns its standard output.
pub(crate) async fn ended(agent: &Agent, id: &str) -> String {
    let output = agent.read_all(id, Output::Stdout, |_| ()).await.unwrap();
    agent.wait(id).await.unwrap();
    agent.remove_container(id).await.unwrap();
    output
}

/// Runs a container until it exits and removes it; returns its standard output.
pub(crate) async fn output(agent: &Agent, request: &CreateContainerRequest) -> String {
    started(agent, request).await;
    ended(agent, &request.container_id).await
}
