//! The manager's lifecycle as a state machine, without time and files.

use std::collections::BTreeSet;

use firstlight_partitions::PartitionId;
use serde::{Deserialize, Serialize};

use crate::board::Board;
use crate::call::Call;
use crate::codes::{self, Family};

/// The maximum number of partitions in a list.
pub const MAX_PARTITIONS: usize = 64;

/// The phase of the manager's lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Training links.
    Starting,
    /// Links are unchanged; the list of active partitions is awaited.
    RestartWait,
    /// Ready.
    Ready,
    /// Ready after a restart: failed devices are unknown then.
    ReadyRestarted,
    /// The start failed, and the configuration keeps the process.
    FailedResident,
    /// The process exits.
    Ended,
}

/// The constants of a run.
#[derive(Debug, Clone)]
pub struct Rules {
    /// The baseboard.
    pub board: Board,
    /// The generation, which determines the codes.
    pub family: Family,
    /// `FABRIC_MODE=1`.
    pub shared: bool,
    /// Links are unchanged, and the list is awaited.
    pub restart: bool,
    /// `FM_STAY_RESIDENT_ON_FAILURES=1`.
    pub resident: bool,
    /// The code for an unexpected list of active partitions: unknown, -3 is a guess.
    pub unexpected_list_code: i32,
}

/// The variable state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// The phase.
    pub phase: Phase,
    /// Active partitions.
    pub active: BTreeSet<PartitionId>,
}

impl Default for State {
    fn default() -> Self {
        Self { phase: Phase::Starting, active: BTreeSet::new() }
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Switches and state file are valid.
    Started,
    /// They are not.
    StartFailed,
    /// The window for the list after a restart has passed.
    WindowOver,
    /// A call.
    Called(Call),
}

/// Returns the next state, and the code of a call.
#[must_use]
pub fn step(rules: &Rules, state: &State, event: &Event) -> (State, i32) {
    let to = |phase| State { phase, ..state.clone() };
    match event {
        Event::Started if state.phase == Phase::Starting => {
            (to(if rules.restart { Phase::RestartWait } else { Phase::Ready }), codes::SUCCESS)
        }
        Event::StartFailed if state.phase == Phase::Starting => {
            (to(if rules.resident { Phase::FailedResident } else { Phase::Ended }), codes::SUCCESS)
        }
        Event::WindowOver if state.phase == Phase::RestartWait => (to(Phase::Ended), codes::SUCCESS),
        Event::Started | Event::StartFailed | Event::WindowOver => (state.clone(), codes::SUCCESS),
        Event::Called(request) => match answer(rules, state, request) {
            Ok(state) => (state, codes::SUCCESS),
            Err(code) => (state.clone(), code),
        },
    }
}

fn answer(rules: &Rules, state: &State, request: &Call) -> Result<State, i32> {
    if let Call::SetActivated(ids) = request {
        return match state.phase {
            Phase::RestartWait if rules.shared => set_activated(rules, ids),
            Phase::Ended => Err(codes::CONNECTION_NOT_VALID),
            _ => Err(rules.unexpected_list_code),
        };
    }
    match state.phase {
        Phase::Starting | Phase::RestartWait | Phase::FailedResident => return Err(codes::NOT_CONFIGURED),
        Phase::Ended => return Err(codes::CONNECTION_NOT_VALID),
        Phase::Ready | Phase::ReadyRestarted => {}
    }
    let unknown = |id: PartitionId| !rules.board.supports(id);
    match *request {
        Call::FailedDevices if state.phase == Phase::Ready => Ok(state.clone()),
        Call::FailedDevices => Err(codes::NOT_SUPPORTED),
        _ if !rules.shared => Err(codes::NOT_SUPPORTED),
        Call::List | Call::Unsupported => Ok(state.clone()),
        // For the vGPU mode.
        Call::ActivateWithVfs(_) => Err(codes::NOT_SUPPORTED),
        Call::SetActivated(_) => Err(rules.unexpected_list_code),
        Call::Activate(id) | Call::Deactivate(id) if unknown(id) => Err(codes::BAD_PARAM),
        Call::Activate(id) => {
            if state.active.contains(&id) {
                return Err(rules.family.already_active());
            }
            if state.active.iter().any(|other| rules.board.overlap(id, *other)) {
                return Err(rules.family.overlap());
            }
            let mut next = state.clone();
            next.active.insert(id);
            Ok(next)
        }
        Call::Deactivate(id) => {
            let mut next = state.clone();
            if next.active.remove(&id) { Ok(next) } else { Err(rules.family.not_active()) }
        }
    }
}

/// An invalid list keeps it waiting.
fn set_activated(rules: &Rules, ids: &[PartitionId]) -> Result<State, i32> {
    let board = &rules.board;
    let clash = |at: usize, id: PartitionId| ids[..at].iter().any(|other| board.overlap(id, *other));
    let wrong = ids.iter().enumerate().any(|(at, id)| !board.supports(*id) || clash(at, *id));
    if wrong || ids.len() > MAX_PARTITIONS {
        return Err(codes::BAD_PARAM);
    }
    Ok(State { phase: Phase::ReadyRestarted, active: ids.iter().copied().collect() })
}

#[cfg(test)]
mod tests;
