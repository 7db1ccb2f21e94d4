//! Carries out the effects of components.

use firstlight_boot_record::State;
use firstlight_init_control::{FromInit, RequestId};
use firstlight_pci::Address;

use super::Supervisor;
use super::clients::gpu_message;
use super::effect::{Effect, ModuleRequest};
use super::threads::Message;
use crate::actions;
use crate::clock::{now_us, thread_us};
use crate::control::ClientId;
use crate::hotplug::BusSnapshot;
use crate::nodes::{self, Mknod};
use crate::open::{self, Answer, Refusal};
use crate::record::cut;

impl Supervisor {
    /// Carries out effects in order, then runs the units that became due.
    pub(super) fn carry_out_and_run(&mut self, effects: impl IntoIterator<Item = Effect>) {
        self.carry_out(effects);
        self.run_due_units();
    }

    /// Carries out effects in order.
    pub(super) fn carry_out(&mut self, effects: impl IntoIterator<Item = Effect>) {
        for effect in effects {
            self.carry_out_one(effect);
        }
    }

    fn carry_out_one(&mut self, effect: Effect) {
        match effect {
            Effect::EndUnit(unit, end) => self.end_unit(unit, end),
            Effect::Event { kind, object, detail } => self.recorder.event(now_us(), kind, &object, &detail),
            Effect::UrgentEvent { at_us, kind, object, detail } => {
                self.recorder.urgent_event(at_us, kind, &object, &detail);
            }
            Effect::ClientEvent { at_us, kind, object, detail } => {
                self.recorder.event(at_us, &kind, &object, &detail);
            }
            Effect::Gpu { row, console } => {
                if console {
                    self.recorder.gpu(*row);
                } else {
                    self.recorder.gpu_step(*row);
                }
                self.clients.gpus_changed();
            }
            Effect::StartConsole => self.recorder.start_console(),
            Effect::Degrade => {
                if self.recorder.record().state == State::Ready {
                    self.recorder.state(State::Degraded);
                }
            }
            Effect::Log { line, console, clients } => {
                if console {
                    self.recorder.log(&line);
                }
                if clients {
                    self.clients.publish_line(line);
                }
            }
            Effect::ProgramLine(source, text) => {
                let line = self.logs.program_line(now_us(), self.guest.params().log, &source, text);
                self.carry_out(line);
            }
            Effect::GpusChanged => self.clients.gpus_changed(),
            Effect::Publish(message) => self.clients.publish(&message),
            Effect::SendState(client) => self.send_state(client),
            Effect::SendRecord(client, id) => self.send_record(client, id),
            Effect::LoadModule { request, parameters } => self.load_module(request, parameters),
            Effect::Fail(unit, text) => self.fail(unit, &text),
            Effect::BeginShutdown(goal, reason) => self.begin_shutdown(goal, &reason),
            Effect::Shutdown(event) => self.step_shutdown(event),
            Effect::AgentListens(at_us) => {
                let effects = self.agent.listens(at_us);
                self.carry_out(effects);
            }
            Effect::Attach(pci, minor) => self.start_attach(pci, minor),
            Effect::MakeNode(pci) => self.make_node(pci),
            Effect::AttachAdded(pci, bound) => self.attach_added(pci, bound),
            Effect::CloseGpu(pci) => self.close_gpu(pci),
            Effect::ApplySettings(pci) => self.apply_settings(pci),
            Effect::MakeCapabilities => self.make_capabilities(),
            Effect::SettingsApplied(pci, undivided) => {
                let effects = self.with_gpus(|gpus, context| gpus.settings_applied(pci, undivided, context));
                self.carry_out(effects);
            }
            Effect::ScanBus => self.scan_bus(),
            Effect::LoadDriver => self.load_driver(),
        }
    }

    /// Opens the kernel log.
    pub(super) fn open_log(&mut self) {
        let effects = self.logs.open_kernel_log(now_us(), self.guest.root(), self.guest.params().log);
        self.carry_out(effects);
    }

    /// Reads the whole kernel log, so that the driver's last messages about each GPU are up to
    /// date.
    pub(super) fn read_whole_log(&mut self) {
        let effects = self.logs.read_whole_kernel_log(now_us(), self.guest.root(), self.guest.params().log);
        self.carry_out(effects);
    }

    /// Writes the boot record to its file; an error is added to the record as an event.
    pub(super) fn save(&mut self) {
        self.recorder.milestones(self.logs.kernel().milestones());
        if let Err(text) = self.recorder.save() {
            self.recorder.event(now_us(), "record-not-written", "", &text);
        }
    }

    fn send_state(&mut self, client: ClientId) {
        self.clients.send(client, &gpu_message(self.gpus.is_scanned(), &self.recorder.record().gpus));
        for message in self.daemons.messages() {
            self.clients.send(client, &message);
        }
    }

    fn send_record(&mut self, client: ClientId, id: Option<RequestId>) {
        self.read_whole_log();
        self.save();
        let record = FromInit::Record { id, record: Box::new(self.recorder.record().clone()) };
        self.clients.send(client, &record);
    }

    /// Loads a module for a client. It runs on a thread, because the init function of a driver may
    /// probe its devices.
    fn load_module(&mut self, request: ModuleRequest, parameters: String) {
        let (inputs, requested) = (self.inputs(), request.clone());
        let spawned = self.threads.spawn("load-module".to_owned(), move |outbox| {
            let result = actions::load_requested(&inputs, &requested.name, &parameters);
            outbox.send(Message::Module(requested, result));
        });
        if let Err(text) = spawned {
            self.module_loaded(request, Err(text));
        }
    }

    pub(super) fn module_loaded(&mut self, request: ModuleRequest, result: Result<String, String>) {
        let ModuleRequest { client, id, name } = request;
        let detail = result.as_ref().unwrap_or_else(|error| error).clone();
        self.recorder.event(now_us(), "module-requested", &cut(name.clone()), &cut(detail));
        self.clients.send(client, &FromInit::Module { id, name, error: result.err() });
    }

    fn start_attach(&mut self, pci: Address, minor: u32) {
        let node = self.guest.root().path(&format!("/dev/nvidia{minor}"));
        let spawned = self.threads.spawn(format!("attach-{pci}"), move |outbox| {
            let answer = open::attach(&node, || outbox.send(Message::Opened(pci)));
            outbox.send(Message::Attach(pci, answer, thread_us()));
        });
        if let Err(reason) = spawned {
            let answer = Answer::Failed(Refusal { step: open::OPEN, reason, code: None });
            self.threads.send(Message::Attach(pci, answer, 0));
        }
    }

    fn make_node(&mut self, pci: Address) {
        let (root, channels) = (self.guest.root().clone(), self.guest.params().imex_channels);
        let spawned = self.threads.spawn(format!("nodes-{pci}"), move |outbox| {
            let minor = match nodes::make(&root, &[pci], channels, &mut Mknod) {
                Ok(made) => {
                    made.minors.into_iter().next().map_or(Err("it has no minor".to_owned()), |(_, minor)| minor)
                }
                Err(error) => Err(error.to_string()),
            };
            outbox.send(Message::Node(pci, minor));
        });
        if let Err(text) = spawned {
            self.node_made(pci, Err(text));
        }
    }

    /// Attaches a GPU that was added to the bus, if the mode permits. If the driver has not bound
    /// the GPU, the attach starts after the bind; a missing driver is loaded.
    fn attach_added(&mut self, pci: Address, bound: bool) {
        self.update_mode();
        if !self.guest.attaches_gpus() {
            let why = self.guest.mode_reason();
            let effects = self.with_gpus(|gpus, context| gpus.give_up(pci, "mode", &why, context));
            self.carry_out(effects);
        } else if bound {
            let effects = self.gpus.bound(pci);
            self.carry_out(effects);
        } else if nodes::driver_major(self.guest.root()).is_none() {
            let effect = self.bus.request_driver();
            self.carry_out(effect);
        }
    }

    /// Decides the mode again if the current mode attaches no GPUs: the first GPU may have been
    /// added.
    fn update_mode(&mut self) {
        if self.guest.attaches_gpus() {
            return;
        }
        let decision = actions::decide(&self.inputs());
        if decision.attach {
            self.recorder.mode(decision.mode.clone());
            self.guest.set_decision(decision);
        }
    }

    /// Closes a removed GPU on a thread: at the last close the driver shuts the GPU down, which
    /// takes time.
    fn close_gpu(&mut self, pci: Address) {
        let held = self.gpus.take_closing(pci);
        // If the thread cannot be started, the closure is dropped here, and with it the
        // descriptors.
        let _ = self.threads.spawn(format!("close-{pci}"), move |_| drop(held));
    }

    fn apply_settings(&mut self, pci: Address) {
        if let Some(place) = self.gpus.place(pci) {
            let effects = self.settings.apply(now_us(), place, &self.guest);
            self.carry_out(effects);
        }
    }

    fn make_capabilities(&mut self) {
        if let Err(error) = nodes::make_capabilities(self.guest.root(), &mut Mknod) {
            self.recorder.event(now_us(), "device-nodes-skipped", "", &error.to_string());
        }
    }

    /// Scans the PCI bus on a thread, because reads of sysfs can be slow.
    fn scan_bus(&mut self) {
        let root = self.guest.root().clone();
        let spawned = self.threads.spawn("pci-scan".to_owned(), move |outbox| {
            outbox.send(Message::BusScanned(BusSnapshot::read(&root).map_err(|error| error.to_string())));
        });
        if spawned.is_err() {
            self.bus.scan_ended();
        }
    }

    /// Loads the driver for the first hotplugged GPU of a guest that booted without one, on a
    /// thread.
    fn load_driver(&mut self) {
        let inputs = self.inputs();
        let spawned = self
            .threads
            .spawn("driver".to_owned(), move |outbox| outbox.send(Message::Driver(actions::load_driver(&inputs))));
        if let Err(text) = spawned {
            self.driver_loaded(Err(text));
        }
    }
}
