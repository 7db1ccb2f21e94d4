//! The published view of fabric and daemon, readable while a change is in progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use firstlight_partitions::known::KnownBaseboard;
use firstlight_partitions::{Allocation, Free, Gpus, PartitionId};

use crate::change_stats::ChangeStats;
use crate::fault::{Fault, Kind};
use crate::manager::ManagerState;
use crate::module_map_store::ModuleMapState;
use crate::snapshot::FabricSnapshot;
use crate::state::State;

/// FM's last list and the daemon's state.
#[derive(Debug, Clone)]
pub struct View {
    /// FM's last list.
    pub fabric: FabricSnapshot,
    /// When it was received.
    pub polled_at: Option<Instant>,
    /// The daemon's state.
    pub state: State,
    /// When the change in progress began.
    pub in_progress: Option<Instant>,
    /// Why the last poll failed, if it did.
    pub poll_error: Option<String>,
    /// The state of FM's process, as PID 1 reports it.
    pub manager: Option<ManagerState>,
    /// Non-fatal SXids, and Xids of GPUs without a known module id, since the daemon's start: by device, the count
    /// and the last one.
    pub noted_faults: BTreeMap<String, (u64, Fault)>,
    /// The module map.
    pub module_map: Arc<ModuleMapState>,
    /// Counts and durations of changes.
    pub change_stats: ChangeStats,
    /// The journal's length, in bytes.
    pub journal_end: u64,
}

impl View {
    /// Returns the view before the first poll.
    #[must_use]
    pub fn new(state: State) -> Self {
        let (fabric, module_map, change_stats) = (FabricSnapshot::default(), Arc::default(), ChangeStats::default());
        let (manager, noted_faults) = (None, BTreeMap::new());
        Self {
            fabric,
            polled_at: None,
            state,
            in_progress: None,
            poll_error: None,
            manager,
            noted_faults,
            module_map,
            change_stats,
            journal_end: 0,
        }
    }

    /// Returns the GPUs that are in use and those that are quarantined.
    #[must_use]
    pub fn taken(&self) -> Allocation {
        Allocation { busy: self.state.busy().with(self.fabric.busy()), quarantined: self.state.quarantined() }
    }

    /// Returns the number of free partitions.
    #[must_use]
    pub fn free(&self) -> Free {
        self.fabric.table.free(&self.taken())
    }

    /// Returns whether all these GPUs are free.
    #[must_use]
    pub fn is_free(&self, gpus: Gpus) -> bool {
        let Allocation { busy, quarantined } = self.taken();
        !gpus.overlaps(busy.with(quarantined))
    }

    /// Returns whether a change of this partition is in progress.
    #[must_use]
    pub fn is_changing(&self, id: PartitionId) -> bool {
        self.state.in_progress.as_ref().is_some_and(|pending| pending.change.partition() == id)
    }

    /// Returns the name of the baseboard whose known table FM's list is.
    #[must_use]
    pub fn baseboard(&self) -> Option<&'static str> {
        KnownBaseboard::matching(&self.fabric.table).map(|known| known.name)
    }

    /// Returns the problems with their remedies, most urgent first.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if let Some(outage) = &self.state.outage {
            problems.push(format!(
                "the fabric has lost partitions {} while tenants had them ({}): stop those tenants, then fmctl reconcile",
                id_list(&outage.partitions),
                outage.reason
            ));
        }
        if let Some(manager_state) = self.manager.as_ref().filter(|manager_state| !manager_state.ready) {
            // Without the elapsed time: it would be a new event for Watch at every poll.
            problems.push(format!(
                "the fabric manager exited ({}): PID 1 restarts it; its log is on the guest's console",
                manager_state.detail
            ));
        }
        problems.extend(self.poll_error.clone());
        if let (None, Some(pending)) = (self.in_progress, &self.state.in_progress) {
            problems.push(format!(
                "the outcome of change {} of partition {} is unknown; it is determined when the fabric manager answers",
                pending.number,
                pending.change.partition()
            ));
        }
        let unowned = self.fabric.unowned(&self.state);
        if !unowned.is_empty() {
            problems.push(format!(
                "partitions {} are active without a recorded owner: fmctl reconcile with the running tenants",
                id_list(&unowned)
            ));
        }
        for (switch, reason) in &self.state.faulty_switches {
            problems.push(format!(
                "NVSwitch {switch} had a fatal error ({reason}): no new partitions of several GPUs; stop the tenants that have some, \
                 reset their GPUs, then fmctl release {switch}"
            ));
        }
        problems.extend(self.module_map.problem(&self.fabric, self.state.quarantined()));
        for (gpu, reason) in &self.state.quarantined {
            problems.push(format!("GPU {gpu} is quarantined ({reason}): fmctl release {gpu} after repair"));
        }
        problems
    }
}

/// Maximum number of devices with noted errors.
const MAX_DEVICES: usize = 64;

impl View {
    /// Notes a non-fatal SXid, or an Xid of an unknown GPU.
    pub fn note_fault(&mut self, fault: Fault) {
        if self.noted_faults.contains_key(&fault.device) || self.noted_faults.len() < MAX_DEVICES {
            let entry = self.noted_faults.entry(fault.device.clone()).or_insert_with(|| (0, fault.clone()));
            *entry = (entry.0 + 1, fault);
        }
    }

    /// Returns the noted errors: a switch with many of them may fail soon.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let note = |(device, (count, last)): (&String, &(u64, Fault))| {
            let what = if last.kind == Kind::Xid { "GPU" } else { "NVSwitch" };
            format!("{what} {device}: {count} errors, the last: {last}")
        };
        self.noted_faults.iter().map(note).collect()
    }
}

fn id_list(ids: &[PartitionId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
