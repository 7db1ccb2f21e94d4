use super::*;
use crate::journal::tests::dir;
use crate::state::Assignment;
use firstlight_partitions::known::{A100_16, B200, H100, KnownBaseboard};
use firstlight_sys::nvfm::{Code, Error, Gpu, Partition};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The outcome of the next change.
#[derive(Debug, Clone, Copy)]
struct Fault {
    code: i32,
    /// Whether it is done despite the code.
    done: bool,
    /// Whether FM dies after it.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Ready,
    Gone,
    /// Restarted with `--restart`.
    Waits,
}

/// A fabric manager in memory that records violations.
struct Sim {
    known: &'static KnownBaseboard,
    later: bool,
    mode: Mode,
    active: BTreeSet<PartitionId>,
    faults: VecDeque<Fault>,
    /// Partitions whose tenants run.
    tenants: BTreeSet<PartitionId>,
    violations: Vec<String>,
    /// For each change of the active partitions: the journal's length before it, and the new set.
    effects: Vec<(u64, BTreeSet<PartitionId>)>,
    journal: PathBuf,
}

#[derive(Clone)]
pub(super) struct Shared(Rc<RefCell<Sim>>);

fn refused(call: &'static str, code: i32) -> Result<(), Error> {
    Err(Error::Refused { call, code: Code(code) })
}

impl Sim {
    fn gpus(&self, id: PartitionId) -> Option<Gpus> {
        let row = self.known.rows.iter().find(|(of, ..)| *of == id)?;
        Gpus::of(row.1.iter().copied()).ok()
    }

    fn set(&mut self, active: BTreeSet<PartitionId>) {
        let length = fs::metadata(&self.journal).map_or(0, |data| data.len());
        for tenant in self.tenants.difference(&active) {
            self.violations.push(format!("partition {tenant} is deactivated under its tenant"));
        }
        self.effects.push((length, active.clone()));
        self.active = active;
    }

    fn change(&mut self, call: &'static str, id: PartitionId, on: bool) -> Result<(), Error> {
        match self.mode {
            Mode::Gone => return refused("fmConnect", -9),
            Mode::Waits => return refused(call, -8),
            Mode::Ready => {}
        }
        let Some(gpus) = self.gpus(id) else { return refused(call, -1) };
        let overlaps = |other: &PartitionId| self.gpus(*other).is_some_and(|other| other.overlaps(gpus));
        if on && self.active.contains(&id) {
            return refused(call, if self.later { -17 } else { -7 });
        }
        if on && self.active.iter().any(overlaps) {
            self.violations.push(format!("partition {id} was asked for beside {:?}", self.active));
            return refused(call, if self.later { -24 } else { -7 });
        }
        if !on && !self.active.contains(&id) {
            return refused(call, if self.later { -18 } else { -4 });
        }
        let fault = self.faults.pop_front();
        if fault.is_none_or(|fault| fault.done) {
            let mut active = self.active.clone();
            if on {
                active.insert(id)
            } else {
                active.remove(&id)
            };
            self.set(active);
        }
        if fault.is_some_and(|fault| fault.gone) {
            self.mode = Mode::Gone;
        }
        fault.map_or(Ok(()), |fault| if fault.code == 0 { Ok(()) } else { refused(call, fault.code) })
    }
}

impl Fabric for Shared {
    fn partitions(&mut self) -> Result<Vec<Partition>, Error> {
        let sim = self.0.borrow();
        match sim.mode {
            Mode::Gone => refused("fmConnect", -9)?,
            Mode::Waits => refused("fmGetSupportedFabricPartitions", -8)?,
            Mode::Ready => {}
        }
        let gpu = |id: &u32| Gpu {
            physical_id: *id,
            uuid: String::new(),
            pci: String::new(),
            links: 18,
            max_links: 18,
            line_rate: 0,
        };
        let one = |(id, gpus, _): &(u32, &[u32], u32)| Partition {
            id: *id,
            is_active: sim.active.contains(id),
            gpus: gpus.iter().map(gpu).collect(),
        };
        Ok(sim.known.rows.iter().map(one).collect())
    }

    fn activate(&mut self, id: u32) -> Result<(), Error> {
        self.0.borrow_mut().change("fmActivateFabricPartition", id, true)
    }

    fn deactivate(&mut self, id: u32) -> Result<(), Error> {
        self.0.borrow_mut().change("fmDeactivateFabricPartition", id, false)
    }

    fn set_activated(&mut self, ids: &[u32]) -> Result<(), Error> {
        let mut sim = self.0.borrow_mut();
        match sim.mode {
            Mode::Waits => {
                sim.mode = Mode::Ready;
                sim.set(ids.iter().copied().collect());
                Ok(())
            }
            Mode::Gone => refused("fmConnect", -9),
            Mode::Ready => refused("fmSetActivatedFabricPartitions", -3),
        }
    }
}

pub(super) struct Fixture {
    pub(super) dir: tempfile::TempDir,
    pub(super) sim: Shared,
    pub(super) engine: Engine<Shared>,
}

fn sim(known: &'static KnownBaseboard, journal: &Path) -> Shared {
    Shared(Rc::new(RefCell::new(Sim {
        known,
        later: known.name == "b200",
        mode: Mode::Ready,
        active: BTreeSet::new(),
        faults: VecDeque::new(),
        tenants: BTreeSet::new(),
        violations: Vec::new(),
        effects: Vec::new(),
        journal: journal.to_owned(),
    })))
}

/// Opens an engine that allows unverified maps.
fn pending(sim: &Shared, journal: &Path) -> Engine<Shared> {
    // A child of a parallel test inherits the lock until exec.
    let (start, mut opened) = (Instant::now(), Journal::open(journal));
    while matches!(opened, Err(crate::journal::Error::Locked { .. })) && start.elapsed().as_secs() < 5 {
        std::thread::yield_now();
        opened = Journal::open(journal);
    }
    Engine::new(sim.clone(), opened.unwrap()).with(ModuleMapStore::default().allow_unverified(true))
}

pub(super) fn fixture(known: &'static KnownBaseboard) -> Fixture {
    let dir = dir();
    let path = dir.path().join("journal");
    let sim = sim(known, &path);
    let engine = pending(&sim, &path);
    Fixture { dir, sim, engine }
}

impl Fixture {
    fn fault(&self, code: i32, done: bool, gone: bool) {
        self.sim.0.borrow_mut().faults.push_back(Fault { code, done, gone });
    }

    pub(super) fn active(&self) -> BTreeSet<PartitionId> {
        self.sim.0.borrow().active.clone()
    }

    fn mode(&self, mode: Mode) {
        self.sim.0.borrow_mut().mode = mode;
    }

    fn held(&self) -> Vec<PartitionId> {
        self.engine.state().assignments.keys().copied().collect()
    }

    /// Kills and restarts the daemon.
    fn restarted(self) -> Self {
        let Self { dir, sim, engine } = self;
        drop(engine);
        let engine = pending(&sim, &dir.path().join("journal"));
        Self { dir, sim, engine }
    }
}

fn count(count: u32) -> PartitionSelector {
    PartitionSelector::Count(count)
}

#[test]
fn activation_survives_a_restart_and_is_idempotent() {
    let mut fixture = fixture(&H100);
    let first = fixture.engine.activate("r1", count(2), "alice").unwrap();
    assert_eq!((first.partition, first.gpus.to_string(), first.already_done), (3, "1,3".to_owned(), false));
    let already_done = fixture.engine.activate("r1", count(2), "alice").unwrap();
    assert_eq!(already_done, Activated { already_done: true, ..first });
    assert_eq!(fixture.engine.activate("r2", count(2), "bob").unwrap().partition, 4);
    let mut fixture = fixture.restarted();
    assert_eq!(fixture.held(), [3, 4]);
    assert_eq!(fixture.engine.activate("r1", count(2), "alice").unwrap().partition, 3, "also after a restart");
    let error = fixture.engine.deactivate("r3", 3, "bob").unwrap_err().to_string();
    assert_eq!(error, "partition 3 is owned by alice, not by bob");
    assert!(fixture.engine.deactivate("r4", 3, "alice").unwrap());
    assert!(fixture.engine.deactivate("r4", 3, "alice").unwrap(), "idempotent");
    assert!(!fixture.engine.deactivate("r5", 3, "alice").unwrap(), "a new request has nothing to do");
    assert_eq!(fixture.active(), BTreeSet::from([4]));
    // A late retry of the first request must not activate it again.
    let error = fixture.engine.activate("r1", count(2), "alice").unwrap_err().to_string();
    assert!(error.contains("request r1 activated partition 3, which is no longer active for it"), "{error}");
    assert_eq!(fixture.active(), BTreeSet::from([4]));
    assert_eq!(fixture.engine.activate("r6", count(1), "alice").unwrap().gpus.count(), 1);
}

#[test]
fn invalid_requests_are_reported_and_change_nothing() {
    let mut fixture = fixture(&H100);
    fixture.engine.activate("r1", count(4), "alice").unwrap();
    fixture.engine.quarantine(8, "Xid 79\n").unwrap();
    let end = fixture.engine.journal_end();
    let pair = PartitionSelector::Gpus(Gpus::of([1, 2]).unwrap());
    let long = "x".repeat(129);
    for (request, selector, owner, said) in [
        ("", count(1), "a", "invalid request id \"\": it has to be 1 to 128"),
        (long.as_str(), count(1), "a", "it has to be 1 to 128"),
        ("r 2", count(1), "a", "request id \"r 2\""),
        ("r2", count(1), "a\nb", "owner \"a\\nb\""),
        ("r2", count(3), "a", "no partition has 3 GPUs; there are partitions of 1, 2, 4 and 8"),
        ("r2", count(8), "a", "GPUs 1,2,3,4 are taken, GPUs 8 are quarantined; the largest that is free has 2"),
        ("r2", pair, "a", "exactly the GPUs 1,2; partitions of this size: 1,3 (partition 3)"),
        ("r2", PartitionSelector::Partition(99), "a", "there is no partition 99; there are 0, 1, 2"),
        (
            "r2",
            PartitionSelector::Partition(14),
            "a",
            "GPUs 8 are partition 14, and it is not free: GPUs 8 are quarantined",
        ),
        ("r1", count(2), "alice", "request id r1 was used before, to activate 4 GPUs for alice"),
        ("r1", count(4), "mallory", "request id r1 was used before"),
    ] {
        let error = fixture.engine.activate(request, selector, owner).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
    for (partition, said) in [(2, None), (99, Some("no partition 99"))] {
        match (fixture.engine.deactivate("d", partition, "alice"), said) {
            (Ok(was), None) => assert!(!was),
            (Err(error), Some(said)) => assert!(error.to_string().contains(said), "{error}"),
            (other, _) => panic!("{partition}: {other:?}"),
        }
    }
    let desired = |ids: &[u32]| ids.iter().map(|id| (*id, "t".to_owned())).collect::<Vec<_>>();
    for (ids, said) in [
        (&[1, 3][..], "partitions 1 and 3 share GPUs 1,3"),
        (&[5, 5], "partitions 5 and 5 share GPUs 5,7"),
        (&[77], "no partition 77"),
    ] {
        let error = fixture.engine.reconcile("q", &desired(ids)).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
    let error = fixture.engine.quarantine(9, "x").unwrap_err().to_string();
    assert_eq!(error, "there is no GPU 9; module ids are 1,2,3,4,5,6,7,8");
    assert_eq!((fixture.engine.journal_end(), fixture.active()), (end, BTreeSet::from([1])));
    assert_eq!(fixture.engine.state().quarantined[&8], "Xid 79");
    assert!(fixture.engine.release(8).unwrap() && !fixture.engine.release(8).unwrap());
    assert!(fixture.engine.activate("r3", PartitionSelector::Partition(14), "a").is_ok());
}

#[test]
fn list_decides_the_outcome_not_the_reply() {
    for known in [&H100, &B200] {
        let mut fixture = fixture(known);
        // FM reports an error, but the change was made.
        for code in [-5, -2, -10, -99] {
            fixture.fault(code, true, false);
            let given = fixture.engine.activate(&format!("r{code}"), count(1), "a").unwrap();
            assert!(fixture.active().contains(&given.partition));
        }
        // FM reports an error, and the change was not made.
        fixture.fault(-10, false, false);
        let error = fixture.engine.activate("n", count(1), "a").unwrap_err().to_string();
        assert!(error.contains("NVLink error (-10)") && error.contains("quarantine the GPU"), "{error}");
        // FM reports success, but the change was not made.
        fixture.fault(0, false, false);
        let error = fixture.engine.activate("n", count(1), "a").unwrap_err().to_string();
        assert!(error.contains("activate partition"), "{error}");
        assert_eq!(fixture.held().len(), 4);
        let given = fixture.engine.activate("n", count(1), "a").unwrap();
        fixture.fault(-5, true, false);
        assert!(fixture.engine.deactivate("d", given.partition, "a").unwrap());
        fixture.fault(-10, false, false);
        let other = fixture.held()[0];
        assert!(fixture.engine.deactivate("e", other, "a").is_err());
        assert_eq!(fixture.held().len(), 4, "active partitions stay assigned");
        assert!(fixture.sim.0.borrow().violations.is_empty());
    }
}

#[test]
fn unknown_outcome_is_settled_when_fm_answers() {
    let mut fixture = fixture(&H100);
    for (request, done) in [("r1", true), ("r2", false)] {
        fixture.fault(-5, done, true);
        let error = fixture.engine.activate(request, count(2), "a").unwrap_err();
        assert!(matches!(error, EngineError::OutcomeUnknown { .. }), "{error}");
        assert!(error.to_string().contains("timeout (-5)"), "{error}");
        // Other requests are refused meanwhile.
        let error = fixture.engine.activate("other", count(1), "b").unwrap_err().to_string();
        assert!(error.contains("fmConnect: connection not valid (-9)") && error.contains("does not run"), "{error}");
        let mut after = fixture.restarted();
        after.mode(Mode::Ready);
        let given = after.engine.activate(request, count(2), "a").unwrap();
        assert_eq!((given.already_done, after.active().contains(&given.partition)), (done, true));
        fixture = after;
    }
    let first = fixture.held()[0];
    fixture.fault(-5, false, true);
    assert!(matches!(fixture.engine.deactivate("d", first, "a"), Err(EngineError::OutcomeUnknown { .. })));
    fixture.mode(Mode::Ready);
    fixture.engine.settle().unwrap();
    assert_eq!(fixture.held().len(), 1, "the deactivation was repeated");
    assert!(fixture.engine.deactivate("d", first, "a").unwrap());
}

#[test]
fn fm_restart_restores_assigned_partitions_only() {
    let mut fixture = fixture(&H100);
    let assigned = fixture.engine.activate("r1", count(4), "a").unwrap().partition;
    fixture.sim.0.borrow_mut().tenants.insert(assigned);
    fixture.fault(-9, true, true);
    assert!(matches!(fixture.engine.activate("r2", count(2), "b"), Err(EngineError::OutcomeUnknown { .. })));
    fixture.mode(Mode::Waits);
    fixture.engine.settle().unwrap();
    assert_eq!((fixture.active(), fixture.held()), (BTreeSet::from([assigned]), vec![assigned]));
    assert!(fixture.sim.0.borrow().violations.is_empty());
    assert!(!fixture.engine.activate("r2", count(2), "b").unwrap().already_done);
}

#[test]
fn empty_journal_does_not_report_active_partitions() {
    let mut fixture = fixture(&H100);
    fixture.sim.0.borrow_mut().tenants.insert(1);
    fixture.sim.0.borrow_mut().active.insert(1);
    fixture.mode(Mode::Waits);
    let error = fixture.engine.activate("r", count(1), "c").unwrap_err().to_string();
    assert!(error.contains("not configured (-8)") && error.contains("is starting"), "{error}");
    assert!(fixture.sim.0.borrow().violations.is_empty());
}

#[test]
fn fm_restart_without_state_is_an_outage_until_reconciled() {
    let mut fixture = fixture(&H100);
    let one = fixture.engine.activate("r1", count(4), "a").unwrap().partition;
    fixture.sim.0.borrow_mut().active.clear();
    let error = fixture.engine.activate("r2", count(2), "b").unwrap_err().to_string();
    assert!(error.contains("lost partitions [1]") && error.contains("stop those tenants, then reconcile"), "{error}");
    assert!(fixture.active().is_empty());
    let mut fixture = fixture.restarted();
    assert!(fixture.engine.activate("r2", count(2), "b").is_err(), "also after a restart");
    let desired = [(one, "a".to_owned()), (5, "c".to_owned())];
    let steps = fixture.engine.reconcile("q", &desired).unwrap();
    assert_eq!(steps.len(), 2);
    assert_eq!((fixture.active(), fixture.held()), (BTreeSet::from([1, 5]), vec![1, 5]));
    assert!(fixture.engine.reconcile("q2", &desired).unwrap().is_empty(), "a second reconciliation has no steps");
    assert_eq!(fixture.engine.activate("r2", count(2), "b").unwrap().gpus.to_string(), "6,8");
}

#[test]
fn partition_active_before_is_unowned_until_reconciled() {
    let mut fixture = fixture(&B200);
    fixture.sim.0.borrow_mut().active.extend([2, 6]);
    let snapshot = fixture.engine.settle().unwrap();
    assert_eq!(snapshot.unowned(fixture.engine.state()), [2, 6]);
    assert!(matches!(fixture.engine.deactivate("d", 2, "a"), Err(EngineError::Unowned { partition: 2 })));
    assert_eq!(fixture.engine.activate("r", count(2), "a").unwrap().partition, 7, "unowned GPUs are not given");
    let steps = fixture.engine.steps(&[(2, "t".into()), (7, "a".into())]).unwrap();
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert_eq!(fixture.active(), BTreeSet::from([2, 6, 7]), "a dry run changes nothing");
    fixture.engine.reconcile("q", &[(2, "t".into()), (7, "a".into())]).unwrap();
    assert_eq!(fixture.active(), BTreeSet::from([2, 7]));
    assert_eq!(fixture.engine.state().assignments[&2].owner, "t");
    assert!(fixture.engine.deactivate("e", 2, "t").unwrap());
}

#[test]
fn inconsistent_list_is_rejected() {
    let gpu = |physical_id| Gpu {
        physical_id,
        uuid: String::new(),
        pci: String::new(),
        links: 0,
        max_links: 0,
        line_rate: 0,
    };
    let one = |id, is_active, gpus: &[u32]| Partition { id, is_active, gpus: gpus.iter().map(|id| gpu(*id)).collect() };
    for (listed, said) in [
        (vec![one(1, true, &[1, 2]), one(2, true, &[2])], "both have GPUs 2; restart it"),
        (vec![one(1, false, &[1, 1])], "partition 1: a GPU is listed twice"),
        (vec![one(1, false, &[64])], "invalid module id 64"),
        (vec![one(1, false, &[])], "partition 1 has no GPU"),
        (vec![one(1, false, &[1]), one(1, false, &[2])], "partition 1 is in the table twice"),
    ] {
        let error = FabricSnapshot::of(&listed).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
}

/// Journal length and acknowledged assignments after each step.
#[derive(Default)]
struct Acknowledged(Vec<(u64, BTreeMap<PartitionId, Assignment>)>);

impl Acknowledged {
    fn note(&mut self, fixture: &Fixture) {
        self.0.push((fixture.engine.journal_end(), fixture.engine.state().assignments.clone()));
    }
}

/// The steps of the crash matrix.
fn crash_scenario(fixture: &mut Fixture) -> Acknowledged {
    let mut acknowledged = Acknowledged::default();
    acknowledged.note(fixture);
    fixture.engine.activate("r1", count(2), "a").unwrap();
    acknowledged.note(fixture);
    fixture.fault(-5, true, false);
    fixture.engine.activate("r2", count(4), "b").unwrap();
    acknowledged.note(fixture);
    fixture.fault(-10, false, false);
    assert!(fixture.engine.activate("r3", count(1), "c").is_err());
    acknowledged.note(fixture);
    fixture.engine.activate("r3", count(1), "c").unwrap();
    acknowledged.note(fixture);
    assert!(fixture.engine.deactivate("d1", 3, "a").unwrap());
    acknowledged.note(fixture);
    fixture.engine.quarantine(1, "Xid 79").unwrap();
    let desired = [(2, "b".to_owned()), (9, "d".to_owned())];
    fixture.engine.reconcile("q", &desired).unwrap();
    acknowledged.note(fixture);
    acknowledged
}

/// Kills the daemon at every byte that it writes, before and after every change of the fabric: after a restart the
/// state matches the fabric, acknowledged assignments are kept, and the same requests lead to the same result.
#[test]
fn daemon_killed_at_any_step_recovers_a_consistent_state() {
    let mut whole = fixture(&H100);
    let acknowledged = crash_scenario(&mut whole);
    let path = whole.dir.path().join("journal");
    let bytes = fs::read(&path).unwrap();
    let effects = whole.sim.0.borrow().effects.clone();
    assert!(effects.len() >= 6, "{effects:?}");
    let mut crashes = 0;
    for cut in 0..=bytes.len() {
        let length = cut as u64;
        // An effect at exactly this length may or may not have happened.
        let before = effects.iter().take_while(|(at, _)| *at < length).count();
        let after = effects.iter().take_while(|(at, _)| *at <= length).count();
        for count in before..=after {
            crashes += 1;
            let active = count.checked_sub(1).map(|at| effects[at].1.clone()).unwrap_or_default();
            let dir = dir();
            let path = dir.path().join("journal");
            fs::write(&path, &bytes[..cut]).unwrap();
            let sim = sim(&H100, &path);
            sim.0.borrow_mut().active = active;
            // Tenants with an acknowledged partition run until they request its deactivation.
            let known = acknowledged
                .0
                .iter()
                .rev()
                .find(|(at, _)| *at <= length)
                .map(|(_, held)| held.clone())
                .unwrap_or_default();
            let mut engine = pending(&sim, &path);
            let ending = engine.state().in_progress.as_ref().and_then(|pending| match pending.change {
                Change::Deactivate { partition } => Some(partition),
                Change::Activate { .. } => None,
            });
            let still =
                known.keys().copied().filter(|id| engine.state().assignments.contains_key(id) && ending != Some(*id));
            sim.0.borrow_mut().tenants = still.collect();
            let snapshot = engine.settle().unwrap();
            let held: BTreeSet<PartitionId> = engine.state().assignments.keys().copied().collect();
            assert_eq!(held, snapshot.active, "cut at {cut} after {count} effects");
            assert_eq!(engine.state().in_progress, None);
            assert_eq!(engine.state().outage, None);
            assert_eq!(sim.0.borrow().violations, [] as [String; 0], "cut at {cut}");
            // Acknowledged assignments are lost only by a request that was in progress.
            let next = acknowledged.0.iter().find(|(at, _)| *at > length).map(|(_, held)| held);
            for (id, assignment) in &known {
                let may_go = next.is_some_and(|next| next.get(id) != Some(assignment));
                assert!(may_go || engine.state().assignments.get(id) == Some(assignment), "cut at {cut}: {id}");
            }
            // The remaining requests lead to the same result.
            sim.0.borrow_mut().tenants.clear();
            engine.reconcile("again", &[(2, "b".to_owned()), (9, "d".to_owned())]).unwrap();
            assert_eq!(sim.0.borrow().active, BTreeSet::from([2, 9]));
            assert_eq!(sim.0.borrow().violations, [] as [String; 0]);
        }
    }
    assert!(crashes > bytes.len(), "{crashes}");
}

#[derive(Debug, Clone)]
enum Act {
    Activate(u32, u8),
    Deactivate(usize),
    Quarantine(u32),
    Release(u32),
    Fault(i32, bool, bool),
    Restart,
    FmResumes,
    FmAnew,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (prop::sample::select(vec![1_u32, 2, 4, 8, 16]), 0_u8..4).prop_map(|(size, who)| Act::Activate(size, who)),
        3 => (0_usize..8).prop_map(Act::Deactivate),
        1 => (1_u32..9).prop_map(Act::Quarantine),
        1 => (1_u32..9).prop_map(Act::Release),
        2 => (prop::sample::select(vec![-2, -5, -7, -10, -17, -99, 0]), any::<bool>(), any::<bool>())
            .prop_map(|(code, done, gone)| Act::Fault(code, done, gone)),
        1 => Just(Act::Restart),
        1 => Just(Act::FmResumes),
        1 => Just(Act::FmAnew),
    ];
    prop::collection::vec(act, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// In any sequence of events: no GPU is in two partitions, no running tenant loses its partition, and the
    /// assignments match the active partitions.
    #[test]
    fn no_sequence_of_events_assigns_a_gpu_twice(acts in acts(), which in 0_usize..3) {
        let mut fixture = fixture([&H100, &B200, &A100_16][which]);
        let mut requests = 0;
        for act in acts {
            match act {
                Act::Activate(size, who) => {
                    requests += 1;
                    let owner = format!("t{who}");
                    if let Ok(given) = fixture.engine.activate(&format!("r{requests}"), count(size), &owner) {
                        prop_assert!(fixture.active().contains(&given.partition));
                        fixture.sim.0.borrow_mut().tenants.insert(given.partition);
                    }
                }
                Act::Deactivate(at) => {
                    requests += 1;
                    let held: Vec<_> = fixture.engine.state().assignments.iter().map(|(id, one)| (*id, one.owner.clone())).collect();
                    let Some((id, owner)) = held.get(at % held.len().max(1)) else { continue };
                    // The tenant ends first.
                    fixture.sim.0.borrow_mut().tenants.remove(id);
                    if fixture.engine.deactivate(&format!("r{requests}"), *id, owner).is_ok() {
                        prop_assert!(!fixture.active().contains(id));
                    }
                }
                Act::Quarantine(gpu) => drop(fixture.engine.quarantine(gpu, "x")),
                Act::Release(gpu) => drop(fixture.engine.release(gpu)),
                Act::Fault(code, done, gone) => fixture.fault(code, done, gone),
                Act::Restart => fixture = fixture.restarted(),
                Act::FmResumes => {
                    fixture.mode(Mode::Waits);
                    if fixture.engine.settle().is_err() {
                        // No change was made yet, so no tenant runs.
                        fixture.mode(Mode::Ready);
                    }
                }
                Act::FmAnew => {
                    // All tenants end, and the fabric is reconciled.
                    fixture.mode(Mode::Ready);
                    fixture.sim.0.borrow_mut().tenants.clear();
                    fixture.sim.0.borrow_mut().faults.clear();
                    fixture.sim.0.borrow_mut().active.clear();
                    fixture.engine.reconcile("q", &[]).unwrap();
                }
            }
            let violations = fixture.sim.0.borrow().violations.clone();
            prop_assert!(violations.is_empty(), "{:?}", violations);
        }
        fixture.mode(Mode::Ready);
        fixture.sim.0.borrow_mut().faults.clear();
        let snapshot = fixture.engine.settle().unwrap();
        let held: BTreeSet<_> = fixture.held().into_iter().collect();
        prop_assert_eq!(&held, &snapshot.active);
        let tenants = fixture.sim.0.borrow().tenants.clone();
        prop_assert!(tenants.is_subset(&held), "{:?} {:?}", tenants, held);
        let violations = fixture.sim.0.borrow().violations.clone();
        prop_assert!(violations.is_empty(), "{:?}", violations);
    }
}
