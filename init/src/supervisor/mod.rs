//! The main loop: it serialises all events of PID 1.
//!
//! The loop never blocks on a unit. Units run on their own threads and send
//! their result through a channel; an eventfd wakes the loop.

mod agent;
mod clients;
mod daemons;
mod gpus;
mod hotplug;
mod log;
mod power;
mod settings;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use firstlight_boot_record::{Outcome, State};
use firstlight_sys::signals::SignalFd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::nice;

use crate::actions::{self, Inputs, Product, Report};
use crate::clock::{Moment, ms, now_us, process_us, thread_us};
use crate::control::{ClientId, Server};
use crate::daemons::table::DAEMONS;
use crate::executor::{Effect, End, Event, Executor};
use crate::hotplug::BusSnapshot;
use crate::open::Answer;
use crate::params::Params;
use crate::plan::{PlanError, check};
use crate::record::{Recorder, unit_of};
use crate::root::Root;
use crate::units::{Action, PLAN};

/// Stack of a unit's thread. Address space, not memory: only what is touched counts.
const STACK: usize = 128 << 10;

/// Niceness of low-priority units.
const NICE: i32 = 10;

/// Processes reaped per loop iteration.
const REAP_TURN: usize = 256;

/// A message from a thread to the loop.
#[derive(Debug)]
enum Message {
    /// A unit's action ended; its thread's processor time, µs.
    Unit(usize, Report, u64),
    /// The node of a GPU is open, and the driver is at work.
    Opened(usize),
    /// An attach ended; its thread's processor time, µs.
    Attach(usize, Answer, u64),
    /// A module that a client asked for is loaded, and how, or why not.
    Module(ClientId, String, Result<String, String>),
    /// The result of a PCI bus scan.
    BusScanned(Result<BusSnapshot, String>),
    /// The driver is loaded for a GPU that was plugged in, or why not.
    Driver(Result<String, String>),
    /// The node of a GPU that was plugged in.
    Node(firstlight_pci::Address, Result<u32, String>),
    /// A shutdown thread has ended.
    Shutdown(crate::shutdown::Event),
}

/// The sending side of the loop's channel.
#[derive(Debug, Clone)]
struct Outbox {
    sender: Sender<Message>,
    bell: Arc<OwnedFd>,
}

impl Outbox {
    fn send(&self, message: Message) {
        // The loop holds the other ends for as long as the machine runs.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// PID 1.
#[derive(Debug)]
pub struct Supervisor {
    root: Root,
    release: String,
    executor: Executor,
    effects: VecDeque<Effect>,
    recorder: Recorder,
    signals: SignalFd,
    inbox: Receiver<Message>,
    outbox: Outbox,
    server: Option<Server>,
    logs: log::LogSources,
    params: Arc<Params>,
    functions: Arc<Vec<firstlight_pci::Function>>,
    decision: Option<crate::mode::Decision>,
    scanned: bool,
    gpus: gpus::Gpus,
    /// Whether subscribers need a GPU update.
    gpus_changed: bool,
    hotplug: hotplug::Hotplug,
    agent: agent::Agent,
    daemons: daemons::Daemons,
    settings: settings::Settings,
    shutdown: Option<power::ShutdownState>,
    /// Processor time of the units that have ended, µs.
    processor_us: BTreeMap<usize, u64>,
    /// When this process began.
    begin: Moment,
    /// Whether processes have ended that are not reaped yet.
    more_ended: bool,
    /// Reaped orphans.
    orphans: u64,
}

/// An error before the boot begins.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The plan in this program is wrong.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The kernel has no descriptor for us.
    #[error("cannot make {0}: {1}")]
    Descriptor(&'static str, std::io::Error),
}

impl Supervisor {
    /// A supervisor that has done nothing yet.
    ///
    /// # Errors
    /// The plan makes no sense, or the kernel refuses the most basic things.
    pub fn new(signals: SignalFd, begin: Moment) -> Result<Self, StartError> {
        let graph = check(PLAN)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| StartError::Descriptor("an eventfd", error.into()))?;
        let (sender, inbox) = channel();
        let root = Root::real();
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let executor = Executor::new(&graph);
        let mut recorder = Recorder::new(&root, &release, begin.at_us);
        for slot in executor.slots().iter().filter(|slot| !slot.is_template()) {
            recorder.unit(unit_of(slot, executor.slots(), false), None);
        }
        Ok(Self {
            root,
            release,
            executor,
            effects: VecDeque::new(),
            recorder,
            signals,
            inbox,
            outbox: Outbox { sender, bell: Arc::new(bell) },
            server: None,
            logs: log::LogSources::default(),
            params: Arc::default(),
            functions: Arc::default(),
            decision: None,
            scanned: false,
            gpus: gpus::Gpus::default(),
            gpus_changed: false,
            hotplug: hotplug::Hotplug::default(),
            agent: agent::Agent::default(),
            daemons: daemons::Daemons::default(),
            settings: settings::Settings::default(),
            shutdown: None,
            processor_us: BTreeMap::new(),
            begin,
            more_ended: false,
            orphans: 0,
        })
    }

    /// Boots and supervises until power-off.
    pub fn run(mut self) -> ! {
        self.feed(Event::Begin);
        loop {
            self.drain();
            self.publish_ready_gpus();
            // The units of those that are served now.
            self.drain();
            self.send_gpus();
            self.wait();
            self.handle_signals();
            if self.more_ended {
                self.reap();
            }
            while let Ok(message) = self.inbox.try_recv() {
                self.handle_message(message);
            }
            self.handle_clients();
            self.poll_daemons();
            self.poll_settings();
            self.read_logs();
            self.check_drivers();
            self.handle_uevents();
            self.watch_clock();
        }
    }

    /// Sleeps until a descriptor or a deadline wakes the loop.
    fn wait(&mut self) {
        let deadlines = [
            self.executor.next_deadline(),
            self.gpus.next_deadline(),
            self.agent.restart_at,
            self.daemons.next_deadline(),
            self.settings.next_deadline(),
            self.shutdown_deadline(),
            self.logs.next_deadline(),
            self.recorder.console_due(),
        ];
        let more = self.more_ended.then_some(0);
        let timeout = deadlines.into_iter().chain([more]).flatten().min().map(|at| {
            let left = at.saturating_sub(now_us());
            Timespec {
                tv_sec: i64::try_from(left / 1_000_000).unwrap_or(i64::MAX),
                // Below a thousand million by construction.
                tv_nsec: i64::try_from(left % 1_000_000 * 1000).unwrap_or_default(),
            }
        });
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.outbox.bell.as_fd(), PollFlags::IN),
        ];
        fds.extend(self.logs.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if let Some(plug) = self.hotplug.descriptor() {
            fds.push(PollFd::from_borrowed_fd(plug, PollFlags::IN));
        }
        if let Some(server) = &self.server {
            for (fd, output) in server.descriptors() {
                let flags = if output { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
                fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        }
        fds.extend(self.settings.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        fds.extend(self.daemons.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        // Nothing can be done about a poll that fails; a signal ends it too.
        let _ = poll(&mut fds, timeout.as_ref());
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.outbox.bell, &mut count);
    }

    fn watch_clock(&mut self) {
        let now = now_us();
        if self.executor.next_deadline().is_some_and(|at| at <= now) {
            self.feed(Event::Clock);
        }
        if self.recorder.console_due().is_some_and(|at| at <= now) {
            self.recorder.start_console();
        }
        self.watch_gpus(now);
        self.watch_agent(now);
        self.watch_shutdown(now);
    }

    fn feed(&mut self, event: Event) {
        let effects = self.executor.step(now_us(), event);
        self.effects.extend(effects);
    }

    /// Applies the executor's effects. Units that need no thread run first, so
    /// that the agent is not delayed.
    fn drain(&mut self) {
        let mut threads = VecDeque::new();
        loop {
            while let Some(effect) = self.effects.pop_front() {
                match effect {
                    Effect::Start(unit) if self.shutdown.is_some() => {
                        self.feed(Event::Ended(unit, End::NotNeeded("the machine is being stopped".to_owned())));
                    }
                    Effect::Start(unit) => {
                        if !self.start_at_once(unit) {
                            threads.push_back(unit);
                        }
                    }
                    Effect::Ended(unit) => self.unit_ended(unit),
                    Effect::RequiredFailed(unit) => self.required_failed(unit),
                    Effect::Late(unit) => self.unit_late(unit),
                    Effect::Finished => self.plan_finished(),
                }
            }
            match threads.pop_front() {
                Some(unit) => self.start_thread(unit),
                None => return,
            }
        }
    }

    fn action(&self, unit: usize) -> Option<Action> {
        let slot = self.executor.slots().get(unit)?;
        PLAN.get(slot.template.unwrap_or(unit)).map(|spec| spec.action)
    }

    fn name(&self, unit: usize) -> String {
        self.executor.slots().get(unit).map(|slot| slot.node.name.clone()).unwrap_or_default()
    }

    fn inputs(&self) -> Inputs {
        Inputs {
            root: self.root.clone(),
            release: self.release.clone(),
            params: Arc::clone(&self.params),
            functions: Arc::clone(&self.functions),
            decision: self.decision.clone(),
            gpus: self.gpus.addresses(),
            ready: self.gpus.ready().count(),
            units: self.executor.slots().iter().filter(|slot| !slot.is_template()).count(),
        }
    }

    /// Does what needs no thread; `false` if this unit does.
    fn start_at_once(&mut self, unit: usize) -> bool {
        self.write_unit(unit);
        match self.action(unit) {
            Some(Action::Agent) => self.start_agent_unit(unit),
            Some(Action::GpuAttach) => self.start_gpu_unit(unit),
            Some(Action::DevLog) => self.start_syslog_unit(unit),
            Some(Action::GpuSettings) => self.start_settings_unit(unit),
            Some(Action::Daemon(at)) => self.start_daemon_unit(unit, at),
            Some(action) => {
                let begin = thread_us();
                match actions::at_once(action, &self.inputs()) {
                    Some(report) => self.unit_reported(unit, report, thread_us() - begin),
                    None => return false,
                }
            }
            None => {}
        }
        true
    }

    fn start_thread(&mut self, unit: usize) {
        let Some(action) = self.action(unit) else { return };
        let (inputs, outbox) = (self.inputs(), self.outbox.clone());
        let thread = std::thread::Builder::new().name(self.name(unit)).stack_size(STACK);
        let spawned = thread.spawn(move || {
            if action.yields() {
                // On Linux the niceness is the thread's own.
                let _ = nice(NICE);
            }
            let report = actions::run(action, &inputs);
            outbox.send(Message::Unit(unit, report, thread_us()));
        });
        if let Err(error) = spawned {
            self.feed(Event::Ended(unit, End::Failed(format!("cannot start a thread: {error}; is memory short?"))));
        }
    }

    fn handle_message(&mut self, message: Message) {
        match message {
            Message::Unit(unit, report, processor_us) => self.unit_reported(unit, report, processor_us),
            Message::Opened(gpu) => self.gpu_opened(gpu),
            Message::Attach(gpu, answer, processor_us) => {
                self.gpu_worked(gpu, processor_us);
                self.gpu_answered(gpu, answer);
            }
            Message::Module(client, name, result) => self.module_loaded(client, name, result),
            Message::BusScanned(snapshot) => self.bus_scanned(snapshot),
            Message::Driver(result) => self.driver_loaded(result),
            Message::Node(pci, minor) => self.node_made(pci, minor),
            Message::Shutdown(event) => self.step_shutdown(event),
        }
        self.drain();
    }

    /// Takes an action's product, then its end: units started next see both.
    fn unit_reported(&mut self, unit: usize, (end, product): Report, processor_us: u64) {
        self.worked(unit, processor_us);
        match product {
            Product::Nothing => {}
            Product::CommandLine(text, params) => {
                self.recorder.command_line(&text);
                for complaint in &params.complaints {
                    self.recorder.event(now_us(), "parameter-ignored", &complaint.param, &complaint.text);
                }
                for (unit, time) in &params.deadlines {
                    self.executor.set_deadline(unit, gpus::micros(*time));
                }
                self.params = Arc::from(params);
            }
            Product::Functions(functions) => {
                self.functions = Arc::new(functions);
                self.gpus_found(unit);
            }
            Product::Mode(decision) => {
                self.recorder.mode(decision.mode.clone());
                if let Some(reason) = &decision.unsupported {
                    self.recorder.event(now_us(), "unsupported-topology", &decision.mode.name, reason);
                }
                self.decision = Some(decision);
            }
            Product::Minors(minors) => self.gpus.take_minors(minors),
        }
        self.feed(Event::Ended(unit, end));
    }

    /// Adds CPU time to a unit.
    fn worked(&mut self, unit: usize, processor_us: u64) {
        *self.processor_us.entry(unit).or_default() += processor_us;
    }

    /// Puts a unit into the record as the executor has it.
    fn write_unit(&mut self, unit: usize) {
        let slots = self.executor.slots();
        let Some(slot) = slots.get(unit) else { return };
        let action = self.action(unit);
        let mut row = unit_of(slot, slots, matches!(action, Some(Action::Agent | Action::Daemon(_))));
        if action == Some(Action::Agent) && row.ready_us.is_some() {
            row.ready_us = self.agent.listening_us.or(row.ready_us);
        }
        if action == Some(Action::GpuAttach) {
            row.deadline_us = gpus::micros(self.params.attach_deadline);
        }
        if action == Some(Action::GpuSettings) {
            row.deadline_us = gpus::micros(self.params.settings_deadline);
        }
        if let Some(Action::Daemon(at)) = action {
            row.deadline_us = DAEMONS.get(at).map_or(0, |spec| gpus::micros(spec.deadline));
            row.severity = self.daemon_severity(at).unwrap_or(row.severity);
        }
        row.processor_us = self.processor_us.get(&unit).copied();
        // Instances stand where their template stands in the plan.
        let next = slot.template.and_then(|template| slots.get(template + 1)).map(|slot| slot.node.name.clone());
        self.recorder.unit(row, next.as_deref());
    }

    fn unit_ended(&mut self, unit: usize) {
        self.write_unit(unit);
        match self.action(unit) {
            Some(Action::PciScan) => self.scan_ended(),
            Some(Action::Mode) => self.mode_ended(unit),
            Some(Action::Nodes) => self.open_hotplug(),
            Some(Action::GpuAttach) => self.gpu_unit_ended(unit),
            Some(Action::Agent) => self.agent_unit_ended(),
            Some(Action::GpuSettings) => self.settings_unit_ended(),
            _ => {}
        }
    }

    /// Fails the boot on an unsupported topology if `firstlight.on-unsupported-topology=fail`.
    fn mode_ended(&mut self, unit: usize) {
        let unsupported = self.decision.as_ref().is_some_and(|decision| decision.unsupported.is_some());
        let failed = self.executor.slots().get(unit).filter(|slot| unsupported && slot.outcome == Outcome::Failed);
        if let Some(detail) = failed.map(|slot| slot.detail.clone()) {
            self.fail("mode", &detail);
        }
    }

    fn unit_late(&mut self, unit: usize) {
        let name = self.name(unit);
        let took = self.executor.slots().get(unit).and_then(|slot| slot.start_us).map(|at| now_us() - at);
        let detail =
            format!("it ended {} ms after its start, after it had timed out (given up)", ms(took.unwrap_or_default()));
        self.recorder.event(now_us(), "unit-ended-after-deadline", &name, &detail);
    }

    fn plan_finished(&mut self) {
        self.open_log();
        if self.executor.failed().is_none() && self.shutdown.is_none() {
            self.recorder.state(if self.executor.degraded() { State::Degraded } else { State::Ready });
        }
        self.note_memory();
        self.note_processor();
        self.save();
    }

    /// Writes the boot record's file; a failure becomes an event.
    fn save(&mut self) {
        self.recorder.milestones(self.logs.kernel.milestones());
        if let Err(text) = self.recorder.save() {
            self.recorder.event(now_us(), "record-not-written", "", &text);
        }
    }

    /// The processor time of the boot's own work: all threads of this process
    /// from its beginning, and what the units have of that, which is in their rows.
    fn note_processor(&mut self) {
        if let Some(moment) = self.agent.executed {
            let spent = moment.processor_us.saturating_sub(self.begin.processor_us);
            self.recorder.event(moment.at_us, "agent-executed", "init", &format!("{spent} us"));
        }
        let spent = process_us().saturating_sub(self.begin.processor_us);
        let units: u64 = self.processor_us.values().sum();
        let console = self.recorder.console_us();
        let detail = format!("{spent} us, of which units {units} us, console {console} us");
        self.recorder.event(now_us(), "processor-time", "init", &detail);
    }

    /// Records the resident memory of PID 1 and the agent after boot.
    fn note_memory(&mut self) {
        let mut rows = vec![("init", 1)];
        if let Some(pid) = self.agent.pid {
            let pid = pid.as_raw_nonzero().get().unsigned_abs();
            rows.push(("agent", pid));
            rows.extend(crate::agent::children(&self.root, pid).into_iter().map(|child| ("agent-child", child)));
        }
        for (who, pid) in rows {
            if let Some(size) = crate::agent::resident_kib(&self.root, pid) {
                self.recorder.event(now_us(), "resident", who, &format!("{size} KiB"));
            }
        }
    }

    fn required_failed(&mut self, unit: usize) {
        let Some(slot) = self.executor.slots().get(unit) else { return };
        let (name, detail) = (slot.node.name.clone(), slot.detail.clone());
        let prefix = if slot.outcome == Outcome::TimedOut { "timed out: " } else { "" };
        self.fail(&name, &format!("{prefix}{detail}"));
    }
}
