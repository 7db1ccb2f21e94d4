//! The gRPC service.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::fabric_server::Fabric;
use firstlight_partitions::{Gpus, PlanError};
use firstlight_sys::nvfm;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::actor::{BoxedEngine, Handle, RequestError};
use crate::engine::{PartitionRequest, PartitionSelector};
use crate::error::EngineError;
use crate::error_class::ErrorClass;
use crate::metrics;
use crate::module_map_api;
use crate::snapshot::Step;
use crate::state::Change;
use crate::versions::{self, DriverMismatchPolicy, Versions};
use crate::view::View;

/// Queued events of a Watch stream.
const EVENTS: usize = 16;

/// The gRPC service in front of the engine's thread.
#[derive(Debug, Clone)]
pub struct Service {
    engine: Handle,
    versions: Arc<Versions>,
    guest_driver: DriverMismatchPolicy,
}

impl Service {
    /// Creates the service for this engine.
    #[must_use]
    pub fn new(engine: Handle, versions: Versions, guest_driver: DriverMismatchPolicy) -> Self {
        Self { engine, versions: Arc::new(versions), guest_driver }
    }

    /// Executes an operation of the engine.
    async fn call<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&mut BoxedEngine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, Status> {
        self.engine.call(operation).await.map_err(|error| status(&error))
    }

    /// Checks a tenant's driver version; returns warnings.
    fn check_guest_driver(&self, guest: &str) -> Result<Vec<String>, EngineError> {
        if guest.is_empty() || self.guest_driver == DriverMismatchPolicy::Ignore {
            return Ok(Vec::new());
        }
        if versions::first(guest).as_deref() != Some(guest) {
            return Err(EngineError::InvalidText {
                what: "guest driver's version",
                text: guest.chars().take(64).collect(),
            });
        }
        match self.versions.mismatch_with(guest) {
            // An unknown version of the fabric manager is no reason to refuse.
            Some(reason) if self.guest_driver == DriverMismatchPolicy::Refuse && self.versions.manager.is_some() => {
                Err(EngineError::GuestDriver(reason))
            }
            reason => Ok(reason.into_iter().collect()),
        }
    }
}

/// Returns the gRPC status code of an error.
fn code(error: &EngineError) -> Code {
    match error {
        EngineError::InvalidText { .. }
        | EngineError::Overlap(..)
        | EngineError::Plan(PlanError::NoSuchSize { .. } | PlanError::NoSuchSet { .. }) => Code::InvalidArgument,
        EngineError::RequestIdReused { .. } | EngineError::AssignmentEnded { .. } => Code::AlreadyExists,
        EngineError::InvalidProbe { .. }
        | EngineError::Map(firstlight_module_map::MapError::Claims(_) | firstlight_module_map::MapError::Serial(_)) => {
            Code::InvalidArgument
        }
        EngineError::UnverifiedMap { .. } | EngineError::Map(_) | EngineError::OtherBaseboard { .. } => {
            Code::FailedPrecondition
        }
        EngineError::UnknownPartition { .. }
        | EngineError::UnknownGpu { .. }
        | EngineError::SwitchNotFaulty { .. }
        | EngineError::AddressNotInMap { .. } => Code::NotFound,
        EngineError::Plan(PlanError::NoneFree { .. } | PlanError::Taken { .. }) => Code::ResourceExhausted,
        EngineError::OwnedByOther { .. } => Code::PermissionDenied,
        EngineError::Outage { .. }
        | EngineError::Unowned { .. }
        | EngineError::ActiveOverlap(..)
        | EngineError::FaultySwitch { .. }
        | EngineError::GuestDriver(_) => Code::FailedPrecondition,
        EngineError::OutcomeUnknown { .. } => Code::Unavailable,
        EngineError::FabricManager { error, .. } => match ErrorClass::of_error(error) {
            ErrorClass::Gone | ErrorClass::NotReady => Code::Unavailable,
            ErrorClass::WrongMode | ErrorClass::OtherVersion => Code::FailedPrecondition,
            _ => Code::Aborted,
        },
        EngineError::InvalidTable(_) | EngineError::InvalidPartition { .. } => Code::FailedPrecondition,
        EngineError::Journal(_) | EngineError::InvalidRecord(_) | EngineError::MapFile { .. } => Code::Internal,
    }
}

fn status(error: &RequestError) -> Status {
    let code = match error {
        RequestError::Engine(error) => code(error),
        RequestError::TimedOut { .. } => Code::DeadlineExceeded,
        RequestError::ShuttingDown => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn gpus(gpus: Gpus) -> api::Gpus {
    api::Gpus { ids: gpus.into() }
}

/// Parses a partition request.
fn parse_request(request: Option<api::PartitionRequest>, unverified_map: bool) -> Result<PartitionRequest, Status> {
    Ok(PartitionRequest { selector: parse_selector(request)?, unverified_map })
}

/// Parses the selector of a partition request.
fn parse_selector(request: Option<api::PartitionRequest>) -> Result<PartitionSelector, Status> {
    let selector = request.and_then(|request| request.selector);
    let selector = selector.ok_or_else(|| Status::invalid_argument("the request has no partition selector"))?;
    Ok(match selector {
        api::partition_request::Selector::Count(count) => PartitionSelector::Count(count),
        api::partition_request::Selector::Partition(id) => PartitionSelector::Partition(id),
        api::partition_request::Selector::Pci(api::PciAddresses { addresses }) => {
            PartitionSelector::Pci(module_map_api::addresses(&addresses)?)
        }
        api::partition_request::Selector::Gpus(gpus) => {
            let count = gpus.ids.len();
            let set = Gpus::of(gpus.ids).map_err(|error| Status::invalid_argument(error.to_string()))?;
            if usize::try_from(set.count()).ok() != Some(count) {
                return Err(Status::invalid_argument("a GPU is named twice"));
            }
            PartitionSelector::Gpus(set)
        }
    })
}

fn gpu(gpu: &nvfm::Gpu) -> api::Gpu {
    api::Gpu {
        physical_id: gpu.physical_id,
        uuid: gpu.uuid.clone(),
        pci: gpu.pci.clone(),
        links: gpu.links,
        max_links: gpu.max_links,
        line_rate_mbps: gpu.line_rate,
    }
}

fn partition(view: &View, listed: &nvfm::Partition) -> api::Partition {
    let set = view.fabric.table.get(listed.id).map_or(Gpus::NONE, |partition| partition.gpus);
    api::Partition {
        id: listed.id,
        gpus: listed.gpus.iter().map(gpu).collect(),
        active: listed.is_active,
        owner: view.state.assignments.get(&listed.id).map(|assignment| assignment.owner.clone()).unwrap_or_default(),
        in_progress: view.is_changing(listed.id),
        free: view.is_free(set),
    }
}

fn list(view: &View) -> Result<api::ListResponse, Status> {
    let Some(polled_at) = view.polled_at else {
        let reason = view.poll_error.as_deref().unwrap_or("the fabric manager was not polled yet");
        return Err(Status::unavailable(reason));
    };
    let free = view.free();
    Ok(api::ListResponse {
        partitions: view.fabric.listed.iter().map(|listed| partition(view, listed)).collect(),
        quarantined: view.state.quarantined.clone().into_iter().collect(),
        free_by_size: free.by_size.into_iter().collect(),
        largest_free: free.largest,
        baseboard: view.baseboard().unwrap_or_default().to_owned(),
        age_ms: millis(polled_at.elapsed()),
        error: view.poll_error.clone().unwrap_or_default(),
    })
}

fn health(view: &View, versions: &Versions) -> api::HealthResponse {
    let mut problems = view.problems();
    problems.extend(versions.problem());
    let in_progress = view.in_progress.map(|since| since.elapsed());
    // Links train within seconds; a call that takes longer hangs.
    if let Some(since) = in_progress.filter(|since| *since > Duration::from_secs(60)) {
        problems.push(format!(
            "the fabric manager has not answered to a change for {} s: look at its log; if it is stuck, restart it",
            since.as_secs()
        ));
    }
    api::HealthResponse {
        ok: problems.is_empty() && view.polled_at.is_some(),
        problems,
        fabric_manager: view.polled_at.is_some() && view.poll_error.is_none(),
        in_progress_ms: in_progress.map_or(0, |since| millis(since).max(1)),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        notes: view.notes(),
        fabric_manager_version: versions.manager.clone().unwrap_or_default(),
        driver_version: versions.driver.clone().unwrap_or_default(),
    }
}

fn step(step: &Step) -> api::Step {
    use api::step::Kind;
    let (kind, partition, owner) = match step {
        Step::Adopt { partition, owner, .. } => (Kind::Adopt, *partition, owner.clone()),
        Step::Change(Change::Activate { partition, owner, .. }) => (Kind::Activate, *partition, owner.clone()),
        Step::Change(Change::Deactivate { partition }) => (Kind::Deactivate, *partition, String::new()),
    };
    api::Step { kind: kind.into(), partition, owner }
}

/// Returns the events between two views.
fn events_between(before: Option<&View>, now: &View, versions: &Versions) -> Vec<api::event::Payload> {
    use api::event::Payload;
    let Some(before) = before.filter(|before| before.polled_at.is_some()) else {
        return list(now).map(Payload::State).into_iter().chain([Payload::Health(health(now, versions))]).collect();
    };
    let mut events = Vec::new();
    for listed in &now.fabric.listed {
        let is = partition(now, listed);
        let was = before.fabric.listed.iter().find(|one| one.id == listed.id).map(|one| partition(before, one));
        // `free` depends on other partitions.
        let without_free = |one: &api::Partition| api::Partition { free: false, ..one.clone() };
        if was.as_ref().map(without_free) != Some(without_free(&is)) {
            events.push(Payload::Partition(is));
        }
    }
    for (gpu, reason) in &now.state.quarantined {
        if before.state.quarantined.get(gpu) != Some(reason) {
            events.push(Payload::Quarantine(api::QuarantineChange { gpu: *gpu, reason: reason.clone() }));
        }
    }
    for gpu in before.state.quarantined.keys().filter(|gpu| !now.state.quarantined.contains_key(gpu)) {
        events.push(Payload::Quarantine(api::QuarantineChange { gpu: *gpu, reason: String::new() }));
    }
    let (was, is) = (health(before, versions), health(now, versions));
    if (was.ok, was.problems, was.notes) != (is.ok, is.problems.clone(), is.notes.clone()) {
        events.push(Payload::Health(is));
    }
    events
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Fabric for Service {
    async fn list(&self, _: Request<api::ListRequest>) -> Answer<api::ListResponse> {
        list(&self.engine.view()).map(Response::new)
    }

    async fn get(&self, request: Request<api::GetRequest>) -> Answer<api::Partition> {
        let id = request.into_inner().id;
        let found = list(&self.engine.view())?.partitions.into_iter().find(|one| one.id == id);
        found.map(Response::new).ok_or_else(|| Status::not_found(format!("there is no partition {id}")))
    }

    async fn plan(&self, request: Request<api::PlanRequest>) -> Answer<api::PlanResponse> {
        let api::PlanRequest { partition_request, unverified_map } = request.into_inner();
        let request = parse_request(partition_request, unverified_map)?;
        let choice = self.call(|engine| engine.plan(request)).await?;
        let (partition, set) = (choice.partition.id, choice.partition.gpus);
        let locations = module_map_api::locations(&self.engine.view(), set);
        Ok(Response::new(api::PlanResponse {
            partition,
            gpus: Some(gpus(set)),
            blocked_partitions: choice.blocked,
            locations,
        }))
    }

    async fn activate(&self, request: Request<api::ActivateRequest>) -> Answer<api::ActivateResponse> {
        let api::ActivateRequest { request_id, partition_request, owner, guest_driver, unverified_map } =
            request.into_inner();
        let warnings = self.check_guest_driver(&guest_driver).map_err(|error| status(&error.into()))?;
        let partition_request = parse_request(partition_request, unverified_map)?;
        let given = self.call(move |engine| engine.activate(&request_id, partition_request, &owner)).await?;
        let locations = module_map_api::locations(&self.engine.view(), given.gpus);
        let (partition, gpus) = (given.partition, Some(gpus(given.gpus)));
        Ok(Response::new(api::ActivateResponse {
            partition,
            gpus,
            already_done: given.already_done,
            warnings,
            locations,
        }))
    }

    async fn deactivate(&self, request: Request<api::DeactivateRequest>) -> Answer<api::DeactivateResponse> {
        let api::DeactivateRequest { request_id, partition, owner } = request.into_inner();
        let was_active = self.call(move |engine| engine.deactivate(&request_id, partition, &owner)).await?;
        Ok(Response::new(api::DeactivateResponse { was_active }))
    }

    async fn reconcile(&self, request: Request<api::ReconcileRequest>) -> Answer<api::ReconcileResponse> {
        let api::ReconcileRequest { request_id, desired, dry_run } = request.into_inner();
        let desired: Vec<_> = desired.into_iter().map(|one| (one.partition, one.owner)).collect();
        let steps = self.call(move |engine| match dry_run {
            true => engine.steps(&desired),
            false => engine.reconcile(&request_id, &desired),
        });
        let steps = steps.await?;
        Ok(Response::new(api::ReconcileResponse { steps: steps.iter().map(step).collect() }))
    }

    async fn quarantine(&self, request: Request<api::QuarantineRequest>) -> Answer<api::QuarantineResponse> {
        let api::QuarantineRequest { gpu, reason } = request.into_inner();
        self.call(move |engine| engine.quarantine(gpu, &reason)).await?;
        Ok(Response::new(api::QuarantineResponse {}))
    }

    async fn release(&self, request: Request<api::ReleaseRequest>) -> Answer<api::ReleaseResponse> {
        use api::release_request::Target;
        let nothing = || Status::invalid_argument("the request has no target");
        let was_quarantined = match request.into_inner().target.ok_or_else(nothing)? {
            Target::Gpu(gpu) => self.call(move |engine| engine.release(gpu)).await?,
            Target::Switch(switch) => {
                self.call(move |engine| engine.release_switch(&switch)).await?;
                true
            }
        };
        Ok(Response::new(api::ReleaseResponse { was_quarantined }))
    }

    async fn inventory(&self, _: Request<api::InventoryRequest>) -> Answer<api::InventoryResponse> {
        Ok(Response::new(module_map_api::inventory(&self.engine.view(), gpu)))
    }

    async fn set_module_map(&self, request: Request<api::SetModuleMapRequest>) -> Answer<api::SetModuleMapResponse> {
        let (request, update) = module_map_api::parse_update(request.into_inner())?;
        let result = self.call(move |engine| engine.set_map(&request, update)).await?;
        Ok(Response::new(module_map_api::update_response(&self.engine.view(), result)))
    }

    async fn forget_module_map(
        &self,
        request: Request<api::ForgetModuleMapRequest>,
    ) -> Answer<api::ForgetModuleMapResponse> {
        let request_id = request.into_inner().request_id;
        let existed = self.call(move |engine| engine.forget_map(&request_id)).await?;
        Ok(Response::new(api::ForgetModuleMapResponse { existed }))
    }

    async fn health(&self, _: Request<api::HealthRequest>) -> Answer<api::HealthResponse> {
        Ok(Response::new(health(&self.engine.view(), &self.versions)))
    }

    async fn metrics(&self, _: Request<api::MetricsRequest>) -> Answer<api::MetricsResponse> {
        Ok(Response::new(api::MetricsResponse { text: metrics::text(&self.engine.view()) }))
    }

    type WatchStream = ReceiverStream<Result<api::Event, Status>>;

    async fn watch(&self, _: Request<api::WatchRequest>) -> Answer<Self::WatchStream> {
        let (events, received) = mpsc::channel(EVENTS);
        tokio::spawn(send_events(self.engine.watch(), self.versions.clone(), events));
        Ok(Response::new(ReceiverStream::new(received)))
    }
}

/// Sends events until the receiver is dropped. A slow client misses intermediate states, but gets the last one
/// complete.
async fn send_events(
    mut views: watch::Receiver<View>,
    versions: Arc<Versions>,
    events: mpsc::Sender<Result<api::Event, Status>>,
) {
    let (mut before, mut sequence): (Option<View>, u64) = (None, 0);
    loop {
        let now = views.borrow_and_update().clone();
        for payload in events_between(before.as_ref(), &now, &versions) {
            sequence += 1;
            let time_ms = millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
            if events.send(Ok(api::Event { sequence, time_ms, payload: Some(payload) })).await.is_err() {
                return;
            }
        }
        before = Some(now);
        tokio::select! {
            changed = views.changed() => if changed.is_err() { return },
            () = events.closed() => return,
        }
    }
}
