//! Failure policy, signals, and shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firstlight_boot_record::{Failure, State};
use firstlight_pci::Address;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use rustix::system::{RebootCommand, reboot};

use super::{Message, Supervisor};
use crate::clock::{micros, ms, now_us};
use crate::console::last_gasp;
use crate::params::OnFailure;
use crate::processes;
use crate::shutdown::{Effect, Event, Goal, Shutdown, Step};
use crate::unit_id::UnitId;

/// Delay after the deadline before the watchdog thread powers off.
const LAST_RESORT: Duration = Duration::from_secs(2);

/// Names of processes in one line, at most.
const MOST_NAMES: usize = 8;

/// A shutdown in progress.
#[derive(Debug)]
pub(super) struct ShutdownState {
    machine: Shutdown,
    begin_us: u64,
    /// GPUs being closed, in order, and how many are closed.
    gpus: (Vec<Address>, Arc<AtomicUsize>),
    /// Objects that did not end in time.
    left: Vec<String>,
}

impl Supervisor {
    /// Records the failure of a required unit and applies the failure policy.
    pub(super) fn fail(&mut self, unit: UnitId, detail: &str) {
        if self.shutdown.is_some() {
            return;
        }
        let policy = self.params.on_failure;
        let action = policy.word().to_owned();
        self.recorder.start_console();
        self.read_whole_log();
        let failure = Failure { unit: unit.to_string(), at_us: now_us(), detail: detail.to_owned(), action };
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

    pub(super) fn handle_signals(&mut self) {
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

    /// Begins an orderly shutdown. Idempotent.
    pub(super) fn begin_shutdown(&mut self, goal: Goal, reason: &str) {
        if self.shutdown.is_some() {
            return;
        }
        self.recorder.start_console();
        let (begin_us, total) = (now_us(), self.params.shutdown_deadline);
        self.recorder.event(begin_us, "shutdown", "", reason);
        if self.recorder.record().failure.is_none() {
            self.recorder.state(State::PoweringOff);
        }
        self.agent.restart_at = None;
        start_power_off_watchdog(goal, total);
        let machine = Shutdown::new(goal, micros(total));
        self.shutdown = Some(ShutdownState { machine, begin_us, gpus: Default::default(), left: Vec::new() });
        self.step_shutdown(Event::Begin { agent: self.agent.pid.is_some() });
    }

    pub(super) fn shutdown_deadline(&self) -> Option<u64> {
        self.shutdown.as_ref().and_then(|down| down.machine.next_deadline())
    }

    pub(super) fn watch_shutdown(&mut self, now: u64) {
        if self.shutdown_deadline().is_some_and(|at| at <= now) {
            self.step_shutdown(Event::Clock);
        }
    }

    pub(super) fn step_shutdown(&mut self, event: Event) {
        let Some(down) = &mut self.shutdown else { return };
        for effect in down.machine.step(now_us(), event) {
            self.apply_shutdown_effect(effect);
        }
    }

    fn apply_shutdown_effect(&mut self, effect: Effect) {
        match effect {
            Effect::TerminateAgent => {
                if let Some(pid) = self.agent.pid {
                    // If it has exited, it is about to be reaped.
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
            Effect::StopDaemons => self.stop_daemons(),
            Effect::KillAll => {
                self.daemons.forget();
                // The group of process 1 is written -1, which is every process but ourselves.
                let _ = kill_process_group(Pid::INIT, Signal::KILL);
                self.reap();
            }
            Effect::Release => self.release(),
            Effect::Late(step, after) => self.report_timed_out(step, after),
            Effect::Finish(goal, words) => self.finish(goal, Duration::from_micros(words)),
        }
    }

    /// Records what did not end in time.
    fn report_timed_out(&mut self, step: Step, after: u64) {
        let after = ms(after);
        let rows: Vec<(String, String)> = match step {
            Step::Agent => {
                let pid = self.agent.pid.map_or(0, |pid| pid.as_raw_nonzero().get());
                vec![("agent".to_owned(), format!("pid {pid} did not end within {after} ms of SIGTERM"))]
            }
            Step::Daemons => {
                let late =
                    |name: String| (name, format!("not stopped within {after} ms for all daemons; it is killed"));
                self.daemons.not_over().map(str::to_owned).map(late).collect()
            }
            Step::Processes => {
                let alive = processes::alive(&self.root, MOST_NAMES);
                let late = |name| (name, format!("killed, and still there {after} ms later: the kernel holds it"));
                alive.into_iter().map(late).collect()
            }
            Step::Gpus => {
                let (gpus, gone) = self.shutdown.as_ref().map(|down| down.gpus.clone()).unwrap_or_default();
                let held = gpus.get(gone.load(Ordering::Relaxed)..).unwrap_or_default();
                let more = held.len().saturating_sub(1);
                let late = |pci: &Address| {
                    (
                        pci.to_string(),
                        format!("closing it did not return from the driver within {after} ms; {more} GPUs wait for it"),
                    )
                };
                held.first().map(late).into_iter().collect()
            }
            Step::Files => {
                let text = format!("not written within {after} ms; what was not written is lost");
                vec![("file-systems".to_owned(), text)]
            }
        };
        for (object, detail) in rows {
            self.recorder.event(now_us(), "shutdown-step-timed-out", &object, &detail);
            if let Some(down) = &mut self.shutdown {
                down.left.push(object);
            }
        }
    }

    /// Closes GPUs and syncs file systems, on two threads because both can hang.
    fn release(&mut self) {
        let (gpus, held): (Vec<Address>, Vec<_>) = self.gpus.take_held().into_iter().unzip();
        let gone = Arc::new(AtomicUsize::new(0));
        if let Some(down) = &mut self.shutdown {
            down.gpus = (gpus, Arc::clone(&gone));
        }
        self.on_thread("release", Event::GpusReleased, move || {
            for descriptor in held {
                drop(descriptor);
                gone.fetch_add(1, Ordering::Relaxed);
            }
        });
        self.on_thread("sync", Event::Synced, rustix::fs::sync);
    }

    fn on_thread(&mut self, name: &str, done: Event, work: impl FnOnce() + Send + 'static) {
        let outbox = self.outbox.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(super::STACK);
        let spawned = thread.spawn(move || {
            work();
            outbox.send(Message::Shutdown(done));
        });
        if let Err(error) = spawned {
            self.recorder.event(
                now_us(),
                "shutdown-step-timed-out",
                name,
                &format!("left out: cannot start a thread: {error}"),
            );
            self.step_shutdown(done);
        }
    }

    fn finish(&mut self, goal: Goal, words: Duration) -> ! {
        self.drain_logs();
        self.save();
        if self.orphans > 0 {
            let text = format!("{} orphaned processes were reaped", self.orphans);
            self.recorder.event(now_us(), "orphans", "", &text);
        }
        let (what, command) = command(goal);
        let detail = self.shutdown.as_ref().map(|down| {
            let took = ms(now_us().saturating_sub(down.begin_us));
            let left = if down.left.is_empty() { String::new() } else { format!("; left: {}", down.left.join(", ")) };
            format!("after {took} ms{left}")
        });
        self.recorder.event(now_us(), what, "", &detail.unwrap_or_default());
        self.recorder.flush(words.min(Duration::from_secs(2)));
        loop {
            let _ = reboot(command);
            // It does not come back, unless this is not a machine of our own.
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

fn command(goal: Goal) -> (&'static str, RebootCommand) {
    match goal {
        Goal::PowerOff => ("power-off", RebootCommand::PowerOff),
        Goal::Reboot => ("reboot", RebootCommand::Restart),
    }
}

/// Starts an independent thread that powers off if the main loop blocks.
fn start_power_off_watchdog(goal: Goal, total: Duration) {
    let thread = std::thread::Builder::new().name("last-resort".to_owned()).stack_size(super::STACK);
    // If the thread cannot be started, shutdown continues without the watchdog.
    let _ = thread.spawn(move || {
        std::thread::sleep(total.saturating_add(LAST_RESORT));
        let (what, command) = command(goal);
        last_gasp(&format!("firstlight: PID 1 did not shut down within {total:?}; {what} without the rest"));
        loop {
            let _ = reboot(command);
            std::thread::sleep(Duration::from_secs(1));
        }
    });
}
