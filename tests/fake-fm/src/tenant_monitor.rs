//! The log of calls, and the detection of violations against tenants.

use std::collections::BTreeSet;

use firstlight_partitions::PartitionId;
use serde::{Deserialize, Serialize};

use crate::board::Board;
use crate::call::{Call, Op};
use crate::machine::{Phase, State};

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Microseconds since the start of the process.
    pub time_us: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: LogEvent,
}

/// The content of a log line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LogEvent {
    /// A call was answered.
    Call {
        /// The kind of call.
        op: Op,
        /// The partitions that it named.
        ids: Vec<PartitionId>,
        /// The returned code.
        rc: i32,
    },
    /// The phase has changed.
    Phase {
        /// The new phase.
        phase: Phase,
    },
    /// A violation.
    Violation {
        /// The description, in one line.
        violation: String,
    },
}

fn is_ready(phase: Phase) -> bool {
    matches!(phase, Phase::Ready | Phase::ReadyRestarted)
}

/// Partitions that virtual machines use, and violations against them.
#[derive(Debug, Clone, Default)]
pub struct TenantMonitor {
    tenants: BTreeSet<PartitionId>,
    /// Tenants without an active partition that were reported.
    cut: BTreeSet<PartitionId>,
}

impl TenantMonitor {
    /// Starts with these tenants.
    #[must_use]
    pub fn new(tenants: BTreeSet<PartitionId>) -> Self {
        Self { tenants, cut: BTreeSet::new() }
    }

    /// Starts or stops a virtual machine; a violation if its partition is not active.
    pub fn tenant(&mut self, partition: PartitionId, running: bool, board: &Board, state: &State) -> Vec<String> {
        if running {
            self.tenants.insert(partition);
        } else {
            self.tenants.remove(&partition);
        }
        self.look(board, state)
    }

    /// Checks a GPU reset: no tenant may have the GPU, and on old baseboards no active partition.
    #[must_use]
    pub fn reset(&self, gpu: u32, board: &Board, state: &State) -> Vec<String> {
        let in_use = self.tenants.iter().filter(|id| board.has(**id, gpu));
        let of_tenants = in_use.map(|id| format!("GPU {gpu} is reset while the tenant of partition {id} runs"));
        let loses = |id: &&PartitionId| board.has(**id, gpu) && board.trains_links(**id);
        let untrained = state.active.iter().filter(loses);
        let untrained = untrained.map(|id| format!("GPU {gpu} is reset and loses the links of active partition {id}"));
        of_tenants.chain(untrained).collect()
    }

    /// Checks a call before its execution for harm to tenants.
    #[must_use]
    pub fn asked(&self, request: &Call, board: &Board, state: &State) -> Vec<String> {
        let ready = is_ready(state.phase);
        match request {
            Call::Deactivate(id) if ready && self.tenants.contains(id) => {
                vec![format!("partition {id} is to be deactivated while its tenant runs")]
            }
            Call::Activate(id) | Call::ActivateWithVfs(id) if ready => {
                let others = self.tenants.iter().filter(|other| *other != id && board.overlap(*id, **other));
                others
                    .map(|other| format!("partition {id} is to be activated, of GPUs that the tenant of {other} has"))
                    .collect()
            }
            Call::SetActivated(ids) if state.phase == Phase::RestartWait => {
                let forgotten = self.tenants.iter().filter(|tenant| !ids.contains(tenant));
                forgotten
                    .map(|tenant| format!("the list after the restart lacks {tenant}, whose tenant runs"))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns new violations after each step.
    pub fn look(&mut self, board: &Board, state: &State) -> Vec<String> {
        let mut wrong = Vec::new();
        let active: Vec<PartitionId> = state.active.iter().copied().collect();
        for (at, one) in active.iter().enumerate() {
            for other in active[..at].iter().filter(|other| board.overlap(*one, **other)) {
                wrong.push(format!("partitions {other} and {one} are both active and share a GPU"));
            }
        }
        // Until then the active partitions are unknown, and links are as before the restart.
        if !is_ready(state.phase) {
            return wrong;
        }
        let cut: BTreeSet<PartitionId> = self.tenants.difference(&state.active).copied().collect();
        wrong.extend(
            cut.difference(&self.cut).map(|id| format!("the tenant of partition {id} runs and it is not active")),
        );
        self.cut = cut;
        wrong
    }

    /// Returns the partitions with running tenants.
    #[must_use]
    pub fn tenants(&self) -> &BTreeSet<PartitionId> {
        &self.tenants
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::{Failed, Policy};
    use firstlight_partitions::known;

    fn board() -> Board {
        Board::new(&known::H100, Failed::default(), Policy::default())
    }

    fn state(phase: Phase, active: &[PartitionId]) -> State {
        State { phase, active: active.iter().copied().collect() }
    }

    #[test]
    fn tenant_without_its_partition_is_a_violation() {
        let (board, with, without) = (board(), state(Phase::Ready, &[3]), state(Phase::Ready, &[]));
        let mut tenant_monitor = TenantMonitor::default();
        assert!(tenant_monitor.tenant(3, true, &board, &with).is_empty());
        assert_eq!(tenant_monitor.asked(&Call::Deactivate(3), &board, &with).len(), 1);
        assert_eq!(tenant_monitor.look(&board, &without).len(), 1);
        assert!(tenant_monitor.look(&board, &without).is_empty(), "reported once");
        assert!(tenant_monitor.look(&board, &with).is_empty());
        assert_eq!(tenant_monitor.look(&board, &without).len(), 1, "cut again");
        assert!(tenant_monitor.tenant(3, false, &board, &without).is_empty());
        assert!(tenant_monitor.asked(&Call::Deactivate(3), &board, &with).is_empty());
        assert_eq!(
            tenant_monitor.tenant(7, true, &board, &without).len(),
            1,
            "started before its partition was active"
        );
    }

    #[test]
    fn gpu_reset_under_a_tenant_is_a_violation() {
        let active = state(Phase::Ready, &[7, 19]);
        let old = Board::new(&known::A100_16, Failed::default(), Policy::default());
        assert_eq!(TenantMonitor::default().reset(1, &old, &active).len(), 1, "of 7");
        assert!(TenantMonitor::default().reset(5, &old, &active).is_empty());
        assert!(TenantMonitor::default().reset(1, &old, &state(Phase::Ready, &[19])).is_empty(), "it has no links");
        let (board, active) = (board(), state(Phase::Ready, &[3]));
        assert!(TenantMonitor::default().reset(1, &board, &active).is_empty());
        assert_eq!(TenantMonitor::new([3].into()).reset(1, &board, &active).len(), 1);
        assert!(TenantMonitor::new([3].into()).reset(2, &board, &active).is_empty());
    }

    #[test]
    fn requests_against_tenants_are_violations() {
        let (board, active) = (board(), state(Phase::Ready, &[3]));
        let mut tenant_monitor = TenantMonitor::new([3].into());
        assert_eq!(tenant_monitor.asked(&Call::Activate(7), &board, &active).len(), 1, "GPU 1");
        assert!(tenant_monitor.asked(&Call::Activate(4), &board, &active).is_empty());
        assert!(tenant_monitor.asked(&Call::Activate(3), &board, &active).is_empty(), "asked twice");
        let waiting = state(Phase::RestartWait, &[]);
        assert!(tenant_monitor.look(&board, &waiting).is_empty(), "not known yet");
        assert!(tenant_monitor.asked(&Call::Deactivate(3), &board, &waiting).is_empty(), "refused");
        assert_eq!(tenant_monitor.asked(&Call::SetActivated(vec![4]), &board, &waiting).len(), 1);
        assert!(tenant_monitor.asked(&Call::SetActivated(vec![4, 3]), &board, &waiting).is_empty());
        assert_eq!(tenant_monitor.look(&board, &state(Phase::Ready, &[])).len(), 1, "a full start under a tenant");
        assert_eq!(TenantMonitor::default().look(&board, &state(Phase::Ready, &[3, 7])).len(), 1, "GPU 1 twice");
    }
}
