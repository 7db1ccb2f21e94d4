//! Failure, signals, and the way down.

use std::time::Duration;

use firstlight_boot_record::{Failure, State};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use rustix::system::{RebootCommand, reboot};

use super::{Message, Supervisor};
use crate::clock::now_us;
use crate::params::OnFailure;
use crate::shutdown::{Effect, Event, Goal, Shutdown};

impl Supervisor {
    /// A required unit failed: says so, writes it down, and follows the policy.
    pub(super) fn fail(&mut self, unit: &str, detail: &str) {
        if self.shutdown.is_some() {
            return;
        }
        let policy = self.params.on_failure;
        let action = policy.word().to_owned();
        self.recorder.start_console();
        self.read_whole_log();
        let failure = Failure { unit: unit.to_owned(), at_us: now_us(), detail: detail.to_owned(), action };
        self.recorder.failure(failure);
        self.save();
        let reason = format!("unit {unit} failed; firstlight.on-failure={}", policy.word());
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

    pub(super) fn hear_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.next() {
            match signal.number {
                libc::SIGCHLD => self.reap(),
                libc::SIGTERM | libc::SIGPWR => {
                    self.begin_shutdown(
                        Goal::PowerOff,
                        &format!("signal {} from pid {}", signal.number, signal.sender),
                    );
                }
                // Ctrl-Alt-Del on the console, as the kernel tells it.
                libc::SIGINT => self.begin_shutdown(Goal::Reboot, "ctrl-alt-del"),
                libc::SIGUSR1 => {
                    self.read_whole_log();
                    self.save();
                }
                _ => {}
            }
            self.drain();
        }
    }

    /// Starts to stop everything in order. A second wish changes nothing.
    pub(super) fn begin_shutdown(&mut self, goal: Goal, reason: &str) {
        if self.shutdown.is_some() {
            return;
        }
        self.recorder.start_console();
        self.recorder.event(now_us(), "shutdown", "", reason);
        if self.recorder.record().failure.is_none() {
            self.recorder.state(State::PoweringOff);
        }
        self.agent.restart_at = None;
        self.shutdown = Some(Shutdown::new(goal));
        self.step_shutdown(Event::Begin { agent: self.agent.pid.is_some() });
    }

    pub(super) fn shutdown_deadline(&self) -> Option<u64> {
        self.shutdown.as_ref().and_then(Shutdown::next_deadline)
    }

    pub(super) fn watch_shutdown(&mut self, now: u64) {
        if self.shutdown_deadline().is_some_and(|at| at <= now) {
            self.step_shutdown(Event::Clock);
        }
    }

    pub(super) fn released(&mut self) {
        self.step_shutdown(Event::Released);
    }

    pub(super) fn step_shutdown(&mut self, event: Event) {
        let Some(effect) = self.shutdown.as_mut().and_then(|down| down.step(now_us(), event)) else { return };
        match effect {
            Effect::AskAgent => {
                if let Some(pid) = self.agent.pid {
                    // An agent that is gone is told by its own end.
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
            Effect::KillAll => {
                // The group of process 1 is written -1, which is every process but ourselves.
                let _ = kill_process_group(Pid::INIT, Signal::KILL);
                self.reap();
            }
            Effect::Release => self.release(),
            Effect::Finish(goal) => self.finish(goal),
        }
    }

    /// Lets GPUs go and writes file systems: both can hang, so not here.
    fn release(&mut self) {
        let (held, outbox) = (self.gpus.take_held(), self.outbox.clone());
        let thread = std::thread::Builder::new().name("release".to_owned()).stack_size(super::STACK);
        let spawned = thread.spawn(move || {
            drop(held);
            rustix::fs::sync();
            outbox.send(Message::Released);
        });
        if spawned.is_err() {
            self.step_shutdown(Event::Released);
        }
    }

    fn finish(&mut self, goal: Goal) -> ! {
        self.save();
        let (what, command) = match goal {
            Goal::PowerOff => ("power-off", RebootCommand::PowerOff),
            Goal::Reboot => ("reboot", RebootCommand::Restart),
        };
        self.recorder.event(now_us(), what, "", "");
        self.recorder.flush();
        loop {
            let _ = reboot(command);
            // It does not come back, unless this is not a machine of our own.
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}
