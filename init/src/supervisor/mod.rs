//! The main loop of PID 1. The loop handles all events one after the other.
//!
//! The loop never blocks on a unit. Units run on their own threads and send their results through a
//! channel; an eventfd wakes the loop.
//!
//! The state belongs to components, one per file. A component takes an event and returns
//! [`effect::Effect`]s. The loop routes events to components (this file), runs the units of the
//! boot plan (`units`) and carries out effects (`carry_out`).

mod agent;
mod boot;
mod bus_watch;
mod carry_out;
mod children;
mod clients;
mod daemons;
mod effect;
mod gpus;
mod guest;
mod logs;
mod power;
mod settings;
mod stop;
mod threads;
mod units;

use std::fs;
use std::os::fd::AsFd;

use firstlight_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::agent::{Agent, Situation};
use self::boot::Boot;
use self::bus_watch::BusWatch;
use self::children::Children;
use self::clients::Clients;
use self::daemons::Daemons;
use self::effect::Effect;
use self::gpus::{GpuContext, Gpus};
use self::guest::Guest;
use self::logs::Logs;
use self::power::Power;
use self::settings::SettingsRuns;
use self::threads::{Message, Threads};
use crate::agent::describe_exit;
use crate::clock::{Moment, now_us};
use crate::hotplug::BusSnapshot;
use crate::open::Answer;
use crate::plan::PlanError;
use crate::record::Recorder;
use crate::root::Root;
use crate::shutdown::{self, Goal};
use crate::unit_id::UnitId;

/// The supervisor: the state of PID 1.
#[derive(Debug)]
pub struct Supervisor {
    guest: Guest,
    boot: Boot,
    recorder: Recorder,
    signals: SignalFd,
    threads: Threads,
    clients: Clients,
    logs: Logs,
    gpus: Gpus,
    bus: BusWatch,
    agent: Agent,
    daemons: Daemons,
    settings: SettingsRuns,
    children: Children,
    power: Power,
}

/// An error before the boot begins.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The boot plan that is compiled into PID 1 is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The kernel could not create a descriptor.
    #[error("cannot make {0}: {1}")]
    Descriptor(&'static str, std::io::Error),
}

impl Supervisor {
    /// Creates a supervisor; no unit has started.
    ///
    /// # Errors
    /// The boot plan is invalid, or the kernel could not create an eventfd.
    pub fn new(signals: SignalFd, begin: Moment) -> Result<Self, StartError> {
        let boot = Boot::new(begin)?;
        let threads = Threads::new().map_err(|error| StartError::Descriptor("an eventfd", error))?;
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut recorder = Recorder::new(&Root::real(), &release, begin.at_us);
        for (unit, row) in boot.plan_rows() {
            recorder.unit(unit, row, None);
        }
        Ok(Self {
            guest: Guest::new(Root::real(), release),
            boot,
            recorder,
            signals,
            threads,
            clients: Clients::default(),
            logs: Logs::default(),
            gpus: Gpus::default(),
            bus: BusWatch::default(),
            agent: Agent::default(),
            daemons: Daemons::default(),
            settings: SettingsRuns::default(),
            children: Children::default(),
            power: Power::default(),
        })
    }

    /// Boots and supervises until power-off.
    pub fn run(mut self) -> ! {
        self.boot.begin(now_us());
        loop {
            self.run_due_units();
            self.publish_ready_gpus();
            // The publication of GPUs ends their attach units: run the units that depend on them.
            self.run_due_units();
            self.clients.send_gpus(self.gpus.is_scanned(), &self.recorder.record().gpus);
            self.wait();
            self.handle_signals();
            if self.children.more() {
                self.reap();
            }
            while let Some(message) = self.threads.receive() {
                self.handle_message(message);
            }
            self.poll_components();
            self.watch_clock();
        }
    }

    /// Sleeps until a descriptor or a deadline wakes the loop.
    fn wait(&self) {
        let deadlines = [
            self.boot.next_deadline(),
            self.gpus.next_deadline(),
            self.agent.next_deadline(),
            self.daemons.next_deadline(),
            self.settings.next_deadline(),
            self.power.next_deadline(),
            self.logs.next_deadline(),
            self.recorder.console_due(),
            self.children.more().then_some(0),
        ];
        let timeout = deadlines.into_iter().flatten().min().map(|at| {
            let left = at.saturating_sub(now_us());
            Timespec {
                tv_sec: i64::try_from(left / 1_000_000).unwrap_or(i64::MAX),
                // The remainder is less than 1 s, so the value is below 1,000,000,000 ns.
                tv_nsec: i64::try_from(left % 1_000_000 * 1000).unwrap_or_default(),
            }
        });
        let inputs = [self.signals.as_fd(), self.threads.descriptor()].into_iter();
        let inputs = inputs.chain(self.logs.descriptors()).chain(self.bus.descriptor());
        let inputs = inputs.chain(self.settings.descriptors()).chain(self.daemons.descriptors());
        let mut fds: Vec<PollFd<'_>> = inputs.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        for (fd, output) in self.clients.descriptors() {
            let flags = if output { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
        // An error of poll is ignored, because there is no recovery. EINTR ends the wait early.
        let _ = poll(&mut fds, timeout.as_ref());
        self.threads.clear();
    }

    /// Receives the pending input of all components and handles it.
    fn poll_components(&mut self) {
        for (client, request) in self.clients.receive() {
            let effects = self.clients.handle(now_us(), client, request);
            self.carry_out_and_run(effects);
        }
        let effects = self.daemons.poll(now_us());
        self.carry_out_and_run(effects);
        let effects = self.settings.poll(now_us(), &self.guest);
        self.carry_out_and_run(effects);
        let effects = self.logs.read(now_us(), self.guest.params().log);
        self.carry_out(effects);
        self.check_drivers();
        let effect = self.bus.receive();
        self.carry_out(effect);
    }

    /// Requests a bus scan if the driver has logged a message about a GPU that PID 1 holds open and
    /// that sysfs links to no driver. On the unbind of an open GPU the driver logs a message and
    /// waits for the last close.
    fn check_drivers(&mut self) {
        for pci in self.logs.take_gpus_with_messages() {
            let link = self.guest.root().path(&format!("/sys/bus/pci/devices/{pci}/driver"));
            if self.gpus.is_held(pci) && fs::symlink_metadata(link).is_err() {
                let effect = self.bus.request_scan();
                self.carry_out(effect);
            }
        }
    }

    /// Passes the current time to the components whose deadlines have expired.
    fn watch_clock(&mut self) {
        let now = now_us();
        self.boot.clock(now);
        if self.recorder.console_due().is_some_and(|at| at <= now) {
            self.recorder.start_console();
        }
        if self.gpus.next_deadline().is_some_and(|at| at <= now) {
            self.read_whole_log();
            let effects = self.with_gpus(Gpus::clock);
            self.carry_out(effects);
        }
        if self.agent.take_due_restart(now) {
            self.restart_agent();
        }
        let effects = self.power.clock(now);
        self.carry_out_shutdown(effects);
    }

    fn handle_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.next() {
            match signal.number {
                libc::SIGCHLD => self.reap(),
                libc::SIGTERM | libc::SIGPWR => {
                    let reason = format!("signal {} from pid {}", signal.number, signal.sender);
                    self.begin_shutdown(Goal::PowerOff, &reason);
                }
                // SIGINT: the kernel sends it to PID 1 on Ctrl-Alt-Del.
                libc::SIGINT => self.begin_shutdown(Goal::Reboot, "ctrl-alt-del"),
                libc::SIGUSR1 => {
                    self.read_whole_log();
                    self.save();
                }
                _ => {}
            }
            self.run_due_units();
        }
    }

    /// Reaps a batch of exited processes and passes each to the component that started it; all
    /// others are counted as orphans.
    fn reap(&mut self) {
        let reaped = self.children.reap();
        for (pid, status) in reaped.ended {
            if self.agent.pid() == Some(pid) {
                let words = describe_exit(status.exit_status(), status.terminating_signal());
                let effects = self.agent.exited(now_us(), &words, self.situation());
                self.carry_out(effects);
            } else if let Some(effects) = self.settings.process_ended(pid, status) {
                self.carry_out(effects);
            } else if !self.daemons.process_ended(now_us(), pid, status) {
                self.children.count_orphan();
            }
        }
        if reaped.none_left {
            self.step_shutdown(shutdown::Event::ChildrenGone);
        }
    }

    fn situation(&self) -> Situation {
        if self.power.is_shutting_down() {
            Situation::ShuttingDown
        } else if self.recorder.record().failure.is_some() {
            Situation::Failed
        } else {
            Situation::Running(self.guest.params().agent_restart)
        }
    }

    /// Handles the message of a thread.
    fn handle_message(&mut self, message: Message) {
        match message {
            Message::Unit(unit, report, processor_us) => self.unit_reported(unit, report, processor_us),
            Message::Opened(pci) => {
                let effects = self.gpus.opened(pci);
                self.carry_out(effects);
            }
            Message::Attach(pci, answer, processor_us) => {
                // A hotplugged GPU has no attach unit.
                if self.gpus.has_unit(pci) {
                    self.boot.worked(UnitId::GpuAttach(pci), processor_us);
                }
                if matches!(answer, Answer::Failed(_)) {
                    self.read_whole_log();
                }
                let effects = self.with_gpus(|gpus, context| gpus.answered(pci, answer, context));
                self.carry_out(effects);
            }
            Message::Module(request, result) => self.module_loaded(request, result),
            Message::BusScanned(snapshot) => self.bus_scanned(snapshot),
            Message::Driver(result) => self.driver_loaded(result),
            Message::Node(pci, minor) => self.node_made(pci, minor),
            Message::Shutdown(event) => self.step_shutdown(event),
        }
        self.run_due_units();
    }

    fn bus_scanned(&mut self, snapshot: Result<BusSnapshot, String>) {
        self.bus.scan_ended();
        match snapshot {
            Ok(snapshot) => self.apply_snapshot(snapshot),
            Err(text) => self.recorder.event(now_us(), "pci-scan-failed", "", &text),
        }
        let effect = self.bus.next_scan();
        self.carry_out(effect);
    }

    fn apply_snapshot(&mut self, snapshot: BusSnapshot) {
        let changes = self.gpus.changes(&snapshot);
        if changes.is_empty() {
            return;
        }
        self.guest.set_functions(snapshot.functions);
        for change in changes {
            let effects = self.with_gpus(|gpus, context| gpus.changed(change, context));
            self.carry_out(effects);
        }
    }

    fn driver_loaded(&mut self, result: Result<String, String>) {
        self.read_whole_log();
        match result {
            Ok(text) => self.recorder.event(now_us(), "driver-loaded", "", &text),
            Err(text) => {
                let effects = self.with_gpus(|gpus, context| gpus.driver_failed(&text, context));
                self.carry_out(effects);
            }
        }
        let effect = self.bus.driver_load_ended();
        self.carry_out(effect);
    }

    fn node_made(&mut self, pci: firstlight_pci::Address, minor: Result<u32, String>) {
        if !self.power.is_shutting_down() {
            let effects = self.with_gpus(|gpus, context| gpus.node_made(pci, minor, context));
            self.carry_out(effects);
        }
    }

    fn publish_ready_gpus(&mut self) {
        let effects = self.with_gpus(Gpus::publish_ready);
        self.carry_out(effects);
    }

    /// Calls `handle` with the GPUs and the data of other components that they need.
    fn with_gpus(&mut self, handle: impl FnOnce(&mut Gpus, &GpuContext<'_>) -> Vec<Effect>) -> Vec<Effect> {
        let context = GpuContext { now: now_us(), guest: &self.guest, log: self.logs.kernel() };
        handle(&mut self.gpus, &context)
    }
}
