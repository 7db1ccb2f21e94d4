//! Shutdown as a state machine: the agent, the daemons, all other processes, the GPUs and file
//! systems, power-off.
//!
//! Pure: [`Shutdown::step`] takes the time and an event and returns effects. One deadline covers
//! the shutdown; each stage has a share of the time. A stage that exceeds its share is reported and
//! abandoned, so the VM powers off by the deadline.

/// The end of the shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Power off the VM.
    PowerOff,
    /// Reboot the VM.
    Reboot,
}

/// Share of the agent, which stops its containers. Shares are in parts of `WHOLE`.
const AGENT: u64 = 5;
/// Share of the daemons, which are stopped one after the other.
const DAEMONS: u64 = 14;
/// Share of the exit of killed processes.
const REAP: u64 = 1;
/// Share of closing the GPUs and syncing the file systems.
const RELEASE: u64 = 8;
/// Share of flushing the console.
const CONSOLE_FLUSH: u64 = 2;
/// The sum of all shares.
const WHOLE: u64 = AGENT + DAEMONS + REAP + RELEASE + CONSOLE_FLUSH;

/// An input of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The shutdown starts.
    Begin {
        /// Whether the agent is running.
        agent: bool,
    },
    /// The agent has exited.
    AgentGone,
    /// All daemons are stopped.
    DaemonsGone,
    /// PID 1 has no child left.
    ChildrenGone,
    /// All GPUs are closed.
    GpusReleased,
    /// File systems are synced.
    Synced,
    /// Time has passed.
    Clock,
}

/// A stage that can exceed its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The agent, after SIGTERM.
    Agent,
    /// The daemons, stopped one after the other.
    Daemons,
    /// The exit of killed processes.
    Processes,
    /// The close of the GPUs: at the last close the driver shuts a GPU down.
    Gpus,
    /// The sync of the file systems.
    Files,
}

/// An effect that the caller carries out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Send SIGTERM to the agent.
    TerminateAgent,
    /// Stop the daemons in reverse start order.
    StopDaemons,
    /// Kill every process but PID 1.
    KillAll,
    /// Close the GPUs and sync file systems, each on its own thread.
    Release,
    /// Report that this stage exceeded its share, given in µs.
    Late(Step, u64),
    /// Flush the console for at most this many µs, then power off or reboot.
    Finish(Goal, u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Asked { until: u64 },
    Daemons { until: u64 },
    Killed { until: u64 },
    Releasing { until: u64, gpus: bool, files: bool },
    Finished,
}

/// A shutdown in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shutdown {
    goal: Goal,
    total: u64,
    phase: Phase,
}

impl Shutdown {
    /// Creates a shutdown that has not started; `total` is its deadline in µs.
    #[must_use]
    pub fn new(goal: Goal, total: u64) -> Self {
        Self { goal, total, phase: Phase::New }
    }

    /// Returns when [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::Asked { until }
            | Phase::Daemons { until }
            | Phase::Killed { until }
            | Phase::Releasing { until, .. } => Some(until),
            Phase::New | Phase::Finished => None,
        }
    }

    /// Returns the duration of a share, µs. Rounded down, so that the sum does not exceed `total`.
    fn share(&self, parts: u64) -> u64 {
        self.total / WHOLE * parts
    }

    /// Processes an event at time `now` (µs); returns the effects in order.
    pub fn step(&mut self, now: u64, event: Event) -> Vec<Effect> {
        let due = event == Event::Clock && self.next_deadline().is_some_and(|until| until <= now);
        let until = |parts| now.saturating_add(self.share(parts));
        let late = |step, parts| Effect::Late(step, self.share(parts));
        let daemons = Phase::Daemons { until: until(DAEMONS) };
        let killed = Phase::Killed { until: until(REAP) };
        let releasing = Phase::Releasing { until: until(RELEASE), gpus: false, files: false };
        let finish = Effect::Finish(self.goal, self.share(CONSOLE_FLUSH));
        let (phase, effects) = match (self.phase, event) {
            (Phase::New, Event::Begin { agent: true }) => {
                (Phase::Asked { until: until(AGENT) }, vec![Effect::TerminateAgent])
            }
            (Phase::New, Event::Begin { agent: false }) | (Phase::Asked { .. }, Event::AgentGone) => {
                (daemons, vec![Effect::StopDaemons])
            }
            (Phase::Asked { .. }, _) if due => (daemons, vec![late(Step::Agent, AGENT), Effect::StopDaemons]),
            (Phase::Daemons { .. }, Event::DaemonsGone) => (killed, vec![Effect::KillAll]),
            (Phase::Daemons { .. }, _) if due => (killed, vec![late(Step::Daemons, DAEMONS), Effect::KillAll]),
            (Phase::Killed { .. }, Event::ChildrenGone) => (releasing, vec![Effect::Release]),
            (Phase::Killed { .. }, _) if due => (releasing, vec![late(Step::Processes, REAP), Effect::Release]),
            (Phase::Releasing { until, gpus, files }, Event::GpusReleased | Event::Synced) => {
                let (gpus, files) = (gpus || event == Event::GpusReleased, files || event == Event::Synced);
                if gpus && files {
                    (Phase::Finished, vec![finish])
                } else {
                    (Phase::Releasing { until, gpus, files }, Vec::new())
                }
            }
            (Phase::Releasing { gpus, files, .. }, _) if due => {
                let steps = [(gpus, Step::Gpus), (files, Step::Files)].into_iter().filter(|(done, _)| !done);
                let late = steps.map(|(_, step)| late(step, RELEASE));
                (Phase::Finished, late.chain([finish]).collect())
            }
            _ => return Vec::new(),
        };
        self.phase = phase;
        effects
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The default deadline, µs: one part of a share is one second.
    const TOTAL: u64 = 30_000_000;
    const SECOND: u64 = 1_000_000;

    #[test]
    fn agent_is_terminated_once_and_stages_follow_in_order() {
        let mut down = Shutdown::new(Goal::PowerOff, TOTAL);
        assert_eq!(down.step(0, Event::Begin { agent: true }), [Effect::TerminateAgent]);
        assert_eq!(down.step(1, Event::Begin { agent: true }), []);
        assert_eq!(down.step(2, Event::ChildrenGone), [], "the agent's own end comes first");
        assert_eq!(down.step(3, Event::DaemonsGone), [], "daemons serve the agent's containers");
        assert_eq!(down.step(3, Event::AgentGone), [Effect::StopDaemons]);
        assert_eq!(down.step(3, Event::ChildrenGone), []);
        assert_eq!(down.step(3, Event::DaemonsGone), [Effect::KillAll]);
        assert_eq!(down.step(4, Event::ChildrenGone), [Effect::Release]);
        assert_eq!(down.step(5, Event::Synced), []);
        assert_eq!(down.step(5, Event::Synced), []);
        assert_eq!(down.step(5, Event::GpusReleased), [Effect::Finish(Goal::PowerOff, 2 * SECOND)]);
        assert_eq!(down.next_deadline(), None);
    }

    #[test]
    fn stages_that_hang_are_reported_and_do_not_block_shutdown() {
        let mut down = Shutdown::new(Goal::Reboot, TOTAL);
        let mut effects = down.step(0, Event::Begin { agent: true });
        let mut ends = 0;
        while let Some(at) = down.next_deadline() {
            assert_eq!(down.step(at - 1, Event::Clock), []);
            effects.extend(down.step(at, Event::Clock));
            ends = at;
        }
        let all = [
            Effect::TerminateAgent,
            Effect::Late(Step::Agent, 5 * SECOND),
            Effect::StopDaemons,
            Effect::Late(Step::Daemons, 14 * SECOND),
            Effect::KillAll,
            Effect::Late(Step::Processes, SECOND),
            Effect::Release,
            Effect::Late(Step::Gpus, 8 * SECOND),
            Effect::Late(Step::Files, 8 * SECOND),
            Effect::Finish(Goal::Reboot, 2 * SECOND),
        ];
        assert_eq!(effects, all);
        assert_eq!(ends + 2 * SECOND, TOTAL);
    }

    #[test]
    fn hanging_driver_does_not_prevent_sync() {
        let mut down = Shutdown::new(Goal::PowerOff, TOTAL);
        down.step(0, Event::Begin { agent: false });
        down.step(0, Event::DaemonsGone);
        assert_eq!(down.step(0, Event::ChildrenGone), [Effect::Release]);
        assert_eq!(down.step(1, Event::Synced), []);
        let effects = down.step(8 * SECOND, Event::Clock);
        assert_eq!(
            effects,
            [Effect::Late(Step::Gpus, 8 * SECOND), Effect::Finish(Goal::PowerOff, 2 * SECOND)],
            "only what did not end is named"
        );
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            any::<bool>().prop_map(|agent| Event::Begin { agent }),
            Just(Event::AgentGone),
            Just(Event::DaemonsGone),
            Just(Event::ChildrenGone),
            Just(Event::GpusReleased),
            Just(Event::Synced),
            Just(Event::Clock),
        ]
    }

    /// Returns the position of an effect in the documented order.
    fn place(effect: Effect) -> usize {
        match effect {
            Effect::TerminateAgent => 0,
            Effect::Late(Step::Agent, _) => 1,
            Effect::StopDaemons => 2,
            Effect::Late(Step::Daemons, _) => 3,
            Effect::KillAll => 4,
            Effect::Late(Step::Processes, _) => 5,
            Effect::Release => 6,
            Effect::Late(Step::Gpus, _) => 7,
            Effect::Late(Step::Files, _) => 8,
            Effect::Finish(..) => 9,
        }
    }

    proptest! {
        #[test]
        fn any_event_sequence_powers_off_by_the_deadline(
            total in 1u64..200_000_000,
            start in 0u64..1 << 40,
            agent in any::<bool>(),
            walk in proptest::collection::vec((0u64..10_000_000, event()), 0..60),
        ) {
            let mut down = Shutdown::new(Goal::PowerOff, total);
            let mut now = start;
            let mut effects = down.step(now, Event::Begin { agent });
            let over = |effects: &[Effect]| matches!(effects.last(), Some(Effect::Finish(..)));
            // The loop wakes at each deadline; other events arrive between deadlines in any order.
            for (pause, event) in walk {
                let next = now + pause;
                while let Some(at) = down.next_deadline().filter(|at| *at <= next) {
                    now = at;
                    effects.extend(down.step(now, Event::Clock));
                }
                if over(&effects) {
                    break;
                }
                now = next;
                effects.extend(down.step(now, event));
            }
            while let Some(at) = down.next_deadline() {
                now = at;
                effects.extend(down.step(now, Event::Clock));
            }
            let Some(Effect::Finish(Goal::PowerOff, words)) = effects.last().copied() else {
                return Err(TestCaseError::fail(format!("no end: {effects:?}")));
            };
            prop_assert!(now + words <= start + total, "{} of {total} us", now + words - start);
            prop_assert!(effects.windows(2).all(|pair| place(pair[0]) < place(pair[1])), "{effects:?}");
            for needed in [Effect::StopDaemons, Effect::KillAll, Effect::Release] {
                prop_assert!(effects.contains(&needed), "{needed:?} is left out: {effects:?}");
            }
            prop_assert!(down.step(now, Event::Clock).is_empty() && down.next_deadline().is_none());
        }
    }
}
