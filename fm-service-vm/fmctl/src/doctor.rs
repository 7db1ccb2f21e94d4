//! `fmctl doctor`: checks each component and prints remedies.

use std::io::Write;
use std::process::ExitCode;

use firstlight_fabric_api::v1 as api;
use serde_json::json;

use crate::exit::{Failure, PROBLEMS};
use crate::{Args, connect, probe, show};

/// Above this age the list counts as stale.
const OLD_MS: u64 = 60_000;

/// The result of a check.
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

/// One check.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    level: Level,
    /// The component.
    name: &'static str,
    /// The finding.
    finding: String,
    /// The remedy; empty if there is none, or the finding contains it.
    remedy: String,
}

fn check(level: Level, name: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { level, name, finding: finding.into(), remedy: remedy.into() }
}

/// The daemon's responses.
struct Responses {
    health: api::HealthResponse,
    /// Or why there is no list.
    list: Result<api::ListResponse, String>,
    inventory: api::InventoryResponse,
}

/// Runs all checks; failed checks set the exit code and are no error.
pub(crate) async fn examine(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let checks = match query(args).await {
        Ok(responses) => checks(&responses),
        Err(failure) => {
            let remedy =
                format!("is fm-partitiond running, and does it listen on {}? check its unit and log", args.connect);
            vec![check(Level::Fail, "daemon", failure.to_string(), remedy)]
        }
    };
    let is_well = checks.iter().all(|check| check.level != Level::Fail);
    if args.json {
        let one = |check: &Check| json!({ "level": check.level.word(), "check": check.name, "finding": check.finding, "remedy": check.remedy });
        let all: Vec<_> = checks.iter().map(one).collect();
        show::document(out, &json!({ "ok": is_well, "checks": all }))?;
    } else {
        for Check { level, name, finding, remedy } in &checks {
            writeln!(out, "{:<4}  {name}: {finding}", level.word())?;
            if !remedy.is_empty() {
                writeln!(out, "      -> {remedy}")?;
            }
        }
    }
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(PROBLEMS) })
}

async fn query(args: &Args) -> Result<Responses, Failure> {
    let mut client = connect::connect(args).await?;
    let health = client.health(api::HealthRequest {}).await?.into_inner();
    let list = client.list(api::ListRequest {}).await;
    let list = list.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned());
    let inventory = client.inventory(api::InventoryRequest {}).await?.into_inner();
    Ok(Responses { health, list, inventory })
}

fn checks(responses: &Responses) -> Vec<Check> {
    let mut all = versions(&responses.health);
    all.extend(manager(responses));
    all.push(map(&responses.inventory));
    if let Ok(list) = &responses.list {
        all.extend(quarantines(list));
        all.extend(owners(list));
    }
    all.extend(problems(&responses.health, &all));
    all.extend(responses.health.notes.iter().map(|note| check(Level::Warn, "note", note.as_str(), "")));
    all
}

/// Checks that versions match.
fn versions(health: &api::HealthResponse) -> Vec<Check> {
    let own = env!("CARGO_PKG_VERSION");
    let daemon = match health.version == own {
        true => check(Level::Ok, "daemon", format!("version {own}"), ""),
        false => {
            let finding = format!("version {}, and this is {own}", health.version);
            check(Level::Warn, "daemon", finding, "use the fmctl of the daemon's image")
        }
    };
    let (manager, driver) = (health.fabric_manager_version.as_str(), health.driver_version.as_str());
    let nvidia = match (manager, driver) {
        ("", _) => {
            let remedy = "set the daemon's --fabric-manager-program; tenants' drivers are not checked";
            check(Level::Warn, "versions", "the fabric manager's version is unknown", remedy)
        }
        // With the fifth NVLink generation there is no driver.
        (manager, "") => check(Level::Ok, "versions", format!("fabric manager {manager}"), ""),
        (manager, driver) if manager == driver => {
            check(Level::Ok, "versions", format!("fabric manager and driver {manager}"), "")
        }
        (manager, driver) => {
            let finding = format!("fabric manager {manager}, driver {driver}");
            check(Level::Fail, "versions", finding, "build the service VM's image with both from one release")
        }
    };
    vec![daemon, nvidia]
}

fn manager(responses: &Responses) -> Vec<Check> {
    let list = match &responses.list {
        Ok(list) => list,
        Err(reason) => {
            return vec![check(
                Level::Fail,
                "fabric manager",
                format!("no list received yet: {reason}"),
                "check its unit and log",
            )];
        }
    };
    let answers = match list.error.as_str() {
        "" => check(Level::Ok, "fabric manager", "it answers", ""),
        // The error contains its remedy.
        error => check(Level::Fail, "fabric manager", error, ""),
    };
    let (age, partitions) = (list.age_ms / 1000, list.partitions.len());
    let finding = format!("{partitions} partitions, received {age} s ago");
    let age = match list.age_ms {
        OLD_MS.. => check(Level::Fail, "list", finding, "the fabric manager hangs or is gone: check its unit and log"),
        _ if partitions == 0 => check(
            Level::Fail,
            "list",
            finding,
            "a fabric manager without partitions: is it in the shared mode, FABRIC_MODE=1?",
        ),
        _ => check(Level::Ok, "list", finding, ""),
    };
    let baseboard = match list.baseboard.as_str() {
        "" => {
            let remedy = "check fmctl list: it is used unchanged, and another version of the fabric manager may list other partitions";
            check(Level::Warn, "baseboard", "the list matches no known baseboard", remedy)
        }
        name => check(Level::Ok, "baseboard", name, ""),
    };
    vec![answers, age, baseboard]
}

fn map(inventory: &api::InventoryResponse) -> Check {
    let api::InventoryResponse { verified, reason, remedy, unverified_map_allowed, .. } = inventory;
    match (verified, unverified_map_allowed) {
        (true, _) => {
            let finding = format!("verified, of baseboard {}", inventory.baseboard_serial);
            check(Level::Ok, "module map", finding, "")
        }
        (false, true) => {
            let finding = format!("not verified, and several GPUs are given by --allow-unverified-map: {reason}");
            check(Level::Warn, "module map", finding, remedy.as_str())
        }
        (false, false) => check(
            Level::Fail,
            "module map",
            format!("not verified, only single GPUs are given: {reason}"),
            remedy.as_str(),
        ),
    }
}

fn quarantines(list: &api::ListResponse) -> Vec<Check> {
    let mut gpus: Vec<_> = list.quarantined.iter().collect();
    gpus.sort();
    let one = |(gpu, reason): (&u32, &String)| {
        let remedy = format!("fmctl release {gpu} after repair");
        check(Level::Warn, "quarantine", format!("GPU {gpu}: {reason}"), remedy)
    };
    match gpus.is_empty() {
        true => vec![check(Level::Ok, "quarantine", "no GPU", "")],
        false => gpus.into_iter().map(one).collect(),
    }
}

fn owners(list: &api::ListResponse) -> Vec<Check> {
    let of = |owner: &str| -> Vec<u32> {
        let active = list.partitions.iter().filter(|one| one.active && !one.in_progress);
        active.filter(|one| one.owner == owner).map(|one| one.id).collect()
    };
    let mut all = Vec::new();
    let foreign = of("");
    if !foreign.is_empty() {
        let finding = format!("partitions {} are active without a recorded owner", show::id_list(&foreign));
        let remedy = "fmctl reconcile with every running tenant; look at its steps before --yes";
        all.push(check(Level::Fail, "owners", finding, remedy));
    }
    for partition in of(probe::OWNER) {
        let finding = format!("partition {partition} is active for a probe");
        let remedy = format!("if none runs, fmctl deactivate {partition} --owner {}", probe::OWNER);
        all.push(check(Level::Warn, "owners", finding, remedy));
    }
    if all.is_empty() {
        all.push(check(Level::Ok, "owners", "every active partition has an owner", ""));
    }
    all
}

/// Reports problems of `health` that no other check has reported; they contain their remedies.
fn problems(health: &api::HealthResponse, reported: &[Check]) -> Vec<Check> {
    let is_reported = |error: &&String| {
        let gone =
            reported.iter().any(|check| check.name == "fabric manager" && check.finding.contains(error.as_str()));
        let above = [
            "they have to be of one version",
            "the module map is not verified",
            "are active without a recorded owner",
            "is quarantined (",
        ];
        gone || above.iter().any(|id_list| error.contains(id_list))
    };
    let more: Vec<&String> = health.problems.iter().filter(|error| !is_reported(error)).collect();
    match more.is_empty() {
        true => vec![check(Level::Ok, "health", "no other problems", "")],
        false => more.into_iter().map(|error| check(Level::Fail, "health", error.as_str(), "")).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well() -> Responses {
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
        Responses { health, list: Ok(list), inventory }
    }

    fn found(change: impl FnOnce(&mut Responses)) -> Vec<String> {
        let mut responses = well();
        change(&mut responses);
        let bad = checks(&responses).into_iter().filter(|check| check.level != Level::Ok);
        bad.map(|check| format!("{} {}: {} -> {}", check.level.word(), check.name, check.finding, check.remedy))
            .collect()
    }

    #[test]
    fn each_problem_is_one_check_with_a_remedy() {
        assert_eq!(found(|_| {}), [] as [String; 0]);
        let list =
            |responses: &mut Responses, change: fn(&mut api::ListResponse)| change(responses.list.as_mut().unwrap());
        let error = |responses: &mut Responses, text: &str| responses.health.problems.push(text.to_owned());
        let driver = |responses: &mut Responses, text: &str| responses.health.driver_version = text.to_owned();
        assert_eq!(found(|responses| driver(responses, "610.43.02")), [] as [String; 0]);
        let cases: [(Vec<String>, &str); 13] = [
            (
                found(|responses| list(responses, |list| list.partitions[0].owner = probe::OWNER.to_owned())),
                "warn owners: partition 7 is active for a probe -> if none runs, fmctl deactivate 7 --owner fmctl-probe",
            ),
            (
                found(|responses| responses.health.fabric_manager_version.clear()),
                "warn versions: the fabric manager's version is unknown",
            ),
            (
                found(|responses| {
                    driver(responses, "575.1");
                    error(
                        responses,
                        "the fabric manager is 610.43.02 and the driver 575.1: they have to be of one version; ..",
                    );
                }),
                "FAIL versions: fabric manager 610.43.02, driver 575.1 -> build",
            ),
            (found(|responses| responses.health.notes.push("SXid 1".to_owned())), "warn note: SXid 1 -> "),
            (found(|responses| responses.health.version = "9.9".to_owned()), "warn daemon: version 9.9"),
            (
                found(|responses| responses.list = Err("x".to_owned())),
                "FAIL fabric manager: no list received yet: x -> check its unit",
            ),
            (
                found(|responses| list(responses, |list| list.age_ms = 61_000)),
                "FAIL list: 1 partitions, received 61 s ago -> the fabric",
            ),
            (found(|responses| list(responses, |list| list.partitions.clear())), "FABRIC_MODE=1"),
            (found(|responses| list(responses, |list| list.baseboard.clear())), "warn baseboard: "),
            (
                found(|responses| {
                    (responses.inventory.verified, responses.inventory.remedy) = (false, "run x".to_owned())
                }),
                "FAIL module map: not verified, only single GPUs are given:  -> run x",
            ),
            (
                found(|responses| {
                    (responses.inventory.verified, responses.inventory.unverified_map_allowed) = (false, true)
                }),
                "warn module map: ",
            ),
            (
                found(|responses| list(responses, |list| list.partitions[0].owner.clear())),
                "FAIL owners: partitions 7 are active without a recorded owner -> fmctl reconcile",
            ),
            (
                found(|responses| error(responses, "the fabric has lost partitions 3")),
                "FAIL health: the fabric has lost partitions 3 -> ",
            ),
        ];
        for (found, finding) in cases {
            assert!(found.len() == 1 && found[0].contains(finding), "{finding} in {found:?}");
        }
        // A problem is reported once.
        let found = found(|responses| {
            list(responses, |list| {
                list.error = "gone".to_owned();
                list.quarantined.insert(8, "Xid 79".to_owned());
            });
            error(responses, "gone");
            error(responses, "GPU 8 is quarantined (Xid 79): fmctl release 8 after repair");
        });
        assert_eq!(
            found,
            ["FAIL fabric manager: gone -> ", "warn quarantine: GPU 8: Xid 79 -> fmctl release 8 after repair"]
        );
    }
}
