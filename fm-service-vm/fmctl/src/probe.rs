//! Finds the modules of GPUs by trying.
//!
//! A GPU's guest gets a fabric only while a partition with that GPU is active. So the
//! partition of one module is activated, somebody's command starts a guest
//! with the GPU and says whether it got a fabric, and the partition is deactivated, come what may.

mod check;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::evidence::How;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_module_map::Claim;
use firstlight_pci::Address;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::exit::Failure;
use crate::inventory::{NotedArgs, claims_of, placement};
use check::{Check, Outcome, Stop};

/// Whose the partitions are meanwhile.
pub(crate) const OWNER: &str = "fmctl-probe";
/// How often a deactivation is tried.
const TRIES: u32 = 10;

/// What is tried, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct ProbeArgs {
    /// PCI addresses of the GPUs on the host; all have to be idle.
    #[arg(long, value_name = "PCI,..", value_delimiter = ',', required = true)]
    gpus: Vec<Address>,
    /// Run by the shell with FIRSTLIGHT_PROBE_PCI and FIRSTLIGHT_PROBE_MODULE: it starts a guest with that GPU, waits, ends the
    /// guest, and ends with 0 if the fabric came up in it, with 10 if not, and with anything else to stop.
    #[arg(long, value_name = "COMMAND")]
    check: String,
    /// How long COMMAND may take, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    check_timeout: u64,
    /// A table to try first, as with set: what it says is not noted by that.
    #[arg(long, value_name = "FILE")]
    guess: Option<PathBuf>,
    #[command(flatten)]
    noted: NotedArgs,
}

/// What is known before and while it is tried.
#[derive(Debug, Default)]
struct Bench {
    /// The partition of each module alone.
    singles: BTreeMap<u32, u32>,
    /// Modules of which the place was measured.
    proven: BTreeMap<u32, Address>,
    /// Where somebody says that they are.
    guesses: BTreeMap<Address, u32>,
    /// GPUs and the modules that they are not.
    tried: BTreeSet<(Address, u32)>,
}

impl Bench {
    /// The next check: first what is said of each GPU, then of the first one the first module that is left.
    fn next(&self, pending: &[Address]) -> Option<(Address, u32)> {
        let is_left = |gpu: Address, module: u32| {
            let is_free = self.singles.contains_key(&module) && !self.proven.contains_key(&module);
            is_free && !self.tried.contains(&(gpu, module))
        };
        let guess = |gpu: &Address| Some((*gpu, *self.guesses.get(gpu)?));
        let said = pending.iter().filter_map(guess).find(|(gpu, module)| is_left(*gpu, *module));
        let first = || {
            let gpu = *pending.first()?;
            self.singles.keys().find(|module| is_left(gpu, **module)).map(|module| (gpu, *module))
        };
        said.or_else(first)
    }

    fn module_of(&self, gpu: Address) -> Option<u32> {
        self.proven.iter().find(|(_, place)| **place == gpu).map(|(module, _)| *module)
    }

    /// What the daemon knows. With `anew`, what was measured is a guess.
    fn of(inventory: &api::InventoryResponse, list: &api::ListResponse, anew: bool) -> Self {
        let mut bench = Self::default();
        for one in &list.partitions {
            if let [gpu] = one.gpus.as_slice()
                && !list.quarantined.contains_key(&gpu.physical_id)
            {
                bench.singles.insert(gpu.physical_id, one.id);
            }
        }
        for (id, entry) in inventory.modules.iter().filter_map(|one| Some((one.module_id, one.entry.as_ref()?))) {
            let Ok(pci) = entry.pci.parse::<Address>() else { continue };
            let how = entry.evidence.as_ref().and_then(|evidence| evidence.how.as_ref());
            match how {
                Some(How::Nvml(_) | How::Probe(_)) if !anew => drop(bench.proven.insert(id, pci)),
                _ => drop(bench.guesses.insert(pci, id)),
            }
        }
        bench
    }

    /// Somebody has a GPU that would have to be tried.
    fn in_the_way(&self, list: &api::ListResponse) -> Result<(), Failure> {
        let is_left =
            |gpu: &api::Gpu| self.singles.contains_key(&gpu.physical_id) && !self.proven.contains_key(&gpu.physical_id);
        let active = list.partitions.iter().filter(|one| one.active || one.under_way);
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
                "module {module} would have to be tried, and partition {id} with it is active{}: probe when its virtual machine is \
                 gone and it is deactivated",
                if owner.is_empty() { String::new() } else { format!(" for {owner}") }
            ),
        }))
    }
}

/// Tries, and notes each GPU as soon as its module is known.
pub(crate) async fn run(client: &mut FabricClient<Channel>, args: &ProbeArgs) -> Result<(), Failure> {
    let mut stop = Stop::new()?;
    let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
    let list = client.list(api::ListRequest {}).await?.into_inner();
    let (serial, replace) = (&args.noted.serial, args.noted.replace);
    let is_other = !inventory.baseboard_serial.is_empty() && inventory.baseboard_serial != *serial;
    if is_other && !replace {
        let map = &inventory.baseboard_serial;
        let text = format!("the module map is of baseboard {map}, not of {serial}: --replace forgets it");
        return Err(Failure::State(text));
    }
    let mut bench = Bench::of(&inventory, &list, replace);
    if is_other {
        bench.guesses.clear();
    }
    if let Some(path) = &args.guess {
        bench.guesses = claims_of(path)?.into_iter().map(|Claim { module, pci, .. }| (pci, module)).collect();
    }
    let gpus: BTreeSet<Address> = args.gpus.iter().copied().collect();
    if gpus.len() != args.gpus.len() {
        return Err(Failure::Input("--gpus names one twice".to_owned()));
    }
    if gpus.iter().any(|gpu| bench.module_of(*gpu).is_none()) {
        bench.in_the_way(&list)?;
    }
    let mut pending = Vec::new();
    for gpu in gpus {
        match bench.module_of(gpu) {
            Some(module) => {
                eprintln!("fmctl: {gpu} is module {module}: it was measured before, and --replace would do it anew")
            }
            None => pending.push(gpu),
        }
    }
    while let Some((gpu, module)) = bench.next(&pending) {
        let Some(partition) = bench.singles.get(&module).copied() else { break };
        eprintln!("fmctl: is {gpu} module {module}? Partition {partition} is activated, and the check runs");
        if trial(client, args, gpu, module, partition, &mut stop).await? {
            eprintln!("fmctl: {gpu} is module {module}");
            note(client, args, gpu, module, partition).await?;
            bench.proven.insert(module, gpu);
            pending.retain(|one| *one != gpu);
        } else {
            bench.tried.insert((gpu, module));
        }
    }
    let Some(gpu) = pending.first() else { return Ok(()) };
    let tried: Vec<u32> = bench.tried.iter().filter(|(of, _)| of == gpu).map(|(_, module)| *module).collect();
    Err(Failure::Probe(format!(
        "{gpu} got a fabric as none of the modules {}: was it reset before each check, does the check wait long enough, and is it a \
         GPU of this baseboard?",
        crate::show::words(&tried)
    )))
}

/// One check; its partition is not active any more afterwards.
async fn trial(
    client: &mut FabricClient<Channel>,
    args: &ProbeArgs,
    gpu: Address,
    module: u32,
    partition: u32,
    stop: &mut Stop,
) -> Result<bool, Failure> {
    let ask = Some(api::Ask { what: Some(api::ask::What::Partition(partition)) });
    let (request_id, owner) = (crate::identified(None)?, OWNER.to_owned());
    let request = api::ActivateRequest { request_id, ask, owner, ..Default::default() };
    let outcome = match client.activate(request).await {
        Ok(_) => {
            let limit = Duration::from_secs(args.check_timeout);
            Check { command: &args.check, pci: gpu, module, limit }.run(stop).await
        }
        Err(status) if is_open(&status) => Outcome::Stopped(Failure::from(status).to_string()),
        // It was refused: nothing was begun.
        Err(status) => return Err(status.into()),
    };
    let off = deactivated(client, partition).await;
    match (outcome, off) {
        (Outcome::Up, Ok(())) => Ok(true),
        (Outcome::Down, Ok(())) => Ok(false),
        (Outcome::Stopped(why), Ok(())) => {
            let text = format!(
                "the probe of {gpu} as module {module} was stopped: {why}; partition {partition} is deactivated"
            );
            Err(Failure::Probe(text))
        }
        (outcome, Err(failure)) => {
            let why = if let Outcome::Stopped(why) = outcome { format!("{why}; ") } else { String::new() };
            Err(Failure::Probe(format!(
                "{why}partition {partition} may be active still ({failure}): fmctl deactivate {partition} --owner {OWNER}"
            )))
        }
    }
}

/// Whether what was asked for may come to be nevertheless: nobody knows, or the daemon died meanwhile.
fn is_open(status: &Status) -> bool {
    let is_broken = std::error::Error::source(status).is_some();
    is_broken || matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
}

/// The guest is gone: its partition goes, also if the daemon is just beginning anew.
async fn deactivated(client: &mut FabricClient<Channel>, partition: u32) -> Result<(), Failure> {
    let (request_id, owner) = (crate::identified(None)?, OWNER.to_owned());
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
        request_id: crate::identified(None)?,
        baseboard_serial: args.noted.serial.clone(),
        entries: vec![placement(&claim)],
        evidence: Some(api::Evidence { how: Some(How::Probe(api::Probe { when_ms: 0, partition })) }),
        replace: args.noted.replace,
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

    fn bench(guesses: &[(u8, u32)]) -> Bench {
        let singles = (1..=8).map(|id| (id, id + 6)).collect();
        let guesses = guesses.iter().map(|(bus, id)| (pci(*bus), *id)).collect();
        Bench { singles, guesses, ..Bench::default() }
    }

    /// How many checks it takes where `truth` is so.
    fn checks(mut bench: Bench, truth: &[(u8, u32)]) -> usize {
        let mut pending: Vec<Address> = truth.iter().map(|(bus, _)| pci(*bus)).collect();
        let mut count = 0;
        while let Some((gpu, module)) = bench.next(&pending) {
            count += 1;
            if truth.contains(&(gpu.bus, module)) {
                bench.proven.insert(module, gpu);
                pending.retain(|one| *one != gpu);
            } else {
                assert!(bench.tried.insert((gpu, module)), "nothing is tried twice");
            }
        }
        assert_eq!(pending, []);
        count
    }

    #[test]
    fn a_good_guess_takes_a_check_for_each_gpu_and_none_at_most_36() {
        assert_eq!(checks(bench(&TRUTH), &TRUTH), 8);
        let worst: Vec<(u8, u32)> = (1..=8).map(|bus| (bus, 9 - u32::from(bus))).collect();
        assert_eq!(checks(bench(&[]), &worst), 36);
        // Two are exchanged.
        let mut wrong = TRUTH;
        (wrong[0].1, wrong[1].1) = (7, 5);
        assert_eq!(checks(bench(&wrong), &TRUTH), 8 + 2);
        // Everything is said in order, and is not so.
        let sorted: Vec<(u8, u32)> = TRUTH.iter().zip(1..).map(|((bus, _), id)| (*bus, id)).collect();
        assert!(checks(bench(&sorted), &TRUTH) <= 36);
    }

    #[test]
    fn what_is_said_is_tried_first() {
        let mut bench = bench(&[(1, 3), (2, 1)]);
        let both = [pci(1), pci(2)];
        assert_eq!(bench.next(&both), Some((pci(1), 3)));
        bench.tried.insert((pci(1), 3));
        assert_eq!(bench.next(&both), Some((pci(2), 1)));
        bench.proven.insert(1, pci(2));
        assert_eq!((bench.next(&both[..1]), bench.module_of(pci(2))), (Some((pci(1), 2)), Some(1)));
        assert_eq!(bench.next(&[]), None);
    }

    #[test]
    fn nobody_is_tried_under_a_tenant() {
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
        let bench = |list: &api::ListResponse| Bench::of(&api::InventoryResponse::default(), list, false);
        let said = |list: &api::ListResponse| {
            bench(list).in_the_way(list).map_err(|failure| (failure.code(), failure.to_string()))
        };
        assert_eq!(said(&of("", "")), Ok(()));
        let (code, text) = said(&of("vm-1", "")).unwrap_err();
        assert!(
            code == 5 && text.contains("module 1 would have to be tried, and partition 3 with it is active for vm-1"),
            "{text}"
        );
        let (_, text) = said(&of("", OWNER)).unwrap_err();
        assert!(text.contains("fmctl deactivate 8 --owner fmctl-probe"), "{text}");
        let mut proven = bench(&of("vm-1", ""));
        assert_eq!(proven.singles.keys().copied().collect::<Vec<_>>(), [1, 2], "a GPU in quarantine is not tried");
        proven.proven.insert(1, pci(1));
        assert!(proven.in_the_way(&of("vm-1", "")).is_ok(), "what is known need not be tried");
    }
}
