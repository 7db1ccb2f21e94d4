//! The module map in the API's words.

use std::collections::BTreeMap;

use firstlight_fabric_api::v1 as api;
use firstlight_module_map::{Claim, Entry, Evidence};
use firstlight_partitions::Gpus;
use firstlight_pci::Address;
use firstlight_sys::nvfm;
use tonic::Status;

use crate::engine::{Noted, Said};
use crate::view::View;

/// More are on no baseboard.
const MOST: usize = firstlight_partitions::MOST as usize;

fn address(text: &str) -> Result<Address, Status> {
    text.parse().map_err(|error: firstlight_pci::ParseAddressError| Status::invalid_argument(error.to_string()))
}

/// Host addresses, each once.
pub(crate) fn addresses(texts: &[String]) -> Result<Vec<Address>, Status> {
    if texts.len() > MOST {
        return Err(Status::invalid_argument(format!("{} PCI addresses are more than there can be", texts.len())));
    }
    let mut places: Vec<Address> = texts.iter().map(|text| address(text)).collect::<Result<_, _>>()?;
    places.sort_unstable();
    if let Some(pair) = places.windows(2).find(|pair| pair.first() == pair.last()) {
        let twice = pair.first().map(ToString::to_string).unwrap_or_default();
        return Err(Status::invalid_argument(format!("{twice} is named twice")));
    }
    Ok(places)
}

/// Where GPUs are, as far as the map says.
pub(crate) fn placed(view: &View, gpus: Gpus) -> Vec<api::Placed> {
    let one = |(module_id, entry): (u32, &Entry)| api::Placed {
        module_id,
        pci: entry.pci.to_string(),
        measured: entry.evidence.is_measurement(),
    };
    view.modules.placed(gpus).map(one).collect()
}

/// What somebody says.
pub(crate) fn said(request: api::SetModuleMapRequest) -> Result<(String, Said), Status> {
    use api::evidence::How;
    let api::SetModuleMapRequest { request_id, baseboard_serial: serial, entries, evidence, replace } = request;
    let evidence = match evidence.and_then(|evidence| evidence.how) {
        Some(How::Operator(api::Told {})) => Evidence::Operator,
        // The time is put in where it is noted.
        Some(How::Nvml(nvml)) => Evidence::Nvml { when: 0, what: nvml.what },
        Some(How::Probe(probe)) => Evidence::Probe { when: 0, partition: probe.partition },
        None => return Err(Status::invalid_argument("the request does not say how it is known where the GPUs are")),
    };
    if entries.len() > MOST {
        return Err(Status::invalid_argument(format!("{} GPUs are more than there can be", entries.len())));
    }
    let claim = |entry: api::Placement| {
        let word = |text: String| Some(text).filter(|text| !text.is_empty());
        let (uuid, serial) = (word(entry.uuid), word(entry.serial));
        Ok(Claim { module: entry.module_id, pci: address(&entry.pci)?, uuid, serial })
    };
    let claims = entries.into_iter().map(claim).collect::<Result<_, Status>>()?;
    Ok((request_id, Said { serial, claims, evidence, replace }))
}

/// What became of it.
pub(crate) fn noted(view: &View, noted: Noted) -> api::SetModuleMapResponse {
    let Noted { changed, dropped, replaced, standing, again } = noted;
    let gpus = |gpus: Gpus| Some(api::Gpus { ids: gpus.into() });
    let verified = standing.is_verified();
    let why = if verified { String::new() } else { standing.why() };
    let advice = standing.advice(view.modules.serial());
    let (changed, dropped) = (gpus(changed), gpus(dropped));
    api::SetModuleMapResponse { changed, dropped, replaced, verified, why, advice, again }
}

fn entry(entry: &Entry) -> api::MapEntry {
    use api::evidence::How;
    let how = match &entry.evidence {
        Evidence::Operator => How::Operator(api::Told {}),
        Evidence::Nvml { when, what } => {
            How::Nvml(api::Nvml { when_ms: when.saturating_mul(1000), what: what.clone() })
        }
        Evidence::Probe { when, partition } => {
            How::Probe(api::Probe { when_ms: when.saturating_mul(1000), partition: *partition })
        }
    };
    api::MapEntry {
        pci: entry.pci.to_string(),
        uuid: entry.uuid.clone().unwrap_or_default(),
        serial: entry.serial.clone().unwrap_or_default(),
        evidence: Some(api::Evidence { how: Some(how) }),
    }
}

/// Which GPU is where.
pub(crate) fn inventory(view: &View, gpu: impl Fn(&nvfm::Gpu) -> api::Gpu) -> api::InventoryResponse {
    let mut modules: BTreeMap<u32, api::Module> = BTreeMap::new();
    let module = |module_id| api::Module {
        module_id,
        quarantined: view.state.barred.contains_key(&module_id),
        ..api::Module::default()
    };
    for listed in view.look.listed.iter().flat_map(|one| &one.gpus) {
        let id = listed.physical_id;
        let known = modules.entry(id).or_insert_with(|| module(id));
        if known.listed.as_ref().is_none_or(|known| known.links < listed.links) {
            known.listed = Some(gpu(listed));
        }
    }
    let map = view.modules.map.as_ref();
    for (id, known) in map.iter().flat_map(|map| &map.entries) {
        modules.entry(*id).or_insert_with(|| module(*id)).entry = Some(entry(known));
    }
    let standing = view.modules.standing(&view.look, view.state.barred());
    let verified = view.looked.is_some() && standing.is_verified();
    let trouble = match (&view.trouble, view.looked) {
        (Some(trouble), _) => trouble.clone(),
        (None, None) => "the fabric manager was not asked yet".to_owned(),
        (None, Some(_)) => String::new(),
    };
    let why = match (view.looked, &standing) {
        (None, standing) if standing.is_verified() => "the fabric manager's list was not seen yet".to_owned(),
        _ if verified => String::new(),
        (_, standing) => standing.why(),
    };
    api::InventoryResponse {
        modules: modules.into_values().collect(),
        baseboard: view.baseboard().unwrap_or_default().to_owned(),
        baseboard_serial: map.map(|map| map.baseboard.clone()).unwrap_or_default(),
        verified,
        why,
        advice: standing.advice(view.modules.serial()),
        allowed: view.modules.allowed,
        age_ms: view.looked.map_or(0, |looked| u64::try_from(looked.elapsed().as_millis()).unwrap_or(u64::MAX)),
        trouble,
    }
}
