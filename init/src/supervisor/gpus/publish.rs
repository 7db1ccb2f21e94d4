//! Publication of attached GPUs: the CDI file first, then the boot record and subscribers.

use firstlight_boot_record::GpuPhase;
use firstlight_pci::Address;

use super::super::effect::Effect;
use super::{GpuContext, Gpus};
use crate::cdi::ReadyGpu;
use crate::root::Root;

/// An attached GPU that waits for its publication.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingReady {
    /// The GPU's index in the entries.
    pub(super) gpu: usize,
    /// Whether the GPU had timed out before the attach succeeded; `None` if its attach unit has
    /// already ended.
    pub(super) late: Option<bool>,
}

impl Gpus {
    /// Publishes the attached GPUs. All GPUs of one loop iteration share one write of the CDI file.
    pub(in crate::supervisor) fn publish_ready(&mut self, context: &GpuContext<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        let pending = std::mem::take(&mut self.pending_ready);
        if pending.is_empty() {
            return effects;
        }
        // A GPU that was removed in this loop iteration has no descriptor any more and is left out.
        let held = |gpu: &usize| self.entries.get(*gpu).is_some_and(|entry| entry.held.is_some());
        let further: Vec<usize> = pending.iter().map(|one| one.gpu).filter(held).collect();
        let written = self.write_cdi(&further, context.guest.root());
        for gpu in further {
            match &written {
                Ok(()) => self.change(gpu, &mut effects, |row| {
                    row.end_us = Some(context.now);
                    row.phase = GpuPhase::Ready;
                    "ready".clone_into(&mut row.step);
                    row.detail.clear();
                }),
                Err(text) => {
                    let detail = self.sentence(gpu, "cdi", text, context);
                    self.fail(gpu, context.now, "cdi", detail, &mut effects);
                }
            }
        }
        for one in pending {
            if let Some(late) = one.late {
                self.attach_ended(one.gpu, late, "ready", &mut effects);
            }
        }
        effects
    }

    /// Writes the CDI file of all GPUs that are ready, and of the GPUs with the indices `further`.
    pub(super) fn write_cdi(&mut self, further: &[usize], root: &Root) -> Result<(), String> {
        for entry in further.iter().filter_map(|gpu| self.entries.get(*gpu)) {
            self.catalogue.forget(entry.row.pci);
        }
        let mut ready: Vec<ReadyGpu> = Vec::new();
        for (gpu, entry) in self.entries.iter().enumerate() {
            if (further.contains(&gpu) || entry.row.phase == GpuPhase::Ready)
                && let Ok(minor) = entry.minor
            {
                ready.push(ReadyGpu { index: entry.row.index, pci: entry.row.pci, minor });
            }
        }
        self.catalogue.publish(root, &ready).map(drop).map_err(|error| error.to_string())
    }

    /// Handles the end of a GPU's settings run. `undivided` is the reason why the GPU has no MIG
    /// instances. If MIG instances were requested for such a GPU, the GPU is excluded: containers
    /// must not get the whole GPU in place of an instance.
    pub(in crate::supervisor) fn settings_applied(
        &mut self,
        pci: Address,
        undivided: Option<String>,
        context: &GpuContext<'_>,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(gpu) = self.find(pci).filter(|gpu| self.entries[*gpu].waits_for_settings()) else { return effects };
        let requested = context.guest.params().settings.mig.of(self.entries[gpu].row.index, pci).is_some();
        match undivided.filter(|_| requested) {
            Some(why) => {
                let detail = format!(
                    "{pci}: the MIG instances of firstlight.mig are missing, so the GPU is not given to containers: {why}"
                );
                self.fail(gpu, context.now, "mig", detail, &mut effects);
            }
            None => self.pending_ready.push(PendingReady { gpu, late: None }),
        }
        effects
    }
}
