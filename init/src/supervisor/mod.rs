//! The main loop: what happens anywhere comes in here, one thing at a time.
//!
//! The loop never waits for a unit. Units run on threads of their own and send
//! their end through a channel; a descriptor wakes the loop.

mod agent;
mod clients;
mod gpus;
mod power;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use firstlight_boot_record::{Outcome, State};
use firstlight_sys::signals::SignalFd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::nice;

use crate::actions::{self, Inputs, Product, Report};
use crate::clock::{ms, now_us};
use crate::control::{ClientId, Server};
use crate::executor::{Effect, End, Event, Executor};
use crate::kmsg::{Log, Reader};
use crate::open::Answer;
use crate::params::Params;
use crate::plan::{PlanError, check};
use crate::record::{Recorder, unit_of};
use crate::root::Root;
use crate::shutdown::Shutdown;
use crate::units::{Action, PLAN};

/// Stack of a unit's thread. Address space, not memory: only what is touched counts.
const STACK: usize = 128 << 10;

/// Niceness of units that nobody waits for.
const NICE: i32 = 10;

/// Records of the kernel log that are read before others have their turn.
const LOG_TURN: usize = 64;

/// What a thread tells the loop.
#[derive(Debug)]
enum Message {
    /// A unit's action ended.
    Unit(usize, Report),
    /// The node of a GPU is open, and the driver is at work.
    Opened(usize),
    /// An attach ended.
    Attach(usize, Answer),
    /// A module that a client asked for is loaded, or why not.
    Module(ClientId, String, Option<String>),
    /// GPUs are let go and file systems written.
    Released,
}

/// How threads reach the loop.
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
    kmsg: Option<Reader>,
    log: Log,
    params: Arc<Params>,
    functions: Arc<Vec<firstlight_pci::Function>>,
    decision: Option<crate::mode::Decision>,
    scanned: bool,
    gpus: gpus::Gpus,
    agent: agent::Agent,
    shutdown: Option<Shutdown>,
}

/// Why PID 1 cannot even begin.
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
    pub fn new(signals: SignalFd, start_us: u64) -> Result<Self, StartError> {
        let graph = check(PLAN)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| StartError::Descriptor("an eventfd", error.into()))?;
        let (sender, inbox) = channel();
        let root = Root::real();
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let executor = Executor::new(&graph);
        let mut recorder = Recorder::new(&root, &release, start_us);
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
            kmsg: None,
            log: Log::default(),
            params: Arc::default(),
            functions: Arc::default(),
            decision: None,
            scanned: false,
            gpus: gpus::Gpus::default(),
            agent: agent::Agent::default(),
            shutdown: None,
        })
    }

    /// Boots, and then watches until the machine is switched off.
    pub fn run(mut self) -> ! {
        self.feed(Event::Begin);
        loop {
            self.drain();
            self.wait();
            self.hear_signals();
            while let Ok(message) = self.inbox.try_recv() {
                self.hear(message);
            }
            self.hear_clients();
            self.read_log();
            self.watch_clock();
        }
    }

    /// Sleeps until a descriptor or a deadline wakes the loop.
    fn wait(&mut self) {
        let deadlines = [
            self.executor.next_deadline(),
            self.gpus.next_deadline(),
            self.agent.restart_at,
            self.shutdown_deadline(),
            self.recorder.console_due(),
        ];
        let timeout = deadlines.into_iter().flatten().min().map(|at| {
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
        if let Some(kmsg) = &self.kmsg {
            fds.push(PollFd::from_borrowed_fd(kmsg.as_fd(), PollFlags::IN));
        }
        if let Some(server) = &self.server {
            for (fd, output) in server.descriptors() {
                let flags = if output { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
                fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        }
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

    /// Follows the executor's wishes. What can be done at once goes before
    /// what costs a thread, so that the agent waits for nobody it need not.
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
            Some(action) => match actions::at_once(action, &self.inputs()) {
                Some(report) => self.unit_reported(unit, report),
                None => return false,
            },
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
            outbox.send(Message::Unit(unit, actions::run(action, &inputs)));
        });
        if let Err(error) = spawned {
            self.feed(Event::Ended(unit, End::Failed(format!("cannot start a thread: {error}; is memory short?"))));
        }
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Unit(unit, report) => self.unit_reported(unit, report),
            Message::Opened(gpu) => self.gpu_opened(gpu),
            Message::Attach(gpu, answer) => self.gpu_answered(gpu, answer),
            Message::Module(client, name, error) => self.module_loaded(client, name, error),
            Message::Released => self.released(),
        }
        self.drain();
    }

    /// Takes an action's product, then its end: whoever starts next sees both.
    fn unit_reported(&mut self, unit: usize, (end, product): Report) {
        match product {
            Product::Nothing => {}
            Product::CommandLine(text, params) => {
                self.recorder.command_line(&text);
                for complaint in &params.complaints {
                    self.recorder.event(now_us(), "parameter-ignored", &complaint.param, &complaint.text);
                }
                self.params = Arc::from(params);
            }
            Product::Functions(functions) => {
                self.functions = Arc::new(functions);
                self.gpus_found(unit);
            }
            Product::Mode(decision) => {
                self.recorder.mode(decision.mode.clone());
                self.decision = Some(decision);
            }
            Product::Minors(minors) => self.gpus.take_minors(minors),
        }
        self.feed(Event::Ended(unit, end));
    }

    /// Puts a unit into the record as the executor has it.
    fn write_unit(&mut self, unit: usize) {
        let slots = self.executor.slots();
        let Some(slot) = slots.get(unit) else { return };
        let action = self.action(unit);
        let mut row = unit_of(slot, slots, action == Some(Action::Agent));
        if action == Some(Action::Agent) && row.ready_us.is_some() {
            row.ready_us = self.agent.listening_us.or(row.ready_us);
        }
        if action == Some(Action::GpuAttach) {
            row.deadline_us = gpus::micros(self.params.attach_deadline);
        }
        // Instances stand where their template stands in the plan.
        let next = slot.template.and_then(|template| slots.get(template + 1)).map(|slot| slot.node.name.clone());
        self.recorder.unit(row, next.as_deref());
    }

    fn unit_ended(&mut self, unit: usize) {
        self.write_unit(unit);
        match self.action(unit) {
            Some(Action::PciScan) => self.scan_ended(),
            Some(Action::GpuAttach) => self.gpu_unit_ended(unit),
            Some(Action::Agent) => self.agent_unit_ended(),
            _ => {}
        }
    }

    fn unit_late(&mut self, unit: usize) {
        let name = self.name(unit);
        let took = self.executor.slots().get(unit).and_then(|slot| slot.start_us).map(|at| now_us() - at);
        let detail = format!("it ended {} ms after its start, when it had been given up", ms(took.unwrap_or_default()));
        self.recorder.event(now_us(), "unit-late", &name, &detail);
    }

    fn plan_finished(&mut self) {
        self.open_log();
        if self.executor.failed().is_none() && self.shutdown.is_none() {
            self.recorder.state(if self.executor.degraded() { State::Degraded } else { State::Ready });
        }
        self.note_memory();
        self.save();
    }

    /// Writes the record's file; a record that cannot be written says so.
    fn save(&mut self) {
        self.recorder.milestones(self.log.milestones());
        if let Err(text) = self.recorder.save() {
            self.recorder.event(now_us(), "record-not-written", "", &text);
        }
    }

    /// The resident memory of what stays, once the boot is over.
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

    /// Opens the kernel's log. It has hundreds of records from before us, so
    /// this waits until the agent serves.
    fn open_log(&mut self) {
        if self.kmsg.is_none() {
            self.kmsg = Reader::open().ok();
            self.read_log();
        }
    }

    /// Reads a turn's worth of the log; `false` when nothing is left.
    fn read_log(&mut self) -> bool {
        let Some(kmsg) = &mut self.kmsg else { return false };
        // One that cannot be read would wake the loop for ever.
        kmsg.read(&mut self.log, LOG_TURN).unwrap_or_else(|_| {
            self.kmsg = None;
            false
        })
    }

    /// Reads all that the log has, before somebody's last words are quoted.
    fn read_whole_log(&mut self) {
        self.open_log();
        // A log that grows faster than it is read has an end here.
        let _ = (0..64).all(|_| self.read_log());
    }

    fn required_failed(&mut self, unit: usize) {
        let Some(slot) = self.executor.slots().get(unit) else { return };
        let (name, detail) = (slot.node.name.clone(), slot.detail.clone());
        let prefix = if slot.outcome == Outcome::TimedOut { "timed out: " } else { "" };
        self.fail(&name, &format!("{prefix}{detail}"));
    }
}
