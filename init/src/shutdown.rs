//! The way down, in order: the agent, everybody else, the GPUs, the power.

/// How it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The VM is gone afterwards.
    PowerOff,
    /// The VM boots again.
    Reboot,
}

/// How long the agent may take to stop its containers, µs.
pub const GRACE_US: u64 = 5_000_000;

/// How long killed processes may take to be gone, µs.
const REAP_US: u64 = 1_000_000;

/// How long file systems and drivers may take, µs.
const RELEASE_US: u64 = 10_000_000;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It begins; whether an agent runs.
    Begin {
        /// Whether there is somebody to ask.
        agent: bool,
    },
    /// The agent has ended.
    AgentGone,
    /// PID 1 has no child left.
    ChildrenGone,
    /// GPUs are let go and file systems written.
    Released,
    /// Time went by.
    Clock,
}

/// What has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Ask the agent to stop.
    AskAgent,
    /// Kill every process but PID 1.
    KillAll,
    /// Let the GPUs go and write file systems, on a thread of their own.
    Release,
    /// Say the last word and turn the power off, or boot again.
    Finish(Goal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Asked(u64),
    Killed(u64),
    Releasing(u64),
    Finished,
}

/// A shutdown under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shutdown {
    goal: Goal,
    phase: Phase,
}

impl Shutdown {
    /// Nothing done yet.
    #[must_use]
    pub fn new(goal: Goal) -> Self {
        Self { goal, phase: Phase::New }
    }

    /// When [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::Asked(until) | Phase::Killed(until) | Phase::Releasing(until) => Some(until),
            Phase::New | Phase::Finished => None,
        }
    }

    /// Takes what happened at `now` and says what has to be done.
    pub fn step(&mut self, now: u64, event: Event) -> Option<Effect> {
        let due = self.next_deadline().is_some_and(|until| until <= now) && event == Event::Clock;
        let (phase, effect) = match (self.phase, event) {
            (Phase::New, Event::Begin { agent: true }) => (Phase::Asked(now + GRACE_US), Effect::AskAgent),
            (Phase::New, Event::Begin { agent: false }) | (Phase::Asked(_), Event::AgentGone) => {
                (Phase::Killed(now + REAP_US), Effect::KillAll)
            }
            (Phase::Asked(_), _) if due => (Phase::Killed(now + REAP_US), Effect::KillAll),
            (Phase::Killed(_), Event::ChildrenGone) => (Phase::Releasing(now + RELEASE_US), Effect::Release),
            (Phase::Killed(_), _) if due => (Phase::Releasing(now + RELEASE_US), Effect::Release),
            (Phase::Releasing(_), Event::Released) => (Phase::Finished, Effect::Finish(self.goal)),
            (Phase::Releasing(_), _) if due => (Phase::Finished, Effect::Finish(self.goal)),
            _ => return None,
        };
        self.phase = phase;
        Some(effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_willing_agent_is_asked_once_and_the_rest_follows() {
        let mut down = Shutdown::new(Goal::PowerOff);
        assert_eq!(down.step(0, Event::Begin { agent: true }), Some(Effect::AskAgent));
        assert_eq!(down.step(1, Event::Begin { agent: true }), None);
        assert_eq!(down.step(2, Event::ChildrenGone), None, "the agent's own end comes first");
        assert_eq!(down.step(3, Event::AgentGone), Some(Effect::KillAll));
        assert_eq!(down.step(4, Event::ChildrenGone), Some(Effect::Release));
        assert_eq!(down.step(5, Event::Released), Some(Effect::Finish(Goal::PowerOff)));
        assert_eq!(down.next_deadline(), None);
    }

    #[test]
    fn nobody_can_hold_it_up() {
        let mut down = Shutdown::new(Goal::Reboot);
        let mut effects = vec![down.step(0, Event::Begin { agent: true })];
        let mut ends = 0;
        while let Some(at) = down.next_deadline() {
            assert_eq!(down.step(at - 1, Event::Clock), None);
            effects.push(down.step(at, Event::Clock));
            ends = at;
        }
        let all = [Effect::AskAgent, Effect::KillAll, Effect::Release, Effect::Finish(Goal::Reboot)];
        assert_eq!(effects, all.map(Some));
        assert_eq!(ends, GRACE_US + REAP_US + RELEASE_US);
    }

    #[test]
    fn without_an_agent_it_starts_with_the_kill() {
        let mut down = Shutdown::new(Goal::PowerOff);
        assert_eq!(down.step(0, Event::Begin { agent: false }), Some(Effect::KillAll));
    }
}
