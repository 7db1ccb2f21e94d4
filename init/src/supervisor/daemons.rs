//! Daemons in the main loop: units, log lines, stop.

use std::path::PathBuf;

use firstlight_boot_record::{Severity, State};
use firstlight_init_control::FromInit;
use rustix::process::{Pid, WaitStatus};

use super::Supervisor;
use crate::agent::describe_exit;
use crate::clock::now_us;
use crate::control::ClientId;
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
    /// Whether they are being stopped, the last one first.
    stopping: bool,
}

#[derive(Debug)]
struct Row {
    id: DaemonId,
    daemon: Daemon,
    /// Its unit, until that has ended.
    unit: Option<UnitId>,
}

impl Daemons {
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.rows.iter().filter_map(|row| row.daemon.next_deadline()).min()
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        self.rows.iter().flat_map(|row| row.daemon.descriptors())
    }

    /// A child has ended that is not the agent.
    /// `false` if it was none of the daemons' processes.
    pub(super) fn process_ended(&mut self, pid: Pid, status: WaitStatus) -> bool {
        let Some(row) = self.rows.iter_mut().find(|row| row.daemon.has(pid)) else { return false };
        let now = now_us();
        let words = describe_exit(status.exit_status(), status.terminating_signal());
        let good = status.exit_status() == Some(0);
        row.daemon.process_ended(now, pid, good, &words)
    }

    /// Returns the daemons that may still run.
    pub(super) fn not_over(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.rows.iter().filter(|row| !row.daemon.is_over()).map(|row| row.daemon.spec().name)
    }

    /// Shutting down: no restarts and no probes, as all processes are about to be killed.
    pub(super) fn forget(&mut self) {
        self.rows.clear();
    }
}

impl Supervisor {
    pub(super) fn daemon_context(&self) -> DaemonContext {
        DaemonContext { fabric: self.decision.as_ref().and_then(|decision| decision.fabric) }
    }

    /// Starts a daemon's unit; it ends when the daemon is ready, times out, or reaches its restart limit.
    pub(super) fn start_daemon_unit(&mut self, unit: UnitId, id: DaemonId) {
        let spec = daemon_spec(id);
        let context = self.daemon_context();
        if let Some(why) = spec.disabled_reason(self.params.daemons, context) {
            self.end_unit(unit, End::NotNeeded(why));
            return;
        }
        let groups: PathBuf = self.root.path(PARENT);
        let mut daemon = Daemon::new(spec, context, &self.root, &groups);
        // A file missing in the image will not appear later.
        let missing = launch::missing(spec, &self.root);
        if missing.is_none() {
            daemon.start(now_us());
        }
        self.daemons.rows.push(Row { id, daemon, unit: Some(unit) });
        if let Some(text) = missing {
            let text = format!("not started: {text}; enabled by {}; {}", launch::enabled_by(spec), spec.hint);
            self.daemon_failed(self.daemons.rows.len() - 1, End::Failed(text.clone()), &text);
        }
    }

    /// Polls all daemons.
    pub(super) fn poll_daemons(&mut self) {
        let mut again = true;
        while std::mem::take(&mut again) {
            for at in 0..self.daemons.rows.len() {
                // A required daemon at its restart limit can begin shutdown, which clears the rows.
                let Some(row) = self.daemons.rows.get_mut(at) else { return };
                for report in row.daemon.turn(now_us()) {
                    again |= report == Report::Stopped;
                    self.handle_daemon_report(at, report);
                }
            }
            self.drain();
        }
    }

    fn handle_daemon_report(&mut self, at: usize, report: Report) {
        let Some(row) = self.daemons.rows.get_mut(at) else { return };
        let name = row.daemon.spec().name;
        match report {
            Report::Line(line) => self.log_daemon_line(&Source::Daemon(name), line),
            Report::FileLine(line) => self.log_daemon_line(&Source::DaemonFile(name), line),
            Report::Event(what, detail) => {
                let ended = what == "daemon-exited";
                self.recorder.event(now_us(), what, name, &detail);
                if ended {
                    self.publish_daemon(name, false, &detail);
                }
            }
            Report::Ready(detail) => {
                if let Some(unit) = row.unit.take() {
                    self.end_unit(unit, End::Ok(detail.clone()));
                }
                self.publish_daemon(name, true, &detail);
            }
            Report::StartTimedOut(text) => self.daemon_failed(at, End::TimedOut(text.clone()), &text),
            Report::RestartLimitReached(text) => {
                self.recorder.event(now_us(), "daemon-restart-limit-reached", name, &text);
                self.publish_daemon(name, false, &text);
                self.daemon_failed(at, End::Failed(text.clone()), &text);
            }
            Report::Stopped => {
                self.recorder.event(now_us(), "daemon-stopped", name, "");
                self.stop_next_daemon();
            }
        }
    }

    fn daemon_failed(&mut self, at: usize, end: End, text: &str) {
        let Some(row) = self.daemons.rows.get_mut(at) else { return };
        let (id, spec, context) = (row.id, row.daemon.spec(), row.daemon.context());
        if let Some(unit) = row.unit.take() {
            self.end_unit(unit, end);
        } else if spec.severity_in(context) != Severity::Optional && self.recorder.record().state == State::Ready {
            self.recorder.state(State::Degraded);
        }
        if spec.severity_in(context) == Severity::Required {
            self.fail(UnitId::Daemon(id), text);
        }
    }

    /// Sends a daemon's state to all subscribers.
    fn publish_daemon(&mut self, name: &str, ready: bool, detail: &str) {
        let message = FromInit::Daemon { name: name.to_owned(), ready, detail: detail.to_owned() };
        if let Some(server) = &mut self.server {
            server.publish(&message);
        }
    }

    /// Sends the state of all daemons to a new subscriber.
    pub(super) fn send_daemons(&mut self, client: ClientId) {
        let Some(server) = &mut self.server else { return };
        for row in &self.daemons.rows {
            let (name, ready) = (row.daemon.spec().name.to_owned(), row.daemon.is_ready());
            server.send(client, &FromInit::Daemon { name, ready, detail: String::new() });
        }
    }

    /// Stops all daemons one by one, in reverse order.
    pub(super) fn stop_daemons(&mut self) {
        self.daemons.stopping = true;
        self.stop_next_daemon();
        self.poll_daemons();
    }

    fn stop_next_daemon(&mut self) {
        if !self.daemons.stopping {
            return;
        }
        match self.daemons.rows.iter_mut().rev().find(|row| !row.daemon.is_over()) {
            Some(row) => row.daemon.stop(now_us()),
            None => self.step_shutdown(shutdown::Event::DaemonsGone),
        }
    }
}
