//! The gRPC service.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::fabric_server::Fabric;
use firstlight_partitions::{Gpus, Refusal};
use firstlight_sys::nvfm;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::actor::{Handle, Unanswered};
use crate::engine::{Ask, Wish};
use crate::inventory;
use crate::look::Step;
use crate::meaning::Meaning;
use crate::metrics;
use crate::refused::Refused;
use crate::state::Change;
use crate::versions::{self, GuestDriver, Versions};
use crate::view::View;

/// Events that wait for whoever reads them slowly.
const EVENTS: usize = 16;

/// Answers for the engine's thread.
#[derive(Debug, Clone)]
pub struct Service {
    engine: Handle,
    versions: Arc<Versions>,
    guest_driver: GuestDriver,
}

impl Service {
    /// In front of this engine.
    #[must_use]
    pub fn new(engine: Handle, versions: Versions, guest_driver: GuestDriver) -> Self {
        Self { engine, versions: Arc::new(versions), guest_driver }
    }

    /// What a tenant is to be told of its driver.
    fn judge(&self, guest: &str) -> Result<Vec<String>, Refused> {
        if guest.is_empty() || self.guest_driver == GuestDriver::Ignore {
            return Ok(Vec::new());
        }
        if versions::first(guest).as_deref() != Some(guest) {
            return Err(Refused::Word { what: "guest driver's version", text: guest.chars().take(64).collect() });
        }
        match self.versions.against(guest) {
            // What is not known is no reason to refuse.
            Some(why) if self.guest_driver == GuestDriver::Refuse && self.versions.manager.is_some() => {
                Err(Refused::GuestDriver(why))
            }
            why => Ok(why.into_iter().collect()),
        }
    }
}

/// What a refusal is in gRPC's words.
fn code(refused: &Refused) -> Code {
    match refused {
        Refused::Word { .. }
        | Refused::Overlap(..)
        | Refused::Plan(Refusal::NoSize { .. } | Refusal::NoSuchSet { .. }) => Code::InvalidArgument,
        Refused::Request { .. } | Refused::Over { .. } => Code::AlreadyExists,
        Refused::Probe { .. }
        | Refused::Map(firstlight_module_map::Refused::Claims(_) | firstlight_module_map::Refused::Serial(_)) => {
            Code::InvalidArgument
        }
        Refused::Unverified { .. } | Refused::Map(_) | Refused::OtherBaseboard { .. } => Code::FailedPrecondition,
        Refused::NoPartition { .. } | Refused::NoGpu { .. } | Refused::NoSwitch { .. } | Refused::NotInMap { .. } => {
            Code::NotFound
        }
        Refused::Plan(Refusal::NoneFree { .. } | Refusal::Taken { .. }) => Code::ResourceExhausted,
        Refused::Held { .. } => Code::PermissionDenied,
        Refused::Outage { .. }
        | Refused::Foreign { .. }
        | Refused::Impossible(..)
        | Refused::Switch { .. }
        | Refused::GuestDriver(_) => Code::FailedPrecondition,
        Refused::Unsettled { .. } => Code::Unavailable,
        Refused::Fabric { error, .. } => match Meaning::of_error(error) {
            Meaning::Gone | Meaning::NotReady => Code::Unavailable,
            Meaning::WrongMode | Meaning::OtherVersion => Code::FailedPrecondition,
            _ => Code::Aborted,
        },
        Refused::Table(_) | Refused::Listed { .. } => Code::FailedPrecondition,
        Refused::Journal(_) | Refused::Record(_) | Refused::MapFile { .. } => Code::Internal,
    }
}

fn status(error: &Unanswered) -> Status {
    let code = match error {
        Unanswered::Refused(refused) => code(refused),
        Unanswered::Late { .. } => Code::DeadlineExceeded,
        Unanswered::Ends => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn gpus(gpus: Gpus) -> api::Gpus {
    api::Gpus { ids: gpus.into() }
}

/// What is asked for, and by which map.
fn wish(asked: Option<api::Ask>, unverified_map: bool) -> Result<Wish, Status> {
    Ok(Wish { ask: ask(asked)?, unverified_map })
}

/// What is asked for, if anything is.
fn ask(ask: Option<api::Ask>) -> Result<Ask, Status> {
    let what = ask.and_then(|ask| ask.what);
    let what = what.ok_or_else(|| Status::invalid_argument("the request says neither how many GPUs nor which"))?;
    Ok(match what {
        api::ask::What::Count(count) => Ask::Count(count),
        api::ask::What::Partition(id) => Ask::Partition(id),
        api::ask::What::Pci(api::PciAddresses { addresses }) => Ask::Pci(inventory::addresses(&addresses)?),
        api::ask::What::Gpus(gpus) => {
            let count = gpus.ids.len();
            let set = Gpus::of(gpus.ids).map_err(|error| Status::invalid_argument(error.to_string()))?;
            if usize::try_from(set.count()).ok() != Some(count) {
                return Err(Status::invalid_argument("a GPU is named twice"));
            }
            Ask::Gpus(set)
        }
    })
}

fn gpu(gpu: &nvfm::Gpu) -> api::Gpu {
    api::Gpu {
        physical_id: gpu.physical_id,
        uuid: gpu.uuid.clone(),
        pci: gpu.pci.clone(),
        links: gpu.links,
        most_links: gpu.most_links,
        line_rate_mbps: gpu.line_rate,
    }
}

fn partition(view: &View, listed: &nvfm::Partition) -> api::Partition {
    let set = view.look.table.get(listed.id).map_or(Gpus::NONE, |partition| partition.gpus);
    api::Partition {
        id: listed.id,
        gpus: listed.gpus.iter().map(gpu).collect(),
        active: listed.is_active,
        owner: view.state.holdings.get(&listed.id).map(|holding| holding.owner.clone()).unwrap_or_default(),
        under_way: view.is_under_way(listed.id),
        free: view.is_free(set),
    }
}

fn list(view: &View) -> Result<api::ListResponse, Status> {
    let Some(looked) = view.looked else {
        let why = view.trouble.as_deref().unwrap_or("the fabric manager was not asked yet");
        return Err(Status::unavailable(why));
    };
    let free = view.free();
    Ok(api::ListResponse {
        partitions: view.look.listed.iter().map(|listed| partition(view, listed)).collect(),
        quarantined: view.state.barred.clone().into_iter().collect(),
        free_by_size: free.by_size.into_iter().collect(),
        largest_free: free.largest,
        baseboard: view.baseboard().unwrap_or_default().to_owned(),
        age_ms: millis(looked.elapsed()),
        trouble: view.trouble.clone().unwrap_or_default(),
    })
}

fn health(view: &View, versions: &Versions) -> api::HealthResponse {
    let mut troubles = view.troubles();
    troubles.extend(versions.trouble());
    let under_way = view.under_way.map(|since| since.elapsed());
    // Links are up within seconds; a call that takes longer hangs.
    if let Some(since) = under_way.filter(|since| *since > Duration::from_secs(60)) {
        troubles.push(format!(
            "the fabric manager has not answered to a change for {} s: look at its log; if it is stuck, restart it",
            since.as_secs()
        ));
    }
    api::HealthResponse {
        ok: troubles.is_empty() && view.looked.is_some(),
        troubles,
        fabric_manager: view.looked.is_some() && view.trouble.is_none(),
        under_way_ms: under_way.map_or(0, |since| millis(since).max(1)),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        notes: view.notes(),
        fabric_manager_version: versions.manager.clone().unwrap_or_default(),
        driver_version: versions.driver.clone().unwrap_or_default(),
    }
}

fn step(step: &Step) -> api::Step {
    use api::step::Kind;
    let (kind, partition, owner) = match step {
        Step::Found { partition, owner, .. } => (Kind::Found, *partition, owner.clone()),
        Step::Change(Change::Activate { partition, owner, .. }) => (Kind::Activate, *partition, owner.clone()),
        Step::Change(Change::Deactivate { partition }) => (Kind::Deactivate, *partition, String::new()),
    };
    api::Step { kind: kind.into(), partition, owner }
}

/// What happened between two views.
fn happened(before: Option<&View>, now: &View, versions: &Versions) -> Vec<api::event::What> {
    use api::event::What;
    let Some(before) = before.filter(|before| before.looked.is_some()) else {
        return list(now).map(What::State).into_iter().chain([What::Health(health(now, versions))]).collect();
    };
    let mut events = Vec::new();
    for listed in &now.look.listed {
        let is = partition(now, listed);
        let was = before.look.listed.iter().find(|one| one.id == listed.id).map(|one| partition(before, one));
        // Whether it is free says something of others.
        let told = |one: &api::Partition| api::Partition { free: false, ..one.clone() };
        if was.as_ref().map(told) != Some(told(&is)) {
            events.push(What::Partition(is));
        }
    }
    for (gpu, reason) in &now.state.barred {
        if before.state.barred.get(gpu) != Some(reason) {
            events.push(What::Quarantined(api::Quarantined { gpu: *gpu, reason: reason.clone() }));
        }
    }
    for gpu in before.state.barred.keys().filter(|gpu| !now.state.barred.contains_key(gpu)) {
        events.push(What::Quarantined(api::Quarantined { gpu: *gpu, reason: String::new() }));
    }
    let (was, is) = (health(before, versions), health(now, versions));
    if (was.ok, was.troubles, was.notes) != (is.ok, is.troubles.clone(), is.notes.clone()) {
        events.push(What::Health(is));
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
        let api::PlanRequest { ask, unverified_map } = request.into_inner();
        let choice = self.engine.plan(wish(ask, unverified_map)?).await.map_err(|error| status(&error))?;
        let (partition, set) = (choice.partition.id, choice.partition.gpus);
        let placed = inventory::placed(&self.engine.view(), set);
        Ok(Response::new(api::PlanResponse { partition, gpus: Some(gpus(set)), blocks: choice.blocks, placed }))
    }

    async fn activate(&self, request: Request<api::ActivateRequest>) -> Answer<api::ActivateResponse> {
        let api::ActivateRequest { request_id, ask, owner, guest_driver, unverified_map } = request.into_inner();
        let warnings = self.judge(&guest_driver).map_err(|error| status(&error.into()))?;
        let wish = wish(ask, unverified_map)?;
        let given = self.engine.activate(request_id, wish, owner).await.map_err(|error| status(&error))?;
        let placed = inventory::placed(&self.engine.view(), given.gpus);
        let (partition, gpus) = (given.partition, Some(gpus(given.gpus)));
        Ok(Response::new(api::ActivateResponse { partition, gpus, again: given.again, warnings, placed }))
    }

    async fn deactivate(&self, request: Request<api::DeactivateRequest>) -> Answer<api::DeactivateResponse> {
        let api::DeactivateRequest { request_id, partition, owner } = request.into_inner();
        let was_active = self.engine.deactivate(request_id, partition, owner).await.map_err(|error| status(&error))?;
        Ok(Response::new(api::DeactivateResponse { was_active }))
    }

    async fn reconcile(&self, request: Request<api::ReconcileRequest>) -> Answer<api::ReconcileResponse> {
        let api::ReconcileRequest { request_id, wanted, dry_run } = request.into_inner();
        let wanted = wanted.into_iter().map(|one| (one.partition, one.owner)).collect();
        let steps = self.engine.reconcile(request_id, wanted, dry_run).await.map_err(|error| status(&error))?;
        Ok(Response::new(api::ReconcileResponse { steps: steps.iter().map(step).collect() }))
    }

    async fn quarantine(&self, request: Request<api::QuarantineRequest>) -> Answer<api::QuarantineResponse> {
        let api::QuarantineRequest { gpu, reason } = request.into_inner();
        self.engine.quarantine(gpu, reason).await.map_err(|error| status(&error))?;
        Ok(Response::new(api::QuarantineResponse {}))
    }

    async fn release(&self, request: Request<api::ReleaseRequest>) -> Answer<api::ReleaseResponse> {
        use api::release_request::What;
        let nothing = || Status::invalid_argument("the request names neither a GPU nor a switch");
        let was_quarantined = match request.into_inner().what.ok_or_else(nothing)? {
            What::Gpu(gpu) => self.engine.release(gpu).await.map_err(|error| status(&error))?,
            What::Switch(switch) => {
                self.engine.mended(switch).await.map_err(|error| status(&error))?;
                true
            }
        };
        Ok(Response::new(api::ReleaseResponse { was_quarantined }))
    }

    async fn inventory(&self, _: Request<api::InventoryRequest>) -> Answer<api::InventoryResponse> {
        Ok(Response::new(inventory::inventory(&self.engine.view(), gpu)))
    }

    async fn set_module_map(&self, request: Request<api::SetModuleMapRequest>) -> Answer<api::SetModuleMapResponse> {
        let (request, said) = inventory::said(request.into_inner())?;
        let noted = self.engine.set_map(request, said).await.map_err(|error| status(&error))?;
        Ok(Response::new(inventory::noted(&self.engine.view(), noted)))
    }

    async fn forget_module_map(
        &self,
        request: Request<api::ForgetModuleMapRequest>,
    ) -> Answer<api::ForgetModuleMapResponse> {
        let was_there =
            self.engine.forget_map(request.into_inner().request_id).await.map_err(|error| status(&error))?;
        Ok(Response::new(api::ForgetModuleMapResponse { was_there }))
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
        tokio::spawn(tell(self.engine.watch(), self.versions.clone(), events));
        Ok(Response::new(ReceiverStream::new(received)))
    }
}

/// Tells what happens until nobody listens. Who reads slowly is told the last
/// of what it has missed, never half of something.
async fn tell(
    mut views: watch::Receiver<View>,
    versions: Arc<Versions>,
    events: mpsc::Sender<Result<api::Event, Status>>,
) {
    let (mut before, mut number): (Option<View>, u64) = (None, 0);
    loop {
        let now = views.borrow_and_update().clone();
        for what in happened(before.as_ref(), &now, &versions) {
            number += 1;
            let time_ms = millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
            if events.send(Ok(api::Event { number, time_ms, what: Some(what) })).await.is_err() {
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
