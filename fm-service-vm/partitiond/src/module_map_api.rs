//! Converts the module map between API and engine.

use std::collections::BTreeMap;

use firstlight_fabric_api::v1 as api;
use firstlight_module_map::{Claim, Entry, Evidence};
use firstlight_partitions::Gpus;
use firstlight_pci::Address;
use firstlight_sys::nvfm;
use tonic::Status;

use crate::engine::{ModuleMapUpdate, ModuleMapUpdateResult};
use crate::view::View;

/// No baseboard has more GPUs.
const MAX_ENTRIES: usize = firstlight_partitions::MODULE_ID_LIMIT as usize;

fn address(text: &str) -> Result<Address, Status> {
    text.parse().map_err(|error: firstlight_pci::ParseAddressError| Status::invalid_argument(error.to_string()))
}

/// Parses host addresses; duplicates are refused.
pub(crate) fn addresses(texts: &[String]) -> Result<Vec<Address>, Status> {
    if texts.len() > MAX_ENTRIES {
        return Err(Status::invalid_argument(format!("{} PCI addresses exceed the limit of 64", texts.len())));
    }
    let mut places: Vec<Address> = texts.iter().map(|text| address(text)).collect::<Result<_, _>>()?;
    places.sort_unstable();
    if let Some(pair) = places.windows(2).find(|pair| pair.first() == pair.last()) {
        let twice = pair.first().map(ToString::to_string).unwrap_or_default();
        return Err(Status::invalid_argument(format!("{twice} is named twice")));
    }
    Ok(places)
}

/// Returns the locations of GPUs, as far as the map has them.
pub(crate) fn locations(view: &View, gpus: Gpus) -> Vec<api::GpuLocation> {
    let one = |(module_id, entry): (u32, &Entry)| api::GpuLocation {
        module_id,
        pci: entry.pci.to_string(),
        measured: entry.evidence.is_measurement(),
    };
    view.module_map.locations(gpus).map(one).collect()
}

/// Parses an update of the map.
pub(crate) fn parse_update(request: api::SetModuleMapRequest) -> Result<(String, ModuleMapUpdate), Status> {
    use api::evidence::Source;
    let api::SetModuleMapRequest { request_id, baseboard_serial: serial, entries, evidence, replace } = request;
    let evidence = match evidence.and_then(|evidence| evidence.source) {
        Some(Source::Operator(api::OperatorStatement {})) => Evidence::Operator,
        // The engine sets the time.
        Some(Source::Nvml(nvml)) => Evidence::Nvml { recorded_at: 0, origin: nvml.origin },
        Some(Source::Probe(probe)) => Evidence::Probe { recorded_at: 0, partition: probe.partition },
        None => return Err(Status::invalid_argument("the request names no evidence")),
    };
    if entries.len() > MAX_ENTRIES {
        return Err(Status::invalid_argument(format!("{} GPUs exceed the limit of 64", entries.len())));
    }
    let claim = |entry: api::Placement| {
        let word = |text: String| Some(text).filter(|text| !text.is_empty());
        let (uuid, serial) = (word(entry.uuid), word(entry.serial));
        Ok(Claim { module: entry.module_id, pci: address(&entry.pci)?, uuid, serial })
    };
    let claims = entries.into_iter().map(claim).collect::<Result<_, Status>>()?;
    Ok((request_id, ModuleMapUpdate { serial, claims, evidence, replace }))
}

/// Converts the result of an update.
pub(crate) fn update_response(view: &View, result: ModuleMapUpdateResult) -> api::SetModuleMapResponse {
    let ModuleMapUpdateResult { changed, removed, replaced, verification, already_done } = result;
    let gpus = |gpus: Gpus| Some(api::Gpus { ids: gpus.into() });
    let verified = verification.is_verified();
    let reason = if verified { String::new() } else { verification.reason() };
    let remedy = verification.remedy(view.module_map.serial());
    let (changed, removed) = (gpus(changed), gpus(removed));
    api::SetModuleMapResponse { changed, removed, replaced, verified, reason, remedy, already_done }
}

fn entry(entry: &Entry) -> api::MapEntry {
    use api::evidence::Source;
    let source = match &entry.evidence {
        Evidence::Operator => Source::Operator(api::OperatorStatement {}),
        Evidence::Nvml { recorded_at, origin } => {
            Source::Nvml(api::Nvml { recorded_at_ms: recorded_at.saturating_mul(1000), origin: origin.clone() })
        }
        Evidence::Probe { recorded_at, partition } => {
            Source::Probe(api::Probe { recorded_at_ms: recorded_at.saturating_mul(1000), partition: *partition })
        }
    };
    api::MapEntry {
        pci: entry.pci.to_string(),
        uuid: entry.uuid.clone().unwrap_or_default(),
        serial: entry.serial.clone().unwrap_or_default(),
        evidence: Some(api::Evidence { source: Some(source) }),
    }
}

/// Returns the inventory: FM's GPUs with their map entries.
pub(crate) fn inventory(view: &View, gpu: impl Fn(&nvfm::Gpu) -> api::Gpu) -> api::InventoryResponse {
    let mut baseboard_modules: BTreeMap<u32, api::BaseboardModule> = BTreeMap::new();
    let module = |module_id| api::BaseboardModule {
        module_id,
        quarantined: view.state.quarantined.contains_key(&module_id),
        ..api::BaseboardModule::default()
    };
    for listed in view.fabric.listed.iter().flat_map(|one| &one.gpus) {
        let id = listed.physical_id;
        let known = baseboard_modules.entry(id).or_insert_with(|| module(id));
        if known.listed.as_ref().is_none_or(|known| known.links < listed.links) {
            known.listed = Some(gpu(listed));
        }
    }
    let map = view.module_map.map.as_ref();
    for (id, known) in map.iter().flat_map(|map| &map.entries) {
        baseboard_modules.entry(*id).or_insert_with(|| module(*id)).entry = Some(entry(known));
    }
    let verification = view.module_map.verification(&view.fabric, view.state.quarantined());
    let verified = view.polled_at.is_some() && verification.is_verified();
    let error = match (&view.poll_error, view.polled_at) {
        (Some(error), _) => error.clone(),
        (None, None) => "the fabric manager was not polled yet".to_owned(),
        (None, Some(_)) => String::new(),
    };
    let reason = match (view.polled_at, &verification) {
        (None, verification) if verification.is_verified() => {
            "the fabric manager's list was not received yet".to_owned()
        }
        _ if verified => String::new(),
        (_, verification) => verification.reason(),
    };
    api::InventoryResponse {
        baseboard_modules: baseboard_modules.into_values().collect(),
        baseboard: view.baseboard().unwrap_or_default().to_owned(),
        baseboard_serial: map.map(|map| map.baseboard.clone()).unwrap_or_default(),
        verified,
        reason,
        remedy: verification.remedy(view.module_map.serial()),
        unverified_map_allowed: view.module_map.unverified_allowed,
        age_ms: view
            .polled_at
            .map_or(0, |polled_at| u64::try_from(polled_at.elapsed().as_millis()).unwrap_or(u64::MAX)),
        error,
    }
}
