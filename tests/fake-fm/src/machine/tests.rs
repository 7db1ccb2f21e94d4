use proptest::prelude::*;

use firstlight_partitions::known::{self, KnownBaseboard};

use super::*;
use crate::board::{Failed, Policy};

const PHASES: [Phase; 6] =
    [Phase::Starting, Phase::RestartWait, Phase::Ready, Phase::ReadyRestarted, Phase::FailedResident, Phase::Ended];

fn rules(known: &'static KnownBaseboard) -> Rules {
    let board = Board::new(known, Failed::default(), Policy::default());
    Rules { board, family: Family::of(known), shared: true, restart: false, resident: false, unexpected_list_code: -3 }
}

fn all_calls(id: PartitionId) -> [Call; 7] {
    [
        Call::List,
        Call::Unsupported,
        Call::FailedDevices,
        Call::Activate(id),
        Call::ActivateWithVfs(id),
        Call::Deactivate(id),
        Call::SetActivated(vec![id]),
    ]
}

fn ready(active: &[PartitionId]) -> State {
    State { phase: Phase::Ready, active: active.iter().copied().collect() }
}

fn code(rules: &Rules, state: &State, request: Call) -> i32 {
    step(rules, state, &Event::Called(request)).1
}

#[test]
fn every_phase_answers_every_call_as_it_should() {
    let (shared, bare) = (rules(&known::H100), Rules { shared: false, ..rules(&known::H100) });
    for phase in PHASES {
        let state = State { phase, active: BTreeSet::new() };
        let codes = |rules: &Rules| all_calls(3).map(|request| code(rules, &state, request));
        let waiting = [-8, -8, -8, -8, -8, -8, -3];
        let (with, without) = match phase {
            Phase::Starting | Phase::FailedResident => (waiting, waiting),
            Phase::RestartWait => ([-8, -8, -8, -8, -8, -8, 0], waiting),
            Phase::Ready => ([0, 0, 0, 0, -3, -4, -3], [-3, -3, 0, -3, -3, -3, -3]),
            Phase::ReadyRestarted => ([0, 0, -3, 0, -3, -4, -3], [-3; 7]),
            Phase::Ended => ([-9; 7], [-9; 7]),
        };
        assert_eq!((codes(&shared), codes(&bare)), (with, without), "{phase:?}");
    }
}

#[test]
fn phases_follow_the_lifecycle() {
    for (restart, resident) in [(false, false), (false, true), (true, false), (true, true)] {
        let rules = Rules { restart, resident, ..rules(&known::H100) };
        for phase in PHASES {
            let state = State { phase, active: BTreeSet::new() };
            let next = |event| step(&rules, &state, &event).0.phase;
            let starts = phase == Phase::Starting;
            let waits = phase == Phase::RestartWait;
            let ready = if restart { Phase::RestartWait } else { Phase::Ready };
            let failed = if resident { Phase::FailedResident } else { Phase::Ended };
            assert_eq!(next(Event::Started), if starts { ready } else { phase });
            assert_eq!(next(Event::StartFailed), if starts { failed } else { phase });
            assert_eq!(next(Event::WindowOver), if waits { Phase::Ended } else { phase });
        }
    }
}

#[test]
fn each_nvlink_generation_uses_its_own_codes() {
    let nvl4 = rules(&known::H100);
    let active = ready(&[3]);
    assert_eq!(code(&nvl4, &active, Call::Activate(3)), -7, "active");
    assert_eq!(code(&nvl4, &active, Call::Activate(7)), -7, "GPU 1 is in 3");
    assert_eq!(code(&nvl4, &active, Call::Deactivate(4)), -4);
    assert_eq!(code(&nvl4, &active, Call::Activate(15)), -1);
    assert_eq!(code(&nvl4, &active, Call::Deactivate(64)), -1);
    let nvl5 = rules(&known::B200);
    let active = ready(&[4]);
    assert_eq!(code(&nvl5, &active, Call::Activate(4)), -17);
    assert_eq!(code(&nvl5, &active, Call::Activate(8)), -24);
    assert_eq!(code(&nvl5, &active, Call::Deactivate(5)), -18);
    assert_eq!(code(&nvl5, &active, Call::Activate(0)), -1, "numbers begin with 1");
}

#[test]
fn list_after_a_restart_is_accepted_completely_or_refused() {
    let rules = Rules { restart: true, ..rules(&known::H100) };
    let waiting = State { phase: Phase::RestartWait, active: BTreeSet::new() };
    for (ids, taken) in
        [(vec![], true), (vec![3, 4, 2], true), (vec![1, 3], false), (vec![3, 3], false), (vec![3, 99], false)]
    {
        let (next, rc) = step(&rules, &waiting, &Event::Called(Call::SetActivated(ids.clone())));
        if taken {
            let expected = State { phase: Phase::ReadyRestarted, active: ids.into_iter().collect() };
            assert_eq!((next, rc), (expected, 0));
        } else {
            assert_eq!((next, rc), (waiting.clone(), -1));
        }
    }
}

#[test]
fn partition_of_failed_gpu_is_a_bad_parameter() {
    let failed = Failed { gpus: [1].into(), ..Failed::default() };
    let board = Board::new(&known::A100_8, failed, Policy::default());
    let rules = Rules { board, ..rules(&known::A100_8) };
    assert_eq!(code(&rules, &ready(&[]), Call::Activate(11)), -1);
    assert_eq!(code(&rules, &ready(&[]), Call::Activate(12)), 0);
}

proptest! {
    /// Whatever is asked: active partitions share no GPU, a refusal changes nothing, and a
    /// call changes at most the partition that it names.
    #[test]
    fn active_partitions_are_disjoint(
        table in 0..known::ALL.len(),
        calls in prop::collection::vec((any::<bool>(), 0u32..40), 0..60),
    ) {
        let rules = rules(known::ALL[table]);
        let mut state = ready(&[]);
        for (on, id) in calls {
            let request = if on { Call::Activate(id) } else { Call::Deactivate(id) };
            let (next, rc) = step(&rules, &state, &Event::Called(request));
            prop_assert_eq!(rc == 0, next != state);
            let changed: Vec<_> = next.active.symmetric_difference(&state.active).copied().collect();
            prop_assert!(changed.is_empty() || changed == [id] && next.active.contains(&id) == on);
            let active: Vec<_> = next.active.iter().copied().collect();
            for (at, one) in active.iter().enumerate() {
                prop_assert!(active[..at].iter().all(|other| !rules.board.overlap(*one, *other)));
            }
            state = next;
        }
    }
}
