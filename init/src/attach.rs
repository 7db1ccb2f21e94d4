//! The attach of all GPUs as a state machine: order, deadlines and retries.
//!
//! An attach that has begun is never interrupted: a driver that is killed in
//! the middle can leave a GPU unusable until it is reset. One that misses its
//! deadline stays watched, and may still end well.
//!
//! How long an attach takes is not known beforehand: 2 s on one system, 34 s on
//! another, and that times the number of GPUs where the driver takes them one
//! after the other behind its lock. So a deadline counts from the last sign
//! that something moves: an interrupt of that GPU, or the driver's answer for
//! another one. Only a limit on the whole counts from the beginning.

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
    /// at once gains nothing, and nothing is tried twice: there, a GPU whose
    /// attach failed wants a reset first.
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
    /// This GPU's attempt ended, and the GPU is not here any more.
    Abandoned(usize),
    /// This GPU has been seen at work.
    Progress(usize),
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
        /// Which deadline that was.
        overdue: Overdue,
    },
}

/// Which deadline an attempt has missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overdue {
    /// Nothing has moved for [`Limits::silence_us`].
    Silent,
    /// Something moves, but [`Limits::whole_us`] are over.
    TooLong,
}

/// How long one attempt may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Since the last sign that something moves, µs.
    pub silence_us: u64,
    /// Since its beginning, µs.
    pub whole_us: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its unit has not begun.
    Idle,
    /// Waits for its first attempt.
    Queued,
    /// In the driver.
    InProgress {
        /// Since then, µs.
        since: u64,
        /// When something moved last, µs.
        moved: u64,
    },
    /// In the driver, past its deadline.
    Hung,
    /// Failed; waits for its next attempt.
    AwaitingRetry,
    /// Has ended.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    state: State,
    attempts: u32,
    given_up: bool,
}

/// The attach state of all GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    policy: Policy,
    limits: Limits,
    slots: Vec<Slot>,
}

const NEW: Slot = Slot { state: State::Idle, attempts: 0, given_up: false };

impl Group {
    /// `gpus` GPUs of which none is attached.
    #[must_use]
    pub fn new(policy: Policy, limits: Limits, gpus: usize) -> Self {
        Self { policy, limits, slots: vec![NEW; gpus] }
    }

    /// Resets or adds the slot of a hotplugged GPU. `false` while an
    /// attempt is in the driver.
    pub fn renew(&mut self, gpu: usize) -> bool {
        if gpu >= self.slots.len() {
            self.slots.resize(gpu + 1, NEW);
        }
        let free = self.in_driver(gpu).is_none();
        if free {
            self.slots[gpu] = NEW;
        }
        free
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
        let Limits { silence_us, whole_us } = self.limits;
        match slot.state {
            State::InProgress { since, moved } => {
                Some(moved.saturating_add(silence_us).min(since.saturating_add(whole_us)))
            }
            _ => None,
        }
    }

    /// Returns the GPUs that time out at `now` unless activity is found.
    pub fn silent(&self, now: u64) -> impl Iterator<Item = usize> {
        let due = move |slot: &Slot| self.deadline(slot).is_some_and(|at| at <= now) && !self.too_long(slot, now);
        self.slots.iter().enumerate().filter(move |(_, slot)| due(slot)).map(|(gpu, _)| gpu)
    }

    fn too_long(&self, slot: &Slot, now: u64) -> bool {
        matches!(slot.state, State::InProgress { since, .. } if since.saturating_add(self.limits.whole_us) <= now)
    }

    /// The driver answered for one GPU, so it may have been what others waited for.
    fn all_moved(&mut self, now: u64) {
        for slot in &mut self.slots {
            if let State::InProgress { moved, .. } = &mut slot.state {
                *moved = now;
            }
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
                    self.all_moved(now);
                }
            }
            Event::Failed(gpu) => {
                let most = self.policy.attempts();
                if let Some(slot) = self.in_driver(gpu) {
                    if slot.attempts < most {
                        slot.state = State::AwaitingRetry;
                        effects.push(Effect::Retry(gpu));
                    } else {
                        slot.state = State::Ended;
                        effects.push(Effect::Failed { gpu, late: slot.given_up });
                    }
                    self.all_moved(now);
                }
            }
            Event::Abandoned(gpu) => {
                if let Some(slot) = self.in_driver(gpu) {
                    slot.state = State::Ended;
                    self.all_moved(now);
                }
            }
            Event::Progress(gpu) => {
                if let Some(Slot { state: State::InProgress { moved, .. }, .. }) = self.slots.get_mut(gpu) {
                    *moved = now;
                }
            }
            Event::Clock => {
                for gpu in 0..self.slots.len() {
                    if self.deadline(&self.slots[gpu]).is_some_and(|at| at <= now) {
                        let long = self.too_long(&self.slots[gpu], now);
                        let overdue = if long { Overdue::TooLong } else { Overdue::Silent };
                        let slot = &mut self.slots[gpu];
                        effects.push(Effect::TimedOut { gpu, late: slot.given_up, overdue });
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
        self.slots.get_mut(gpu).filter(|slot| matches!(slot.state, State::InProgress { .. } | State::Hung))
    }

    fn launch(&mut self, now: u64, effects: &mut Vec<Effect>) {
        let in_progress = |slots: &[Slot]| slots.iter().any(|slot| matches!(slot.state, State::InProgress { .. }));
        for gpu in 0..self.slots.len() {
            let free = match self.slots[gpu].state {
                State::Queued => self.policy != Policy::Serial || !in_progress(&self.slots),
                State::AwaitingRetry => {
                    !in_progress(&self.slots) && !self.slots.iter().any(|slot| slot.state == State::Queued)
                }
                _ => false,
            };
            if free {
                self.slots[gpu].state = State::InProgress { since: now, moved: now };
                self.slots[gpu].attempts += 1;
                effects.push(Effect::Start(gpu));
            }
        }
    }
}

#[cfg(test)]
mod tests;
