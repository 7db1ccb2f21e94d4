//! Which GPU is which: what the daemon knows, and what somebody tells it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::evidence::How;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_module_map::{Claim, LONGEST, measurements, placed, table as operators_table};
use firstlight_pci::Address;
use serde_json::json;
use tonic::transport::Channel;

use crate::exit::Failure;
use crate::probe::{self, ProbeArgs};
use crate::show::{self, document, ids, or_none, table, words};

/// What to do with it; without, it is shown.
#[derive(Debug, Subcommand)]
pub(crate) enum What {
    /// Say where every GPU is, by a table of TOML or JSON. It is not verified by that.
    Set {
        /// The table: [modules] with lines such as 1 = "0000:86:00.0".
        file: PathBuf,
        #[command(flatten)]
        noted: NotedArgs,
    },
    /// Note what a trusted inventory guest has measured: what firstlight-gpu-settings inventory prints there.
    Nvml {
        /// Its output, a file or several.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Which host address a slot of the guest is; for each GPU that has none in the files.
        #[arg(long, value_name = "GUEST_PCI=HOST_PCI", value_parser = pair)]
        at: Vec<(Address, Address)>,
        #[command(flatten)]
        noted: NotedArgs,
    },
    /// Find the modules of GPUs by trying: slow, and it shows that partitions keep GPUs apart as well.
    Probe(ProbeArgs),
    /// Forget which GPU is which.
    Forget {
        /// As with activate.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
}

/// What goes with everything that is noted.
#[derive(Debug, clap::Args)]
pub(crate) struct NotedArgs {
    /// The baseboard's serial number.
    #[arg(long)]
    pub(crate) serial: String,
    /// It takes the place of what contradicts it.
    #[arg(long)]
    pub(crate) replace: bool,
    /// As with activate.
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,
}

/// `GUEST_PCI=HOST_PCI`.
fn pair(text: &str) -> Result<(Address, Address), String> {
    let (guest, host) = text.split_once('=').ok_or("it is GUEST_PCI=HOST_PCI, such as 0000:01:00.0=0000:0f:00.0")?;
    let address = |text: &str| text.parse::<Address>().map_err(|error| error.to_string());
    Ok((address(guest)?, address(host)?))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let most = u64::try_from(LONGEST).unwrap_or(u64::MAX) + 1;
    let file = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    file.map_err(|source| Failure::File { path: path.to_owned(), source })?;
    Ok(bytes)
}

/// An operator's table.
pub(crate) fn claims_of(path: &Path) -> Result<Vec<Claim>, Failure> {
    let wrong = |why: String| Failure::Content { path: path.to_owned(), why };
    operators_table(&read(path)?).map_err(|error| wrong(error.to_string()))
}

fn measured(files: &[PathBuf], at: &[(Address, Address)]) -> Result<Vec<Claim>, Failure> {
    let mut all = Vec::new();
    for path in files {
        let wrong = |why: String| Failure::Content { path: path.clone(), why };
        all.extend(measurements(&read(path)?).map_err(|error| wrong(error.to_string()))?);
    }
    let mut places = BTreeMap::new();
    for (guest, host) in at {
        if let Some(other) = places.insert(*guest, *host) {
            return Err(Failure::Input(format!(
                "--at says that the guest's {guest} is {other}, and that it is {host}"
            )));
        }
    }
    placed(&all, &places).map_err(|error| Failure::Input(error.to_string()))
}

/// A claim in the API's words.
pub(crate) fn placement(claim: &Claim) -> api::Placement {
    let (uuid, serial) = (claim.uuid.clone().unwrap_or_default(), claim.serial.clone().unwrap_or_default());
    api::Placement { module_id: claim.module, pci: claim.pci.to_string(), uuid, serial }
}

fn request(claims: &[Claim], how: How, noted: &NotedArgs) -> Result<api::SetModuleMapRequest, Failure> {
    Ok(api::SetModuleMapRequest {
        request_id: crate::identified(noted.request_id.as_ref())?,
        baseboard_serial: noted.serial.clone(),
        entries: claims.iter().map(placement).collect(),
        evidence: Some(api::Evidence { how: Some(how) }),
        replace: noted.replace,
    })
}

/// Shows the inventory, or changes it.
pub(crate) async fn run(
    client: &mut FabricClient<Channel>,
    what: Option<&What>,
    out: &mut dyn Write,
    json: bool,
) -> Result<(), Failure> {
    let request = match what {
        None => {
            let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
            return Ok(inventory_text(out, &inventory, json)?);
        }
        Some(What::Forget { request_id }) => {
            let request_id = crate::identified(request_id.as_ref())?;
            let was =
                client.forget_module_map(api::ForgetModuleMapRequest { request_id }).await?.into_inner().was_there;
            let (word, text) = match was {
                true => ("forgotten", "The module map is forgotten"),
                false => ("unchanged", "There was no module map"),
            };
            return Ok(show::line(out, json, word, text)?);
        }
        Some(What::Probe(args)) => {
            probe::run(client, args).await?;
            let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
            return Ok(inventory_text(out, &inventory, json)?);
        }
        Some(What::Set { file, noted }) => request(&claims_of(file)?, How::Operator(api::Told {}), noted)?,
        Some(What::Nvml { files, at, noted }) => {
            let what = format!("{}-files", files.len());
            request(&measured(files, at)?, How::Nvml(api::Nvml { when_ms: 0, what }), noted)?
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
        writeln!(out, "It said until now: {replaced}")?;
    }
    let (changed, dropped) = (ids(answer.changed.as_ref()), ids(answer.dropped.as_ref()));
    match (changed, answer.again) {
        (_, true) => writeln!(out, "It was noted before, for the same request")?,
        ([], _) => writeln!(out, "The module map said so already")?,
        (changed, _) => writeln!(out, "The module map says something new of GPUs {}", words(changed))?,
    }
    if !dropped.is_empty() {
        writeln!(out, "It says nothing any more of GPUs {}", words(dropped))?;
    }
    verdict(out, answer.verified, &answer.why, &answer.advice)
}

fn verdict(out: &mut dyn Write, verified: bool, why: &str, advice: &str) -> show::Result {
    match verified {
        true => writeln!(out, "It is verified: every GPU was measured"),
        false if advice.is_empty() => writeln!(out, "It is not verified: {why}"),
        false => writeln!(out, "It is not verified: {why}; {advice}"),
    }
}

fn evidence(entry: Option<&api::MapEntry>) -> String {
    match entry.and_then(|entry| entry.evidence.as_ref()?.how.as_ref()) {
        None if entry.is_none() => "none".to_owned(),
        None => "of a later version".to_owned(),
        Some(How::Operator(_)) => "operator".to_owned(),
        Some(How::Nvml(nvml)) => format!("nvml, {}", date(nvml.when_ms)),
        Some(How::Probe(probe)) => format!("probe of partition {}, {}", probe.partition, date(probe.when_ms)),
    }
}

/// The day, UTC, of a time in milliseconds since the epoch.
fn date(ms: u64) -> String {
    // Days in the proleptic Gregorian calendar, from 1 March of year 0: no leap day is inside a year then.
    let days = ms / 86_400_000 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * shifted + 2) / 5 + 1, if shifted < 10 { shifted + 3 } else { shifted - 9 });
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + u64::from(month <= 2))
}

fn inventory_text(out: &mut dyn Write, inventory: &api::InventoryResponse, json: bool) -> show::Result {
    if json {
        return document(out, &json!(inventory));
    }
    let row = |one: &api::Module| {
        let entry = one.entry.as_ref();
        let listed = one.listed.as_ref();
        let uuid = entry.map(|entry| entry.uuid.as_str()).filter(|uuid| !uuid.is_empty());
        let links = listed.map_or("not listed".to_owned(), |gpu| format!("{}/{}", gpu.links, gpu.most_links));
        let quarantined = if one.quarantined { ", in quarantine" } else { "" };
        vec![
            one.module_id.to_string(),
            entry.map_or("unknown", |entry| &entry.pci).to_owned(),
            or_none(uuid.or(listed.map(|gpu| gpu.uuid.as_str())).unwrap_or_default()).to_owned(),
            links,
            format!("{}{quarantined}", evidence(entry)),
        ]
    };
    let rows: Vec<Vec<String>> = inventory.modules.iter().map(row).collect();
    table(out, &["MODULE ID", "PCI ADDRESS", "UUID", "LINKS", "EVIDENCE"], &rows)?;
    let or = |text: &str, other: &str| if text.is_empty() { other.to_owned() } else { text.to_owned() };
    let (baseboard, serial) = (or(&inventory.baseboard, "not known"), or(&inventory.baseboard_serial, "not told"));
    writeln!(out, "Baseboard: {baseboard}; serial: {serial}")?;
    if !inventory.trouble.is_empty() {
        writeln!(out, "The list is {} s old: {}", inventory.age_ms / 1000, inventory.trouble)?;
    }
    verdict(out, inventory.verified, &inventory.why, &inventory.advice)?;
    if inventory.allowed && !inventory.verified {
        writeln!(out, "Several GPUs are given all the same: the daemon runs with --allow-unverified-map")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_795_305_600, "2026-11-22"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds * 1000), day);
        }
    }

    #[test]
    fn a_slot_is_two_addresses() {
        let (guest, host) = pair("0000:01:00.0=0000:0f:00.0").unwrap();
        assert_eq!((guest.bus, host.bus), (1, 0x0f));
        for wrong in ["0000:01:00.0", "=", "0000:01:00.0=0f:00.0"] {
            assert!(pair(wrong).is_err(), "{wrong}");
        }
    }
}
