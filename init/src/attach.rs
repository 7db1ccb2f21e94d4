//! The attach of all GPUs as a state machine: order, deadlines and retries.
//!
//! An attach that has started is never interrupted: a driver thread that is killed during an attach
//! can leave a GPU unusable until it is reset. An attach that exceeds its deadline stays supervised
//! and may still succeed.
//!
//! The duration of an attach is not known in advance: 2 s on one system, 34 s on another,
//! multiplied by the number of GPUs if the driver serialises attaches by a global lock. So a
//! deadline counts from the last sign of progress: an interrupt of the GPU, or the driver's answer
//! for another GPU. Only the limit of the whole attach counts from its start.

/// The order in which GPUs are attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// All GPUs at the same time.
    Parallel,
    /// One GPU after the other.
    Serial,
    /// All GPUs at the same time; GPUs that fail are retried one after the other when all first
    /// attempts have ended, because two attaches can fail because of each other.
    #[default]
    Auto,
}

impl Policy {
    /// Returns the value as it is written on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Serial => "serial",
            Self::Auto => "auto",
        }
    }

    /// Returns the effective policy of this guest. Under confidential computing the driver holds
    /// its global lock during the whole attach, so that parallel attaches are not faster, and
    /// nothing is retried: a GPU whose attach failed needs a reset first.
    #[must_use]
    pub fn resolve(self, confidential: bool) -> Self {
        if confidential && self == Self::Auto { Self::Serial } else { self }
    }

    /// Returns the maximum number of attempts for one GPU.
    #[must_use]
    pub fn attempts(self) -> u32 {
        if self == Self::Auto { 2 } else { 1 }
    }
}

/// An input of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// This GPU may be attached from now on.
    Begin(usize),
    /// This GPU's attempt succeeded.
    Attached(usize),
    /// This GPU's attempt failed.
    Failed(usize),
    /// This GPU's attempt ended, and the GPU was removed.
    Abandoned(usize),
    /// This GPU shows progress.
    Progress(usize),
    /// Time has passed.
    Clock,
}

/// An effect that the caller carries out. `late` is set for a GPU that had timed out before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start an attempt.
    Start(usize),
    /// The attempt failed and will be repeated.
    Retry(usize),
    /// The GPU is ready.
    Ready {
        /// The GPU.
        gpu: usize,
        /// Whether it had timed out.
        late: bool,
    },
    /// The GPU cannot be used.
    Failed {
        /// The GPU.
        gpu: usize,
        /// Whether it had timed out.
        late: bool,
    },
    /// The attempt exceeded its deadline: the GPU counts as failed, the attempt continues.
    TimedOut {
        /// The GPU.
        gpu: usize,
        /// Whether it had timed out.
        late: bool,
        /// The deadline that was exceeded.
        overdue: Overdue,
    },
}

/// The deadline that an attempt has exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overdue {
    /// No progress for [`Limits::silence_us`].
    Silent,
    /// There was progress, but [`Limits::whole_us`] have passed.
    TooLong,
}

/// Limits of the duration of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Since the last sign of progress, µs.
    pub silence_us: u64,
    /// Since its start, µs.
    pub whole_us: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its unit has not started.
    Idle,
    /// Waits for its first attempt.
    Queued,
    /// In the driver.
    InProgress {
        /// Start of the attempt, µs.
        since: u64,
        /// Time of the last progress, µs.
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
    /// Creates the state of `gpus` GPUs that are not attached.
    #[must_use]
    pub fn new(policy: Policy, limits: Limits, gpus: usize) -> Self {
        Self { policy, limits, slots: vec![NEW; gpus] }
    }

    /// Resets or adds the slot of a hotplugged GPU. Returns `false` while an attempt is in the
    /// driver.
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

    /// Returns the number of attempts for this GPU.
    #[must_use]
    pub fn attempts(&self, gpu: usize) -> u32 {
        self.slots.get(gpu).map_or(0, |slot| slot.attempts)
    }

    /// Returns the effective policy.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Returns when [`Event::Clock`] is due next, µs.
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

    /// Returns the GPUs that time out at `now` unless progress is found.
    pub fn silent(&self, now: u64) -> impl Iterator<Item = usize> {
        let due = move |slot: &Slot| self.deadline(slot).is_some_and(|at| at <= now) && !self.too_long(slot, now);
        self.slots.iter().enumerate().filter(move |(_, slot)| due(slot)).map(|(gpu, _)| gpu)
    }

    fn too_long(&self, slot: &Slot, now: u64) -> bool {
        matches!(slot.state, State::InProgress { since, .. } if since.saturating_add(self.limits.whole_us) <= now)
    }

    /// Records progress of all GPUs: the driver answered for one, which others may have waited for.
    fn all_moved(&mut self, now: u64) {
        for slot in &mut self.slots {
            if let State::InProgress { moved, .. } = &mut slot.state {
                *moved = now;
            }
        }
    }

    /// Processes an event at time `now` (µs); returns the effects in order.
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
