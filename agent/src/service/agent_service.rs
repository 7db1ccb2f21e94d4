//! `grpc.AgentService`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use firstlight_agent_api::agent::{
    AddARPNeighborsRequest, GetIPTablesRequest, GetIPTablesResponse, Interfaces, ListInterfacesRequest,
    ListRoutesRequest, Routes, SetIPTablesRequest, SetIPTablesResponse, UpdateInterfaceRequest, UpdateRoutesRequest,
};
use firstlight_agent_api::agent::{
    AddSwapPathRequest, AddSwapRequest, CloseStdinRequest, CopyFileRequest, CreateContainerRequest,
    CreateSandboxRequest, DestroySandboxRequest, ExecProcessRequest, GetDiagnosticDataRequest,
    GetDiagnosticDataResponse, GetMetricsRequest, GetOOMEventRequest, GuestDetailsRequest, GuestDetailsResponse,
    MemHotplugByProbeRequest, Metrics, OOMEvent, OnlineCPUMemRequest, PauseContainerRequest, ReadStreamRequest,
    ReadStreamResponse, RemoveContainerRequest, RemoveStaleVirtiofsShareMountsRequest, ReseedRandomDevRequest,
    ResumeContainerRequest, SetGuestDateTimeRequest, SignalProcessRequest, StartContainerRequest,
    StatsContainerRequest, StatsContainerResponse, TtyWinResizeRequest, UpdateContainerRequest,
    UpdateEphemeralMountsRequest, VolumeStatsRequest, WaitProcessRequest, WaitProcessResponse, WriteStreamRequest,
    WriteStreamResponse,
};
use firstlight_agent_api::agent_ttrpc::AgentService;
use firstlight_agent_api::csi::VolumeStatsResponse;
use firstlight_agent_api::types::Interface;
use protobuf::well_known_types::empty::Empty;
use ttrpc::r#async::TtrpcContext;

use crate::agent::Agent;
use crate::containers::{freeze, update};
use crate::guest::{date, details, diagnostic, entropy, probe};
use crate::{background, stats, storage};

pub(super) struct Calls(pub(super) Arc<Agent>);

type Reply<T> = ttrpc::Result<T>;

/// Returns the caller's timeout; 0 means none.
fn timeout(context: &TtrpcContext) -> Option<Duration> {
    u64::try_from(context.timeout_nano).ok().filter(|nanos| *nanos > 0).map(Duration::from_nanos)
}

fn read_limit(len: u32) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

#[async_trait]
impl AgentService for Calls {
    async fn create_sandbox(&self, _: &TtrpcContext, request: CreateSandboxRequest) -> Reply<Empty> {
        Ok(self.0.create_sandbox(request).await.map(|()| Empty::new())?)
    }

    async fn destroy_sandbox(&self, _: &TtrpcContext, _: DestroySandboxRequest) -> Reply<Empty> {
        Ok(self.0.destroy_sandbox().await.map(|()| Empty::new())?)
    }

    async fn create_container(&self, context: &TtrpcContext, request: CreateContainerRequest) -> Reply<Empty> {
        Ok(self.0.containers.create(request, timeout(context)).await.map(|()| Empty::new())?)
    }

    async fn start_container(&self, _: &TtrpcContext, request: StartContainerRequest) -> Reply<Empty> {
        Ok(self.0.containers.start(&request.container_id).await.map(|()| Empty::new())?)
    }

    async fn remove_container(&self, _: &TtrpcContext, request: RemoveContainerRequest) -> Reply<Empty> {
        Ok(self.0.containers.remove(&request.container_id, request.timeout).await.map(|()| Empty::new())?)
    }

    async fn exec_process(&self, _: &TtrpcContext, request: ExecProcessRequest) -> Reply<Empty> {
        Ok(self.0.processes.exec(request).await.map(|()| Empty::new())?)
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> Reply<Empty> {
        let SignalProcessRequest { container_id, exec_id, signal, .. } = &request;
        Ok(self.0.processes.signal(container_id, exec_id, *signal).await.map(|()| Empty::new())?)
    }

    async fn wait_process(&self, _: &TtrpcContext, request: WaitProcessRequest) -> Reply<WaitProcessResponse> {
        let status = self.0.processes.wait(&request.container_id, &request.exec_id).await?;
        Ok(WaitProcessResponse { status, ..Default::default() })
    }

    async fn write_stdin(&self, _: &TtrpcContext, request: WriteStreamRequest) -> Reply<WriteStreamResponse> {
        let len = u32::try_from(request.data.len()).unwrap_or(u32::MAX);
        self.0.processes.write_stdin(&request.container_id, &request.exec_id, request.data).await?;
        Ok(WriteStreamResponse { len, ..Default::default() })
    }

    async fn close_stdin(&self, _: &TtrpcContext, request: CloseStdinRequest) -> Reply<Empty> {
        let closed = self.0.processes.write_stdin(&request.container_id, &request.exec_id, Vec::new()).await;
        Ok(closed.map(|()| Empty::new())?)
    }

    async fn read_stdout(&self, _: &TtrpcContext, request: ReadStreamRequest) -> Reply<ReadStreamResponse> {
        let ReadStreamRequest { container_id, exec_id, len, .. } = &request;
        let data = self.0.processes.read_stdout(container_id, exec_id, read_limit(*len)).await?;
        Ok(ReadStreamResponse { data, ..Default::default() })
    }

    async fn read_stderr(&self, _: &TtrpcContext, request: ReadStreamRequest) -> Reply<ReadStreamResponse> {
        let ReadStreamRequest { container_id, exec_id, len, .. } = &request;
        let data = self.0.processes.read_stderr(container_id, exec_id, read_limit(*len)).await?;
        Ok(ReadStreamResponse { data, ..Default::default() })
    }

    async fn tty_win_resize(&self, _: &TtrpcContext, request: TtyWinResizeRequest) -> Reply<Empty> {
        let TtyWinResizeRequest { container_id, exec_id, row, column, .. } = &request;
        Ok(self.0.processes.resize(container_id, exec_id, *row, *column).map(|()| Empty::new())?)
    }

    async fn pause_container(&self, _: &TtrpcContext, request: PauseContainerRequest) -> Reply<Empty> {
        let container = self.0.sandbox.container(&request.container_id)?;
        Ok(freeze::pause(container).await.map(|()| Empty::new())?)
    }

    async fn resume_container(&self, _: &TtrpcContext, request: ResumeContainerRequest) -> Reply<Empty> {
        let container = self.0.sandbox.container(&request.container_id)?;
        Ok(freeze::resume(container).await.map(|()| Empty::new())?)
    }

    async fn update_container(&self, _: &TtrpcContext, request: UpdateContainerRequest) -> Reply<Empty> {
        let container = self.0.sandbox.container(&request.container_id)?;
        Ok(update::update(container, request.resources.into_option()).await.map(|()| Empty::new())?)
    }

    async fn update_interface(&self, _: &TtrpcContext, request: UpdateInterfaceRequest) -> Reply<Interface> {
        Ok(self.0.network.update_interface(request).await?)
    }

    async fn update_routes(&self, _: &TtrpcContext, request: UpdateRoutesRequest) -> Reply<Routes> {
        Ok(self.0.network.update_routes(request).await?)
    }

    async fn list_interfaces(&self, _: &TtrpcContext, _: ListInterfacesRequest) -> Reply<Interfaces> {
        Ok(self.0.network.list_interfaces().await?)
    }

    async fn list_routes(&self, _: &TtrpcContext, _: ListRoutesRequest) -> Reply<Routes> {
        Ok(self.0.network.list_routes().await?)
    }

    async fn add_arp_neighbors(&self, _: &TtrpcContext, request: AddARPNeighborsRequest) -> Reply<Empty> {
        Ok(self.0.network.add_neighbours(request).await.map(|()| Empty::new())?)
    }

    async fn get_ip_tables(&self, _: &TtrpcContext, request: GetIPTablesRequest) -> Reply<GetIPTablesResponse> {
        Ok(GetIPTablesResponse { data: self.0.network.get_iptables(request).await?, ..Default::default() })
    }

    async fn set_ip_tables(&self, _: &TtrpcContext, request: SetIPTablesRequest) -> Reply<SetIPTablesResponse> {
        Ok(SetIPTablesResponse { data: self.0.network.set_iptables(request).await?, ..Default::default() })
    }

    async fn stats_container(&self, _: &TtrpcContext, request: StatsContainerRequest) -> Reply<StatsContainerResponse> {
        let container = self.0.sandbox.container(&request.container_id)?;
        let sysfs = self.0.paths.sysfs.clone();
        Ok(background::blocking(move || Ok(stats::read(&container.cgroup, &sysfs))).await?)
    }

    async fn get_oom_event(&self, context: &TtrpcContext, _: GetOOMEventRequest) -> Reply<OOMEvent> {
        Ok(OOMEvent { container_id: self.0.oom.next(&context.connection_data).await, ..Default::default() })
    }

    async fn get_guest_details(&self, _: &TtrpcContext, request: GuestDetailsRequest) -> Reply<GuestDetailsResponse> {
        Ok(details::details(&request, &self.0.paths.sysfs))
    }

    async fn online_cpu_mem(&self, _: &TtrpcContext, request: OnlineCPUMemRequest) -> Reply<Empty> {
        Ok(self.0.cpus_and_memory.online(request).await.map(|()| Empty::new())?)
    }

    async fn mem_hotplug_by_probe(&self, _: &TtrpcContext, request: MemHotplugByProbeRequest) -> Reply<Empty> {
        let sysfs = self.0.paths.sysfs.clone();
        let probed = background::blocking(move || probe::probe(&sysfs, &request.memHotplugProbeAddr)).await;
        Ok(probed.map(|()| Empty::new())?)
    }

    async fn reseed_random_dev(&self, _: &TtrpcContext, request: ReseedRandomDevRequest) -> Reply<Empty> {
        let root = self.0.paths.root.clone();
        Ok(background::blocking(move || entropy::reseed(&root, &request.data)).await.map(|()| Empty::new())?)
    }

    async fn set_guest_date_time(&self, _: &TtrpcContext, request: SetGuestDateTimeRequest) -> Reply<Empty> {
        Ok(date::set(request.Sec, request.Usec).map(|()| Empty::new())?)
    }

    async fn copy_file(&self, _: &TtrpcContext, request: CopyFileRequest) -> Reply<Empty> {
        let (copies, share) = (Arc::clone(&self.0.copies), self.0.paths.share());
        let copied = background::blocking(move || copies.handle(&share, &request)).await;
        Ok(copied.map(|()| Empty::new())?)
    }

    async fn get_diagnostic_data(
        &self,
        _: &TtrpcContext,
        request: GetDiagnosticDataRequest,
    ) -> Reply<GetDiagnosticDataResponse> {
        let Agent { sandbox, paths, .. } = &*self.0;
        let data = diagnostic::read(sandbox, &paths.run, &request.log_type, &request.container_id).await?;
        Ok(GetDiagnosticDataResponse { data, ..Default::default() })
    }

    async fn get_metrics(&self, _: &TtrpcContext, _: GetMetricsRequest) -> Reply<Metrics> {
        Ok(Metrics { metrics: self.0.metrics.collect(self.0.sandbox.containers().len()).await?, ..Default::default() })
    }

    async fn add_swap(&self, _: &TtrpcContext, request: AddSwapRequest) -> Reply<Empty> {
        Ok(self.0.swap.add_disk(&request.PCIPath).await.map(|()| Empty::new())?)
    }

    async fn add_swap_path(&self, _: &TtrpcContext, request: AddSwapPathRequest) -> Reply<Empty> {
        Ok(self.0.swap.add_path(&request.path).await.map(|()| Empty::new())?)
    }

    async fn update_ephemeral_mounts(&self, _: &TtrpcContext, request: UpdateEphemeralMountsRequest) -> Reply<Empty> {
        let storages = Arc::clone(&self.0.storages);
        let updated = background::to_completion(async move { storages.update(request.storages).await }).await;
        Ok(updated.map(|()| Empty::new())?)
    }

    async fn remove_stale_virtiofs_share_mounts(
        &self,
        _: &TtrpcContext,
        _: RemoveStaleVirtiofsShareMountsRequest,
    ) -> Reply<Empty> {
        Ok(storage::refresh_stale(&self.0.paths.run).await.map(|()| Empty::new())?)
    }

    async fn get_volume_stats(&self, _: &TtrpcContext, request: VolumeStatsRequest) -> Reply<VolumeStatsResponse> {
        Ok(storage::stats(self.0.paths.run.clone(), &request.volume_guest_path).await?)
    }
}
