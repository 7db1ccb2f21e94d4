//! Prints responses, as tables or as JSON.

use std::io::{self, Write};

use firstlight_fabric_api::v1 as api;
use serde_json::{Value, json};

pub(crate) type Result = io::Result<()>;

pub(crate) fn document(out: &mut dyn Write, value: &Value) -> Result {
    writeln!(out, "{value:#}")
}

/// Prints a status word as JSON, or a line.
pub(crate) fn line(out: &mut dyn Write, json: bool, word: &str, text: &str) -> Result {
    if json { document(out, &json!({ "status": word })) } else { writeln!(out, "{text}") }
}

pub(crate) fn id_list(ids: &[u32]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

pub(crate) fn ids(gpus: Option<&api::Gpus>) -> &[u32] {
    gpus.map_or(&[], |gpus| &gpus.ids)
}

pub(crate) fn or_none(text: &str) -> &str {
    if text.is_empty() { "N/A" } else { text }
}

/// Prints left-aligned columns, with a line under each heading.
pub(crate) fn table(out: &mut dyn Write, heads: &[&str], rows: &[Vec<String>]) -> Result {
    let widths: Vec<usize> = heads
        .iter()
        .enumerate()
        .map(|(at, head)| rows.iter().filter_map(|row| row.get(at)).map(String::len).chain([head.len()]).max())
        .map(Option::unwrap_or_default)
        .collect();
    let mut print = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "{}", padded.collect::<Vec<_>>().join("  ").trim_end())
    };
    print(heads.to_vec())?;
    let lines: Vec<String> = heads.iter().map(|head| "-".repeat(head.len())).collect();
    print(lines.iter().map(String::as_str).collect())?;
    rows.iter().try_for_each(|row| print(row.iter().map(String::as_str).collect()))
}

/// Prints all partitions in NVIDIA's table format.
pub(crate) fn list(out: &mut dyn Write, list: &api::ListResponse, json: bool) -> Result {
    if json {
        return document(out, &json!(list));
    }
    let row = |one: &api::Partition| {
        let links: u32 = one.gpus.iter().map(|gpu| gpu.links).sum();
        let gpus: Vec<u32> = one.gpus.iter().map(|gpu| gpu.physical_id).collect();
        let status = if one.active { "Active" } else { "Inactive" };
        vec![one.id.to_string(), status.to_owned(), gpus.len().to_string(), links.to_string(), id_list(&gpus)]
    };
    let rows: Vec<Vec<String>> = list.partitions.iter().map(row).collect();
    table(out, &["PARTITION ID", "STATUS", "GPUs", "NVLINKS", "GPU PHYSICAL IDs"], &rows)
}

/// Prints one partition and its GPUs.
pub(crate) fn partition(out: &mut dyn Write, one: &api::Partition, json: bool) -> Result {
    if json {
        return document(out, &json!(one));
    }
    let state = match (one.active, one.in_progress, one.free) {
        (_, true, _) => "a change is in progress",
        (true, ..) => "active",
        (false, _, true) => "free",
        (false, _, false) => "not active, and not free",
    };
    let owner = if one.owner.is_empty() { String::new() } else { format!(", owner {}", one.owner) };
    writeln!(out, "Partition {}: {state}{owner}", one.id)?;
    let row = |gpu: &api::Gpu| {
        let links = format!("{}/{}", gpu.links, gpu.max_links);
        let pci = if gpu.pci == "00000000:00:00.0" { "N/A" } else { or_none(&gpu.pci) };
        vec![
            gpu.physical_id.to_string(),
            or_none(&gpu.uuid).to_owned(),
            pci.to_owned(),
            links,
            gpu.line_rate_mbps.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = one.gpus.iter().map(row).collect();
    table(out, &["PHYSICAL ID", "UUID", "PCI BUS ID", "NVLINKS", "RATE (MB/s)"], &rows)
}

/// Formats the known locations of GPUs.
fn places(placed: &[api::GpuLocation]) -> String {
    let all: Vec<&str> = placed.iter().map(|one| one.pci.as_str()).collect();
    if all.is_empty() { String::new() } else { format!(" at {}", all.join(",")) }
}

/// Prints the planned partition.
pub(crate) fn plan(out: &mut dyn Write, plan: &api::PlanResponse, json: bool) -> Result {
    if json {
        return document(out, &json!(plan));
    }
    let blocks = match plan.blocked_partitions.as_slice() {
        [] => "blocks no larger partition".to_owned(),
        blocks => format!("blocks larger partitions {}", id_list(blocks)),
    };
    let (gpus, places) = (id_list(ids(plan.gpus.as_ref())), places(&plan.locations));
    writeln!(out, "Partition {} with GPUs {gpus}{places}; {blocks}", plan.partition)
}

/// Prints the activated partition.
pub(crate) fn activated(out: &mut dyn Write, given: &api::ActivateResponse, json: bool) -> Result {
    if json {
        return document(out, &json!(given));
    }
    let already_done = if given.already_done { " (already done by the same request)" } else { "" };
    let (gpus, places) = (id_list(ids(given.gpus.as_ref())), places(&given.locations));
    writeln!(out, "Successfully activated partition {} with GPUs {gpus}{places}{already_done}", given.partition)
}

/// Prints the result of a deactivation.
pub(crate) fn deactivated(out: &mut dyn Write, partition: u32, answer: &api::DeactivateResponse, json: bool) -> Result {
    match (json, answer.was_active) {
        (true, _) => document(out, &json!({ "partition": partition, "was_active": answer.was_active })),
        (false, true) => writeln!(out, "Successfully deactivated partition {partition}"),
        (false, false) => writeln!(out, "Partition {partition} was not active"),
    }
}

fn kind(step: &api::Step) -> &'static str {
    match step.kind() {
        api::step::Kind::Unspecified => "unknown",
        api::step::Kind::Adopt => "adopt",
        api::step::Kind::Activate => "activate",
        api::step::Kind::Deactivate => "deactivate",
    }
}

/// Prints the steps of a reconciliation.
pub(crate) fn steps(out: &mut dyn Write, answer: &api::ReconcileResponse, done: bool, json: bool) -> Result {
    if json {
        let one = |step: &api::Step| json!({ "action": kind(step), "partition": step.partition, "owner": step.owner });
        let steps: Vec<Value> = answer.steps.iter().map(one).collect();
        return document(out, &json!({ "applied": done, "steps": steps }));
    }
    for step in &answer.steps {
        match kind(step) {
            "deactivate" => writeln!(out, "deactivate partition {}", step.partition)?,
            "adopt" => writeln!(out, "adopt active partition {} for {}", step.partition, step.owner)?,
            word => writeln!(out, "{word} partition {} for {}", step.partition, step.owner)?,
        }
    }
    match (answer.steps.is_empty(), done) {
        (true, _) => writeln!(out, "The fabric is already in the desired state"),
        (false, true) => writeln!(out, "Done"),
        (false, false) => writeln!(out, "Dry run: nothing was changed, --yes applies the steps"),
    }
}

/// Prints problems, notes and versions.
pub(crate) fn health(out: &mut dyn Write, health: &api::HealthResponse, json: bool) -> Result {
    if json {
        return document(out, &json!(health));
    }
    if health.ok {
        writeln!(out, "No problems")?;
    }
    health.problems.iter().try_for_each(|problem| writeln!(out, "* {problem}"))?;
    health.notes.iter().try_for_each(|note| writeln!(out, "- {note}"))?;
    let known = |what: &str, version: &str| match version {
        "" => format!("{what} unknown"),
        version => format!("{what} {version}"),
    };
    let (manager, driver) = (&health.fabric_manager_version, &health.driver_version);
    let versions = [known("fm-partitiond", &health.version), known("fabric manager", manager), known("driver", driver)];
    writeln!(out, "Versions: {}", versions.join(", "))?;
    if health.in_progress_ms > 0 {
        writeln!(out, "A change has been in progress for {} ms", health.in_progress_ms)?;
    }
    Ok(())
}

/// Prints an event on one line.
pub(crate) fn event(out: &mut dyn Write, event: &api::Event, json: bool) -> Result {
    use api::event::Payload;
    if json {
        writeln!(out, "{}", json!(event))?;
        return out.flush();
    }
    let text = match &event.payload {
        None => "unknown event".to_owned(),
        Some(Payload::State(list)) => {
            let active: Vec<u32> = list.partitions.iter().filter(|one| one.active).map(|one| one.id).collect();
            let active = if active.is_empty() { "none".to_owned() } else { id_list(&active) };
            format!("{} partitions, active: {active}; largest free: {}", list.partitions.len(), list.largest_free)
        }
        Some(Payload::Partition(one)) => {
            let state = match (one.active, one.in_progress) {
                (_, true) => "changes",
                (true, _) => "is active",
                (false, _) => "is not active",
            };
            let owner = if one.owner.is_empty() { String::new() } else { format!(", owner {}", one.owner) };
            format!("partition {} {state}{owner}", one.id)
        }
        Some(Payload::Quarantine(one)) if one.reason.is_empty() => format!("GPU {} is available again", one.gpu),
        Some(Payload::Quarantine(one)) => format!("GPU {} is quarantined: {}", one.gpu, one.reason),
        Some(Payload::Health(health)) if health.ok => "no problems".to_owned(),
        Some(Payload::Health(health)) => health.problems.join("; "),
    };
    writeln!(out, "{} {}.{:03} {text}", event.sequence, event.time_ms / 1000, event.time_ms % 1000)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(show: impl FnOnce(&mut dyn Write) -> Result) -> String {
        let mut out = Vec::new();
        show(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn gpu(physical_id: u32) -> api::Gpu {
        let pci = "00000000:00:00.0".to_owned();
        api::Gpu { physical_id, uuid: String::new(), pci, links: 18, max_links: 18, line_rate_mbps: 26_562 }
    }

    #[test]
    fn list_has_nvidias_table_format() {
        let partition = |id, active, gpus: &[u32]| api::Partition {
            id,
            active,
            gpus: gpus.iter().map(|id| gpu(*id)).collect(),
            ..api::Partition::default()
        };
        let partitions = vec![partition(0, false, &[1, 2, 3, 4, 5, 6, 7, 8]), partition(14, true, &[8])];
        let response = api::ListResponse { partitions, ..api::ListResponse::default() };
        assert_eq!(
            text(|out| list(out, &response, false)),
            "PARTITION ID  STATUS    GPUs  NVLINKS  GPU PHYSICAL IDs\n\
             ------------  ------    ----  -------  ----------------\n\
             0             Inactive  8     144      1,2,3,4,5,6,7,8\n\
             14            Active    1     18       8\n"
        );
        let read: Value = serde_json::from_str(&text(|out| list(out, &response, true))).unwrap();
        assert_eq!((&read["partitions"][1]["id"], &read["partitions"][1]["active"]), (&json!(14), &json!(true)));
        let one = api::Partition { owner: "vm-1".to_owned(), ..partition(14, true, &[8]) };
        assert_eq!(
            text(|out| super::partition(out, &one, false)),
            "Partition 14: active, owner vm-1\n\
             PHYSICAL ID  UUID  PCI BUS ID  NVLINKS  RATE (MB/s)\n\
             -----------  ----  ----------  -------  -----------\n\
             8            N/A   N/A         18/18    26562\n"
        );
    }

    #[test]
    fn reconcile_prints_its_steps() {
        let step = |kind: api::step::Kind, partition, owner: &str| api::Step {
            kind: kind.into(),
            partition,
            owner: owner.to_owned(),
        };
        use api::step::Kind;
        let answer = api::ReconcileResponse {
            steps: vec![step(Kind::Deactivate, 3, ""), step(Kind::Adopt, 4, "a"), step(Kind::Activate, 5, "b")],
        };
        let said = "deactivate partition 3\nadopt active partition 4 for a\nactivate partition 5 for b\n";
        assert_eq!(text(|out| steps(out, &answer, true, false)), format!("{said}Done\n"));
        assert!(text(|out| steps(out, &answer, false, false)).ends_with(
            "--yes applies the steps
"
        ));
        let none = api::ReconcileResponse::default();
        assert_eq!(text(|out| steps(out, &none, false, false)), "The fabric is already in the desired state\n");
    }
}
