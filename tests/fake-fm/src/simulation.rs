//! The mutable state of the process, behind one lock.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use crate::call::{Call, Op, Payload};
use crate::codes;
use crate::control::{Answer, Command, Fault, Latency, Snapshot};
use crate::machine::{Event, Phase, Rules, State, step};
use crate::tenant_monitor::{LogEvent, LogLine, TenantMonitor};
use crate::wire::Reply;

/// The state, injected faults, and the log.
#[derive(Debug)]
pub(crate) struct Simulation {
    rules: Rules,
    state: State,
    tenant_monitor: TenantMonitor,
    latency: Latency,
    faults: VecDeque<Fault>,
    /// The next call of that kind, or any, hangs.
    hang: Option<Option<Op>>,
    pub(crate) hanging: bool,
    lines: Vec<LogLine>,
    journal: Option<File>,
    since: Instant,
}

impl Simulation {
    pub(crate) fn new(rules: Rules, tenant_monitor: TenantMonitor, latency: Latency, journal: Option<File>) -> Self {
        let mut simulation = Self {
            rules,
            state: State::default(),
            tenant_monitor,
            latency,
            faults: VecDeque::new(),
            hang: None,
            hanging: false,
            lines: Vec::new(),
            journal,
            since: Instant::now(),
        };
        simulation.note(LogEvent::Phase { phase: Phase::Starting });
        simulation
    }

    fn note(&mut self, what: LogEvent) {
        let time_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let line = LogLine { time_us, what };
        if let Some(journal) = &mut self.journal
            && let Ok(mut text) = serde_json::to_vec(&line)
        {
            text.push(b'\n');
            // A full disk does not fail calls: the snapshot has the line.
            let _ = journal.write_all(&text);
        }
        self.lines.push(line);
    }

    fn note_all(&mut self, violations: Vec<String>) {
        violations.into_iter().for_each(|violation| self.note(LogEvent::Violation { violation }));
    }

    fn become_state(&mut self, next: State) {
        let phase = next.phase;
        let turned = phase != self.state.phase;
        self.state = next;
        if turned {
            self.note(LogEvent::Phase { phase });
        }
        let wrong = self.tenant_monitor.look(&self.rules.board, &self.state);
        self.note_all(wrong);
    }

    /// Applies an event; returns the phase.
    pub(crate) fn apply_event(&mut self, event: &Event) -> Phase {
        let (next, _) = step(&self.rules, &self.state, event);
        self.become_state(next);
        self.state.phase
    }

    /// Whether a call has to hang until it is released.
    pub(crate) fn hangs(&self, op: Op) -> bool {
        self.hang.is_some_and(|which| which.is_none_or(|which| which == op))
    }

    /// Returns the fault for this call, and its duration. Refusals take no time.
    pub(crate) fn begin(&mut self, request: &Call) -> (Option<Fault>, Duration) {
        let op = request.op();
        let applies = |fault: &Fault| fault.op.is_none_or(|which| which == op);
        if let Some(at) = self.faults.iter().position(applies) {
            let fault = self.faults[at].clone();
            self.faults[at].times = fault.times.saturating_sub(1);
            if self.faults[at].times == 0 {
                self.faults.remove(at);
            }
            let after = Duration::from_millis(fault.after_ms);
            return (Some(fault), after);
        }
        let (_, rc) = step(&self.rules, &self.state, &Event::Called(request.clone()));
        (None, if rc == codes::SUCCESS { self.latency.of_call(op) } else { Duration::ZERO })
    }

    /// Executes and answers the call.
    pub(crate) fn finish(&mut self, request: Call, fault: Option<&Fault>) -> Reply {
        let harm = self.tenant_monitor.asked(&request, &self.rules.board, &self.state);
        self.note_all(harm);
        let (op, ids) = (request.op(), request.ids().to_vec());
        let (next, rc) = step(&self.rules, &self.state, &Event::Called(request));
        let effective = fault.is_none_or(|fault| fault.take_effect);
        let rc = fault.map_or(rc, |fault| fault.rc);
        self.note(LogEvent::Call { op, ids, rc });
        let next = if effective { next } else { self.state.clone() };
        self.become_state(next);
        Reply { rc, payload: if rc == codes::SUCCESS { self.payload(op) } else { Payload::Nothing } }
    }

    fn payload(&self, op: Op) -> Payload {
        let board = &self.rules.board;
        match op {
            Op::List => {
                let most = u32::try_from(board.known.rows.len()).unwrap_or(u32::MAX);
                Payload::List { partitions: board.list(&self.state.active), most }
            }
            Op::Unsupported => Payload::Unsupported(board.unsupported()),
            Op::FailedDevices => {
                let (gpus, switches) = board.failed_devices();
                Payload::FailedDevices { gpus, switches }
            }
            Op::Activate | Op::ActivateWithVfs | Op::Deactivate | Op::SetActivated => Payload::Nothing,
        }
    }

    /// Executes a test's command; may return a line for the manager's log.
    pub(crate) fn control(&mut self, command: Command) -> (Answer, Option<String>) {
        match command {
            Command::Latency(latency) => self.latency = self.latency.with(latency),
            Command::Fault(fault) if fault.times > 0 => self.faults.push_back(fault),
            Command::Fault(_) => return (Answer::Error("a fault for no call".to_owned()), None),
            Command::Hang(which) => self.hang = Some(which),
            Command::Release => self.hang = None,
            Command::Tenant { partition, running } => {
                if !self.rules.board.supports(partition) {
                    return (Answer::Error(format!("no partition {partition}")), None);
                }
                let wrong = self.tenant_monitor.tenant(partition, running, &self.rules.board, &self.state);
                self.note_all(wrong);
            }
            Command::Reset { gpu } => {
                let wrong = self.tenant_monitor.reset(gpu, &self.rules.board, &self.state);
                self.note_all(wrong);
            }
            Command::Sxid { switch, code } => return (Answer::Done, Some(sxid(switch, code))),
            Command::Xid { gpu, code } => return (Answer::Done, Some(xid(gpu, code))),
            Command::Snapshot => return (Answer::Snapshot(self.snapshot()), None),
        }
        (Answer::Done, None)
    }

    fn snapshot(&self) -> Snapshot {
        let violations = self.lines.iter().filter_map(|line| match &line.what {
            LogEvent::Violation { violation } => Some(violation.clone()),
            LogEvent::Call { .. } | LogEvent::Phase { .. } => None,
        });
        Snapshot {
            phase: self.state.phase,
            active: self.state.active.clone(),
            tenants: self.tenant_monitor.tenants().clone(),
            hanging: self.hanging,
            violations: violations.collect(),
            log: self.lines.clone(),
        }
    }

    /// Whether there were no violations.
    pub(crate) fn is_clean(&self) -> bool {
        !self.lines.iter().any(|line| matches!(line.what, LogEvent::Violation { .. }))
    }
}

/// An SXid line of the manager's log.
pub(crate) fn sxid(switch: u32, code: u32) -> String {
    format!("detected NVSwitch error SXid {code} on NVSwitch {switch}")
}

/// An Xid line of the manager's log.
pub(crate) fn xid(gpu: u32, code: u32) -> String {
    format!("detected GPU error Xid {code} on GPU with physical id {gpu}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::{Board, Failed, Policy};
    use crate::codes::Family;
    use crate::scenario::Scenario;
    use firstlight_partitions::known;

    fn ready() -> Simulation {
        let board = Board::new(&known::H100, Failed::default(), Policy::default());
        let rules = Rules {
            board,
            family: Family::Nvl4,
            shared: true,
            restart: false,
            resident: false,
            unexpected_list_code: -3,
        };
        let mut simulation = Simulation::new(rules, TenantMonitor::default(), Latency::of(&Scenario::default()), None);
        assert_eq!(simulation.apply_event(&Event::Started), Phase::Ready);
        simulation
    }

    fn call(simulation: &mut Simulation, request: &Call) -> i32 {
        let (fault, _) = simulation.begin(request);
        simulation.finish(request.clone(), fault.as_ref()).rc
    }

    #[test]
    fn faults_can_contradict_the_effect() {
        let mut simulation = ready();
        let fault = |rc, take_effect, times| {
            Command::Fault(Fault { op: Some(Op::Activate), rc, after_ms: 0, take_effect, times })
        };
        simulation.control(fault(-5, true, 1));
        simulation.control(fault(0, false, 2));
        assert_eq!(call(&mut simulation, &Call::List), 0, "of another kind");
        assert_eq!(call(&mut simulation, &Call::Activate(3)), -5);
        assert_eq!(simulation.snapshot().active, [3].into());
        assert_eq!((call(&mut simulation, &Call::Activate(4)), call(&mut simulation, &Call::Activate(4))), (0, 0));
        assert_eq!(simulation.snapshot().active, [3].into());
        assert_eq!(call(&mut simulation, &Call::Activate(4)), 0);
        assert_eq!(simulation.snapshot().active, [3, 4].into());
        assert!(simulation.is_clean());
        assert!(matches!(simulation.control(fault(0, true, 0)).0, Answer::Error(_)));
    }

    #[test]
    fn refused_calls_take_no_time() {
        let mut simulation = ready();
        assert_eq!(simulation.begin(&Call::Activate(3)).1, Duration::from_millis(200));
        assert_eq!(simulation.begin(&Call::Deactivate(3)).1, Duration::ZERO, "refused");
        simulation.control(Command::Latency(Latency { activate_ms: Some(5000), ..Latency::default() }));
        assert_eq!(simulation.begin(&Call::Activate(3)).1, Duration::from_secs(5));
        assert_eq!(simulation.begin(&Call::List).1, Duration::from_millis(2));
    }

    #[test]
    fn snapshot_reports_calls_and_violations() {
        let mut simulation = ready();
        call(&mut simulation, &Call::Activate(3));
        assert!(matches!(simulation.control(Command::Tenant { partition: 99, running: true }).0, Answer::Error(_)));
        simulation.control(Command::Tenant { partition: 3, running: true });
        call(&mut simulation, &Call::Deactivate(3));
        let snapshot = simulation.snapshot();
        assert_eq!((snapshot.violations.len(), simulation.is_clean()), (2, false), "asked for, and done");
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
        assert!(text.contains(r#""op":"deactivate","ids":[3],"rc":0"#));
    }
}
