//! Changes to the fabric, one at a time.

use std::fmt;
use std::time::Instant;

use firstlight_partitions::{Gpus, PartitionId, Request, State as Taken};
use firstlight_pci::Address;
use firstlight_sys::nvfm;

use crate::fabric::Fabric;
use crate::fault::{Fault, Kind};
use crate::journal::Journal;
use crate::look::{Look, Step};
use crate::meaning::Meaning;
use crate::modules::Modules;
use crate::refused::Refused;
use crate::state::{Begun, Change, Ended, Heard, Record, State};
use crate::tally::Tally;

mod inventory;

pub use inventory::{Noted, Said, Wish};

/// Which GPUs somebody wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    /// So many, whichever.
    Count(u32),
    /// Exactly these.
    Gpus(Gpus),
    /// Those of this partition.
    Partition(PartitionId),
    /// Exactly those at these places on the host.
    Pci(Vec<Address>),
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count} GPUs"),
            Self::Gpus(gpus) => write!(f, "GPUs {gpus}"),
            Self::Partition(id) => write!(f, "partition {id}"),
            Self::Pci(places) => {
                let places: Vec<String> = places.iter().map(ToString::to_string).collect();
                write!(f, "GPUs at {}", places.join(","))
            }
        }
    }
}

/// A partition that is active for whoever asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activated {
    /// Which.
    pub partition: PartitionId,
    /// Its GPUs.
    pub gpus: Gpus,
    /// The same request had it already.
    pub again: bool,
}

/// The daemon's heart: FM, the journal, and what is known.
pub struct Engine<F> {
    fabric: F,
    journal: Journal,
    state: State,
    modules: Modules,
    /// What changes there were, and how long they took.
    tally: Tally,
    /// What FM listed last, and when.
    seen: Option<(Look, Instant)>,
    /// Is told what is known whenever that is another.
    observer: Box<dyn FnMut(&State) + Send>,
}

impl<F: fmt::Debug> fmt::Debug for Engine<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fabric, journal, state, .. } = self;
        f.debug_struct("Engine").field("fabric", fabric).field("journal", journal).field("state", state).finish()
    }
}

fn word(what: &'static str, text: &str) -> Result<(), Refused> {
    if (1..=128).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(Refused::Word { what, text: text.chars().take(200).collect() })
}

impl<F> Engine<F> {
    /// Where the journal ends, in bytes.
    #[must_use]
    pub fn journal_end(&self) -> u64 {
        self.journal.end()
    }

    /// What is known without asking FM.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What changes there were.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// What FM listed last, and when.
    #[must_use]
    pub fn seen(&self) -> Option<&(Look, Instant)> {
        self.seen.as_ref()
    }
}

impl<F: Fabric> Engine<F> {
    /// Goes on where the journal ends. What was under way is settled before the next change.
    #[must_use]
    pub fn new(fabric: F, (journal, state): (Journal, State)) -> Self {
        let (modules, tally) = (Modules::default(), Tally::default());
        Self { fabric, journal, state, modules, tally, seen: None, observer: Box::new(|_| {}) }
    }

    /// Tells `observer` what is known whenever that is another, also while FM is asked.
    pub fn observe(&mut self, observer: impl FnMut(&State) + Send + 'static) {
        self.observer = Box::new(observer);
    }

    /// The fabric manager.
    pub fn fabric(&mut self) -> &mut F {
        &mut self.fabric
    }

    fn write(&mut self, record: Record) -> Result<(), Refused> {
        let mut state = self.state.clone();
        state.apply(record.clone()).map_err(Refused::Record)?;
        self.journal.append(&record, &state)?;
        self.state = state;
        (self.observer)(&self.state);
        Ok(())
    }

    fn look(&mut self, doing: &str) -> Result<Look, Refused> {
        let listed = self.fabric.partitions();
        let look = Look::of(&listed.map_err(|error| Refused::Fabric { doing: doing.to_owned(), error })?)?;
        self.seen = Some((look.clone(), Instant::now()));
        Ok(look)
    }

    /// Looks at the fabric, ends what was under way, and notes what FM has lost.
    ///
    /// # Errors
    /// FM does not answer or lists what cannot be, or nothing can be written down.
    pub fn settle(&mut self) -> Result<Look, Refused> {
        let mut look = match self.look("list the partitions") {
            Err(Refused::Fabric { error, .. }) if self.resumed(&error) => self.look("list the partitions")?,
            other => other?,
        };
        if let Some(begun) = self.state.under_way.clone() {
            let is_active = look.active.contains(&begun.change.partition());
            match &begun.change {
                Change::Activate { .. } if is_active => self.write(Record::Ended(Ended::Done))?,
                Change::Activate { .. } => {
                    let why = "it was interrupted, and the fabric manager has it not active".to_owned();
                    self.write(Record::Ended(Ended::Undone { why }))?;
                }
                // Whoever asked has no tenant on it any more, and was not told that it is done.
                Change::Deactivate { partition } if is_active => {
                    let partition = *partition;
                    let answer = self.fabric.deactivate(partition);
                    look = self.ended(&begun, answer)?;
                }
                Change::Deactivate { .. } => self.write(Record::Ended(Ended::Done))?,
            }
        }
        let lost = look.lost(&self.state);
        if !lost.is_empty() {
            let why = "the fabric manager lists them as not active: it has begun anew".to_owned();
            self.write(Record::Lost { partitions: lost, why })?;
        }
        Ok(look)
    }

    /// Tells an FM that was restarted beside running tenants what is active: it
    /// waits for that, and ends if nobody says it. One that has begun anew refuses.
    /// What is under way is not active: its tenant does not run yet, or no more.
    fn resumed(&mut self, error: &nvfm::Error) -> bool {
        // Who knows nothing must not say that nothing is active.
        if Meaning::of_error(error) != Meaning::NotReady || self.state.number == 0 {
            return false;
        }
        let under_way = self.state.under_way.as_ref().map(|begun| begun.change.partition());
        let held = self.state.holdings.keys().copied();
        let ids: Vec<PartitionId> = held.filter(|id| under_way != Some(*id)).collect();
        self.fabric.set_activated(&ids).is_ok()
    }

    /// Writes down what came of a change, whatever FM has answered: its list decides.
    fn ended(&mut self, begun: &Begun, answer: Result<(), nvfm::Error>) -> Result<Look, Refused> {
        let partition = begun.change.partition();
        let unsettled = |why: String| Refused::Unsettled { number: begun.number, partition, why };
        let look = self.look("list the partitions").map_err(|error| match &answer {
            Ok(()) => unsettled(error.to_string()),
            Err(first) => unsettled(format!("{first}; then {error}")),
        })?;
        let wanted = matches!(begun.change, Change::Activate { .. });
        if look.active.contains(&partition) == wanted {
            self.write(Record::Ended(Ended::Done))?;
            return Ok(look);
        }
        let verb = if wanted { "activate" } else { "deactivate" };
        let doing = format!("{verb} partition {partition}");
        let code = nvfm::Code::GENERIC;
        // It said that it has, and lists that it has not.
        let error = answer.err().unwrap_or(nvfm::Error::Refused { call: "fmGetSupportedFabricPartitions", code });
        self.write(Record::Ended(Ended::Undone { why: error.to_string() }))?;
        Err(Refused::Fabric { doing, error })
    }

    fn carry_out(&mut self, request: &str, asked: &str, change: Change) -> Result<Look, Refused> {
        let number = self.state.number + 1;
        let begun = Begun { number, request: request.to_owned(), asked: asked.to_owned(), change };
        self.write(Record::Begun(begun.clone()))?;
        let since = Instant::now();
        let answer = match begun.change {
            Change::Activate { partition, .. } => self.fabric.activate(partition),
            Change::Deactivate { partition } => self.fabric.deactivate(partition),
        };
        let ended = self.ended(&begun, answer);
        self.tally.count(&begun.change, &ended, since.elapsed());
        ended
    }

    /// The outcome of the same request, if it was done.
    fn again(&self, request: &str, asked: &str) -> Result<Option<&Change>, Refused> {
        let used = |was: &str| Refused::Request { request: request.to_owned(), was: was.to_owned() };
        if let Some(begun) =
            self.state.under_way.as_ref().filter(|begun| begun.request == request && begun.asked != asked)
        {
            return Err(used(&begun.asked));
        }
        match self.state.remembers(request) {
            Some(known) if known.asked == asked => Ok(Some(&known.change)),
            Some(known) => Err(used(&known.asked)),
            None => Ok(None),
        }
    }

    /// What the same request was given, if it has it still. One that comes late must not give it anew.
    fn activated_before(&self, request: &str, asked: &str) -> Result<Option<Activated>, Refused> {
        let Some(Change::Activate { partition, gpus, owner }) = self.again(request, asked)? else { return Ok(None) };
        if self.state.holdings.get(partition).is_some_and(|holding| holding.owner == *owner) {
            return Ok(Some(Activated { partition: *partition, gpus: *gpus, again: true }));
        }
        Err(Refused::Over { request: request.to_owned(), partition: *partition })
    }

    fn unless_lost(&self) -> Result<(), Refused> {
        match &self.state.outage {
            Some(outage) => Err(Refused::Outage { partitions: outage.partitions.clone(), why: outage.why.clone() }),
            None => Ok(()),
        }
    }

    /// Which partition a request would get now, without giving it.
    ///
    /// # Errors
    /// Why it would get none.
    pub fn plan(&mut self, wish: impl Into<Wish>) -> Result<firstlight_partitions::Choice, Refused> {
        let wish = wish.into();
        let look = self.settle()?;
        let request = match &wish.ask {
            Ask::Count(count) => Request::Count(*count),
            Ask::Gpus(gpus) => Request::Exactly(*gpus),
            Ask::Partition(id) => Request::Exactly(look.partition(*id)?.gpus),
            Ask::Pci(places) => Request::Exactly(self.modules.known().at(places)?),
        };
        let taken = Taken { busy: self.state.busy().with(look.busy()), barred: self.state.barred() };
        let choice = look.table.plan(&taken, request)?;
        self.by_map(&look, &wish, &choice.partition)?;
        // Which GPUs a switch's links lead to, nobody says. A lone GPU needs none.
        match self.state.faulty.iter().next().filter(|_| choice.partition.gpus.count() > 1) {
            Some((switch, reason)) => Err(Refused::Switch { switch: switch.clone(), reason: reason.clone() }),
            None => Ok(choice),
        }
    }

    /// Activates a partition for `owner`. The same request again is answered the same.
    ///
    /// # Errors
    /// Why not; [`Refused::Unsettled`] says that it may still come to be.
    pub fn activate(&mut self, request: &str, wish: impl Into<Wish>, owner: &str) -> Result<Activated, Refused> {
        word("request", request)?;
        word("owner", owner)?;
        let wish = wish.into();
        let asked = format!("activate {} for {owner}", wish.ask);
        if let Some(activated) = self.activated_before(request, &asked)? {
            return Ok(activated);
        }
        let choice = self.plan(wish);
        // That may have settled this very request, if it was interrupted.
        if let Some(activated) = self.activated_before(request, &asked)? {
            return Ok(activated);
        }
        self.unless_lost()?;
        let partition = choice?.partition;
        let (id, gpus) = (partition.id, partition.gpus);
        self.carry_out(request, &asked, Change::Activate { partition: id, gpus, owner: owner.to_owned() })?;
        Ok(Activated { partition: id, gpus, again: false })
    }

    /// Deactivates a partition of `owner`; whether it was active. Its tenant has to be gone.
    ///
    /// # Errors
    /// Why not; [`Refused::Unsettled`] says that it is asked for again when FM answers.
    pub fn deactivate(&mut self, request: &str, partition: PartitionId, owner: &str) -> Result<bool, Refused> {
        word("request", request)?;
        word("owner", owner)?;
        let asked = format!("deactivate partition {partition} of {owner}");
        if self.again(request, &asked)?.is_some() {
            return Ok(true);
        }
        let look = self.settle()?;
        if self.again(request, &asked)?.is_some() {
            return Ok(true);
        }
        look.partition(partition)?;
        match self.state.holdings.get(&partition) {
            Some(holding) if holding.owner != owner => {
                let (holder, owner) = (holding.owner.clone(), owner.to_owned());
                Err(Refused::Held { partition, holder, owner })
            }
            Some(_) => self.carry_out(request, &asked, Change::Deactivate { partition }).map(|_| true),
            None if look.active.contains(&partition) => Err(Refused::Foreign { partition }),
            None => Ok(false),
        }
    }

    /// What would make the fabric exactly this: partitions and whose they are.
    ///
    /// # Errors
    /// What is wanted cannot be, or FM does not answer.
    pub fn steps(&mut self, wanted: &[(PartitionId, String)]) -> Result<Vec<Step>, Refused> {
        wanted.iter().try_for_each(|(_, owner)| word("owner", owner))?;
        self.settle()?.steps(&self.state, wanted)
    }

    /// Makes the fabric exactly this. Who asks knows which tenants run: what is
    /// not named is switched off. Ends an outage.
    ///
    /// # Errors
    /// As [`Engine::steps`]; or a step failed, and those before it are done.
    pub fn reconcile(&mut self, request: &str, wanted: &[(PartitionId, String)]) -> Result<Vec<Step>, Refused> {
        word("request", request)?;
        let steps = self.steps(wanted)?;
        for (at, step) in steps.iter().enumerate() {
            match step.clone() {
                Step::Found { partition, gpus, owner } => self.write(Record::Found { partition, gpus, owner })?,
                Step::Change(change) => {
                    let asked = format!("reconcile: step {at}");
                    self.carry_out(&format!("{request}/{at}"), &asked, change)?;
                }
            }
        }
        if self.state.outage.is_some() {
            self.write(Record::Reconciled)?;
        }
        Ok(steps)
    }

    /// Keeps a GPU from everybody. Whoever has it keeps it until it is deactivated.
    ///
    /// # Errors
    /// There is no such GPU, FM does not answer, or nothing can be written down.
    pub fn quarantine(&mut self, gpu: u32, reason: &str) -> Result<(), Refused> {
        let gpus = self.settle()?.table.gpus();
        if !gpus.ids().any(|id| id == gpu) {
            return Err(Refused::NoGpu { gpu, gpus });
        }
        let reason: String = reason.chars().filter(|letter| !letter.is_control()).take(200).collect();
        if self.state.barred.get(&gpu) == Some(&reason) { Ok(()) } else { self.write(Record::Barred { gpu, reason }) }
    }

    /// Lets a GPU be given again; whether it was kept.
    ///
    /// # Errors
    /// Nothing can be written down.
    pub fn release(&mut self, gpu: u32) -> Result<bool, Refused> {
        let was = self.state.barred.contains_key(&gpu);
        if was {
            self.write(Record::Released { gpu })?;
        }
        Ok(was)
    }

    /// Takes a line of the kernel's log, each once; whether it means anything for who gets what.
    /// What takes links from tenants keeps partitions from
    /// new ones until somebody has looked; a GPU of this machine that is not well is kept from everybody.
    ///
    /// # Errors
    /// Nothing can be written down.
    pub fn heard(&mut self, boot: &str, number: u64, fault: &Fault) -> Result<bool, Refused> {
        let reason = fault.to_string();
        let record = match fault.kind {
            Kind::FatalOfSwitch => Record::Faulty { switch: fault.device.clone(), reason },
            // Those that FM lists with their addresses; on H100 and later it lists none.
            Kind::OfGpu => match self.seen.as_ref().and_then(|(look, _)| look.gpu_at(&fault.device)) {
                Some(gpu) => Record::Barred { gpu, reason },
                None => return Ok(false),
            },
            Kind::OfSwitch => return Ok(false),
        };
        let is_known = |heard: &Heard| heard.boot == boot && heard.number >= number;
        if !self.state.heard.as_ref().is_some_and(is_known) {
            self.write(record)?;
            self.write(Record::Heard(Heard { boot: boot.to_owned(), number }))?;
        }
        Ok(true)
    }

    /// Relies on a switch again.
    ///
    /// # Errors
    /// It was relied on all the time, or nothing can be written down.
    pub fn mended(&mut self, switch: &str) -> Result<(), Refused> {
        if !self.state.faulty.contains_key(switch) {
            let there = self.state.faulty.keys().cloned().collect::<Vec<_>>().join(", ");
            let switch = switch.chars().filter(|letter| !letter.is_control()).take(32).collect();
            return Err(Refused::NoSwitch { switch, there });
        }
        self.write(Record::Mended { switch: switch.to_owned() })
    }
}

#[cfg(test)]
mod tests;
