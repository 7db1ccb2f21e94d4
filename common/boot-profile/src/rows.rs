//! What is on the axis.

use firstlight_boot_record::{BootRecord, Event, GpuPhase, Outcome, Unit};

/// How a row is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The kernel before PID 1.
    Kernel,
    /// Ended well.
    Good,
    /// Runs on: a daemon or a container, from ready.
    Serving,
    /// Ended badly.
    Bad,
    /// Never ran or never ended.
    Missing,
}

/// One line of the picture; times in µs since the kernel's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// What it is.
    pub name: String,
    /// Its beginning.
    pub start_us: Option<u64>,
    /// When others could use it, if before its end.
    pub ready_us: Option<u64>,
    /// Its end.
    pub end_us: Option<u64>,
    /// Its own processor time.
    pub processor_us: Option<u64>,
    /// How it is drawn.
    pub look: Look,
    /// How it ended, one word.
    pub outcome: String,
    /// One line more.
    pub detail: String,
}

fn unit(unit: &Unit) -> Row {
    let look = match unit.outcome {
        // A daemon that is ready and has not ended serves on.
        Outcome::Ok | Outcome::Running if unit.ready_us.is_some() && unit.end_us.is_none() => Look::Serving,
        Outcome::Ok => Look::Good,
        Outcome::Failed | Outcome::TimedOut => Look::Bad,
        Outcome::Pending | Outcome::Running | Outcome::Skipped => Look::Missing,
    };
    Row {
        name: unit.name.clone(),
        start_us: unit.start_us,
        ready_us: unit.ready_us,
        end_us: unit.end_us,
        processor_us: unit.processor_us,
        look,
        outcome: unit.outcome.word().to_owned(),
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
        look: Look::Serving,
        outcome: if exited.is_some() { "exited" } else { "running" }.to_owned(),
        detail: exited.map(|e| e.detail.clone()).unwrap_or_default(),
    }
}

/// The rows of a record in the order of their beginnings; what never began
/// comes last. GPUs have rows of their own only where no unit is about them.
#[must_use]
pub fn rows(record: &BootRecord) -> Vec<Row> {
    let mut rows = vec![Row {
        name: "kernel".to_owned(),
        start_us: Some(0),
        ready_us: None,
        end_us: Some(record.pid1_start_us),
        processor_us: None,
        look: Look::Kernel,
        outcome: "ok".to_owned(),
        detail: record.kernel.release.clone(),
    }];
    rows.extend(record.units.iter().map(unit));
    for gpu in &record.gpus {
        if record.units.iter().any(|unit| unit.pci == Some(gpu.pci)) {
            continue;
        }
        let look = match gpu.phase {
            GpuPhase::Ready => Look::Good,
            GpuPhase::Found | GpuPhase::Attaching | GpuPhase::Removed => Look::Missing,
            GpuPhase::Failed | GpuPhase::TimedOut => Look::Bad,
        };
        rows.push(Row {
            name: format!("gpu {}", gpu.pci),
            start_us: gpu.start_us,
            ready_us: None,
            end_us: gpu.end_us,
            processor_us: None,
            look,
            outcome: gpu.phase.word().to_owned(),
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
            look: Look::Good,
            outcome: "ok".to_owned(),
            detail: off.detail.clone(),
        });
    }
    rows.sort_by_key(|row| row.start_us.unwrap_or(u64::MAX));
    rows
}

/// The last moment on the axis, at least 1.
pub(crate) fn last_us(rows: &[Row]) -> u64 {
    rows.iter().flat_map(|row| [row.start_us, row.ready_us, row.end_us]).flatten().max().unwrap_or(0).max(1)
}
