//! One thing after the other, each with what to do.

use std::io::Write;
use std::process::ExitCode;

use firstlight_fabric_api::v1 as api;
use serde_json::json;

use crate::exit::{Failure, TROUBLE};
use crate::{Args, connect, probe, show};

/// A list that is older than this is not looked at any more, as a rule.
const OLD_MS: u64 = 60_000;

/// How it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Ok,
    Warn,
    Fail,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

/// Something that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    level: Level,
    /// What.
    name: &'static str,
    /// How it is.
    said: String,
    /// What to do; empty if nothing, or if that is said already.
    todo: String,
}

fn check(level: Level, name: &'static str, said: impl Into<String>, todo: impl Into<String>) -> Check {
    Check { level, name, said: said.into(), todo: todo.into() }
}

/// What the daemon says of itself and the fabric.
struct Seen {
    health: api::HealthResponse,
    /// Or why there is none.
    list: Result<api::ListResponse, String>,
    inventory: api::InventoryResponse,
}

/// Looks at everything; trouble is an exit code and no failure.
pub(crate) async fn examine(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let checks = match ask(args).await {
        Ok(seen) => checks(&seen),
        Err(failure) => {
            let todo = format!("is fm-partitiond running, and does it listen on {}? its unit, its log", args.connect);
            vec![check(Level::Fail, "daemon", failure.to_string(), todo)]
        }
    };
    let is_well = checks.iter().all(|check| check.level != Level::Fail);
    if args.json {
        let one = |check: &Check| json!({ "level": check.level.word(), "check": check.name, "said": check.said, "todo": check.todo });
        let all: Vec<_> = checks.iter().map(one).collect();
        show::document(out, &json!({ "ok": is_well, "checks": all }))?;
    } else {
        for Check { level, name, said, todo } in &checks {
            writeln!(out, "{:<4}  {name}: {said}", level.word())?;
            if !todo.is_empty() {
                writeln!(out, "      -> {todo}")?;
            }
        }
    }
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(TROUBLE) })
}

async fn ask(args: &Args) -> Result<Seen, Failure> {
    let mut client = connect::connected(args).await?;
    let health = client.health(api::HealthRequest {}).await?.into_inner();
    let list = client.list(api::ListRequest {}).await;
    let list = list.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned());
    let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
    Ok(Seen { health, list, inventory })
}

fn checks(seen: &Seen) -> Vec<Check> {
    let mut all = versions(&seen.health);
    all.extend(manager(seen));
    all.push(map(&seen.inventory));
    if let Ok(list) = &seen.list {
        all.extend(quarantines(list));
        all.extend(owners(list));
    }
    all.extend(troubles(&seen.health, &all));
    all.extend(seen.health.notes.iter().map(|note| check(Level::Warn, "note", note.as_str(), "")));
    all
}

/// Versions that belong together.
fn versions(health: &api::HealthResponse) -> Vec<Check> {
    let own = env!("CARGO_PKG_VERSION");
    let daemon = match health.version == own {
        true => check(Level::Ok, "daemon", format!("it answers, version {own}"), ""),
        false => {
            let said = format!("it answers, version {}, and this is {own}", health.version);
            check(Level::Warn, "daemon", said, "use the fmctl of the daemon's image")
        }
    };
    let (manager, driver) = (health.fabric_manager_version.as_str(), health.driver_version.as_str());
    let nvidia = match (manager, driver) {
        ("", _) => {
            let todo = "tell the daemon where nv-fabricmanager is: --fabric-manager-program; tenants' drivers are not compared";
            check(Level::Warn, "versions", "the fabric manager's is not known", todo)
        }
        // With the fifth NVLink generation there is none.
        (manager, "") => check(Level::Ok, "versions", format!("fabric manager {manager}"), ""),
        (manager, driver) if manager == driver => {
            check(Level::Ok, "versions", format!("fabric manager and driver {manager}"), "")
        }
        (manager, driver) => {
            let said = format!("fabric manager {manager}, driver {driver}");
            check(Level::Fail, "versions", said, "build the service VM's image with both from one release")
        }
    };
    vec![daemon, nvidia]
}

fn manager(seen: &Seen) -> Vec<Check> {
    let list = match &seen.list {
        Ok(list) => list,
        Err(why) => {
            return vec![check(
                Level::Fail,
                "fabric manager",
                format!("its list was never seen: {why}"),
                "its unit and its log",
            )];
        }
    };
    let answers = match list.trouble.as_str() {
        "" => check(Level::Ok, "fabric manager", "it answers", ""),
        // It says what to do.
        trouble => check(Level::Fail, "fabric manager", trouble, ""),
    };
    let (age, partitions) = (list.age_ms / 1000, list.partitions.len());
    let said = format!("{partitions} partitions, seen {age} s ago");
    let age = match list.age_ms {
        OLD_MS.. => check(Level::Fail, "list", said, "the fabric manager hangs or is gone: its unit and its log"),
        _ if partitions == 0 => check(
            Level::Fail,
            "list",
            said,
            "a fabric manager without partitions: is it in the shared mode, FABRIC_MODE=1?",
        ),
        _ => check(Level::Ok, "list", said, ""),
    };
    let baseboard = match list.baseboard.as_str() {
        "" => {
            let todo =
                "look at fmctl list: it is used as it is, and a fabric manager of another version may list another";
            check(Level::Warn, "baseboard", "the list is none of those of known baseboards", todo)
        }
        name => check(Level::Ok, "baseboard", name, ""),
    };
    vec![answers, age, baseboard]
}

fn map(inventory: &api::InventoryResponse) -> Check {
    let api::InventoryResponse { verified, why, advice, allowed, .. } = inventory;
    match (verified, allowed) {
        (true, _) => {
            let said = format!("verified, of baseboard {}", inventory.baseboard_serial);
            check(Level::Ok, "module map", said, "")
        }
        (false, true) => {
            let said = format!("not verified, and several GPUs are given by --allow-unverified-map: {why}");
            check(Level::Warn, "module map", said, advice.as_str())
        }
        (false, false) => check(
            Level::Fail,
            "module map",
            format!("not verified, nobody is given several GPUs: {why}"),
            advice.as_str(),
        ),
    }
}

fn quarantines(list: &api::ListResponse) -> Vec<Check> {
    let mut gpus: Vec<_> = list.quarantined.iter().collect();
    gpus.sort();
    let one = |(gpu, reason): (&u32, &String)| {
        let todo = format!("fmctl release {gpu} when it is good again");
        check(Level::Warn, "quarantine", format!("GPU {gpu}: {reason}"), todo)
    };
    match gpus.is_empty() {
        true => vec![check(Level::Ok, "quarantine", "no GPU", "")],
        false => gpus.into_iter().map(one).collect(),
    }
}

fn owners(list: &api::ListResponse) -> Vec<Check> {
    let of = |owner: &str| -> Vec<u32> {
        let active = list.partitions.iter().filter(|one| one.active && !one.under_way);
        active.filter(|one| one.owner == owner).map(|one| one.id).collect()
    };
    let mut all = Vec::new();
    let foreign = of("");
    if !foreign.is_empty() {
        let said = format!("partitions {} are active and nobody's here", show::words(&foreign));
        let todo = "fmctl reconcile with every tenant that runs; look at its steps before --yes";
        all.push(check(Level::Fail, "owners", said, todo));
    }
    for partition in of(probe::OWNER) {
        let said = format!("partition {partition} is active for a probe");
        let todo = format!("if none runs, fmctl deactivate {partition} --owner {}", probe::OWNER);
        all.push(check(Level::Warn, "owners", said, todo));
    }
    if all.is_empty() {
        all.push(check(Level::Ok, "owners", "every active partition has one", ""));
    }
    all
}

/// What `health` says that was not said above; it says what to do itself.
fn troubles(health: &api::HealthResponse, told: &[Check]) -> Vec<Check> {
    let is_told = |trouble: &&String| {
        let gone = told.iter().any(|check| check.name == "fabric manager" && check.said.contains(trouble.as_str()));
        let above = [
            "they have to be of one version",
            "which GPU is which is not verified",
            "are active and nobody's here",
            "is in quarantine (",
        ];
        gone || above.iter().any(|words| trouble.contains(words))
    };
    let more: Vec<&String> = health.troubles.iter().filter(|trouble| !is_told(trouble)).collect();
    match more.is_empty() {
        true => vec![check(Level::Ok, "health", "nothing more", "")],
        false => more.into_iter().map(|trouble| check(Level::Fail, "health", trouble.as_str(), "")).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well() -> Seen {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let fabric_manager_version = "610.43.02".to_owned();
        let health = api::HealthResponse {
            ok: true,
            fabric_manager: true,
            version,
            fabric_manager_version,
            ..Default::default()
        };
        let partition = api::Partition { id: 7, active: true, owner: "vm-1".to_owned(), ..Default::default() };
        let list =
            api::ListResponse { partitions: vec![partition], baseboard: "h100".to_owned(), ..Default::default() };
        let inventory =
            api::InventoryResponse { verified: true, baseboard_serial: "S1".to_owned(), ..Default::default() };
        Seen { health, list: Ok(list), inventory }
    }

    fn found(change: impl FnOnce(&mut Seen)) -> Vec<String> {
        let mut seen = well();
        change(&mut seen);
        let bad = checks(&seen).into_iter().filter(|check| check.level != Level::Ok);
        bad.map(|check| format!("{} {}: {} -> {}", check.level.word(), check.name, check.said, check.todo)).collect()
    }

    #[test]
    fn each_thing_that_is_not_well_is_one_line_with_what_to_do() {
        assert_eq!(found(|_| {}), [] as [String; 0]);
        let list = |seen: &mut Seen, change: fn(&mut api::ListResponse)| change(seen.list.as_mut().unwrap());
        let trouble = |seen: &mut Seen, text: &str| seen.health.troubles.push(text.to_owned());
        let driver = |seen: &mut Seen, text: &str| seen.health.driver_version = text.to_owned();
        assert_eq!(found(|seen| driver(seen, "610.43.02")), [] as [String; 0]);
        let cases: [(Vec<String>, &str); 13] = [
            (
                found(|seen| list(seen, |list| list.partitions[0].owner = probe::OWNER.to_owned())),
                "warn owners: partition 7 is active for a probe -> if none runs, fmctl deactivate 7 --owner fmctl-probe",
            ),
            (
                found(|seen| seen.health.fabric_manager_version.clear()),
                "warn versions: the fabric manager's is not known",
            ),
            (
                found(|seen| {
                    driver(seen, "575.1");
                    trouble(
                        seen,
                        "the fabric manager is 610.43.02 and the driver 575.1: they have to be of one version; ..",
                    );
                }),
                "FAIL versions: fabric manager 610.43.02, driver 575.1 -> build",
            ),
            (found(|seen| seen.health.notes.push("SXid 1".to_owned())), "warn note: SXid 1 -> "),
            (found(|seen| seen.health.version = "9.9".to_owned()), "warn daemon: it answers, version 9.9"),
            (
                found(|seen| seen.list = Err("x".to_owned())),
                "FAIL fabric manager: its list was never seen: x -> its unit",
            ),
            (
                found(|seen| list(seen, |list| list.age_ms = 61_000)),
                "FAIL list: 1 partitions, seen 61 s ago -> the fabric",
            ),
            (found(|seen| list(seen, |list| list.partitions.clear())), "FABRIC_MODE=1"),
            (found(|seen| list(seen, |list| list.baseboard.clear())), "warn baseboard: "),
            (
                found(|seen| (seen.inventory.verified, seen.inventory.advice) = (false, "run x".to_owned())),
                "FAIL module map: not verified, nobody is given several GPUs:  -> run x",
            ),
            (found(|seen| (seen.inventory.verified, seen.inventory.allowed) = (false, true)), "warn module map: "),
            (
                found(|seen| list(seen, |list| list.partitions[0].owner.clear())),
                "FAIL owners: partitions 7 are active and nobody's here -> fmctl reconcile",
            ),
            (
                found(|seen| trouble(seen, "the fabric has lost partitions 3")),
                "FAIL health: the fabric has lost partitions 3 -> ",
            ),
        ];
        for (found, said) in cases {
            assert!(found.len() == 1 && found[0].contains(said), "{said} in {found:?}");
        }
        // What is said once is not said again.
        let found = found(|seen| {
            list(seen, |list| {
                list.trouble = "gone".to_owned();
                list.quarantined.insert(8, "Xid 79".to_owned());
            });
            trouble(seen, "gone");
            trouble(seen, "GPU 8 is in quarantine (Xid 79): fmctl release 8 when it is good again");
        });
        assert_eq!(
            found,
            [
                "FAIL fabric manager: gone -> ",
                "warn quarantine: GPU 8: Xid 79 -> fmctl release 8 when it is good again"
            ]
        );
    }
}
