//! The agent's process: start, readiness and restarts.

use rustix::process::Pid;

use super::effect::Effect;
use crate::clock::{Moment, micros, ms};
use crate::executor::End;
use crate::params::AgentRestart;
use crate::restart::{Decision, MOST, Restarts, WINDOW};
use crate::shutdown::{self, Goal};
use crate::unit_id::UnitId;

/// The state of the guest that decides whether the agent is restarted after its exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Situation {
    /// The guest is booting or running; the policy is that of `firstlight.agent-restart`.
    Running(AgentRestart),
    /// A required unit failed: the agent is not restarted.
    Failed,
    /// The guest is shutting down.
    ShuttingDown,
}

/// The state of the agent.
#[derive(Debug, Default)]
pub(super) struct Agent {
    /// Whether the agent's unit has started and not ended.
    unit_open: bool,
    /// The agent's process id while it runs.
    pid: Option<Pid>,
    /// Start time of that process, µs.
    start_us: u64,
    /// Time at which the first agent process began to listen, µs. The process sends this time in
    /// its report, which arrives later.
    listening_us: Option<u64>,
    /// Time and processor time at which the first agent process had been executed (execve).
    executed: Option<Moment>,
    /// Time of the next restart, µs.
    restart_at: Option<u64>,
    restarts: Restarts,
}

impl Agent {
    /// Returns the agent's process id while it runs.
    pub(super) fn pid(&self) -> Option<Pid> {
        self.pid
    }

    /// Returns the agent's process id as a number; 0 if the agent does not run.
    pub(super) fn pid_number(&self) -> i32 {
        self.pid.map_or(0, |pid| pid.as_raw_nonzero().get())
    }

    /// Returns the time at which the first agent process began to listen, µs.
    pub(super) fn listening_us(&self) -> Option<u64> {
        self.listening_us
    }

    /// Returns the time and processor time at which the first agent process had been executed.
    pub(super) fn executed(&self) -> Option<Moment> {
        self.executed
    }

    /// Returns when [`Agent::take_due_restart`] is due, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.restart_at
    }

    /// Handles the start of the agent's unit, which ends when the agent listens.
    pub(super) fn unit_started(&mut self) {
        self.unit_open = true;
    }

    /// Handles a successful start of the agent's process: `start_us` is the time before the spawn,
    /// `executed` that after the execve.
    pub(super) fn started(&mut self, start_us: u64, pid: Pid, executed: Moment) {
        (self.pid, self.start_us) = (Some(pid), start_us);
        self.executed.get_or_insert(executed);
    }

    /// Handles the agent's report that it listens.
    pub(super) fn listens(&mut self, at_us: u64) -> Vec<Effect> {
        let pid = self.pid_number();
        let (object, detail) = ("agent".to_owned(), format!("pid {pid}"));
        // The start of the console writer was deferred until here, so that it takes no processor
        // time before the agent listens.
        let mut effects =
            vec![Effect::UrgentEvent { at_us, kind: "agent-listening", object, detail }, Effect::StartConsole];
        if std::mem::take(&mut self.unit_open) {
            self.listening_us = Some(at_us);
            effects.push(Effect::EndUnit(UnitId::Agent, End::Ok(format!("pid {pid} listens"))));
        }
        effects
    }

    /// Handles the exit of the agent's process.
    pub(super) fn exited(&mut self, now: u64, words: &str, situation: Situation) -> Vec<Effect> {
        self.pid = None;
        let lived = ms(now.saturating_sub(self.start_us));
        let mut effects = vec![Effect::event("agent-exited", "agent", format!("{words} after {lived} ms"))];
        match situation {
            Situation::ShuttingDown => effects.push(Effect::Shutdown(shutdown::Event::AgentGone)),
            Situation::Failed => {}
            Situation::Running(AgentRestart::PowerOff) => {
                let reason = format!("the agent ended ({words}); firstlight.agent-restart=poweroff");
                effects.push(Effect::BeginShutdown(Goal::PowerOff, reason));
            }
            Situation::Running(AgentRestart::Restart) => effects.push(self.restart(now, words)),
        }
        effects
    }

    fn restart(&mut self, now: u64, words: &str) -> Effect {
        match self.restarts.step(now) {
            Decision::Restart { pause, number } => {
                self.restart_at = Some(now.saturating_add(micros(pause)));
                let window = WINDOW.as_secs();
                let detail = format!("number {number} of at most {MOST} in {window} s, after a pause of {pause:?}");
                Effect::event("agent-restart", "agent", detail)
            }
            Decision::LimitReached => {
                let (times, window) = (MOST + 1, WINDOW.as_secs());
                let text = format!("it ended {times} times in {window} s, last with {words}; its messages are above");
                if std::mem::take(&mut self.unit_open) {
                    // The agent never listened, so its unit has not ended: the unit fails, and with
                    // it the boot.
                    Effect::EndUnit(UnitId::Agent, End::Failed(text))
                } else {
                    Effect::Fail(UnitId::Agent, text)
                }
            }
        }
    }

    /// Returns whether a restart is due, and clears it.
    pub(super) fn take_due_restart(&mut self, now: u64) -> bool {
        let due = self.restart_at.is_some_and(|at| at <= now);
        if due {
            self.restart_at = None;
        }
        due
    }

    /// Cancels a planned restart.
    pub(super) fn cancel_restart(&mut self) {
        self.restart_at = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESTART: Situation = Situation::Running(AgentRestart::Restart);

    fn started(agent: &mut Agent, now: u64) {
        agent.started(now, Pid::from_raw(7).unwrap(), Moment { at_us: now, processor_us: 0 });
    }

    #[test]
    fn first_report_ends_the_unit_and_later_ones_do_not() {
        let mut agent = Agent::default();
        agent.unit_started();
        started(&mut agent, 5);
        let effects = agent.listens(9);
        assert_eq!(effects[2], Effect::EndUnit(UnitId::Agent, End::Ok("pid 7 listens".to_owned())));
        assert_eq!(agent.listening_us(), Some(9));
        assert_eq!(agent.listens(10).len(), 2);
        assert_eq!(agent.listening_us(), Some(9));
    }

    #[test]
    fn exit_is_followed_by_a_restart_after_a_pause() {
        let mut agent = Agent::default();
        started(&mut agent, 0);
        let effects = agent.exited(2_000_000, "exit status 1", RESTART);
        assert_eq!(effects[0], Effect::event("agent-exited", "agent", "exit status 1 after 2000 ms"));
        assert!(matches!(&effects[1], Effect::Event { kind: "agent-restart", .. }));
        assert_eq!((agent.pid(), agent.next_deadline()), (None, Some(2_100_000)));
        assert!(!agent.take_due_restart(2_099_999));
        assert!(agent.take_due_restart(2_100_000) && !agent.take_due_restart(2_100_000));
    }

    #[test]
    fn restart_limit_fails_the_unit_or_a_running_guest() {
        for (listened, fails_unit) in [(false, true), (true, false)] {
            let mut agent = Agent::default();
            agent.unit_started();
            if listened {
                agent.listens(0);
            }
            let mut last = Vec::new();
            for number in 0..=MOST {
                last = agent.exited(u64::try_from(number).unwrap(), "signal 9", RESTART);
            }
            let failed =
                matches!(&last[1], Effect::EndUnit(UnitId::Agent, End::Failed(text)) if text.contains("6 times"));
            assert_eq!((failed, matches!(&last[1], Effect::Fail(UnitId::Agent, _))), (fails_unit, !fails_unit));
        }
    }

    #[test]
    fn exit_during_shutdown_or_after_a_failure_restarts_nothing() {
        let mut agent = Agent::default();
        started(&mut agent, 0);
        let effects = agent.exited(1, "exit status 0", Situation::ShuttingDown);
        assert_eq!(effects[1], Effect::Shutdown(shutdown::Event::AgentGone));
        assert_eq!(agent.exited(1, "exit status 0", Situation::Failed).len(), 1);
        let effects = agent.exited(1, "exit status 0", Situation::Running(AgentRestart::PowerOff));
        assert!(matches!(&effects[1], Effect::BeginShutdown(Goal::PowerOff, _)));
        assert_eq!(agent.next_deadline(), None);
    }
}
