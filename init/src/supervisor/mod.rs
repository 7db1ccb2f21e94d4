//! The main loop: it serialises all events of PID 1.
//!
//! The loop never blocks on a unit. Units run on their own threads and send
//! their result through a channel; an eventfd wakes the loop.

mod agent;
mod boot;
mod clients;
mod daemons;
mod gpus;
mod hotplug;
mod log;
mod power;
mod settings;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use firstlight_boot_record::{Outcome, State};
use firstlight_sys::signals::SignalFd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::nice;

use self::boot::{Boot, Due, RowContext};
use crate::actions::{self, Component, Dispatch, Inputs, Product, Report};
use crate::clock::{Moment, ms, now_us, process_us, thread_us};
use crate::control::{ClientId, Server};
use crate::executor::End;
use crate::hotplug::BusSnapshot;
use crate::open::Answer;
use crate::params::Params;
use crate::plan::PlanError;
use crate::record::Recorder;
use crate::root::Root;
use crate::unit_id::UnitId;

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
    Unit(UnitId, Report, u64),
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
    boot: Boot,
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
        let boot = Boot::new()?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| StartError::Descriptor("an eventfd", error.into()))?;
        let (sender, inbox) = channel();
        let root = Root::real();
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let recorder = Recorder::new(&root, &release, begin.at_us);
        let mut supervisor = Self {
            root,
            release,
            boot,
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
            begin,
            more_ended: false,
            orphans: 0,
        };
        for unit in supervisor.boot.units().collect::<Vec<_>>() {
            supervisor.write_unit(unit);
        }
        Ok(supervisor)
    }

    /// Boots and supervises until power-off.
    pub fn run(mut self) -> ! {
        self.boot.begin(now_us());
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
            self.boot.next_deadline(),
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
        self.boot.clock(now);
        if self.recorder.console_due().is_some_and(|at| at <= now) {
            self.recorder.start_console();
        }
        self.watch_gpus(now);
        self.watch_agent(now);
        self.watch_shutdown(now);
    }

    fn end_unit(&mut self, unit: UnitId, end: End) {
        self.boot.end(now_us(), unit, end);
    }

    /// Carries out what is due for the plan.
    fn drain(&mut self) {
        while let Some(due) = self.boot.next_due() {
            match due {
                Due::Start(unit) if self.shutdown.is_some() => {
                    self.end_unit(unit, End::NotNeeded("the machine is being stopped".to_owned()));
                }
                Due::Start(unit) => self.start_unit(unit),
                Due::StartThread(unit, run) => self.start_thread(unit, run),
                Due::Ended(unit) => self.unit_ended(unit),
                Due::RequiredFailed(unit) => self.required_failed(unit),
                Due::Late(unit) => self.unit_late(unit),
                Due::Finished => self.plan_finished(),
            }
        }
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
            units: self.boot.units().count(),
        }
    }

    fn start_unit(&mut self, unit: UnitId) {
        self.write_unit(unit);
        let begin = thread_us();
        match actions::dispatch(unit, &self.inputs()) {
            Dispatch::Ended(report) => self.unit_reported(unit, report, thread_us() - begin),
            Dispatch::Thread(run) => self.boot.defer(unit, run),
            Dispatch::Component(Component::Agent) => self.start_agent_unit(unit),
            Dispatch::Component(Component::GpuAttach(_)) => self.start_gpu_unit(unit),
            Dispatch::Component(Component::GpuSettings) => self.start_settings_unit(unit),
            Dispatch::Component(Component::DevLog) => self.start_syslog_unit(unit),
            Dispatch::Component(Component::Daemon(daemon)) => self.start_daemon_unit(unit, daemon),
        }
    }

    fn start_thread(&mut self, unit: UnitId, run: fn(&Inputs) -> Report) {
        let (inputs, outbox) = (self.inputs(), self.outbox.clone());
        let thread = std::thread::Builder::new().name(unit.to_string()).stack_size(STACK);
        let spawned = thread.spawn(move || {
            if unit.runs_at_low_priority() {
                // On Linux the niceness is the thread's own.
                let _ = nice(NICE);
            }
            let report = run(&inputs);
            outbox.send(Message::Unit(unit, report, thread_us()));
        });
        if let Err(error) = spawned {
            self.end_unit(unit, End::Failed(format!("cannot start a thread: {error}; is memory short?")));
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
    fn unit_reported(&mut self, unit: UnitId, (end, product): Report, processor_us: u64) {
        self.boot.worked(unit, processor_us);
        match product {
            Product::Nothing => {}
            Product::CommandLine(text, params) => {
                self.recorder.command_line(&text);
                for complaint in &params.complaints {
                    self.recorder.event(now_us(), "parameter-ignored", &complaint.param, &complaint.text);
                }
                self.boot.set_deadlines(&params.deadlines);
                self.params = Arc::from(params);
            }
            Product::Functions(functions) => {
                self.functions = Arc::new(functions);
                self.gpus_found();
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
        self.end_unit(unit, end);
    }

    /// Puts a unit into the record as the executor has it.
    fn write_unit(&mut self, unit: UnitId) {
        let context = RowContext {
            params: &self.params,
            daemons: self.daemon_context(),
            agent_listening_us: self.agent.listening_us,
        };
        if let Some((row, next)) = self.boot.row(unit, context) {
            self.recorder.unit(unit, row, next);
        }
    }

    fn unit_ended(&mut self, unit: UnitId) {
        self.write_unit(unit);
        match unit {
            UnitId::PciScan => self.scan_ended(),
            UnitId::Mode => self.mode_ended(unit),
            UnitId::Nodes => self.open_hotplug(),
            UnitId::GpuAttach(_) => self.gpu_unit_ended(unit),
            UnitId::Agent => self.agent_unit_ended(),
            UnitId::GpuSettings => self.settings_unit_ended(),
            _ => {}
        }
    }

    /// Fails the boot on an unsupported topology if `firstlight.on-unsupported-topology=fail`.
    fn mode_ended(&mut self, unit: UnitId) {
        let unsupported = self.decision.as_ref().is_some_and(|decision| decision.unsupported.is_some());
        let failed = self.boot.unit(unit).filter(|slot| unsupported && slot.outcome == Outcome::Failed);
        if let Some(detail) = failed.map(|slot| slot.detail.clone()) {
            self.fail(unit, &detail);
        }
    }

    fn unit_late(&mut self, unit: UnitId) {
        let took = self.boot.unit(unit).and_then(|slot| slot.start_us).map(|at| now_us() - at);
        let detail =
            format!("it ended {} ms after its start, after it had timed out (given up)", ms(took.unwrap_or_default()));
        self.recorder.event(now_us(), "unit-ended-after-deadline", &unit.to_string(), &detail);
    }

    fn plan_finished(&mut self) {
        self.open_log();
        if !self.boot.failed() && self.shutdown.is_none() {
            self.recorder.state(if self.boot.degraded() { State::Degraded } else { State::Ready });
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
        let units = self.boot.processor_us();
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

    fn required_failed(&mut self, unit: UnitId) {
        let Some(slot) = self.boot.unit(unit) else { return };
        let prefix = if slot.outcome == Outcome::TimedOut { "timed out: " } else { "" };
        let text = format!("{prefix}{}", slot.detail);
        self.fail(unit, &text);
    }
}
