//! The agent's life.

use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

use super::{REAP_TURN, Supervisor};
use crate::agent;
use crate::clock::{Moment, micros, ms, now_us};
use crate::control::Server;
use crate::executor::End;
use crate::params::AgentRestart;
use crate::restart::{Decision, MOST, Restarts, WINDOW};
use crate::shutdown::{self, Goal};
use crate::unit_id::UnitId;

/// What is known of the agent.
#[derive(Debug, Default)]
pub(super) struct Agent {
    /// Its unit in the plan.
    unit: Option<UnitId>,
    /// Its process, while there is one.
    pub(super) pid: Option<Pid>,
    /// When that process was started, µs.
    start_us: u64,
    /// When the first one listened, as it says itself, µs. We hear of it later.
    pub(super) listening_us: Option<u64>,
    /// When the first one had been executed.
    pub(super) executed: Option<Moment>,
    /// When the next one is to be started, µs.
    pub(super) restart_at: Option<u64>,
    restarts: Restarts,
}

impl Supervisor {
    /// Opens the control socket and starts the agent; the unit ends when it listens.
    pub(super) fn start_agent_unit(&mut self, unit: UnitId) {
        self.agent.unit = Some(unit);
        let socket = self.root.path(firstlight_init_control::SOCKET);
        let started = Server::bind(&socket)
            .map_err(|error| format!("cannot listen at {}: {error}", socket.display()))
            .map(|server| self.server = Some(server))
            .and_then(|()| agent::prepare(&self.root))
            .and_then(|()| self.start_agent());
        if let Err(text) = started {
            self.end_unit(unit, End::Failed(text));
        }
    }

    fn start_agent(&mut self) -> Result<(), String> {
        let now = now_us();
        self.agent.pid = Some(agent::start()?);
        self.agent.start_us = now;
        // It has been executed when its start returns.
        self.agent.executed.get_or_insert_with(Moment::now);
        Ok(())
    }

    /// The agent, or one that took its place, says that it serves.
    pub(super) fn agent_listens(&mut self, at_us: u64) {
        let pid = self.agent.pid.map_or(0, |pid| pid.as_raw_nonzero().get());
        self.recorder.urgent_event(at_us, "agent-listening", "agent", &format!("pid {pid}"));
        // From here on the console may take its time.
        self.recorder.start_console();
        if let Some(unit) = self.agent.unit.take() {
            self.agent.listening_us = Some(at_us);
            self.end_unit(unit, End::Ok(format!("pid {pid} listens")));
        }
    }

    pub(super) fn agent_unit_ended(&mut self) {
        self.open_log();
    }

    /// Reaps at most `REAP_TURN` processes, so that thousands of exited orphans do not
    /// delay other events.
    pub(super) fn reap(&mut self) {
        self.more_ended = true;
        for _ in 0..REAP_TURN {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if self.agent.pid == Some(pid) => self.agent_ended(status),
                Ok(Some((pid, status))) => {
                    if !self.settings_process_ended(pid, status) && !self.daemons.process_ended(pid, status) {
                        self.orphans += 1;
                    }
                }
                Ok(None) => {
                    self.more_ended = false;
                    return;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => {
                    self.more_ended = false;
                    self.step_shutdown(shutdown::Event::ChildrenGone);
                    return;
                }
            }
        }
    }

    fn agent_ended(&mut self, status: WaitStatus) {
        let now = now_us();
        self.agent.pid = None;
        let words = agent::describe_exit(status.exit_status(), status.terminating_signal());
        let lived = ms(now.saturating_sub(self.agent.start_us));
        self.recorder.event(now, "agent-exited", "agent", &format!("{words} after {lived} ms"));
        if self.shutdown.is_some() {
            self.step_shutdown(shutdown::Event::AgentGone);
            return;
        }
        // After a failure the machine is kept as it is.
        if self.recorder.record().failure.is_some() {
            return;
        }
        match self.params.agent_restart {
            AgentRestart::PowerOff => {
                self.begin_shutdown(
                    Goal::PowerOff,
                    &format!("the agent ended ({words}); firstlight.agent-restart=poweroff"),
                );
            }
            AgentRestart::Restart => match self.agent.restarts.step(now) {
                Decision::Restart { pause, number } => {
                    let detail = format!(
                        "number {number} of at most {MOST} in {} s, after a pause of {pause:?}",
                        WINDOW.as_secs()
                    );
                    self.recorder.event(now, "agent-restart", "agent", &detail);
                    self.agent.restart_at = Some(now.saturating_add(micros(pause)));
                }
                Decision::LimitReached => self.agent_given_up(&words),
            },
        }
    }

    fn agent_given_up(&mut self, words: &str) {
        let text =
            format!("it ended {} times in {} s, last with {words}; its messages are above", MOST + 1, WINDOW.as_secs());
        match self.agent.unit.take() {
            // It never listened: its unit has not ended, and its failure is the boot's.
            Some(unit) => self.end_unit(unit, End::Failed(text)),
            None => self.fail(UnitId::Agent, &text),
        }
    }

    pub(super) fn watch_agent(&mut self, now: u64) {
        if self.agent.restart_at.is_none_or(|at| at > now) {
            return;
        }
        self.agent.restart_at = None;
        if self.shutdown.is_some() {
            return;
        }
        match self.start_agent() {
            Ok(()) => {
                let pid = self.agent.pid.map_or(0, |pid| pid.as_raw_nonzero().get());
                self.recorder.event(now_us(), "agent-restarted", "agent", &format!("pid {pid}"));
            }
            Err(text) => self.fail(UnitId::Agent, &text),
        }
    }
}
