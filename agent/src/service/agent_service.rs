//! `grpc.AgentService`.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use firstlight_agent_api::agent::{
    AddSwapPathRequest, AddSwapRequest, AgentDetails, CloseStdinRequest, CreateContainerRequest, CreateSandboxRequest,
    DestroySandboxRequest, ExecProcessRequest, GetOOMEventRequest, GuestDetailsRequest, GuestDetailsResponse, OOMEvent,
    OnlineCPUMemRequest, PauseContainerRequest, ReadStreamRequest, ReadStreamResponse, RemoveContainerRequest,
    RemoveStaleVirtiofsShareMountsRequest, ResumeContainerRequest, SignalProcessRequest, StartContainerRequest,
    StatsContainerRequest, StatsContainerResponse, TtyWinResizeRequest, UpdateContainerRequest,
    UpdateEphemeralMountsRequest, VolumeStatsRequest, WaitProcessRequest, WaitProcessResponse, WriteStreamRequest,
    WriteStreamResponse,
};
use firstlight_agent_api::agent_ttrpc::AgentService;
use firstlight_agent_api::csi::VolumeStatsResponse;
use protobuf::well_known_types::empty::Empty;
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext;

use super::VERSION;
use crate::agent::Agent;
use crate::error::Error;
use crate::{devices, stats, storage, work};

pub(super) struct Calls(pub(super) Arc<Agent>);

type Reply<T> = ttrpc::Result<T>;

/// The caller's deadline; 0 is none.
fn timeout(context: &TtrpcContext) -> Option<Duration> {
    u64::try_from(context.timeout_nano).ok().filter(|nanos| *nanos > 0).map(Duration::from_nanos)
}

fn wanted(len: u32) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

fn unimplemented(what: &str) -> ttrpc::Error {
    Error::new(Code::UNIMPLEMENTED, what).into()
}

#[async_trait]
impl AgentService for Calls {
    async fn create_sandbox(&self, _: &TtrpcContext, request: CreateSandboxRequest) -> Reply<Empty> {
        let agent = Arc::clone(&self.0);
        Ok(work::whole(async move { agent.create_sandbox(request).await }).await.map(|()| Empty::new())?)
    }

    async fn destroy_sandbox(&self, _: &TtrpcContext, _: DestroySandboxRequest) -> Reply<Empty> {
        Ok(self.0.destroy_sandbox().await.map(|()| Empty::new())?)
    }

    async fn create_container(&self, context: &TtrpcContext, request: CreateContainerRequest) -> Reply<Empty> {
        Ok(self.0.create_container(request, timeout(context)).await.map(|()| Empty::new())?)
    }

    async fn start_container(&self, _: &TtrpcContext, request: StartContainerRequest) -> Reply<Empty> {
        Ok(self.0.start_container(&request.container_id).await.map(|()| Empty::new())?)
    }

    async fn remove_container(&self, _: &TtrpcContext, request: RemoveContainerRequest) -> Reply<Empty> {
        Ok(self.0.remove_container(&request.container_id, request.timeout).await.map(|()| Empty::new())?)
    }

    async fn exec_process(&self, _: &TtrpcContext, request: ExecProcessRequest) -> Reply<Empty> {
        Ok(self.0.exec_process(request).await.map(|()| Empty::new())?)
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> Reply<Empty> {
        let SignalProcessRequest { container_id, exec_id, signal, .. } = &request;
        Ok(self.0.signal_process(container_id, exec_id, *signal).await.map(|()| Empty::new())?)
    }

    async fn wait_process(&self, _: &TtrpcContext, request: WaitProcessRequest) -> Reply<WaitProcessResponse> {
        let status = self.0.wait_process(&request.container_id, &request.exec_id).await?;
        Ok(WaitProcessResponse { status, ..Default::default() })
    }

    async fn write_stdin(&self, _: &TtrpcContext, request: WriteStreamRequest) -> Reply<WriteStreamResponse> {
        let len = u32::try_from(request.data.len()).unwrap_or(u32::MAX);
        self.0.write_stdin(&request.container_id, &request.exec_id, request.data).await?;
        Ok(WriteStreamResponse { len, ..Default::default() })
    }

    async fn close_stdin(&self, _: &TtrpcContext, request: CloseStdinRequest) -> Reply<Empty> {
        Ok(self.0.write_stdin(&request.container_id, &request.exec_id, Vec::new()).await.map(|()| Empty::new())?)
    }

    async fn read_stdout(&self, _: &TtrpcContext, request: ReadStreamRequest) -> Reply<ReadStreamResponse> {
        let process = self.0.container(&request.container_id)?.readable(&request.exec_id)?;
        let data = process.stdout.read(wanted(request.len)).await?;
        Ok(ReadStreamResponse { data, ..Default::default() })
    }

    async fn read_stderr(&self, _: &TtrpcContext, request: ReadStreamRequest) -> Reply<ReadStreamResponse> {
        let process = self.0.container(&request.container_id)?.readable(&request.exec_id)?;
        let data = process.stderr.read(wanted(request.len)).await?;
        Ok(ReadStreamResponse { data, ..Default::default() })
    }

    async fn tty_win_resize(&self, _: &TtrpcContext, request: TtyWinResizeRequest) -> Reply<Empty> {
        let TtyWinResizeRequest { container_id, exec_id, row, column, .. } = &request;
        Ok(self.0.resize(container_id, exec_id, *row, *column).map(|()| Empty::new())?)
    }

    async fn pause_container(&self, _: &TtrpcContext, request: PauseContainerRequest) -> Reply<Empty> {
        Ok(self.0.pause_container(&request.container_id).await.map(|()| Empty::new())?)
    }

    async fn resume_container(&self, _: &TtrpcContext, request: ResumeContainerRequest) -> Reply<Empty> {
        Ok(self.0.resume_container(&request.container_id).await.map(|()| Empty::new())?)
    }

    async fn update_container(&self, _: &TtrpcContext, request: UpdateContainerRequest) -> Reply<Empty> {
        let resources = request.resources.into_option();
        Ok(self.0.update_container(&request.container_id, resources).await.map(|()| Empty::new())?)
    }

    async fn stats_container(&self, _: &TtrpcContext, request: StatsContainerRequest) -> Reply<StatsContainerResponse> {
        let container = self.0.container(&request.container_id)?;
        let sysfs = self.0.paths.sysfs.clone();
        Ok(work::blocking(move || Ok(stats::read(&container.cgroup, &sysfs))).await?)
    }

    async fn get_oom_event(&self, context: &TtrpcContext, _: GetOOMEventRequest) -> Reply<OOMEvent> {
        Ok(OOMEvent { container_id: self.0.oom.next(&context.connection_data).await, ..Default::default() })
    }

    async fn get_guest_details(&self, _: &TtrpcContext, request: GuestDetailsRequest) -> Reply<GuestDetailsResponse> {
        Ok(details(&request, &self.0.paths.sysfs))
    }

    async fn online_cpu_mem(&self, _: &TtrpcContext, request: OnlineCPUMemRequest) -> Reply<Empty> {
        // Memory comes online by itself (the guest's kernel is built so); CPUs
        // are there from the start or not at all.
        let online = fs::read_to_string(self.0.paths.sysfs.join("devices/system/cpu/online")).unwrap_or_default();
        if request.nb_cpus <= count(online.trim()) {
            return Ok(Empty::new());
        }
        Err(unimplemented("CPU hot-plug: give the VM its CPUs at the start (static_sandbox_resource_mgmt)"))
    }

    async fn add_swap(&self, _: &TtrpcContext, request: AddSwapRequest) -> Reply<Empty> {
        Ok(self.0.add_swap(&request.PCIPath).await.map(|()| Empty::new())?)
    }

    async fn add_swap_path(&self, _: &TtrpcContext, request: AddSwapPathRequest) -> Reply<Empty> {
        Ok(self.0.add_swap_path(&request.path).await.map(|()| Empty::new())?)
    }

    async fn update_ephemeral_mounts(&self, _: &TtrpcContext, request: UpdateEphemeralMountsRequest) -> Reply<Empty> {
        let agent = Arc::clone(&self.0);
        Ok(work::whole(async move { agent.storages.update(request.storages).await }).await.map(|()| Empty::new())?)
    }

    async fn remove_stale_virtiofs_share_mounts(
        &self,
        _: &TtrpcContext,
        _: RemoveStaleVirtiofsShareMountsRequest,
    ) -> Reply<Empty> {
        Ok(storage::look_for_stale(&self.0.paths.run).await.map(|()| Empty::new())?)
    }

    async fn get_volume_stats(&self, _: &TtrpcContext, request: VolumeStatsRequest) -> Reply<VolumeStatsResponse> {
        Ok(storage::stats(self.0.paths.run.clone(), &request.volume_guest_path).await?)
    }
}

fn details(request: &GuestDetailsRequest, sysfs: &Path) -> GuestDetailsResponse {
    let memory = sysfs.join("devices/system/memory");
    let mut reply = GuestDetailsResponse::new();
    if request.mem_block_size {
        let text = fs::read_to_string(memory.join("block_size_bytes")).unwrap_or_default();
        reply.mem_block_size_bytes = u64::from_str_radix(text.trim(), 16).unwrap_or(0);
    }
    if request.mem_hotplug_probe {
        reply.support_mem_hotplug_probe = memory.join("probe").exists();
    }
    reply.agent_details = Some(AgentDetails {
        version: VERSION.to_owned(),
        init_daemon: false,
        device_handlers: devices::kinds().map(str::to_owned).collect(),
        storage_handlers: storage::drivers().map(str::to_owned).collect(),
        supports_seccomp: true,
        ..Default::default()
    })
    .into();
    reply
}

/// How many numbers a list such as `0-3,7` has.
fn count(list: &str) -> u32 {
    let len = |range: &str| -> u32 {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<u32>(), last.parse::<u32>()) {
            (Ok(first), Ok(last)) if first <= last => (last - first).saturating_add(1),
            _ => 0,
        }
    };
    list.split(',').map(len).fold(0, u32::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_counted() {
        for (list, cpus) in [("0", 1), ("0-3", 4), ("0-3,7", 5), ("", 0), ("3-1", 0), ("x", 0)] {
            assert_eq!(count(list), cpus, "{list}");
        }
    }

    #[test]
    fn details_answer_what_was_asked() {
        let root = tempfile::tempdir().unwrap();
        let memory = root.path().join("devices/system/memory");
        fs::create_dir_all(&memory).unwrap();
        fs::write(memory.join("block_size_bytes"), "8000000\n").unwrap();
        let request = GuestDetailsRequest { mem_block_size: true, mem_hotplug_probe: true, ..Default::default() };
        let reply = details(&request, root.path());
        assert_eq!((reply.mem_block_size_bytes, reply.support_mem_hotplug_probe), (0x800_0000, false));
        assert!(reply.agent_details.storage_handlers.contains(&"virtio-fs".to_owned()));
        assert_eq!(details(&GuestDetailsRequest::new(), root.path()).mem_block_size_bytes, 0);
    }
}
