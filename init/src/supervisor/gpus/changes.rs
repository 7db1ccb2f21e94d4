//! Hotplug: GPUs that are added to the bus, bound, unbound and removed.

use std::fs;

use firstlight_boot_record::GpuPhase;
use firstlight_pci::Address;

use super::super::effect::Effect;
use super::{Entry, GpuContext, Gpus};
use crate::hotplug::{BusSnapshot, Change, DriverState, changes};

/// The time within which the driver has to bind a GPU, µs. The driver's probe function does not
/// access the hardware, so a successful bind takes much less time.
const BIND_US: u64 = 10_000_000;

impl Gpus {
    /// Returns the differences between the known GPUs and a snapshot of the bus.
    pub(in crate::supervisor) fn changes(&self, snapshot: &BusSnapshot) -> Vec<Change> {
        let known: Vec<(Address, DriverState)> =
            self.entries.iter().map(|entry| (entry.row.pci, entry.driver_state)).collect();
        changes(&known, snapshot)
    }

    /// Handles a change on the bus.
    pub(in crate::supervisor) fn changed(&mut self, change: Change, context: &GpuContext<'_>) -> Vec<Effect> {
        match change {
            Change::Removed(pci) => self.removed(pci, DriverState::Absent, "it was removed from the guest", context),
            Change::Unbound(pci) => {
                let why = "its driver is being unbound, so it was closed";
                self.removed(pci, DriverState::Released, why, context)
            }
            Change::Added { pci, device, bound } => self.added(pci, device, bound, context),
            Change::Bound(pci) => self.bound(pci),
        }
    }

    /// Assigns the indices. The index of a GPU is its position among the present GPUs in the order
    /// of PCI addresses, as on the host. Indices change when a GPU is added or removed; addresses
    /// do not.
    fn renumber(&mut self, context: &GpuContext<'_>, effects: &mut Vec<Effect>) {
        let mut here: Vec<(Address, usize)> = Vec::new();
        for (gpu, entry) in self.entries.iter().enumerate() {
            if matches!(entry.driver_state, DriverState::Driven | DriverState::Waiting) {
                here.push((entry.row.pci, gpu));
            }
        }
        here.sort_unstable();
        let mut moved = false;
        for (index, (_, gpu)) in here.into_iter().enumerate() {
            let (index, entry) = (u32::try_from(index).unwrap_or(u32::MAX), &mut self.entries[gpu]);
            if entry.row.index != index {
                entry.row.index = index;
                moved |= entry.row.phase == GpuPhase::Ready;
                effects.push(Effect::Gpu { row: Box::new(entry.row.clone()), console: true });
            }
        }
        if moved && let Err(error) = self.write_cdi(&[], context.guest.root()) {
            effects.push(Effect::event("cdi-not-written", "", error));
        }
    }

    fn added(&mut self, pci: Address, device: u16, bound: bool, context: &GpuContext<'_>) -> Vec<Effect> {
        let mut entry = Entry::found(u32::MAX, pci, device);
        entry.driver_state = DriverState::Waiting;
        entry.bind_by = Some(context.now.saturating_add(BIND_US));
        let gpu = self.find(pci).unwrap_or(self.entries.len());
        match self.entries.get_mut(gpu) {
            Some(known) => *known = entry,
            None => self.entries.push(entry),
        }
        let mut effects = Vec::new();
        self.renumber(context, &mut effects);
        let index = self.entries[gpu].row.index;
        effects.push(Effect::event("gpu-hotplugged", pci.to_string(), format!("index {index}")));
        effects.push(Effect::GpusChanged);
        effects.push(Effect::AttachAdded(pci, bound));
        effects
    }

    /// Handles the bind of a GPU by the driver: requests the creation of its device node.
    pub(in crate::supervisor) fn bound(&mut self, pci: Address) -> Vec<Effect> {
        let Some(gpu) = self.find(pci) else { return Vec::new() };
        let entry = &mut self.entries[gpu];
        (entry.driver_state, entry.bind_by) = (DriverState::Driven, None);
        vec![Effect::MakeNode(pci)]
    }

    /// Handles the creation of a hotplugged GPU's device node: begins the attach.
    pub(in crate::supervisor) fn node_made(
        &mut self,
        pci: Address,
        minor: Result<u32, String>,
        context: &GpuContext<'_>,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(gpu) = self.find(pci).filter(|gpu| self.entries[*gpu].driver_state == DriverState::Driven) else {
            return effects;
        };
        match &minor {
            Ok(number) => self.entries[gpu].row.minor = Some(*number),
            Err(text) => self.give_up_entry(gpu, "nodes", text, context, &mut effects),
        }
        self.entries[gpu].begin = minor.is_ok();
        self.entries[gpu].minor = minor;
        self.begin_hotplugged(gpu, context, &mut effects);
        effects
    }

    /// Marks the GPUs that the driver has not bound in time as failed.
    pub(super) fn fail_unbound(&mut self, context: &GpuContext<'_>, effects: &mut Vec<Effect>) {
        for gpu in 0..self.entries.len() {
            if self.entries[gpu].bind_by.is_some_and(|at| at <= context.now) {
                let text = format!("the driver did not bind it within {} s", BIND_US / 1_000_000);
                self.give_up_entry(gpu, "probe", &text, context, effects);
            }
        }
    }

    /// Marks the GPUs that wait for the driver as failed, because the driver could not be loaded.
    pub(in crate::supervisor) fn driver_failed(&mut self, text: &str, context: &GpuContext<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        for gpu in 0..self.entries.len() {
            if self.entries[gpu].driver_state == DriverState::Waiting {
                self.give_up_entry(gpu, "module", text, context, &mut effects);
            }
        }
        effects
    }

    /// Marks a hotplugged GPU as failed. If the driver binds the GPU later, the GPU is attached.
    pub(in crate::supervisor) fn give_up(
        &mut self,
        pci: Address,
        step: &str,
        text: &str,
        context: &GpuContext<'_>,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Some(gpu) = self.find(pci) {
            self.give_up_entry(gpu, step, text, context, &mut effects);
        }
        effects
    }

    fn give_up_entry(
        &mut self,
        gpu: usize,
        step: &str,
        text: &str,
        context: &GpuContext<'_>,
        effects: &mut Vec<Effect>,
    ) {
        self.entries[gpu].bind_by = None;
        let detail = self.sentence(gpu, step, text, context);
        self.fail(gpu, context.now, step, detail, effects);
    }

    /// Removes a GPU: deletes its device node and rewrites the CDI file without the GPU. The
    /// effects then publish the removal and close the GPU's descriptor, in this order.
    fn removed(&mut self, pci: Address, driver_state: DriverState, why: &str, context: &GpuContext<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(gpu) = self.find(pci) else { return effects };
        self.catalogue.forget(pci);
        let entry = &mut self.entries[gpu];
        entry.bind_by = None;
        let (phase, held) = (entry.row.phase, entry.held.take());
        // The driver never attached this GPU (no driver in the image, or the attach failed), so its
        // unbind is not reported as a removal.
        if driver_state == DriverState::Released
            && held.is_none()
            && matches!(phase, GpuPhase::Found | GpuPhase::Failed)
        {
            return effects;
        }
        entry.driver_state = driver_state;
        if let Ok(minor) = entry.minor {
            // The driver may reuse the minor number for the next GPU; this GPU's node must not lead
            // there.
            let _ = fs::remove_file(context.guest.root().path(&format!("/dev/nvidia{minor}")));
        }
        if phase == GpuPhase::Removed {
            self.change(gpu, &mut effects, |row| row.detail = format!("{pci}: {why}"));
            return effects;
        }
        self.change(gpu, &mut effects, |row| {
            row.phase = GpuPhase::Removed;
            "removed".clone_into(&mut row.step);
            row.end_us = Some(context.now);
            row.detail = format!("{pci}: {why}");
        });
        effects.push(Effect::event("gpu-removed", pci.to_string(), why));
        self.renumber(context, &mut effects);
        if let Err(error) = self.write_cdi(&[], context.guest.root()) {
            effects.push(Effect::event("cdi-not-written", pci.to_string(), error));
        }
        if let Some(held) = held {
            self.closing.push((pci, held));
            effects.push(Effect::CloseGpu(pci));
        }
        effects
    }
}
