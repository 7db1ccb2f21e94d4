//! All that changes in the process, behind one lock.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use crate::ask::{Ask, Op, Told};
use crate::codes;
use crate::control::{Answer, Command, Fault, Latency, Snapshot};
use crate::judge::{Judge, Line, What};
use crate::machine::{Event, Phase, Rules, State, step};
use crate::wire::Reply;

/// The state, what tests have asked for, and what happened.
#[derive(Debug)]
pub(crate) struct World {
    rules: Rules,
    state: State,
    judge: Judge,
    latency: Latency,
    faults: VecDeque<Fault>,
    /// The next call of that kind, or any, hangs.
    hang: Option<Option<Op>>,
    pub(crate) hanging: bool,
    lines: Vec<Line>,
    journal: Option<File>,
    since: Instant,
}

impl World {
    pub(crate) fn new(rules: Rules, judge: Judge, latency: Latency, journal: Option<File>) -> Self {
        let mut world = Self {
            rules,
            state: State::default(),
            judge,
            latency,
            faults: VecDeque::new(),
            hang: None,
            hanging: false,
            lines: Vec::new(),
            journal,
            since: Instant::now(),
        };
        world.note(What::Phase { phase: Phase::Starting });
        world
    }

    fn note(&mut self, what: What) {
        let time_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let line = Line { time_us, what };
        if let Some(journal) = &mut self.journal
            && let Ok(mut text) = serde_json::to_vec(&line)
        {
            text.push(b'\n');
            // A full disk is no reason to fail calls: the snapshot has it.
            let _ = journal.write_all(&text);
        }
        self.lines.push(line);
    }

    fn note_all(&mut self, violations: Vec<String>) {
        violations.into_iter().for_each(|violation| self.note(What::Violation { violation }));
    }

    fn become_state(&mut self, next: State) {
        let phase = next.phase;
        let turned = phase != self.state.phase;
        self.state = next;
        if turned {
            self.note(What::Phase { phase });
        }
        let wrong = self.judge.look(&self.rules.board, &self.state);
        self.note_all(wrong);
    }

    /// The life goes on; where to.
    pub(crate) fn happen(&mut self, event: &Event) -> Phase {
        let (next, _) = step(&self.rules, &self.state, event);
        self.become_state(next);
        self.state.phase
    }

    /// Whether a call has to wait until it is released.
    pub(crate) fn hangs(&self, op: Op) -> bool {
        self.hang.is_some_and(|which| which.is_none_or(|which| which == op))
    }

    /// The fault that this call gets, and how long it takes. A refusal takes no time.
    pub(crate) fn begin(&mut self, ask: &Ask) -> (Option<Fault>, Duration) {
        let op = ask.op();
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
        let (_, rc) = step(&self.rules, &self.state, &Event::Asked(ask.clone()));
        (None, if rc == codes::SUCCESS { self.latency.of_call(op) } else { Duration::ZERO })
    }

    /// The call is carried out and answered.
    pub(crate) fn finish(&mut self, ask: Ask, fault: Option<&Fault>) -> Reply {
        let harm = self.judge.asked(&ask, &self.rules.board, &self.state);
        self.note_all(harm);
        let (op, ids) = (ask.op(), ask.ids().to_vec());
        let (next, rc) = step(&self.rules, &self.state, &Event::Asked(ask));
        let effective = fault.is_none_or(|fault| fault.take_effect);
        let rc = fault.map_or(rc, |fault| fault.rc);
        self.note(What::Call { op, ids, rc });
        let next = if effective { next } else { self.state.clone() };
        self.become_state(next);
        Reply { rc, told: if rc == codes::SUCCESS { self.told(op) } else { Told::Nothing } }
    }

    fn told(&self, op: Op) -> Told {
        let board = &self.rules.board;
        match op {
            Op::List => {
                let most = u32::try_from(board.known.rows.len()).unwrap_or(u32::MAX);
                Told::List { partitions: board.list(&self.state.active), most }
            }
            Op::Unsupported => Told::Unsupported(board.unsupported()),
            Op::FailedDevices => {
                let (gpus, switches) = board.failed_devices();
                Told::FailedDevices { gpus, switches }
            }
            Op::Activate | Op::ActivateWithVfs | Op::Deactivate | Op::SetActivated => Told::Nothing,
        }
    }

    /// What a test asks; a line for the manager's log may come of it.
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
                let wrong = self.judge.tenant(partition, running, &self.rules.board, &self.state);
                self.note_all(wrong);
            }
            Command::Reset { gpu } => {
                let wrong = self.judge.reset(gpu, &self.rules.board, &self.state);
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
            What::Violation { violation } => Some(violation.clone()),
            What::Call { .. } | What::Phase { .. } => None,
        });
        Snapshot {
            phase: self.state.phase,
            active: self.state.active.clone(),
            tenants: self.judge.tenants().clone(),
            hanging: self.hanging,
            violations: violations.collect(),
            log: self.lines.clone(),
        }
    }

    /// Whether nothing was done that must not be.
    pub(crate) fn is_clean(&self) -> bool {
        !self.lines.iter().any(|line| matches!(line.what, What::Violation { .. }))
    }
}

/// A switch's error, as the log tells of it.
pub(crate) fn sxid(switch: u32, code: u32) -> String {
    format!("detected NVSwitch error SXid {code} on NVSwitch {switch}")
}

/// A GPU's error, as the log tells of it.
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

    fn ready() -> World {
        let board = Board::new(&known::H100, Failed::default(), Policy::default());
        let rules =
            Rules { board, family: Family::Nvl4, shared: true, restart: false, resident: false, unwanted_list: -3 };
        let mut world = World::new(rules, Judge::default(), Latency::of(&Scenario::default()), None);
        assert_eq!(world.happen(&Event::Started), Phase::Ready);
        world
    }

    fn call(world: &mut World, ask: &Ask) -> i32 {
        let (fault, _) = world.begin(ask);
        world.finish(ask.clone(), fault.as_ref()).rc
    }

    #[test]
    fn faults_answer_one_thing_and_do_another() {
        let mut world = ready();
        let fault = |rc, take_effect, times| {
            Command::Fault(Fault { op: Some(Op::Activate), rc, after_ms: 0, take_effect, times })
        };
        world.control(fault(-5, true, 1));
        world.control(fault(0, false, 2));
        assert_eq!(call(&mut world, &Ask::List), 0, "of another kind");
        assert_eq!(call(&mut world, &Ask::Activate(3)), -5);
        assert_eq!(world.snapshot().active, [3].into());
        assert_eq!((call(&mut world, &Ask::Activate(4)), call(&mut world, &Ask::Activate(4))), (0, 0));
        assert_eq!(world.snapshot().active, [3].into());
        assert_eq!(call(&mut world, &Ask::Activate(4)), 0);
        assert_eq!(world.snapshot().active, [3, 4].into());
        assert!(world.is_clean());
        assert!(matches!(world.control(fault(0, true, 0)).0, Answer::Error(_)));
    }

    #[test]
    fn only_what_is_done_takes_time() {
        let mut world = ready();
        assert_eq!(world.begin(&Ask::Activate(3)).1, Duration::from_millis(200));
        assert_eq!(world.begin(&Ask::Deactivate(3)).1, Duration::ZERO, "refused");
        world.control(Command::Latency(Latency { activate_ms: Some(5000), ..Latency::default() }));
        assert_eq!(world.begin(&Ask::Activate(3)).1, Duration::from_secs(5));
        assert_eq!(world.begin(&Ask::List).1, Duration::from_millis(2));
    }

    #[test]
    fn what_happened_is_told() {
        let mut world = ready();
        call(&mut world, &Ask::Activate(3));
        assert!(matches!(world.control(Command::Tenant { partition: 99, running: true }).0, Answer::Error(_)));
        world.control(Command::Tenant { partition: 3, running: true });
        call(&mut world, &Ask::Deactivate(3));
        let snapshot = world.snapshot();
        assert_eq!((snapshot.violations.len(), world.is_clean()), (2, false), "asked for, and done");
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
        assert!(text.contains(r#""op":"deactivate","ids":[3],"rc":0"#));
    }
}
