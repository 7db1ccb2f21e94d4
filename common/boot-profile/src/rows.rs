//! Rows of the time axis.

use firstlight_boot_record::{BootRecord, Event, GpuPhase, Outcome, Unit};

/// The style of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowStyle {
    /// The kernel before PID 1.
    Kernel,
    /// Succeeded.
    Good,
    /// A daemon or container that is ready and keeps running.
    Serving,
    /// Failed or timed out.
    Bad,
    /// Not started or not ended.
    Missing,
}

/// One row of the time axis; times in µs since the kernel's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Name of the unit, GPU or container.
    pub name: String,
    /// Start.
    pub start_us: Option<u64>,
    /// When it became ready, if before its end.
    pub ready_us: Option<u64>,
    /// End.
    pub end_us: Option<u64>,
    /// CPU time of its thread.
    pub processor_us: Option<u64>,
    /// Style.
    pub style: RowStyle,
    /// Result, one word.
    pub outcome: String,
    /// One line of detail.
    pub detail: String,
}

fn unit(unit: &Unit) -> Row {
    let style = match unit.outcome {
        // A daemon that is ready and has not ended keeps serving.
        Outcome::Ok | Outcome::Running if unit.ready_us.is_some() && unit.end_us.is_none() => RowStyle::Serving,
        Outcome::Ok => RowStyle::Good,
        Outcome::Failed | Outcome::TimedOut => RowStyle::Bad,
        Outcome::Pending | Outcome::Running | Outcome::Skipped => RowStyle::Missing,
    };
    Row {
        name: unit.name.clone(),
        start_us: unit.start_us,
        ready_us: unit.ready_us,
        end_us: unit.end_us,
        processor_us: unit.processor_us,
        style,
        outcome: unit.outcome.as_str().to_owned(),
        detail: unit.detail.clone(),
    }
}

fn container(events: &[Event], started: &Event) -> Row {
    let exited = events.iter().find(|e| e.kind == "container-exited" && e.object == started.object);
    Row {
        name: format!("container {}", started.object),
        start_us: Some(started.at_us),
        ready_us: None,
        end_us: exited.map(|e| e.at_us),
        processor_us: None,
        style: RowStyle::Serving,
        outcome: if exited.is_some() { "exited" } else { "running" }.to_owned(),
        detail: exited.map(|e| e.detail.clone()).unwrap_or_default(),
    }
}

/// Returns the rows of a record ordered by start; those that never started come
/// last. A GPU has a row of its own only if no unit covers it.
#[must_use]
pub fn rows(record: &BootRecord) -> Vec<Row> {
    let mut rows = vec![Row {
        name: "kernel".to_owned(),
        start_us: Some(0),
        ready_us: None,
        end_us: Some(record.pid1_start_us),
        processor_us: None,
        style: RowStyle::Kernel,
        outcome: "ok".to_owned(),
        detail: record.kernel.release.clone(),
    }];
    rows.extend(record.units.iter().map(unit));
    for gpu in &record.gpus {
        if record.units.iter().any(|unit| unit.pci == Some(gpu.pci)) {
            continue;
        }
        let style = match gpu.phase {
            GpuPhase::Ready => RowStyle::Good,
            GpuPhase::Found | GpuPhase::Attaching | GpuPhase::Removed => RowStyle::Missing,
            GpuPhase::Failed | GpuPhase::TimedOut => RowStyle::Bad,
        };
        rows.push(Row {
            name: format!("gpu {}", gpu.pci),
            start_us: gpu.start_us,
            ready_us: None,
            end_us: gpu.end_us,
            processor_us: None,
            style,
            outcome: gpu.phase.as_str().to_owned(),
            detail: gpu.detail.clone(),
        });
    }
    let started = record.events.iter().filter(|event| event.kind == "container-started");
    rows.extend(started.map(|event| container(&record.events, event)));
    if let Some(off) = record.event("power-off") {
        rows.push(Row {
            name: "power-off".to_owned(),
            start_us: Some(off.at_us),
            ready_us: None,
            end_us: Some(off.at_us),
            processor_us: None,
            style: RowStyle::Good,
            outcome: "ok".to_owned(),
            detail: off.detail.clone(),
        });
    }
    rows.sort_by_key(|row| row.start_us.unwrap_or(u64::MAX));
    rows
}

/// Returns the end of the time axis, at least 1.
pub(crate) fn last_us(rows: &[Row]) -> u64 {
    rows.iter().flat_map(|row| [row.start_us, row.ready_us, row.end_us]).flatten().max().unwrap_or(0).max(1)
}
