//! GetMetrics: metrics of agent and guest in Prometheus' text format.
//!
//! Names and labels equal those of Kata's agent, so existing dashboards work; additional metrics
//! begin with `firstlight_`. A missing kernel file omits its family.

mod filesystems;
mod guest;
mod own;

use std::io::Read;
use std::path::{Path, PathBuf};

use firstlight_boot_record::GpuPhase;
use firstlight_init_control::GpuState;
use firstlight_metrics_text::{Kind, Text};

use crate::background;
use crate::error::Result;
use crate::gpu::Source;
use crate::paths::Paths;

/// Maximum number of interfaces, disks, and file systems: bounds the reply.
const MAX_SERIES: usize = 256;

/// Maximum bytes read of a file.
const MAX_FILE: u64 = 1 << 20;

/// Reads a file below `/proc`; empty if it does not exist.
fn read(proc: &Path, file: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(proc.join(file)) {
        // A partial file is better than none.
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The agent's own state.
#[derive(Debug, Clone, Default)]
pub struct AgentState {
    /// In PCI order; empty without Firstlight's PID 1.
    pub gpus: Vec<GpuState>,
    /// Number of containers.
    pub containers: usize,
    /// Log records that were dropped.
    pub log_dropped: u64,
}

/// Collects metrics of agent and guest.
#[derive(Debug)]
pub struct Metrics {
    proc: PathBuf,
    root: PathBuf,
    gpus: Source,
}

impl Metrics {
    /// Creates the component.
    #[must_use]
    pub fn new(paths: &Paths, gpus: &Source) -> Self {
        Self { proc: paths.proc.clone(), root: paths.root.clone(), gpus: gpus.clone() }
    }

    /// Returns all metrics, read in the blocking pool. `containers` is their number.
    ///
    /// # Errors
    /// The blocking task failed.
    pub async fn collect(&self, containers: usize) -> Result<String> {
        let gpus = match &self.gpus {
            Source::Init(view) => view.borrow().gpus.clone(),
            Source::Files => Vec::new(),
        };
        let log_dropped = crate::log::queue().map_or(0, crate::log::Queue::dropped);
        let state = AgentState { gpus, containers, log_dropped };
        let (proc, root) = (self.proc.clone(), self.root.clone());
        background::blocking(move || Ok(metrics(&proc, &root, &state))).await
    }
}

/// Returns all metrics. Blocks for as long as a disk does.
#[must_use]
pub fn metrics(proc: &Path, root: &Path, state: &AgentState) -> String {
    let mut text = Text::default();
    own::write(&mut text, proc);
    guest::write(&mut text, proc);
    filesystems::write(&mut text, proc, root);
    firstlight(&mut text, state);
    text.finish()
}

fn firstlight(text: &mut Text, state: &AgentState) {
    text.gauge("firstlight_containers", "Number of containers", state.containers);
    let dropped = "Log records dropped because the log port's client did not read them in time";
    text.family("firstlight_log_dropped_total", Kind::Counter, dropped).sample(&[], state.log_dropped);
    let named: Vec<_> = state.gpus.iter().map(|gpu| (gpu, gpu.pci.to_string(), gpu.index.to_string())).collect();
    let mut family = text.family("firstlight_gpu_ready", Kind::Gauge, "Whether this GPU is ready for containers");
    for (gpu, pci, index) in &named {
        family.sample(&[("pci", pci), ("index", index)], gpu.phase == GpuPhase::Ready);
    }
    let mut family = text.family(
        "firstlight_gpu_attach_seconds",
        Kind::Gauge,
        "Time that the driver took to attach this GPU, from the first open to its completion",
    );
    for (gpu, pci, index) in &named {
        if let Some(time) = gpu.attach_us {
            let seconds = std::time::Duration::from_micros(time).as_secs_f64();
            family.sample(&[("pci", pci), ("index", index)], seconds);
        }
    }
}

#[cfg(test)]
mod tests;
