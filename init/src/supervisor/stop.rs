//! The failure policy and the effects of the shutdown.

use std::sync::atomic::Ordering;
use std::time::Duration;

use firstlight_boot_record::{Failure, State};
use firstlight_pci::Address;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::Supervisor;
use super::power::{self, MOST_NAMES, end_machine, last_event, late_agent, late_daemons, late_files, late_processes};
use super::threads::Message;
use crate::clock::now_us;
use crate::params::OnFailure;
use crate::processes;
use crate::shutdown::{Effect, Event, Goal, Step};
use crate::unit_id::UnitId;

impl Supervisor {
    /// Records the failure of a required unit and applies the failure policy.
    pub(super) fn fail(&mut self, unit: UnitId, detail: &str) {
        if self.power.is_shutting_down() {
            return;
        }
        let policy = self.guest.params().on_failure;
        self.recorder.start_console();
        self.read_whole_log();
        let (unit, detail, action) = (unit.to_string(), detail.to_owned(), policy.word().to_owned());
        let reason = format!("unit {unit} failed; firstlight.on-failure={action}");
        self.recorder.failure(Failure { unit, at_us: now_us(), detail, action });
        self.save();
        match policy {
            OnFailure::PowerOff => self.begin_shutdown(Goal::PowerOff, &reason),
            OnFailure::Reboot => self.begin_shutdown(Goal::Reboot, &reason),
            OnFailure::Hold => self.recorder.event(now_us(), "held", "", &reason),
            OnFailure::Debug => self.open_shell(&reason),
        }
    }

    fn open_shell(&mut self, reason: &str) {
        match crate::agent::start_shell() {
            Ok(pid) => self.recorder.event(now_us(), "debug-shell", &format!("pid {pid}"), reason),
            Err(error) => self.recorder.event(now_us(), "held", "", &format!("{reason}; {error}; the VM is held")),
        }
    }

    /// Begins an orderly shutdown. Idempotent.
    pub(super) fn begin_shutdown(&mut self, goal: Goal, reason: &str) {
        let (now, total) = (now_us(), self.guest.params().shutdown_deadline);
        if !self.power.begin(now, goal, total) {
            return;
        }
        self.recorder.start_console();
        self.recorder.event(now, "shutdown", "", reason);
        if self.recorder.record().failure.is_none() {
            self.recorder.state(State::PoweringOff);
        }
        self.agent.cancel_restart();
        self.bus.stop();
        power::start_watchdog(goal, total);
        self.step_shutdown(Event::Begin { agent: self.agent.pid().is_some() });
    }

    pub(super) fn step_shutdown(&mut self, event: Event) {
        let effects = self.power.step(now_us(), event);
        self.carry_out_shutdown(effects);
    }

    pub(super) fn carry_out_shutdown(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::TerminateAgent => {
                    if let Some(pid) = self.agent.pid() {
                        // An error means that the agent has exited and is about to be reaped.
                        let _ = kill_process(pid, Signal::TERM);
                    }
                }
                Effect::StopDaemons => {
                    let effects = self.daemons.stop(now_us());
                    self.carry_out_and_run(effects);
                }
                Effect::KillAll => {
                    self.daemons.forget();
                    // rustix passes -1 to kill(2) for the process group of PID 1: SIGKILL to every
                    // process but PID 1.
                    let _ = kill_process_group(Pid::INIT, Signal::KILL);
                    self.reap();
                }
                Effect::Release => self.release(),
                Effect::Late(step, after) => self.report_late(step, after),
                Effect::Finish(goal, console_us) => self.finish(goal, Duration::from_micros(console_us)),
            }
        }
    }

    /// Records the objects that did not end within the share of this stage.
    fn report_late(&mut self, step: Step, after: u64) {
        let rows = match step {
            Step::Agent => late_agent(self.agent.pid_number(), after),
            Step::Daemons => late_daemons(self.daemons.not_over(), after),
            Step::Processes => late_processes(processes::alive(self.guest.root(), MOST_NAMES), after),
            Step::Gpus => self.power.late_gpus(after),
            Step::Files => late_files(after),
        };
        for (object, detail) in rows {
            self.recorder.event(now_us(), "shutdown-step-timed-out", &object, &detail);
            self.power.left_behind(object);
        }
    }

    /// Closes the GPUs and syncs the file systems, on two threads, because both calls can hang.
    fn release(&mut self) {
        let (gpus, held): (Vec<Address>, Vec<_>) = self.gpus.take_held().into_iter().unzip();
        let closed = self.power.releasing(gpus);
        self.shutdown_thread("release", Event::GpusReleased, move || {
            for descriptor in held {
                drop(descriptor);
                closed.fetch_add(1, Ordering::Relaxed);
            }
        });
        self.shutdown_thread("sync", Event::Synced, rustix::fs::sync);
    }

    fn shutdown_thread(&mut self, name: &str, done: Event, work: impl FnOnce() + Send + 'static) {
        let spawned = self.threads.spawn(name.to_owned(), move |outbox| {
            work();
            outbox.send(Message::Shutdown(done));
        });
        if let Err(text) = spawned {
            self.recorder.event(now_us(), "shutdown-step-timed-out", name, &format!("left out: {text}"));
            self.step_shutdown(done);
        }
    }

    fn finish(&mut self, goal: Goal, console: Duration) -> ! {
        let effects = self.logs.read_last(now_us(), self.guest.params().log);
        self.carry_out(effects);
        self.save();
        if let Some(text) = self.children.orphans() {
            self.recorder.event(now_us(), "orphans", "", &text);
        }
        let now = now_us();
        self.recorder.event(now, last_event(goal), "", &self.power.summary(now));
        self.recorder.flush(console.min(Duration::from_secs(2)));
        end_machine(goal)
    }
}
