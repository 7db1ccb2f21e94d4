//! Runs the units of the boot plan: starts them and handles their products and ends.

use firstlight_boot_record::{Outcome, State};
use rustix::process::nice;

use super::Supervisor;
use super::boot::{Due, RowContext};
use super::threads::Message;
use crate::actions::{self, Component, Dispatch, Inputs, Product, Report};
use crate::agent;
use crate::clock::{Moment, ms, now_us, process_us, thread_us};
use crate::executor::End;
use crate::log::devlog;
use crate::unit_id::UnitId;

/// Niceness of low-priority units.
const NICE: i32 = 10;

impl Supervisor {
    /// Runs all due work items of the boot plan.
    pub(super) fn run_due_units(&mut self) {
        while let Some(due) = self.boot.next_due() {
            match due {
                Due::Start(unit) if self.power.is_shutting_down() => {
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

    pub(super) fn end_unit(&mut self, unit: UnitId, end: End) {
        self.boot.end(now_us(), unit, end);
    }

    pub(super) fn inputs(&self) -> Inputs {
        self.guest.inputs(self.gpus.addresses(), self.gpus.ready(), self.boot.units().count())
    }

    fn start_unit(&mut self, unit: UnitId) {
        self.write_unit(unit);
        let begin = thread_us();
        match actions::dispatch(unit, &self.inputs()) {
            Dispatch::Ended(report) => self.unit_reported(unit, report, thread_us() - begin),
            Dispatch::Thread(run) => self.boot.defer(unit, run),
            Dispatch::Component(component) => self.start_component(component),
        }
    }

    /// Starts a unit that a component carries out.
    fn start_component(&mut self, component: Component) {
        let now = now_us();
        let effects = match component {
            Component::Agent => return self.start_agent_unit(),
            Component::DevLog => return self.start_devlog_unit(),
            Component::GpuAttach(pci) => {
                if !self.gpus.has_node(pci) {
                    self.read_whole_log();
                }
                self.with_gpus(|gpus, context| gpus.start_unit(pci, context))
            }
            Component::GpuSettings => {
                let (all, attached) = (self.gpus.places(), self.gpus.waiting_for_settings());
                self.settings.start_unit(now, &all, &attached, &self.guest)
            }
            Component::Daemon(daemon) => self.daemons.start_unit(now, daemon, &self.guest),
        };
        self.carry_out(effects);
    }

    /// Opens the control socket and starts the agent. The unit ends when the agent reports that it
    /// listens.
    fn start_agent_unit(&mut self) {
        self.agent.unit_started();
        let socket = self.guest.root().path(firstlight_init_control::SOCKET);
        let opened = self.clients.listen(&socket);
        let started = opened
            .map_err(|error| format!("cannot listen at {}: {error}", socket.display()))
            .and_then(|()| agent::prepare(self.guest.root()))
            .and_then(|()| self.start_agent());
        if let Err(text) = started {
            self.end_unit(UnitId::Agent, End::Failed(text));
        }
    }

    fn start_agent(&mut self) -> Result<(), String> {
        let now = now_us();
        let pid = agent::start()?;
        // The spawn returns after the agent's execve, so this is the time of the exec.
        self.agent.started(now, pid, Moment::now());
        Ok(())
    }

    /// Restarts the agent after its exit.
    pub(super) fn restart_agent(&mut self) {
        match self.start_agent() {
            Ok(()) => {
                let detail = format!("pid {}", self.agent.pid_number());
                self.recorder.event(now_us(), "agent-restarted", "agent", &detail);
            }
            Err(text) => self.fail(UnitId::Agent, &text),
        }
    }

    /// Creates `/dev/log`. The unit ends when the socket accepts messages.
    fn start_devlog_unit(&mut self) {
        let opened = self.logs.open_devlog(self.guest.root());
        self.end_unit(UnitId::DevLog, opened.map_or_else(End::Failed, |()| End::Ok(devlog::PATH.to_owned())));
    }

    fn start_thread(&mut self, unit: UnitId, run: fn(&Inputs) -> Report) {
        let inputs = self.inputs();
        let spawned = self.threads.spawn(unit.to_string(), move |outbox| {
            if unit.runs_at_low_priority() {
                // On Linux, niceness is an attribute of the thread.
                let _ = nice(NICE);
            }
            let report = run(&inputs);
            outbox.send(Message::Unit(unit, report, thread_us()));
        });
        if let Err(text) = spawned {
            self.end_unit(unit, End::Failed(text));
        }
    }

    /// Handles the product of an action, then the end of the unit, so that units that start next
    /// see the product.
    pub(super) fn unit_reported(&mut self, unit: UnitId, (end, product): Report, processor_us: u64) {
        self.boot.worked(unit, processor_us);
        match product {
            Product::Nothing => {}
            Product::CommandLine(text, params) => {
                self.recorder.command_line(&text);
                for complaint in &params.complaints {
                    self.recorder.event(now_us(), "parameter-ignored", &complaint.param, &complaint.text);
                }
                self.boot.set_deadlines(&params.deadlines);
                self.guest.set_params(params);
            }
            Product::Functions(functions) => {
                self.guest.set_functions(functions);
                self.gpus_found();
            }
            Product::Mode(decision) => {
                self.recorder.mode(decision.mode.clone());
                if let Some(reason) = &decision.unsupported {
                    self.recorder.event(now_us(), "unsupported-topology", &decision.mode.name, reason);
                }
                self.guest.set_decision(decision);
            }
            Product::Minors(minors) => self.gpus.set_minors(minors),
        }
        self.end_unit(unit, end);
    }

    /// Creates an entry and an attach unit for each GPU function.
    fn gpus_found(&mut self) {
        let effects = self.gpus.found(self.guest.gpus());
        let gpus = self.gpus.addresses();
        self.boot.found_gpus(now_us(), &gpus);
        self.carry_out(effects);
        for pci in gpus {
            self.write_unit(UnitId::GpuAttach(pci));
        }
    }

    /// Writes the current state of a unit into the boot record.
    pub(super) fn write_unit(&mut self, unit: UnitId) {
        let context = RowContext {
            params: self.guest.params(),
            daemons: self.guest.daemon_context(),
            agent_listening_us: self.agent.listening_us(),
        };
        if let Some((row, next)) = self.boot.row(unit, context) {
            self.recorder.unit(unit, row, next);
        }
    }

    fn unit_ended(&mut self, unit: UnitId) {
        self.write_unit(unit);
        match unit {
            UnitId::PciScan => {
                let effect = self.gpus.scan_ended();
                self.carry_out([effect]);
            }
            UnitId::Mode => self.mode_ended(),
            UnitId::Nodes => {
                let effects = self.bus.open();
                self.carry_out(effects);
            }
            UnitId::GpuAttach(pci) => self.attach_unit_ended(pci),
            UnitId::Agent => self.open_log(),
            UnitId::GpuSettings => {
                let effects = self.settings.unit_ended();
                self.carry_out(effects);
            }
            _ => {}
        }
    }

    /// Applies the failure policy if the topology is unsupported and
    /// `firstlight.on-unsupported-topology=fail` made the unit `mode` fail.
    fn mode_ended(&mut self) {
        let unsupported = self.guest.decision().is_some_and(|decision| decision.unsupported.is_some());
        let failed = self.boot.unit(UnitId::Mode).filter(|slot| unsupported && slot.outcome == Outcome::Failed);
        if let Some(detail) = failed.map(|slot| slot.detail.clone()) {
            self.fail(UnitId::Mode, &detail);
        }
    }

    /// Marks the GPU of a skipped attach unit as failed.
    fn attach_unit_ended(&mut self, pci: firstlight_pci::Address) {
        let unit = UnitId::GpuAttach(pci);
        let Some(slot) = self.boot.unit(unit).filter(|slot| slot.outcome == Outcome::Skipped) else { return };
        let step = match self.boot.cause(unit) {
            // The driver is not needed in this mode, so the mode is reported as the cause.
            None | Some(UnitId::NvidiaModules) if slot.not_needed => "mode".to_owned(),
            Some(UnitId::NvidiaModules) => "module".to_owned(),
            cause => cause.map(|cause| cause.to_string()).unwrap_or_default(),
        };
        let why = slot.detail.clone();
        if step == "module" {
            self.read_whole_log();
        }
        let effects = self.with_gpus(|gpus, context| gpus.unit_skipped(pci, &step, &why, context));
        self.carry_out(effects);
    }

    fn unit_late(&mut self, unit: UnitId) {
        let took = self.boot.unit(unit).and_then(|slot| slot.start_us).map(|at| now_us() - at);
        let detail =
            format!("it ended {} ms after its start, after it had timed out (given up)", ms(took.unwrap_or_default()));
        self.recorder.event(now_us(), "unit-ended-after-deadline", &unit.to_string(), &detail);
    }

    fn required_failed(&mut self, unit: UnitId) {
        let Some(slot) = self.boot.unit(unit) else { return };
        let prefix = if slot.outcome == Outcome::TimedOut { "timed out: " } else { "" };
        let text = format!("{prefix}{}", slot.detail);
        self.fail(unit, &text);
    }

    fn plan_finished(&mut self) {
        self.open_log();
        if !self.boot.failed() && !self.power.is_shutting_down() {
            self.recorder.state(if self.boot.degraded() { State::Degraded } else { State::Ready });
        }
        self.note_memory();
        self.note_processor();
        self.save();
    }

    /// Records the processor time of the boot: that of all threads of PID 1 since its start, and
    /// the shares of the units, which are also in their rows, and of the console writer.
    fn note_processor(&mut self) {
        let begin = self.boot.begin_moment();
        if let Some(moment) = self.agent.executed() {
            let spent = moment.processor_us.saturating_sub(begin.processor_us);
            self.recorder.event(moment.at_us, "agent-executed", "init", &format!("{spent} us"));
        }
        let spent = process_us().saturating_sub(begin.processor_us);
        let (units, console) = (self.boot.processor_us(), self.recorder.console_us());
        let detail = format!("{spent} us, of which units {units} us, console {console} us");
        self.recorder.event(now_us(), "processor-time", "init", &detail);
    }

    /// Records the resident memory of PID 1, the agent and the agent's children after boot, KiB.
    fn note_memory(&mut self) {
        let root = self.guest.root();
        let mut rows = vec![("init", 1)];
        if let Some(pid) = self.agent.pid() {
            let pid = pid.as_raw_nonzero().get().unsigned_abs();
            rows.push(("agent", pid));
            rows.extend(agent::children(root, pid).into_iter().map(|child| ("agent-child", child)));
        }
        for (who, pid) in rows {
            if let Some(size) = agent::resident_kib(root, pid) {
                self.recorder.event(now_us(), "resident", who, &format!("{size} KiB"));
            }
        }
    }
}
