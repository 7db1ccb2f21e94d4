//! Finds the module ids of GPUs by activating partitions.
//!
//! A GPU's guest gets a fabric only while a partition with that GPU is active. So the probe activates the partition
//! of one module, the operator's command starts a guest with the GPU and reports whether it got a fabric, and the
//! probe deactivates the partition in every case.

mod check;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::evidence::Source;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_module_map::Claim;
use firstlight_pci::Address;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::exit::Failure;
use crate::inventory::{MapUpdateArgs, claims_of, placement};
use check::{Check, Outcome, Stop};

/// The owner of partitions during a probe.
pub(crate) const OWNER: &str = "fmctl-probe";
/// Number of attempts to deactivate.
const TRIES: u32 = 10;

/// The options of a probe.
#[derive(Debug, clap::Args)]
pub(crate) struct ProbeArgs {
    /// PCI addresses of the GPUs on the host; all have to be idle.
    #[arg(long, value_name = "PCI,..", value_delimiter = ',', required = true)]
    pci: Vec<Address>,
    /// Shell command, run with FIRSTLIGHT_PROBE_PCI and FIRSTLIGHT_PROBE_MODULE_ID: it starts a guest with that GPU,
    /// waits, ends the guest, and exits with 0 if the fabric came up, with 10 if not, and with anything else to
    /// abort.
    #[arg(long, value_name = "COMMAND")]
    check: String,
    /// Timeout of COMMAND, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    check_timeout: u64,
    /// Table of module ids to try first, as with set; it is not added to the module map.
    #[arg(long, value_name = "FILE")]
    initial_map: Option<PathBuf>,
    #[command(flatten)]
    update: MapUpdateArgs,
}

/// The state of a probe.
#[derive(Debug, Default)]
struct ProbeState {
    /// The single-GPU partition of each module.
    single_gpu_partitions: BTreeMap<u32, u32>,
    /// Modules whose address was measured.
    measured: BTreeMap<u32, Address>,
    /// Module ids that are assumed.
    assumed: BTreeMap<Address, u32>,
    /// Pairs of GPU and module id that were excluded.
    excluded: BTreeSet<(Address, u32)>,
}

impl ProbeState {
    /// Returns the next pair to check: first the assumed ones, then for the first GPU the first remaining module.
    fn next(&self, pending: &[Address]) -> Option<(Address, u32)> {
        let is_left = |gpu: Address, module: u32| {
            let is_free = self.single_gpu_partitions.contains_key(&module) && !self.measured.contains_key(&module);
            is_free && !self.excluded.contains(&(gpu, module))
        };
        let assumption = |gpu: &Address| Some((*gpu, *self.assumed.get(gpu)?));
        let said = pending.iter().filter_map(assumption).find(|(gpu, module)| is_left(*gpu, *module));
        let first = || {
            let gpu = *pending.first()?;
            self.single_gpu_partitions.keys().find(|module| is_left(gpu, **module)).map(|module| (gpu, *module))
        };
        said.or_else(first)
    }

    fn module_of(&self, gpu: Address) -> Option<u32> {
        self.measured.iter().find(|(_, place)| **place == gpu).map(|(module, _)| *module)
    }

    /// Builds the state from the daemon's responses. With `replace`, measured entries count as assumed.
    fn of(inventory: &api::InventoryResponse, list: &api::ListResponse, replace: bool) -> Self {
        let mut state = Self::default();
        for one in &list.partitions {
            if let [gpu] = one.gpus.as_slice()
                && !list.quarantined.contains_key(&gpu.physical_id)
            {
                state.single_gpu_partitions.insert(gpu.physical_id, one.id);
            }
        }
        for (id, entry) in
            inventory.baseboard_modules.iter().filter_map(|one| Some((one.module_id, one.entry.as_ref()?)))
        {
            let Ok(pci) = entry.pci.parse::<Address>() else { continue };
            let how = entry.evidence.as_ref().and_then(|evidence| evidence.source.as_ref());
            match how {
                Some(Source::Nvml(_) | Source::Probe(_)) if !replace => drop(state.measured.insert(id, pci)),
                _ => drop(state.assumed.insert(pci, id)),
            }
        }
        state
    }

    /// Refuses to probe while a tenant has a GPU that has to be probed.
    fn check_tenants(&self, list: &api::ListResponse) -> Result<(), Failure> {
        let is_left = |gpu: &api::Gpu| {
            self.single_gpu_partitions.contains_key(&gpu.physical_id) && !self.measured.contains_key(&gpu.physical_id)
        };
        let active = list.partitions.iter().filter(|one| one.active || one.in_progress);
        let Some((one, gpu)) = active.filter_map(|one| Some((one, one.gpus.iter().find(|gpu| is_left(gpu))?))).next()
        else {
            return Ok(());
        };
        let (id, module) = (one.id, gpu.physical_id);
        Err(Failure::State(match one.owner.as_str() {
            OWNER => format!(
                "partition {id} is active for another probe, or for one that was killed: if none runs, fmctl deactivate {id} \
                 --owner {OWNER}"
            ),
            owner => format!(
                "module {module} has to be probed, and its partition {id} is active{}: probe when its virtual machine is \
                 gone and it is deactivated",
                if owner.is_empty() { String::new() } else { format!(" for {owner}") }
            ),
        }))
    }
}

/// Probes all GPUs, and records each as soon as its module id is known.
pub(crate) async fn run(client: &mut FabricClient<Channel>, args: &ProbeArgs) -> Result<(), Failure> {
    let mut stop = Stop::new()?;
    let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
    let list = client.list(api::ListRequest {}).await?.into_inner();
    let (serial, replace) = (&args.update.baseboard_serial, args.update.replace);
    let is_other = !inventory.baseboard_serial.is_empty() && inventory.baseboard_serial != *serial;
    if is_other && !replace {
        let map = &inventory.baseboard_serial;
        let text = format!("the module map is of baseboard {map}, not of {serial}: --replace replaces it");
        return Err(Failure::State(text));
    }
    let mut state = ProbeState::of(&inventory, &list, replace);
    if is_other {
        state.assumed.clear();
    }
    if let Some(path) = &args.initial_map {
        state.assumed = claims_of(path)?.into_iter().map(|Claim { module, pci, .. }| (pci, module)).collect();
    }
    let gpus: BTreeSet<Address> = args.pci.iter().copied().collect();
    if gpus.len() != args.pci.len() {
        return Err(Failure::Input("--pci names one twice".to_owned()));
    }
    if gpus.iter().any(|gpu| state.module_of(*gpu).is_none()) {
        state.check_tenants(&list)?;
    }
    let mut pending = Vec::new();
    for gpu in gpus {
        match state.module_of(gpu) {
            Some(module) => {
                eprintln!("fmctl: {gpu} is module {module}: measured before; --replace measures it again")
            }
            None => pending.push(gpu),
        }
    }
    while let Some((gpu, module)) = state.next(&pending) {
        let Some(partition) = state.single_gpu_partitions.get(&module).copied() else { break };
        eprintln!("fmctl: testing {gpu} as module {module}: partition {partition} is active, running the check");
        if trial(client, args, gpu, module, partition, &mut stop).await? {
            eprintln!("fmctl: {gpu} is module {module}");
            note(client, args, gpu, module, partition).await?;
            state.measured.insert(module, gpu);
            pending.retain(|one| *one != gpu);
        } else {
            state.excluded.insert((gpu, module));
        }
    }
    let Some(gpu) = pending.first() else { return Ok(()) };
    let excluded: Vec<u32> = state.excluded.iter().filter(|(of, _)| of == gpu).map(|(_, module)| *module).collect();
    Err(Failure::Probe(format!(
        "{gpu} got a fabric as none of the modules {}: was it reset before each check, does the check wait long enough, and is it a \
         GPU of this baseboard?",
        crate::show::id_list(&excluded)
    )))
}

/// Runs one check; the partition is deactivated afterwards.
async fn trial(
    client: &mut FabricClient<Channel>,
    args: &ProbeArgs,
    gpu: Address,
    module: u32,
    partition: u32,
    stop: &mut Stop,
) -> Result<bool, Failure> {
    let partition_request =
        Some(api::PartitionRequest { selector: Some(api::partition_request::Selector::Partition(partition)) });
    let (request_id, owner) = (crate::request_id_or_new(None)?, OWNER.to_owned());
    let request = api::ActivateRequest { request_id, partition_request, owner, ..Default::default() };
    let outcome = match client.activate(request).await {
        Ok(_) => {
            let limit = Duration::from_secs(args.check_timeout);
            Check { command: &args.check, pci: gpu, module, limit }.run(stop).await
        }
        Err(status) if is_open(&status) => Outcome::Stopped(Failure::from(status).to_string()),
        // Refused: no change was started.
        Err(status) => return Err(status.into()),
    };
    let off = deactivated(client, partition).await;
    match (outcome, off) {
        (Outcome::Up, Ok(())) => Ok(true),
        (Outcome::Down, Ok(())) => Ok(false),
        (Outcome::Stopped(reason), Ok(())) => {
            let text = format!(
                "the probe of {gpu} as module {module} was stopped: {reason}; partition {partition} is deactivated"
            );
            Err(Failure::Probe(text))
        }
        (outcome, Err(failure)) => {
            let reason = if let Outcome::Stopped(reason) = outcome { format!("{reason}; ") } else { String::new() };
            Err(Failure::Probe(format!(
                "{reason}partition {partition} may still be active ({failure}): fmctl deactivate {partition} --owner {OWNER}"
            )))
        }
    }
}

/// Returns whether a failed request may still complete: a timeout, or a closed connection.
fn is_open(status: &Status) -> bool {
    let is_broken = std::error::Error::source(status).is_some();
    is_broken || matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
}

/// Deactivates the partition after the guest has ended; retries while the daemon restarts.
async fn deactivated(client: &mut FabricClient<Channel>, partition: u32) -> Result<(), Failure> {
    let (request_id, owner) = (crate::request_id_or_new(None)?, OWNER.to_owned());
    let request = api::DeactivateRequest { request_id, partition, owner };
    let mut tries = 0;
    loop {
        tries += 1;
        match client.deactivate(request.clone()).await {
            Ok(_) => return Ok(()),
            Err(status) if is_open(&status) && tries < TRIES => {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Err(status) => return Err(status.into()),
        }
    }
}

async fn note(
    client: &mut FabricClient<Channel>,
    args: &ProbeArgs,
    gpu: Address,
    module: u32,
    partition: u32,
) -> Result<(), Failure> {
    let claim = Claim { module, pci: gpu, uuid: None, serial: None };
    let request = api::SetModuleMapRequest {
        request_id: crate::request_id_or_new(None)?,
        baseboard_serial: args.update.baseboard_serial.clone(),
        entries: vec![placement(&claim)],
        evidence: Some(api::Evidence { source: Some(Source::Probe(api::Probe { recorded_at_ms: 0, partition })) }),
        replace: args.update.replace,
    };
    client.set_module_map(request).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pci(bus: u8) -> Address {
        Address { domain: 0, bus, device: 0, function: 0 }
    }

    const TRUTH: [(u8, u32); 8] =
        [(0x0f, 5), (0x10, 7), (0x41, 6), (0x44, 8), (0x86, 1), (0x87, 3), (0xb8, 2), (0xbb, 4)];

    fn state(assumed: &[(u8, u32)]) -> ProbeState {
        let single_gpu_partitions = (1..=8).map(|id| (id, id + 6)).collect();
        let assumed = assumed.iter().map(|(bus, id)| (pci(*bus), *id)).collect();
        ProbeState { single_gpu_partitions, assumed, ..ProbeState::default() }
    }

    /// Counts the checks until all GPUs of `truth` are found.
    fn checks(mut state: ProbeState, truth: &[(u8, u32)]) -> usize {
        let mut pending: Vec<Address> = truth.iter().map(|(bus, _)| pci(*bus)).collect();
        let mut count = 0;
        while let Some((gpu, module)) = state.next(&pending) {
            count += 1;
            if truth.contains(&(gpu.bus, module)) {
                state.measured.insert(module, gpu);
                pending.retain(|one| *one != gpu);
            } else {
                assert!(state.excluded.insert((gpu, module)), "no pair is checked twice");
            }
        }
        assert_eq!(pending, []);
        count
    }

    #[test]
    fn correct_initial_map_needs_one_check_per_gpu_and_any_at_most_36() {
        assert_eq!(checks(state(&TRUTH), &TRUTH), 8);
        let worst: Vec<(u8, u32)> = (1..=8).map(|bus| (bus, 9 - u32::from(bus))).collect();
        assert_eq!(checks(state(&[]), &worst), 36);
        // Two entries are swapped.
        let mut wrong = TRUTH;
        (wrong[0].1, wrong[1].1) = (7, 5);
        assert_eq!(checks(state(&wrong), &TRUTH), 8 + 2);
        // All entries are wrong: sorted by address.
        let sorted: Vec<(u8, u32)> = TRUTH.iter().zip(1..).map(|((bus, _), id)| (*bus, id)).collect();
        assert!(checks(state(&sorted), &TRUTH) <= 36);
    }

    #[test]
    fn assumed_modules_are_checked_first() {
        let mut state = state(&[(1, 3), (2, 1)]);
        let both = [pci(1), pci(2)];
        assert_eq!(state.next(&both), Some((pci(1), 3)));
        state.excluded.insert((pci(1), 3));
        assert_eq!(state.next(&both), Some((pci(2), 1)));
        state.measured.insert(1, pci(2));
        assert_eq!((state.next(&both[..1]), state.module_of(pci(2))), (Some((pci(1), 2)), Some(1)));
        assert_eq!(state.next(&[]), None);
    }

    #[test]
    fn probe_refuses_modules_of_tenants() {
        let gpu = |physical_id| api::Gpu { physical_id, ..api::Gpu::default() };
        let partition = |id, ids: &[u32], owner: &str| api::Partition {
            id,
            gpus: ids.iter().map(|id| gpu(*id)).collect(),
            active: !owner.is_empty(),
            owner: owner.to_owned(),
            ..api::Partition::default()
        };
        let of = |owner: &str, owner_of_8: &str| api::ListResponse {
            partitions: vec![partition(3, &[1, 3], owner), partition(7, &[1], ""), partition(8, &[2], owner_of_8)],
            quarantined: [(3, "x".to_owned())].into(),
            ..api::ListResponse::default()
        };
        let state = |list: &api::ListResponse| ProbeState::of(&api::InventoryResponse::default(), list, false);
        let said = |list: &api::ListResponse| {
            state(list).check_tenants(list).map_err(|failure| (failure.code(), failure.to_string()))
        };
        assert_eq!(said(&of("", "")), Ok(()));
        let (code, text) = said(&of("vm-1", "")).unwrap_err();
        assert!(
            code == 5 && text.contains("module 1 has to be probed, and its partition 3 is active for vm-1"),
            "{text}"
        );
        let (_, text) = said(&of("", OWNER)).unwrap_err();
        assert!(text.contains("fmctl deactivate 8 --owner fmctl-probe"), "{text}");
        let mut measured = state(&of("vm-1", ""));
        assert_eq!(
            measured.single_gpu_partitions.keys().copied().collect::<Vec<_>>(),
            [1, 2],
            "quarantined GPUs are not probed"
        );
        measured.measured.insert(1, pci(1));
        assert!(measured.check_tenants(&of("vm-1", "")).is_ok(), "measured modules need no probe");
    }
}
