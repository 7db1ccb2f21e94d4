//! How the fabric is, for whoever asks while something else is done.

use std::time::Instant;

use firstlight_partitions::known::Known;
use firstlight_partitions::{Free, Gpus, PartitionId, State as Taken};

use crate::look::Look;
use crate::state::State;

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
}

impl View {
    /// Before the first look.
    #[must_use]
    pub fn new(state: State) -> Self {
        Self { look: Look::default(), looked: None, state, under_way: None, trouble: None }
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
        for (gpu, reason) in &self.state.barred {
            troubles.push(format!("GPU {gpu} is in quarantine ({reason}): fmctl release {gpu} when it is good again"));
        }
        troubles
    }
}

fn words(ids: &[PartitionId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
