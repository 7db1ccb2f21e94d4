//! `fmctl inventory`: shows and updates the module map.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::evidence::Source;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_module_map::{Claim, MAX_FILE, measurements, placed, table as operators_table};
use firstlight_pci::Address;
use jiff::SignedDuration;
use jiff::civil::DateTime;
use serde_json::json;
use tonic::transport::Channel;

use crate::exit::Failure;
use crate::probe::{self, ProbeArgs};
use crate::show::{self, document, id_list, ids, or_none, table};

/// The operation; without one, the inventory is shown.
#[derive(Debug, Subcommand)]
pub(crate) enum InventoryCommand {
    /// Set the address of every GPU from a TOML or JSON table. This does not verify the map.
    Set {
        /// The table: [baseboard_modules] with lines such as 1 = "0000:86:00.0".
        file: PathBuf,
        #[command(flatten)]
        update: MapUpdateArgs,
    },
    /// Add measurements of a trusted inventory guest: the output of firstlight-gpu-settings inventory.
    Nvml {
        /// Files with its output.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// The host address of a guest address, for each GPU without one in the files.
        #[arg(long, value_name = "GUEST_PCI=HOST_PCI", value_parser = pair)]
        pci_mapping: Vec<(Address, Address)>,
        #[command(flatten)]
        update: MapUpdateArgs,
    },
    /// Find the module ids of GPUs by activating partitions: slow, and also shows that partitions isolate GPUs.
    Probe(ProbeArgs),
    /// Delete the module map.
    Forget {
        /// Request id, as with activate.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
}

/// Options of all updates.
#[derive(Debug, clap::Args)]
pub(crate) struct MapUpdateArgs {
    /// The baseboard's serial number.
    #[arg(long)]
    pub(crate) baseboard_serial: String,
    /// Replace entries that contradict the update.
    #[arg(long)]
    pub(crate) replace: bool,
    /// Request id, as with activate.
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,
}

/// Parses `GUEST_PCI=HOST_PCI`.
fn pair(text: &str) -> Result<(Address, Address), String> {
    let (guest, host) = text.split_once('=').ok_or("it is GUEST_PCI=HOST_PCI, such as 0000:01:00.0=0000:0f:00.0")?;
    let address = |text: &str| text.parse::<Address>().map_err(|error| error.to_string());
    Ok((address(guest)?, address(host)?))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let most = u64::try_from(MAX_FILE).unwrap_or(u64::MAX) + 1;
    let file = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    file.map_err(|source| Failure::File { path: path.to_owned(), source })?;
    Ok(bytes)
}

/// Reads an operator's table.
pub(crate) fn claims_of(path: &Path) -> Result<Vec<Claim>, Failure> {
    let wrong = |reason: String| Failure::Content { path: path.to_owned(), reason };
    operators_table(&read(path)?).map_err(|error| wrong(error.to_string()))
}

fn measured(files: &[PathBuf], at: &[(Address, Address)]) -> Result<Vec<Claim>, Failure> {
    let mut all = Vec::new();
    for path in files {
        let wrong = |reason: String| Failure::Content { path: path.clone(), reason };
        all.extend(measurements(&read(path)?).map_err(|error| wrong(error.to_string()))?);
    }
    let mut places = BTreeMap::new();
    for (guest, host) in at {
        if let Some(other) = places.insert(*guest, *host) {
            return Err(Failure::Input(format!("--pci-mapping maps the guest's {guest} to both {other} and {host}")));
        }
    }
    placed(&all, &places).map_err(|error| Failure::Input(error.to_string()))
}

/// Converts a claim to the API.
pub(crate) fn placement(claim: &Claim) -> api::Placement {
    let (uuid, serial) = (claim.uuid.clone().unwrap_or_default(), claim.serial.clone().unwrap_or_default());
    api::Placement { module_id: claim.module, pci: claim.pci.to_string(), uuid, serial }
}

fn request(claims: &[Claim], how: Source, update: &MapUpdateArgs) -> Result<api::SetModuleMapRequest, Failure> {
    Ok(api::SetModuleMapRequest {
        request_id: crate::request_id_or_new(update.request_id.as_ref())?,
        baseboard_serial: update.baseboard_serial.clone(),
        entries: claims.iter().map(placement).collect(),
        evidence: Some(api::Evidence { source: Some(how) }),
        replace: update.replace,
    })
}

/// Shows or updates the inventory.
pub(crate) async fn run(
    client: &mut FabricClient<Channel>,
    what: Option<&InventoryCommand>,
    out: &mut dyn Write,
    json: bool,
) -> Result<(), Failure> {
    let request = match what {
        None => {
            let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
            return Ok(inventory_text(out, &inventory, json)?);
        }
        Some(InventoryCommand::Forget { request_id }) => {
            let request_id = crate::request_id_or_new(request_id.as_ref())?;
            let was = client.forget_module_map(api::ForgetModuleMapRequest { request_id }).await?.into_inner().existed;
            let (word, text) = match was {
                true => ("forgotten", "The module map was deleted"),
                false => ("unchanged", "There was no module map"),
            };
            return Ok(show::line(out, json, word, text)?);
        }
        Some(InventoryCommand::Probe(args)) => {
            probe::run(client, args).await?;
            let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
            return Ok(inventory_text(out, &inventory, json)?);
        }
        Some(InventoryCommand::Set { file, update }) => {
            request(&claims_of(file)?, Source::Operator(api::OperatorStatement {}), update)?
        }
        Some(InventoryCommand::Nvml { files, pci_mapping, update }) => {
            let origin = format!("{}-files", files.len());
            request(&measured(files, pci_mapping)?, Source::Nvml(api::Nvml { recorded_at_ms: 0, origin }), update)?
        }
    };
    let answer = client.set_module_map(request).await?.into_inner();
    Ok(noted_text(out, &answer, json)?)
}

fn noted_text(out: &mut dyn Write, answer: &api::SetModuleMapResponse, json: bool) -> show::Result {
    if json {
        return document(out, &json!(answer));
    }
    for replaced in &answer.replaced {
        writeln!(out, "Replaced: {replaced}")?;
    }
    let (changed, dropped) = (ids(answer.changed.as_ref()), ids(answer.removed.as_ref()));
    match (changed, answer.already_done) {
        (_, true) => writeln!(out, "Already done by the same request")?,
        ([], _) => writeln!(out, "The module map is unchanged")?,
        (changed, _) => writeln!(out, "Changed module map entries of GPUs {}", id_list(changed))?,
    }
    if !dropped.is_empty() {
        writeln!(out, "Removed module map entries of GPUs {}", id_list(dropped))?;
    }
    verdict(out, answer.verified, &answer.reason, &answer.remedy)
}

fn verdict(out: &mut dyn Write, verified: bool, reason: &str, remedy: &str) -> show::Result {
    match verified {
        true => writeln!(out, "Verified: every GPU was measured"),
        false if remedy.is_empty() => writeln!(out, "Not verified: {reason}"),
        false => writeln!(out, "Not verified: {reason}; {remedy}"),
    }
}

fn evidence(entry: Option<&api::MapEntry>) -> String {
    match entry.and_then(|entry| entry.evidence.as_ref()?.source.as_ref()) {
        None if entry.is_none() => "none".to_owned(),
        None => "unknown evidence".to_owned(),
        Some(Source::Operator(_)) => "operator".to_owned(),
        Some(Source::Nvml(nvml)) => format!("nvml, {}", date(nvml.recorded_at_ms)),
        Some(Source::Probe(probe)) => format!("probe of partition {}, {}", probe.partition, date(probe.recorded_at_ms)),
    }
}

/// Formats the day, UTC, of a time in milliseconds since the epoch.
fn date(ms: u64) -> String {
    let since = i64::try_from(ms).ok().map(SignedDuration::from_millis);
    let at = since.and_then(|since| DateTime::constant(1970, 1, 1, 0, 0, 0, 0).checked_add(since).ok());
    at.map_or_else(|| "unknown date".to_owned(), |at| at.date().to_string())
}

fn inventory_text(out: &mut dyn Write, inventory: &api::InventoryResponse, json: bool) -> show::Result {
    if json {
        return document(out, &json!(inventory));
    }
    let row = |one: &api::BaseboardModule| {
        let entry = one.entry.as_ref();
        let listed = one.listed.as_ref();
        let uuid = entry.map(|entry| entry.uuid.as_str()).filter(|uuid| !uuid.is_empty());
        let links = listed.map_or("not listed".to_owned(), |gpu| format!("{}/{}", gpu.links, gpu.max_links));
        let quarantined = if one.quarantined { ", quarantined" } else { "" };
        vec![
            one.module_id.to_string(),
            entry.map_or("unknown", |entry| &entry.pci).to_owned(),
            or_none(uuid.or(listed.map(|gpu| gpu.uuid.as_str())).unwrap_or_default()).to_owned(),
            links,
            format!("{}{quarantined}", evidence(entry)),
        ]
    };
    let rows: Vec<Vec<String>> = inventory.baseboard_modules.iter().map(row).collect();
    table(out, &["MODULE ID", "PCI ADDRESS", "UUID", "LINKS", "EVIDENCE"], &rows)?;
    let or = |text: &str, other: &str| if text.is_empty() { other.to_owned() } else { text.to_owned() };
    let (baseboard, serial) = (or(&inventory.baseboard, "unknown"), or(&inventory.baseboard_serial, "unknown"));
    writeln!(out, "Baseboard: {baseboard}; serial: {serial}")?;
    if !inventory.error.is_empty() {
        writeln!(out, "The list is {} s old: {}", inventory.age_ms / 1000, inventory.error)?;
    }
    verdict(out, inventory.verified, &inventory.reason, &inventory.remedy)?;
    if inventory.unverified_map_allowed && !inventory.verified {
        writeln!(out, "Several GPUs are given nevertheless: the daemon runs with --allow-unverified-map")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_795_305_600, "2026-11-22"),
            (4_107_542_400, "2100-03-01"),
            (u64::MAX / 1000, "unknown date"),
        ] {
            assert_eq!(date(seconds * 1000), day);
        }
    }

    #[test]
    fn pci_mapping_is_two_addresses() {
        let (guest, host) = pair("0000:01:00.0=0000:0f:00.0").unwrap();
        assert_eq!((guest.bus, host.bus), (1, 0x0f));
        for wrong in ["0000:01:00.0", "=", "0000:01:00.0=0f:00.0"] {
            assert!(pair(wrong).is_err(), "{wrong}");
        }
    }
}
