//! GetMetrics: the agent's and the guest's figures as Prometheus text.
//!
//! Names and labels are those of Kata's agent, so that dashboards made for it
//! work; what only this agent knows begins with `firstlight_`. A file of the
//! kernel that is not there leaves its family out.

mod filesystems;
mod guest;
mod own;
mod text;

use std::io::Read;
use std::path::Path;

use firstlight_boot_record::{Gpu, GpuPhase};

use crate::agent::Agent;
use crate::error::Result;
use crate::gpu::Source;
use crate::work;
use text::{Kind, Text};

/// The most interfaces, disks, and file systems that are told of: a reply has bounds.
const MOST: usize = 256;

/// The most that is read of a file.
const LONGEST: u64 = 1 << 20;

/// A file below `/proc`; nothing if it is not there.
fn read(proc: &Path, file: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(proc.join(file)) {
        // Half a file is better than none.
        let _ = file.take(LONGEST).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What the agent itself knows.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// In PCI order; empty without a PID 1 of ours.
    pub gpus: Vec<Gpu>,
    /// Containers that exist.
    pub containers: usize,
    /// Records that the log port's client did not get.
    pub log_dropped: u64,
}

impl Agent {
    /// Everything, read beside the server.
    ///
    /// # Errors
    /// The agent is ending.
    pub async fn metrics(&self) -> Result<String> {
        let gpus = match &self.gpus {
            Source::Init(view) => view.borrow().gpus.clone(),
            Source::Files => Vec::new(),
        };
        let log_dropped = crate::log::queue().map_or(0, crate::log::Queue::dropped);
        let known = Known { gpus, containers: self.containers().len(), log_dropped };
        let (proc, root) = (self.paths.proc.clone(), self.paths.root.clone());
        work::blocking(move || Ok(metrics(&proc, &root, &known))).await
    }
}

/// Everything. May block for as long as a disk does.
#[must_use]
pub fn metrics(proc: &Path, root: &Path, known: &Known) -> String {
    let mut text = Text::default();
    own::write(&mut text, proc);
    guest::write(&mut text, proc);
    filesystems::write(&mut text, proc, root);
    firstlight(&mut text, known);
    text.finish()
}

fn firstlight(text: &mut Text, known: &Known) {
    text.gauge("firstlight_containers", "Containers that exist", known.containers);
    let dropped = "Log records that were dropped because nobody read them";
    text.family("firstlight_log_dropped_total", Kind::Counter, dropped).sample(&[], known.log_dropped);
    let named: Vec<_> = known.gpus.iter().map(|gpu| (gpu, gpu.pci.to_string(), gpu.index.to_string())).collect();
    let mut family = text.family("firstlight_gpu_ready", Kind::Gauge, "Whether a container can have this GPU now");
    for (gpu, pci, index) in &named {
        family.sample(&[("pci", pci), ("index", index)], u8::from(gpu.phase == GpuPhase::Ready));
    }
    let mut family = text.family(
        "firstlight_gpu_attach_seconds",
        Kind::Gauge,
        "How long the driver took to attach this GPU, from the first open to its answer",
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
