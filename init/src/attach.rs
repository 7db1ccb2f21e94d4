//! The attach of all GPUs as a state machine: who is attached when, who is tried again.
//!
//! An attach that has begun is never interrupted: a driver that is killed in
//! the middle can leave a GPU unusable until it is reset. One that misses its
//! deadline stays watched, and may still end well.

/// How GPUs are attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// All at once.
    Parallel,
    /// One after the other.
    Serial,
    /// All at once; those that fail once more, one after the other, when no
    /// first attempt is left. Two GPUs can fail because of each other.
    #[default]
    Auto,
}

impl Policy {
    /// The word on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Serial => "serial",
            Self::Auto => "auto",
        }
    }

    /// What `self` comes to in this guest. Under confidential computing the
    /// driver holds its global lock during the whole attach, so that attaching
    /// at once gains nothing. Nothing detects that yet: callers say `false`.
    #[must_use]
    pub fn resolve(self, confidential: bool) -> Self {
        if confidential && self == Self::Auto { Self::Serial } else { self }
    }

    /// How often one GPU is tried.
    #[must_use]
    pub fn attempts(self) -> u32 {
        if self == Self::Auto { 2 } else { 1 }
    }
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// This GPU may be attached from now on.
    Begin(usize),
    /// This GPU's attempt ended well.
    Attached(usize),
    /// This GPU's attempt ended with an error.
    Failed(usize),
    /// Time went by.
    Clock,
}

/// What has to be done. `late` is set for a GPU that has been given up before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Begin an attempt.
    Start(usize),
    /// The attempt failed and there will be another.
    Retry(usize),
    /// The GPU can be used.
    Ready {
        /// Which.
        gpu: usize,
        /// Whether it had been given up.
        late: bool,
    },
    /// The GPU cannot be used.
    Failed {
        /// Which.
        gpu: usize,
        /// Whether it had been given up.
        late: bool,
    },
    /// The attempt is past its deadline: the GPU is given up, its attempt goes on.
    TimedOut {
        /// Which.
        gpu: usize,
        /// Whether it had been given up.
        late: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its unit has not begun.
    Idle,
    /// Waits for its first attempt.
    Queued,
    /// In the driver since then, µs.
    Flight(u64),
    /// In the driver, past its deadline.
    Hung,
    /// Failed; waits for its next attempt.
    Again,
    /// Has ended.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    state: State,
    attempts: u32,
    given_up: bool,
}

/// All GPUs of a guest on their way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    policy: Policy,
    limit_us: u64,
    slots: Vec<Slot>,
}

impl Group {
    /// `gpus` GPUs of which none is attached; one attempt may take `limit_us`.
    #[must_use]
    pub fn new(policy: Policy, limit_us: u64, gpus: usize) -> Self {
        Self { policy, limit_us, slots: vec![Slot { state: State::Idle, attempts: 0, given_up: false }; gpus] }
    }

    /// How often this GPU was tried.
    #[must_use]
    pub fn attempts(&self, gpu: usize) -> u32 {
        self.slots.get(gpu).map_or(0, |slot| slot.attempts)
    }

    /// How one attach is done and how often.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// When [`Event::Clock`] is due next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.slots.iter().filter_map(|slot| self.deadline(slot)).min()
    }

    fn deadline(&self, slot: &Slot) -> Option<u64> {
        match slot.state {
            State::Flight(since) => Some(since.saturating_add(self.limit_us)),
            _ => None,
        }
    }

    /// Takes what happened at `now` and says what has to be done.
    pub fn step(&mut self, now: u64, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Begin(gpu) => {
                if let Some(slot) = self.slots.get_mut(gpu).filter(|slot| slot.state == State::Idle) {
                    slot.state = State::Queued;
                }
            }
            Event::Attached(gpu) => {
                if let Some(slot) = self.in_driver(gpu) {
                    slot.state = State::Ended;
                    effects.push(Effect::Ready { gpu, late: slot.given_up });
                }
            }
            Event::Failed(gpu) => {
                let most = self.policy.attempts();
                if let Some(slot) = self.in_driver(gpu) {
                    if slot.attempts < most {
                        slot.state = State::Again;
                        effects.push(Effect::Retry(gpu));
                    } else {
                        slot.state = State::Ended;
                        effects.push(Effect::Failed { gpu, late: slot.given_up });
                    }
                }
            }
            Event::Clock => {
                for gpu in 0..self.slots.len() {
                    if self.deadline(&self.slots[gpu]).is_some_and(|at| at <= now) {
                        let slot = &mut self.slots[gpu];
                        effects.push(Effect::TimedOut { gpu, late: slot.given_up });
                        slot.state = State::Hung;
                        slot.given_up = true;
                    }
                }
            }
        }
        self.launch(now, &mut effects);
        effects
    }

    fn in_driver(&mut self, gpu: usize) -> Option<&mut Slot> {
        self.slots.get_mut(gpu).filter(|slot| matches!(slot.state, State::Flight(_) | State::Hung))
    }

    fn launch(&mut self, now: u64, effects: &mut Vec<Effect>) {
        let flying = |slots: &[Slot]| slots.iter().any(|slot| matches!(slot.state, State::Flight(_)));
        for gpu in 0..self.slots.len() {
            let free = match self.slots[gpu].state {
                State::Queued => self.policy != Policy::Serial || !flying(&self.slots),
                State::Again => !flying(&self.slots) && !self.slots.iter().any(|slot| slot.state == State::Queued),
                _ => false,
            };
            if free {
                self.slots[gpu].state = State::Flight(now);
                self.slots[gpu].attempts += 1;
                effects.push(Effect::Start(gpu));
            }
        }
    }
}

#[cfg(test)]
mod tests;
