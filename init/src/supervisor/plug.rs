//! GPUs that are plugged in and pulled out while the guest runs.

use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use firstlight_boot_record::GpuPhase;
use firstlight_pci::Address;
use firstlight_uevent::{MAX_MESSAGE, Uevent};

use super::gpus::Entry;
use super::{Message, STACK, Supervisor};
use crate::actions::{self, Product};
use crate::clock::now_us;
use crate::nodes::{self, Mknod};
use crate::plugged::{Change, Look, Standing, changes};
use crate::units::Action;

/// Messages that are taken before others have their turn.
const TURN: usize = 64;

/// How long the driver may take to take a GPU: its probe does not touch the hardware, so this is generous, µs.
const BIND_US: u64 = 10_000_000;

/// Ears for the bus.
#[derive(Debug, Default)]
pub(super) struct Plug {
    socket: Option<OwnedFd>,
    /// What is read into, turn by turn.
    buffer: Vec<u8>,
    /// Whether a look at the bus is on its way.
    looking: bool,
    /// Whether something has changed since it began.
    again: bool,
    /// Whether the driver is being loaded.
    loading: bool,
}

impl Plug {
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
    /// From the end of the nodes' unit on, GPUs that come are new ones. The
    /// first look finds what came before anybody listened.
    pub(super) fn open_plug(&mut self) {
        if self.plug.socket.is_some() || self.shutdown.is_some() {
            return;
        }
        match firstlight_uevent::open() {
            Ok(socket) => self.plug.socket = Some(socket),
            Err(error) => {
                let text =
                    format!("cannot hear the kernel's messages: {error}; GPUs that are plugged in are not found");
                self.recorder.event(now_us(), "no-hotplug", "", &text);
            }
        }
        self.look();
    }

    pub(super) fn hear_uevents(&mut self) {
        let Some(socket) = &self.plug.socket else { return };
        self.plug.buffer.resize(MAX_MESSAGE, 0);
        let mut heard = false;
        for _ in 0..TURN {
            match firstlight_uevent::receive(socket, &mut self.plug.buffer, about_a_gpu) {
                Ok(wanted) => heard |= wanted,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // One that cannot be read would wake the loop for ever.
                    self.plug.socket = None;
                    break;
                }
            }
        }
        if heard {
            self.look();
        }
    }

    /// The driver said something about these GPUs. It says so, and waits for
    /// us, when it is taken off one that we hold open; whether that is so is in sysfs.
    pub(super) fn check_drivers(&mut self) {
        for pci in self.words.kernel.take_spoken() {
            let held = self.gpus.entries.iter().any(|entry| entry.row.pci == pci && entry.held.is_some());
            let link = self.root.path(&format!("/sys/bus/pci/devices/{pci}/driver"));
            if held && fs::symlink_metadata(link).is_err() {
                self.look();
            }
        }
    }

    /// Looks at the bus, on a thread: sysfs can be slow.
    fn look(&mut self) {
        if self.plug.looking || self.shutdown.is_some() {
            self.plug.again = true;
            return;
        }
        (self.plug.looking, self.plug.again) = (true, false);
        let (root, outbox) = (self.root.clone(), self.outbox.clone());
        let thread = std::thread::Builder::new().name("pci-look".to_owned()).stack_size(STACK);
        let spawned = thread.spawn(move || {
            outbox.send(Message::Looked(Look::at(&root).map_err(|error| error.to_string())));
        });
        if spawned.is_err() {
            self.plug.looking = false;
        }
    }

    pub(super) fn looked(&mut self, look: Result<Look, String>) {
        self.plug.looking = false;
        match look {
            Ok(look) => self.follow_bus(look),
            Err(text) => self.recorder.event(now_us(), "pci-look-failed", "", &text),
        }
        if self.plug.again {
            self.look();
        }
    }

    fn follow_bus(&mut self, look: Look) {
        let known: Vec<(Address, Standing)> =
            self.gpus.entries.iter().map(|entry| (entry.row.pci, entry.standing)).collect();
        let changes = changes(&known, &look);
        if changes.is_empty() {
            return;
        }
        self.functions = std::sync::Arc::new(look.functions);
        for change in changes {
            match change {
                Change::Left(pci) => self.gpu_left(pci, Standing::Absent, "it was taken out of the guest"),
                Change::LetGo(pci) => {
                    self.gpu_left(pci, Standing::Released, "its driver is being taken off it, so it was let go");
                }
                Change::Came { pci, device, bound } => self.gpu_came(pci, device, bound),
                Change::Bound(pci) => self.gpu_bound(pci),
            }
        }
    }

    /// Indices are the order of addresses among the GPUs that are here, as the
    /// host counts them too: they change when one comes or leaves. Who goes by
    /// address is never mistaken.
    fn renumber(&mut self) {
        let mut here: Vec<(Address, usize)> = Vec::new();
        for (at, entry) in self.gpus.entries.iter().enumerate() {
            if matches!(entry.standing, Standing::Driven | Standing::Waiting) {
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

    /// A GPU is here that was not.
    fn gpu_came(&mut self, pci: Address, device: u16, bound: bool) {
        let gpu = self.gpus.entries.iter().position(|entry| entry.row.pci == pci).unwrap_or(self.gpus.entries.len());
        let mut entry = Entry::found(u32::MAX, pci, device);
        entry.standing = Standing::Waiting;
        entry.bind_by = Some(now_us().saturating_add(BIND_US));
        if gpu < self.gpus.entries.len() {
            self.gpus.entries[gpu] = entry;
        } else {
            self.gpus.entries.push(entry);
        }
        self.renumber();
        let index = self.gpus.entries[gpu].row.index;
        self.recorder.event(now_us(), "gpu-plugged", &pci.to_string(), &format!("index {index}"));
        self.publish_gpus();
        if !self.follow_mode(gpu) {
            return;
        }
        if bound {
            self.gpu_bound(pci);
        } else if nodes::driver_major(&self.root).is_none() {
            self.load_driver();
        }
    }

    /// A guest that had no GPU is of another mode now. `false` if this one attaches none.
    fn follow_mode(&mut self, gpu: usize) -> bool {
        let attaches = |supervisor: &Self| supervisor.decision.as_ref().is_some_and(|decision| decision.attach);
        if !attaches(self)
            && let Some((_, Product::Mode(decision))) = actions::at_once(Action::Mode, &self.inputs())
            && decision.attach
        {
            self.recorder.mode(decision.mode.clone());
            self.decision = Some(decision);
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
        if self.plug.loading {
            return;
        }
        self.plug.loading = true;
        let (inputs, outbox) = (self.inputs(), self.outbox.clone());
        let thread = std::thread::Builder::new().name("driver".to_owned()).stack_size(STACK);
        let spawned = thread.spawn(move || outbox.send(Message::Driver(actions::load_driver(&inputs))));
        if let Err(error) = spawned {
            self.driver_loaded(Err(format!("cannot start a thread: {error}; is memory short?")));
        }
    }

    /// The module's start takes all GPUs that are there; the next look finds them taken.
    pub(super) fn driver_loaded(&mut self, result: Result<String, String>) {
        self.plug.loading = false;
        self.read_whole_log();
        match result {
            Ok(text) => self.recorder.event(now_us(), "driver-loaded", "", &text),
            Err(text) => {
                for gpu in 0..self.gpus.entries.len() {
                    if self.gpus.entries[gpu].standing == Standing::Waiting {
                        self.give_up(gpu, "module", &text);
                    }
                }
            }
        }
        self.look();
    }

    /// The driver has a GPU: its node is made, on a thread.
    fn gpu_bound(&mut self, pci: Address) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.row.pci == pci) else { return };
        let entry = &mut self.gpus.entries[gpu];
        (entry.standing, entry.bind_by) = (Standing::Driven, None);
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
        if self.gpus.entries[gpu].standing != Standing::Driven || self.shutdown.is_some() {
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
        self.begin_plugged(gpu);
    }

    /// Those that the driver has not taken in time.
    pub(super) fn watch_plugged(&mut self, now: u64) {
        for gpu in 0..self.gpus.entries.len() {
            if self.gpus.entries[gpu].bind_by.is_some_and(|at| at <= now) {
                self.gpus.entries[gpu].bind_by = None;
                self.read_whole_log();
                let text = format!("the driver has not taken it in {} s", BIND_US / 1_000_000);
                self.give_up(gpu, "probe", &text);
            }
        }
    }

    /// A GPU that cannot be served now. One that the driver takes later is.
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

    /// A GPU is not to be used any more: first in no file, then told, then closed.
    fn gpu_left(&mut self, pci: Address, standing: Standing, why: &str) {
        let Some(gpu) = self.gpus.entries.iter().position(|entry| entry.row.pci == pci) else { return };
        let entry = &mut self.gpus.entries[gpu];
        let was = entry.standing;
        entry.standing = standing;
        entry.bind_by = None;
        let phase = entry.row.phase;
        let held = entry.held.take();
        self.gpus.catalogue.forget(pci);
        // One that never was driven (no driver in the image, one that failed) has nothing to be taken off.
        if standing == Standing::Released && held.is_none() && matches!(phase, GpuPhase::Found | GpuPhase::Failed) {
            entry.standing = was;
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
