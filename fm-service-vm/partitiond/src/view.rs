//! How the fabric is, for whoever asks while something else is done.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use firstlight_partitions::known::Known;
use firstlight_partitions::{Free, Gpus, PartitionId, State as Taken};

use crate::fault::{Fault, Kind};
use crate::look::Look;
use crate::manager::News;
use crate::modules::Known as Modules;
use crate::state::State;
use crate::tally::Tally;

/// The last look at the fabric, and what is known now.
#[derive(Debug, Clone)]
pub struct View {
    /// What FM listed.
    pub look: Look,
    /// When.
    pub looked: Option<Instant>,
    /// What is known.
    pub state: State,
    /// Since when a change is under way.
    pub under_way: Option<Instant>,
    /// Why FM could not be looked at, if the last try failed.
    pub trouble: Option<String>,
    /// What PID 1 says of FM's process.
    pub manager: Option<News>,
    /// Errors that switches got over by themselves, and those of GPUs that nobody knows, since the daemon began: by device,
    /// how often, and the last.
    pub passing: BTreeMap<String, (u64, Fault)>,
    /// The module map.
    pub modules: Arc<Modules>,
    /// What changes there were.
    pub tally: Tally,
    /// Where the journal ends, in bytes.
    pub journal_end: u64,
}

impl View {
    /// Before the first look.
    #[must_use]
    pub fn new(state: State) -> Self {
        let (look, modules, tally) = (Look::default(), Arc::default(), Tally::default());
        let (manager, passing) = (None, BTreeMap::new());
        Self {
            look,
            looked: None,
            state,
            under_way: None,
            trouble: None,
            manager,
            passing,
            modules,
            tally,
            journal_end: 0,
        }
    }

    /// GPUs that nobody else can have, and those that nobody may.
    #[must_use]
    pub fn taken(&self) -> Taken {
        Taken { busy: self.state.busy().with(self.look.busy()), barred: self.state.barred() }
    }

    /// What could be had now.
    #[must_use]
    pub fn free(&self) -> Free {
        self.look.table.free(&self.taken())
    }

    /// Whether a set of GPUs could be had now.
    #[must_use]
    pub fn is_free(&self, gpus: Gpus) -> bool {
        let Taken { busy, barred } = self.taken();
        !gpus.meets(busy.with(barred))
    }

    /// Whether a change of this partition is under way.
    #[must_use]
    pub fn is_under_way(&self, id: PartitionId) -> bool {
        self.state.under_way.as_ref().is_some_and(|begun| begun.change.partition() == id)
    }

    /// The baseboard that the list is known of.
    #[must_use]
    pub fn baseboard(&self) -> Option<&'static str> {
        Known::like(&self.look.table).map(|known| known.name)
    }

    /// What is not well, most urgent first, each with what to do.
    #[must_use]
    pub fn troubles(&self) -> Vec<String> {
        let mut troubles = Vec::new();
        if let Some(outage) = &self.state.outage {
            troubles.push(format!(
                "the fabric has lost partitions {} while tenants had them ({}): stop those tenants, then fmctl reconcile",
                words(&outage.partitions),
                outage.why
            ));
        }
        if let Some(news) = self.manager.as_ref().filter(|news| !news.serves) {
            // Without how long ago: who watches would be told of it again at every look.
            troubles.push(format!(
                "the fabric manager has ended ({}): PID 1 starts it again; its lines are on the machine's console",
                news.detail
            ));
        }
        troubles.extend(self.trouble.clone());
        if let (None, Some(begun)) = (self.under_way, &self.state.under_way) {
            troubles.push(format!(
                "what came of change {} of partition {} is not known; it is settled when the fabric manager answers",
                begun.number,
                begun.change.partition()
            ));
        }
        let foreign = self.look.foreign(&self.state);
        if !foreign.is_empty() {
            troubles.push(format!(
                "partitions {} are active and nobody's here: fmctl reconcile with the tenants that run",
                words(&foreign)
            ));
        }
        for (switch, reason) in &self.state.faulty {
            troubles.push(format!(
                "NVSwitch {switch} had a fatal error ({reason}): no new partitions of several GPUs; stop the tenants that have some, \
                 reset their GPUs, then fmctl release {switch}"
            ));
        }
        troubles.extend(self.modules.trouble(&self.look, self.state.barred()));
        for (gpu, reason) in &self.state.barred {
            troubles.push(format!("GPU {gpu} is in quarantine ({reason}): fmctl release {gpu} when it is good again"));
        }
        troubles
    }
}

/// Devices that are remembered for errors that pass.
const DEVICES: usize = 64;

impl View {
    /// Remembers an error that has passed, or that is nobody's.
    pub fn pass(&mut self, fault: Fault) {
        if self.passing.contains_key(&fault.device) || self.passing.len() < DEVICES {
            let entry = self.passing.entry(fault.device.clone()).or_insert_with(|| (0, fault.clone()));
            *entry = (entry.0 + 1, fault);
        }
    }

    /// What has passed, for who wants to know: a switch that has many is about to have worse.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let note = |(device, (count, last)): (&String, &(u64, Fault))| {
            let what = if last.kind == Kind::OfGpu { "GPU" } else { "NVSwitch" };
            format!("{what} {device}: {count} errors that passed, the last: {last}")
        };
        self.passing.iter().map(note).collect()
    }
}

fn words(ids: &[PartitionId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
