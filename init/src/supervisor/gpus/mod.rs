//! All GPUs of the guest: their rows in the boot record, their attach, hotplug and publication.
//!
//! * this file: the entries, and the functions for other components
//! * [`attach`]: the attach of a GPU, from its start to its result
//! * [`publish`]: the publication of attached GPUs in the CDI file
//! * [`changes`]: GPUs that are added, bound, unbound and removed

mod attach;
mod changes;
mod publish;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;

use firstlight_boot_record::{Gpu, GpuPhase};
use firstlight_pci::{Address, Function};

use self::publish::PendingReady;
use super::effect::Effect;
use super::guest::Guest;
use super::settings::Place;
use crate::attach::{Group, Policy};
use crate::cdi::Catalogue;
use crate::clock::ms;
use crate::executor::End;
use crate::hotplug::DriverState;
use crate::kmsg::Log;
use crate::open::{OPEN, Refusal, WAIT};
use crate::unit_id::UnitId;

/// The step of a GPU whose settings are being applied or are about to be.
const SETTINGS: &str = "settings";

/// The data of other components that GPUs need to handle an event.
#[derive(Debug, Clone, Copy)]
pub(super) struct GpuContext<'a> {
    /// The current time, µs.
    pub(super) now: u64,
    /// The guest.
    pub(super) guest: &'a Guest,
    /// The data of the kernel log. The caller reads the whole log before an event that can fail a
    /// GPU, so that its error message has the driver's last message.
    pub(super) log: &'a Log,
}

/// The state of one GPU.
#[derive(Debug)]
struct Entry {
    row: Gpu,
    /// Whether the GPU has an attach unit; a hotplugged GPU has none.
    has_unit: bool,
    minor: Result<u32, String>,
    driver_state: DriverState,
    /// For a hotplugged GPU: the time by which the driver has to bind the GPU, µs.
    bind_by: Option<u64>,
    /// For a hotplugged GPU: whether the attach has to begin.
    begin: bool,
    /// The start of the current attempt, µs.
    attempt_us: u64,
    /// Number of interrupts of the GPU at the last check in this attempt.
    interrupts: u64,
    refusal: Option<Refusal>,
    held: Option<OwnedFd>,
}

impl Entry {
    /// Creates the entry of a GPU that was found on the bus.
    fn found(index: u32, pci: Address, device: u16) -> Self {
        let row = Gpu {
            pci,
            index,
            device_id: device,
            minor: None,
            phase: GpuPhase::Found,
            step: "found".to_owned(),
            attempts: 0,
            start_us: None,
            end_us: None,
            attach_us: None,
            driver: None,
            detail: String::new(),
        };
        Self {
            row,
            has_unit: false,
            minor: Err("the driver's nodes were not made".to_owned()),
            driver_state: DriverState::Driven,
            bind_by: None,
            begin: false,
            attempt_us: 0,
            interrupts: 0,
            refusal: None,
            held: None,
        }
    }

    fn place(&self) -> Place {
        (self.row.index, self.row.pci)
    }

    fn waits_for_settings(&self) -> bool {
        self.row.phase == GpuPhase::Attaching && self.row.step == SETTINGS
    }
}

/// All GPUs of this guest: those found at boot in PCI order, followed by hotplugged GPUs in order
/// of arrival.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    entries: Vec<Entry>,
    group: Option<Group>,
    catalogue: Catalogue,
    /// Attached GPUs that are published in this loop iteration.
    pending_ready: Vec<PendingReady>,
    /// Descriptors of removed GPUs that have to be closed.
    closing: Vec<(Address, OwnedFd)>,
    /// Whether the first scan of the PCI bus has ended.
    scanned: bool,
}

impl Gpus {
    fn find(&self, pci: Address) -> Option<usize> {
        self.entries.iter().position(|entry| entry.row.pci == pci)
    }

    /// Returns whether the first scan of the PCI bus has ended.
    pub(super) fn is_scanned(&self) -> bool {
        self.scanned
    }

    /// Returns the PCI addresses of all GPUs.
    pub(super) fn addresses(&self) -> Vec<Address> {
        self.entries.iter().map(|entry| entry.row.pci).collect()
    }

    /// Returns the index and the PCI address of all GPUs.
    pub(super) fn places(&self) -> Vec<Place> {
        self.entries.iter().map(Entry::place).collect()
    }

    /// Returns the index and the PCI address of a GPU.
    pub(super) fn place(&self, pci: Address) -> Option<Place> {
        self.find(pci).map(|gpu| self.entries[gpu].place())
    }

    /// Returns the GPUs whose settings are being applied or are about to be.
    pub(super) fn waiting_for_settings(&self) -> Vec<Place> {
        self.entries.iter().filter(|entry| entry.waits_for_settings()).map(Entry::place).collect()
    }

    /// Returns the number of GPUs that are ready.
    pub(super) fn ready(&self) -> usize {
        self.entries.iter().filter(|entry| entry.row.phase == GpuPhase::Ready).count()
    }

    /// Returns whether an attach unit exists for this GPU.
    pub(super) fn has_unit(&self, pci: Address) -> bool {
        self.find(pci).is_some_and(|gpu| self.entries[gpu].has_unit)
    }

    /// Returns whether the minor number of the GPU's device node is known.
    pub(super) fn has_node(&self, pci: Address) -> bool {
        self.find(pci).is_some_and(|gpu| self.entries[gpu].minor.is_ok())
    }

    /// Returns whether PID 1 holds the GPU's device node open.
    pub(super) fn is_held(&self, pci: Address) -> bool {
        self.find(pci).is_some_and(|gpu| self.entries[gpu].held.is_some())
    }

    /// Returns when [`Gpus::clock`] is due next, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        let attach = self.group.as_ref().and_then(Group::next_deadline);
        attach.into_iter().chain(self.entries.iter().filter_map(|entry| entry.bind_by)).min()
    }

    /// Adds the GPUs of the first bus scan.
    pub(super) fn found<'a>(&mut self, functions: impl Iterator<Item = &'a Function>) -> Vec<Effect> {
        let mut effects = Vec::new();
        for (index, function) in functions.enumerate() {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            let entry = Entry { has_unit: true, ..Entry::found(index, function.address, function.device) };
            effects.push(Effect::Gpu { row: Box::new(entry.row.clone()), console: true });
            self.entries.push(entry);
        }
        effects
    }

    /// Handles the end of the first bus scan: from now on, clients can rely on the list of GPUs.
    pub(super) fn scan_ended(&mut self) -> Effect {
        self.scanned = true;
        Effect::GpusChanged
    }

    /// Sets the minor numbers of the GPUs' device nodes.
    pub(super) fn set_minors(&mut self, minors: Vec<(Address, Result<u32, String>)>) {
        for (pci, minor) in minors {
            if let Some(gpu) = self.find(pci) {
                let entry = &mut self.entries[gpu];
                entry.row.minor = minor.as_ref().ok().copied();
                entry.minor = minor;
            }
        }
    }

    /// Takes the descriptors of all attached GPUs out of the entries.
    pub(super) fn take_held(&mut self) -> Vec<(Address, OwnedFd)> {
        self.entries.iter_mut().filter_map(|entry| Some((entry.row.pci, entry.held.take()?))).collect()
    }

    /// Takes the descriptors of a removed GPU, for their close.
    pub(super) fn take_closing(&mut self, pci: Address) -> Vec<OwnedFd> {
        let (taken, left) = std::mem::take(&mut self.closing).into_iter().partition(|(other, _)| *other == pci);
        self.closing = left;
        let taken: Vec<(Address, OwnedFd)> = taken;
        taken.into_iter().map(|(_, held)| held).collect()
    }

    /// Changes a GPU's row. A change that keeps the phase is not written to the console.
    fn change(&mut self, gpu: usize, effects: &mut Vec<Effect>, change: impl FnOnce(&mut Gpu)) {
        let Some(entry) = self.entries.get_mut(gpu) else { return };
        let before = entry.row.phase;
        change(&mut entry.row);
        let row = Box::new(entry.row.clone());
        effects.push(Effect::Gpu { console: before != row.phase, row });
    }

    /// Marks a GPU as failed in `step`.
    fn fail(&mut self, gpu: usize, now: u64, step: &str, detail: String, effects: &mut Vec<Effect>) {
        self.change(gpu, effects, |row| {
            row.phase = GpuPhase::Failed;
            step.clone_into(&mut row.step);
            row.end_us = Some(now);
            row.detail = detail;
        });
    }

    /// Ends a GPU's attach unit, if the GPU has one, with the detail of its row.
    fn end_unit(&self, gpu: usize, end: fn(String) -> End, effects: &mut Vec<Effect>) {
        let detail = self.entries.get(gpu).map(|entry| entry.row.detail.clone()).unwrap_or_default();
        self.end_unit_with(gpu, end(detail), effects);
    }

    fn end_unit_with(&self, gpu: usize, end: End, effects: &mut Vec<Effect>) {
        if let Some(entry) = self.entries.get(gpu).filter(|entry| entry.has_unit) {
            effects.push(Effect::EndUnit(UnitId::GpuAttach(entry.row.pci), end));
        }
    }

    /// Composes the error message of a GPU: step, duration, attempt, reason, the driver's last
    /// message and advice.
    fn sentence(&self, gpu: usize, step: &str, reason: &str, context: &GpuContext<'_>) -> String {
        let Some(entry) = self.entries.get(gpu) else { return reason.to_owned() };
        let policy = context.guest.attach_policy();
        let after = match entry.row.start_us {
            Some(_) => format!(" after {} ms", ms(context.now.saturating_sub(entry.attempt_us))),
            None => String::new(),
        };
        let attempt = match entry.row.attempts {
            0 => String::new(),
            number => format!(" (attempt {number} of {})", policy.attempts()),
        };
        let words = last_message(entry.row.pci, context.log);
        let advice = if [OPEN, WAIT].contains(&step) {
            advice(policy, entry.row.attempts, context.guest.is_confidential())
        } else {
            ""
        };
        format!("{}: attach failed in {step}{after}{attempt}: {reason}{words}{advice}", entry.row.pci)
    }
}

/// Returns the advice for a failed attach; serial attach is suggested only if no serial attempt has
/// failed.
fn advice(policy: Policy, attempts: u32, confidential: bool) -> &'static str {
    match policy {
        Policy::Serial if confidential => {
            "; under confidential computing the host has to reset a GPU whose attach failed"
        }
        Policy::Serial => "; look at the host's vfio log",
        // The second attempt runs without concurrent attempts.
        Policy::Auto if attempts >= Policy::Auto.attempts() => {
            "; it failed without concurrent attempts too: look at the host's vfio log"
        }
        Policy::Auto | Policy::Parallel => "; try firstlight.attach=serial or look at the host's vfio log",
    }
}

/// Returns the driver's last kernel-log message about a GPU as a suffix.
fn last_message(pci: Address, log: &Log) -> String {
    match log.last_message(pci) {
        Some(message) => format!("; driver's last message: {message:?}"),
        None => "; the driver logged nothing about it".to_owned(),
    }
}
