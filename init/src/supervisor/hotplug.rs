//! GPU hotplug and hot-unplug.

use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use firstlight_boot_record::GpuPhase;
use firstlight_pci::Address;
use firstlight_uevent::{MAX_MESSAGE, Uevent};

use super::gpus::Entry;
use super::{Message, STACK, Supervisor};
use crate::actions;
use crate::clock::now_us;
use crate::hotplug::{BusSnapshot, Change, DriverState, changes};
use crate::nodes::{self, Mknod};

/// uevents received per loop iteration.
const TURN: usize = 64;

/// The deadline for the driver to bind a GPU, µs. Generous: its probe does not touch the hardware.
const BIND_US: u64 = 10_000_000;

/// The uevent socket and the state of bus scans.
#[derive(Debug, Default)]
pub(super) struct Hotplug {
    socket: Option<OwnedFd>,
    /// What is read into, turn by turn.
    buffer: Vec<u8>,
    /// Whether a bus scan is in progress.
    scanning: bool,
    /// Whether another scan is needed after it.
    rescan: bool,
    /// Whether the driver is being loaded.
    loading: bool,
}

impl Hotplug {
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }
}

/// Whether a message is about an NVIDIA function of the display class.
fn about_a_gpu(event: &Uevent<'_>) -> bool {
    let says = |name: &str, start: &str| event.variable(name).is_some_and(|value| value.starts_with(start));
    event.subsystem == "pci" && says("PCI_ID", "10DE:") && says("PCI_CLASS", "3")
}

impl Supervisor {
    /// Opens the uevent socket when the unit `nodes` has ended. The first scan
    /// finds GPUs that were added before.
    pub(super) fn open_hotplug(&mut self) {
        if self.hotplug.socket.is_some() || self.shutdown.is_some() {
            return;
        }
        match firstlight_uevent::open() {
            Ok(socket) => self.hotplug.socket = Some(socket),
            Err(error) => {
                let text = format!("failed to open the uevent socket: {error}; hotplugged GPUs are not detected");
                self.recorder.event(now_us(), "hotplug-unavailable", "", &text);
            }
        }
        self.scan_bus();
    }

    pub(super) fn handle_uevents(&mut self) {
        let Some(socket) = &self.hotplug.socket else { return };
        self.hotplug.buffer.resize(MAX_MESSAGE, 0);
        let mut heard = false;
        for _ in 0..TURN {
            match firstlight_uevent::receive(socket, &mut self.hotplug.buffer, about_a_gpu) {
                Ok(wanted) => heard |= wanted,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // An unreadable socket would keep waking the loop.
                    self.hotplug.socket = None;
                    break;
                }
            }
        }
        if heard {
            self.scan_bus();
        }
    }

    /// Scans the bus if the driver logged a message about an open GPU that is unbound.
    /// On unbind of an open GPU the driver logs and waits for the last close.
    pub(super) fn check_drivers(&mut self) {
        for pci in self.logs.kernel.take_spoken() {
            let held = self.gpus.entries.iter().any(|entry| entry.row.pci == pci && entry.held.is_some());
            let link = self.root.path(&format!("/sys/bus/pci/devices/{pci}/driver"));
            if held && fs::symlink_metadata(link).is_err() {
                self.scan_bus();
            }
        }
    }

    /// Scans the bus on a thread: sysfs can be slow.
    fn scan_bus(&mut self) {
        if self.hotplug.scanning || self.shutdown.is_some() {
            self.hotplug.rescan = true;
            return;
        }
        (self.hotplug.scanning, self.hotplug.rescan) = (true, false);
        let (root, outbox) = (self.root.clone(), self.outbox.clone());
        let thread = std::thread::Builder::new().name("pci-scan".to_owned()).stack_size(STACK);
        let spawned = thread.spawn(move || {
            outbox.send(Message::BusScanned(BusSnapshot::read(&root).map_err(|error| error.to_string())));
        });
        if spawned.is_err() {
            self.hotplug.scanning = false;
        }
    }

    pub(super) fn bus_scanned(&mut self, snapshot: Result<BusSnapshot, String>) {
        self.hotplug.scanning = false;
        match snapshot {
            Ok(snapshot) => self.apply_bus_changes(snapshot),
            Err(text) => self.recorder.event(now_us(), "pci-scan-failed", "", &text),
        }
        if self.hotplug.rescan {
            self.scan_bus();
        }
    }

    fn apply_bus_changes(&mut self, snapshot: BusSnapshot) {
        let known: Vec<(Address, DriverState)> =
            self.gpus.entries.iter().map(|entry| (entry.row.pci, entry.driver_state)).collect();
        let changes = changes(&known, &snapshot);
        if changes.is_empty() {
            return;
        }
        self.functions = std::sync::Arc::new(snapshot.functions);
        for change in changes {
            match change {
                Change::Removed(pci) => self.gpu_removed(pci, DriverState::Absent, "it was removed from the guest"),
                Change::Unbound(pci) => {
                    self.gpu_removed(pci, DriverState::Released, "its driver is being unbound, so it was closed");
                }
                Change::Added { pci, device, bound } => self.gpu_added(pci, device, bound),
                Change::Bound(pci) => self.gpu_bound(pci),
            }
        }
    }

    /// Indices are the order of addresses among the GPUs that are here, as the
    /// host counts them too: they change when a GPU is added or removed. Addresses
    /// do not change.
    fn renumber(&mut self) {
        let mut here: Vec<(Address, usize)> = Vec::new();
        for (at, entry) in self.gpus.entries.iter().enumerate() {
            if matches!(entry.driver_state, DriverState::Driven | DriverState::Waiting) {
                here.push((entry.row.pci, at));
            }
        }
        here.sort_unstable();
        let mut moved = false;
        for (index, (_, at)) in here.into_iter().enumerate() {
            let (index, entry) = (u32::try_from(index).unwrap_or(u32::MAX), &mut self.gpus.entries[at]);
            if entry.row.index != index {
                entry.row.index = index;
                moved |= entry.row.phase == GpuPhase::Ready;
                let row = entry.row.clone();
                self.recorder.gpu(row);
            }
        }
        if moved && let Err(error) = self.write_cdi() {
            self.recorder.event(now_us(), "cdi-not-written", "", &error);
        }
    }

    /// Adds a GPU.
    fn gpu_added(&mut self, pci: Address, device: u16, bound: bool) {
        let gpu = self.gpus.entries.iter().position(|entry| entry.row.pci == pci).unwrap_or(self.gpus.entries.len());
        let mut entry = Entry::found(u32::MAX, pci, device);
        entry.driver_state = DriverState::Waiting;
        entry.bind_by = Some(now_us().saturating_add(BIND_US));
        if gpu < self.gpus.entries.len() {
            self.gpus.entries[gpu] = entry;
        } else {
            self.gpus.entries.push(entry);
        }
        self.renumber();
        let index = self.gpus.entries[gpu].row.index;
        self.recorder.event(now_us(), "gpu-hotplugged", &pci.to_string(), &format!("index {index}"));
        self.publish_gpus();
        if !self.update_mode(gpu) {
            return;
        }
        if bound {
            self.gpu_bound(pci);
        } else if nodes::driver_major(&self.root).is_none() {
            self.load_driver();
        }
    }

    /// Decides the mode again for the first GPU. `false` if the mode attaches no GPUs.
    fn update_mode(&mut self, gpu: usize) -> bool {
        let attaches = |supervisor: &Self| supervisor.decision.as_ref().is_some_and(|decision| decision.attach);
        if !attaches(self) {
            let decision = actions::decide(&self.inputs());
            if decision.attach {
                self.recorder.mode(decision.mode.clone());
                self.decision = Some(decision);
            }
        }
        if attaches(self) {
            return true;
        }
        let why = self.decision.as_ref().map_or_else(
            || "no mode was decided".to_owned(),
            |decision| format!("mode {}: {}", decision.mode.name, decision.mode.reason),
        );
        self.give_up(gpu, "mode", &why);
        false
    }

    /// Loads the driver for the first GPU of a guest that had none.
    fn load_driver(&mut self) {
        if self.hotplug.loading {
            return;
        }
        self.hotplug.loading = true;
        let (inputs, outbox) = (self.inputs(), self.outbox.clone());
        let thread = std::thread::Builder::new().name("driver".to_owned()).stack_size(STACK);
        let spawned = thread.spawn(move || outbox.send(Message::Driver(actions::load_driver(&inputs))));
        if let Err(error) = spawned {
            self.driver_loaded(Err(format!("cannot start a thread: {error}; is memory short?")));
        }
    }

    /// The module's init binds all present GPUs; the next scan finds them bound.
    pub(super) fn driver_loaded(&mut self, result: Result<String, String>) {
        self.hotplug.loading = false;
        self.read_whole_log();
        match result {
            Ok(text) => self.recorder.event(now_us(), "driver-loaded", "", &text),
            Err(text) => {
                for gpu in 0..self.gpus.entries.len() {
                    if self.gpus.entries[gpu].driver_state == DriverState::Waiting {
                        self.give_up(gpu, "module", &text);
                    }
                }
            }
        }
        self.scan_bus();
    }

    /// Creates the device node of a bound GPU, on a thread.
    fn gpu_bound(&mut self, pci: Address) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.row.pci == pci) else { return };
        let entry = &mut self.gpus.entries[gpu];
        (entry.driver_state, entry.bind_by) = (DriverState::Driven, None);
        let (root, channels, outbox) = (self.root.clone(), self.params.imex_channels, self.outbox.clone());
        let thread = std::thread::Builder::new().name(format!("nodes-{pci}")).stack_size(STACK);
        let spawned = thread.spawn(move || {
            let minor = match nodes::make(&root, &[pci], channels, &mut Mknod) {
                Ok(made) => {
                    made.minors.into_iter().next().map_or(Err("it has no minor".to_owned()), |(_, minor)| minor)
                }
                Err(error) => Err(error.to_string()),
            };
            outbox.send(Message::Node(pci, minor));
        });
        if let Err(error) = spawned {
            self.node_made(pci, Err(format!("cannot start a thread: {error}; is memory short?")));
        }
    }

    pub(super) fn node_made(&mut self, pci: Address, minor: Result<u32, String>) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.row.pci == pci) else { return };
        if self.gpus.entries[gpu].driver_state != DriverState::Driven || self.shutdown.is_some() {
            return;
        }
        match &minor {
            Ok(number) => self.gpus.entries[gpu].row.minor = Some(*number),
            Err(text) => {
                let text = text.clone();
                self.give_up(gpu, "nodes", &text);
            }
        }
        let begin = minor.is_ok();
        self.gpus.entries[gpu].minor = minor;
        self.gpus.entries[gpu].begin = begin;
        self.begin_hotplugged(gpu);
    }

    /// Fails the GPUs that were not bound in time.
    pub(super) fn watch_hotplugged(&mut self, now: u64) {
        for gpu in 0..self.gpus.entries.len() {
            if self.gpus.entries[gpu].bind_by.is_some_and(|at| at <= now) {
                self.gpus.entries[gpu].bind_by = None;
                self.read_whole_log();
                let text = format!("the driver did not bind it within {} s", BIND_US / 1_000_000);
                self.give_up(gpu, "probe", &text);
            }
        }
    }

    /// Marks a GPU as failed. If the driver binds it later, it is attached.
    fn give_up(&mut self, gpu: usize, step: &str, text: &str) {
        let Some(entry) = self.gpus.entries.get_mut(gpu) else { return };
        entry.bind_by = None;
        let detail = self.sentence(gpu, step, text);
        self.change(gpu, |row| {
            row.phase = GpuPhase::Failed;
            step.clone_into(&mut row.step);
            row.end_us = Some(now_us());
            row.detail = detail;
        });
    }

    /// Removes a GPU: first from the CDI file, then published, then closed.
    fn gpu_removed(&mut self, pci: Address, driver_state: DriverState, why: &str) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.row.pci == pci) else { return };
        let entry = &mut self.gpus.entries[gpu];
        let was = entry.driver_state;
        entry.driver_state = driver_state;
        entry.bind_by = None;
        let phase = entry.row.phase;
        let held = entry.held.take();
        self.gpus.catalogue.forget(pci);
        // One that never was driven (no driver in the image, one that failed) has nothing to be taken off.
        if driver_state == DriverState::Released
            && held.is_none()
            && matches!(phase, GpuPhase::Found | GpuPhase::Failed)
        {
            entry.driver_state = was;
            return;
        }
        if let Ok(minor) = entry.minor {
            // A number that the driver gives to the next GPU must not lead to this one.
            let _ = fs::remove_file(self.root.path(&format!("/dev/nvidia{minor}")));
        }
        if phase == GpuPhase::Removed {
            self.change(gpu, |row| row.detail = format!("{pci}: {why}"));
            return;
        }
        self.change(gpu, |row| {
            row.phase = GpuPhase::Removed;
            "removed".clone_into(&mut row.step);
            row.end_us = Some(now_us());
            row.detail = format!("{pci}: {why}");
        });
        self.recorder.event(now_us(), "gpu-removed", &pci.to_string(), why);
        self.renumber();
        if let Err(error) = self.write_cdi() {
            self.recorder.event(now_us(), "cdi-not-written", &pci.to_string(), &error);
        }
        // The last close shuts the GPU down, which takes the driver its time.
        let thread = std::thread::Builder::new().name(format!("close-{pci}")).stack_size(STACK);
        // Without a thread it is closed here and now, with the closure.
        let _ = thread.spawn(move || drop(held));
    }
}
