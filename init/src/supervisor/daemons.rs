//! Daemons: their units, their readiness, and their stop in reverse start order.

use std::os::fd::BorrowedFd;

use firstlight_boot_record::Severity;
use firstlight_init_control::FromInit;
use rustix::process::{Pid, WaitStatus};

use super::effect::Effect;
use super::guest::Guest;
use crate::agent::describe_exit;
use crate::daemons::cgroup::PARENT;
use crate::daemons::daemon::{Daemon, Report};
use crate::daemons::launch;
use crate::daemons::table::{DaemonContext, daemon_spec};
use crate::executor::End;
use crate::log::Source;
use crate::shutdown;
use crate::unit_id::{DaemonId, UnitId};

/// The enabled daemons in start order.
#[derive(Debug, Default)]
pub(super) struct Daemons {
    rows: Vec<Row>,
    /// Whether the daemons are being stopped, in reverse start order.
    stopping: bool,
}

#[derive(Debug)]
struct Row {
    state: State,
    daemon: Daemon,
}

/// The data that decides the effects of a daemon's reports.
#[derive(Debug, Clone, Copy)]
struct State {
    id: DaemonId,
    context: DaemonContext,
    /// Whether the daemon's unit has not ended.
    unit_open: bool,
}

impl State {
    fn name(self) -> &'static str {
        self.id.name()
    }

    /// Returns the effects of a report.
    fn handle(&mut self, report: Report) -> Vec<Effect> {
        let name = self.name();
        match report {
            Report::Line(line) => vec![Effect::ProgramLine(Source::Daemon(name), line)],
            Report::FileLine(line) => vec![Effect::ProgramLine(Source::DaemonFile(name), line)],
            Report::Event(kind, detail) => {
                let exited = (kind == "daemon-exited").then(|| self.published(false, &detail));
                std::iter::once(Effect::event(kind, name, detail)).chain(exited).collect()
            }
            Report::Ready(detail) => {
                let published = self.published(true, &detail);
                let end = std::mem::take(&mut self.unit_open)
                    .then_some(Effect::EndUnit(UnitId::Daemon(self.id), End::Ok(detail)));
                end.into_iter().chain([published]).collect()
            }
            Report::StartTimedOut(text) => self.failed(End::TimedOut(text.clone()), text),
            Report::RestartLimitReached(text) => {
                let reported =
                    [Effect::event("daemon-restart-limit-reached", name, text.clone()), self.published(false, &text)];
                reported.into_iter().chain(self.failed(End::Failed(text.clone()), text)).collect()
            }
            Report::Stopped => vec![Effect::event("daemon-stopped", name, "")],
        }
    }

    fn published(self, ready: bool, detail: &str) -> Effect {
        Effect::Publish(FromInit::Daemon { name: self.name().to_owned(), ready, detail: detail.to_owned() })
    }

    fn failed(&mut self, end: End, text: String) -> Vec<Effect> {
        let (unit, severity) = (UnitId::Daemon(self.id), daemon_spec(self.id).severity_in(self.context));
        let mut effects = Vec::new();
        if std::mem::take(&mut self.unit_open) {
            effects.push(Effect::EndUnit(unit, end));
        } else if severity != Severity::Optional {
            effects.push(Effect::Degrade);
        }
        if severity == Severity::Required {
            effects.push(Effect::Fail(unit, text));
        }
        effects
    }
}

impl Daemons {
    /// Returns when [`Daemons::poll`] is due if no descriptor is ready, µs.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.rows.iter().filter_map(|row| row.daemon.next_deadline()).min()
    }

    /// Returns the descriptors to poll.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rows.iter().flat_map(|row| row.daemon.descriptors())
    }

    /// Starts a daemon's unit. The unit ends when the daemon is ready, times out, or reaches its
    /// restart limit.
    pub(super) fn start_unit(&mut self, now: u64, id: DaemonId, guest: &Guest) -> Vec<Effect> {
        let (spec, context) = (daemon_spec(id), guest.daemon_context());
        if let Some(why) = spec.disabled_reason(guest.params().daemons, context) {
            return vec![Effect::EndUnit(UnitId::Daemon(id), End::NotNeeded(why))];
        }
        let mut daemon = Daemon::new(spec, context, guest.root(), &guest.root().path(PARENT));
        let mut state = State { id, context, unit_open: true };
        // A file that is missing in the image does not appear later, so there is no retry.
        let effects = match launch::missing(spec, guest.root()) {
            None => {
                daemon.start(now);
                Vec::new()
            }
            Some(text) => {
                let text = format!("not started: {text}; enabled by {}; {}", launch::enabled_by(spec), spec.hint);
                state.failed(End::Failed(text.clone()), text)
            }
        };
        self.rows.push(Row { state, daemon });
        effects
    }

    /// Handles the exit of a child; returns `false` if the process belongs to no daemon.
    pub(super) fn process_ended(&mut self, now: u64, pid: Pid, status: WaitStatus) -> bool {
        let Some(row) = self.rows.iter_mut().find(|row| row.daemon.has(pid)) else { return false };
        let words = describe_exit(status.exit_status(), status.terminating_signal());
        row.daemon.process_ended(now, pid, status.exit_status() == Some(0), &words)
    }

    /// Polls all daemons and returns the effects of their reports.
    pub(super) fn poll(&mut self, now: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        let mut again = true;
        while std::mem::take(&mut again) {
            for at in 0..self.rows.len() {
                let row = &mut self.rows[at];
                for report in row.daemon.turn(now) {
                    let stopped = report == Report::Stopped;
                    effects.extend(self.rows[at].state.handle(report));
                    if stopped && self.stopping {
                        again = true;
                        effects.extend(self.stop_next(now));
                    }
                }
            }
        }
        effects
    }

    /// Returns one message per daemon with its state, for a new subscriber.
    pub(super) fn messages(&self) -> impl Iterator<Item = FromInit> + '_ {
        self.rows.iter().map(|row| {
            let (name, ready) = (row.state.name().to_owned(), row.daemon.is_ready());
            FromInit::Daemon { name, ready, detail: String::new() }
        })
    }

    /// Stops all daemons one by one, in reverse order.
    pub(super) fn stop(&mut self, now: u64) -> Vec<Effect> {
        self.stopping = true;
        let mut effects = Vec::from_iter(self.stop_next(now));
        effects.extend(self.poll(now));
        effects
    }

    fn stop_next(&mut self, now: u64) -> Option<Effect> {
        match self.rows.iter_mut().rev().find(|row| !row.daemon.is_over()) {
            Some(row) => {
                row.daemon.stop(now);
                None
            }
            None => Some(Effect::Shutdown(shutdown::Event::DaemonsGone)),
        }
    }

    /// Returns the names of the daemons that may still be running.
    pub(super) fn not_over(&self) -> Vec<&'static str> {
        self.rows.iter().filter(|row| !row.daemon.is_over()).map(|row| row.state.name()).collect()
    }

    /// Removes all daemons: no restarts and no probes, because all processes are about to be
    /// killed.
    pub(super) fn forget(&mut self) {
        self.rows.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::testing::guest;
    use super::*;
    use crate::mode::{Fabric, NvLinkGeneration};

    const UNIT: UnitId = UnitId::Daemon(DaemonId::FabricManager);

    fn state(shared: bool) -> State {
        let fabric = Some(Fabric { generation: NvLinkGeneration::NvLink4, shared });
        State { id: DaemonId::FabricManager, context: DaemonContext { fabric }, unit_open: true }
    }

    #[test]
    fn ready_daemon_ends_its_unit_once_and_is_published() {
        let mut state = state(false);
        let effects = state.handle(Report::Ready("ready".into()));
        assert_eq!(effects[0], Effect::EndUnit(UNIT, End::Ok("ready".into())));
        assert!(matches!(&effects[1], Effect::Publish(FromInit::Daemon { ready: true, .. })));
        assert_eq!(state.handle(Report::Ready("again".into())).len(), 1);
    }

    #[test]
    fn exit_is_an_event_and_is_published() {
        let effects = state(false).handle(Report::Event("daemon-exited", "signal 9".into()));
        assert_eq!(effects[0], Effect::event("daemon-exited", "fabricmanager", "signal 9"));
        assert!(matches!(&effects[1], Effect::Publish(FromInit::Daemon { ready: false, .. })));
        assert_eq!(state(false).handle(Report::Event("daemon-started", String::new())).len(), 1);
    }

    #[test]
    fn restart_limit_degrades_a_guest_and_fails_a_service_vm() {
        let mut degraded = state(false);
        let effects = degraded.handle(Report::RestartLimitReached("x".into()));
        assert_eq!(effects[2..], [Effect::EndUnit(UNIT, End::Failed("x".into()))]);
        assert_eq!(degraded.handle(Report::RestartLimitReached("x".into()))[2..], [Effect::Degrade]);
        let effects = state(true).handle(Report::RestartLimitReached("x".into()));
        assert_eq!(effects[3], Effect::Fail(UNIT, "x".into()));
    }

    #[test]
    fn disabled_daemon_is_not_needed_and_missing_one_fails() {
        let dir = tempfile::tempdir().unwrap();
        let mut daemons = Daemons::default();
        let effects = daemons.start_unit(1, DaemonId::Imex, &guest(dir.path(), "", &[]));
        let unit = UnitId::Daemon(DaemonId::Imex);
        assert_eq!(effects, [Effect::EndUnit(unit, End::NotNeeded("firstlight.imex=off".into()))]);
        assert_eq!(daemons.messages().count(), 0);
        let effects = daemons.start_unit(1, DaemonId::Imex, &guest(dir.path(), "firstlight.imex=on", &[]));
        let Effect::EndUnit(ended, End::Failed(text)) = &effects[0] else { panic!("{effects:?}") };
        assert!(*ended == unit && text.starts_with("not started: ") && text.contains("firstlight.imex=on"), "{text}");
        assert_eq!((daemons.messages().count(), daemons.not_over()), (1, vec!["imex"]));
    }

    #[test]
    fn stop_without_daemons_is_over_at_once() {
        assert_eq!(Daemons::default().stop(1), [Effect::Shutdown(shutdown::Event::DaemonsGone)]);
    }
}
