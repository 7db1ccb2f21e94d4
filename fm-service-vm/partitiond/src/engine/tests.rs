use super::*;
use crate::journal::tests::dir;
use crate::state::Holding;
use firstlight_partitions::known::{A100_16, B200, H100, Known};
use firstlight_sys::nvfm::{Code, Error, Gpu, Partition};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// What becomes of the next change.
#[derive(Debug, Clone, Copy)]
struct Fault {
    code: i32,
    /// Whether it is done nevertheless.
    done: bool,
    /// Whether FM is gone after it.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Ready,
    Gone,
    /// Restarted beside running tenants.
    Waits,
}

/// A fabric manager in memory, which notes what must never be.
struct Sim {
    known: &'static Known,
    later: bool,
    mode: Mode,
    active: BTreeSet<PartitionId>,
    faults: VecDeque<Fault>,
    /// Partitions whose tenant runs.
    tenants: BTreeSet<PartitionId>,
    violations: Vec<String>,
    /// The journal's length before each change of what is active, and what is active then.
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
            self.violations.push(format!("partition {tenant} is switched off under its tenant"));
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
        let meets = |other: &PartitionId| self.gpus(*other).is_some_and(|other| other.meets(gpus));
        if on && self.active.contains(&id) {
            return refused(call, if self.later { -17 } else { -7 });
        }
        if on && self.active.iter().any(meets) {
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
            most_links: 18,
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

pub(super) struct Stand {
    pub(super) dir: tempfile::TempDir,
    pub(super) sim: Shared,
    pub(super) engine: Engine<Shared>,
}

fn sim(known: &'static Known, journal: &Path) -> Shared {
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

/// What the map is for is not asked for here.
fn begun(sim: &Shared, journal: &Path) -> Engine<Shared> {
    // Another test's child has all of this process's files, and so the lock, until it is another program.
    let (begun, mut opened) = (Instant::now(), Journal::open(journal));
    while matches!(opened, Err(crate::journal::Error::Locked { .. })) && begun.elapsed().as_secs() < 5 {
        std::thread::yield_now();
        opened = Journal::open(journal);
    }
    Engine::new(sim.clone(), opened.unwrap()).with(Modules::default().allowing(true))
}

pub(super) fn stand(known: &'static Known) -> Stand {
    let dir = dir();
    let path = dir.path().join("journal");
    let sim = sim(known, &path);
    let engine = begun(&sim, &path);
    Stand { dir, sim, engine }
}

impl Stand {
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
        self.engine.state().holdings.keys().copied().collect()
    }

    /// The daemon dies here and begins anew.
    fn restarted(self) -> Self {
        let Self { dir, sim, engine } = self;
        drop(engine);
        let engine = begun(&sim, &dir.path().join("journal"));
        Self { dir, sim, engine }
    }
}

fn count(count: u32) -> Ask {
    Ask::Count(count)
}

#[test]
fn a_partition_is_given_kept_and_taken_back() {
    let mut stand = stand(&H100);
    let first = stand.engine.activate("r1", count(2), "alice").unwrap();
    assert_eq!((first.partition, first.gpus.to_string(), first.again), (3, "1,3".to_owned(), false));
    let again = stand.engine.activate("r1", count(2), "alice").unwrap();
    assert_eq!(again, Activated { again: true, ..first });
    assert_eq!(stand.engine.activate("r2", count(2), "bob").unwrap().partition, 4);
    let mut stand = stand.restarted();
    assert_eq!(stand.held(), [3, 4]);
    assert_eq!(stand.engine.activate("r1", count(2), "alice").unwrap().partition, 3, "also after a restart");
    let error = stand.engine.deactivate("r3", 3, "bob").unwrap_err().to_string();
    assert_eq!(error, "partition 3 is alice's, not bob's");
    assert!(stand.engine.deactivate("r4", 3, "alice").unwrap());
    assert!(stand.engine.deactivate("r4", 3, "alice").unwrap(), "the same request again");
    assert!(!stand.engine.deactivate("r5", 3, "alice").unwrap(), "another one finds nothing to do");
    assert_eq!(stand.active(), BTreeSet::from([4]));
    // The request of before comes once more, late: nobody is to have a partition that nobody wants.
    let error = stand.engine.activate("r1", count(2), "alice").unwrap_err().to_string();
    assert!(error.contains("request r1 activated partition 3, which is not active for it any more"), "{error}");
    assert_eq!(stand.active(), BTreeSet::from([4]));
    assert_eq!(stand.engine.activate("r6", count(1), "alice").unwrap().gpus.count(), 1);
}

#[test]
fn bad_requests_are_named_and_change_nothing() {
    let mut stand = stand(&H100);
    stand.engine.activate("r1", count(4), "alice").unwrap();
    stand.engine.quarantine(8, "Xid 79\n").unwrap();
    let end = stand.engine.journal_end();
    let pair = Ask::Gpus(Gpus::of([1, 2]).unwrap());
    let long = "x".repeat(129);
    for (request, ask, owner, said) in [
        ("", count(1), "a", "request \"\" is not 1 to 128"),
        (long.as_str(), count(1), "a", "is not 1 to 128"),
        ("r 2", count(1), "a", "request \"r 2\""),
        ("r2", count(1), "a\nb", "owner \"a\\nb\""),
        ("r2", count(3), "a", "no partition has 3 GPUs; there are partitions of 1, 2, 4 and 8"),
        ("r2", count(8), "a", "GPUs 1,2,3,4 are taken, GPUs 8 are in quarantine; the largest that is free has 2"),
        ("r2", pair, "a", "exactly the GPUs 1,2; with as many there are 1,3 (partition 3)"),
        ("r2", Ask::Partition(99), "a", "there is no partition 99; there are 0, 1, 2"),
        ("r2", Ask::Partition(14), "a", "GPUs 8 are partition 14, and it is not free: GPUs 8 are in quarantine"),
        ("r1", count(2), "alice", "request r1 was used before, to activate 4 GPUs for alice"),
        ("r1", count(4), "mallory", "request r1 was used before"),
    ] {
        let error = stand.engine.activate(request, ask, owner).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
    for (partition, said) in [(2, None), (99, Some("no partition 99"))] {
        match (stand.engine.deactivate("d", partition, "alice"), said) {
            (Ok(was), None) => assert!(!was),
            (Err(error), Some(said)) => assert!(error.to_string().contains(said), "{error}"),
            (other, _) => panic!("{partition}: {other:?}"),
        }
    }
    let wanted = |ids: &[u32]| ids.iter().map(|id| (*id, "t".to_owned())).collect::<Vec<_>>();
    for (ids, said) in [
        (&[1, 3][..], "partitions 1 and 3 share GPUs 1,3"),
        (&[5, 5], "partitions 5 and 5 share GPUs 5,7"),
        (&[77], "no partition 77"),
    ] {
        let error = stand.engine.reconcile("q", &wanted(ids)).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
    let error = stand.engine.quarantine(9, "x").unwrap_err().to_string();
    assert_eq!(error, "there is no GPU 9; module ids are 1,2,3,4,5,6,7,8");
    assert_eq!((stand.engine.journal_end(), stand.active()), (end, BTreeSet::from([1])));
    assert_eq!(stand.engine.state().barred[&8], "Xid 79");
    assert!(stand.engine.release(8).unwrap() && !stand.engine.release(8).unwrap());
    assert!(stand.engine.activate("r3", Ask::Partition(14), "a").is_ok());
}

#[test]
fn what_fm_lists_decides_and_not_what_it_answers() {
    for known in [&H100, &B200] {
        let mut stand = stand(known);
        // It says that it has failed, and has done it.
        for code in [-5, -2, -10, -99] {
            stand.fault(code, true, false);
            let given = stand.engine.activate(&format!("r{code}"), count(1), "a").unwrap();
            assert!(stand.active().contains(&given.partition));
        }
        // It says so, and has not.
        stand.fault(-10, false, false);
        let error = stand.engine.activate("n", count(1), "a").unwrap_err().to_string();
        assert!(error.contains("NVLink error (-10)") && error.contains("quarantine the GPU"), "{error}");
        // It says that it has, and has not.
        stand.fault(0, false, false);
        let error = stand.engine.activate("n", count(1), "a").unwrap_err().to_string();
        assert!(error.contains("activate partition"), "{error}");
        assert_eq!(stand.held().len(), 4);
        let given = stand.engine.activate("n", count(1), "a").unwrap();
        stand.fault(-5, true, false);
        assert!(stand.engine.deactivate("d", given.partition, "a").unwrap());
        stand.fault(-10, false, false);
        let other = stand.held()[0];
        assert!(stand.engine.deactivate("e", other, "a").is_err());
        assert_eq!(stand.held().len(), 4, "what is active is held");
        assert!(stand.sim.0.borrow().violations.is_empty());
    }
}

#[test]
fn what_is_not_known_is_settled_when_fm_answers() {
    let mut stand = stand(&H100);
    for (request, done) in [("r1", true), ("r2", false)] {
        stand.fault(-5, done, true);
        let error = stand.engine.activate(request, count(2), "a").unwrap_err();
        assert!(matches!(error, Refused::Unsettled { .. }), "{error}");
        assert!(error.to_string().contains("timeout (-5)"), "{error}");
        // Another one does not get past it.
        let error = stand.engine.activate("other", count(1), "b").unwrap_err().to_string();
        assert!(error.contains("fmConnect: connection not valid (-9)") && error.contains("does not run"), "{error}");
        let mut after = stand.restarted();
        after.mode(Mode::Ready);
        let given = after.engine.activate(request, count(2), "a").unwrap();
        assert_eq!((given.again, after.active().contains(&given.partition)), (done, true));
        stand = after;
    }
    let first = stand.held()[0];
    stand.fault(-5, false, true);
    assert!(matches!(stand.engine.deactivate("d", first, "a"), Err(Refused::Unsettled { .. })));
    stand.mode(Mode::Ready);
    stand.engine.settle().unwrap();
    assert_eq!(stand.held().len(), 1, "it was asked for, and is done");
    assert!(stand.engine.deactivate("d", first, "a").unwrap());
}

#[test]
fn a_restart_beside_tenants_keeps_what_is_held_and_nothing_else() {
    let mut stand = stand(&H100);
    let kept = stand.engine.activate("r1", count(4), "a").unwrap().partition;
    stand.sim.0.borrow_mut().tenants.insert(kept);
    stand.fault(-9, true, true);
    assert!(matches!(stand.engine.activate("r2", count(2), "b"), Err(Refused::Unsettled { .. })));
    stand.mode(Mode::Waits);
    stand.engine.settle().unwrap();
    assert_eq!((stand.active(), stand.held()), (BTreeSet::from([kept]), vec![kept]));
    assert!(stand.sim.0.borrow().violations.is_empty());
    assert!(!stand.engine.activate("r2", count(2), "b").unwrap().again);
}

#[test]
fn who_knows_nothing_does_not_say_that_nothing_is_active() {
    let mut stand = stand(&H100);
    stand.sim.0.borrow_mut().tenants.insert(1);
    stand.sim.0.borrow_mut().active.insert(1);
    stand.mode(Mode::Waits);
    let error = stand.engine.activate("r", count(1), "c").unwrap_err().to_string();
    assert!(error.contains("not configured (-8)") && error.contains("just begun"), "{error}");
    assert!(stand.sim.0.borrow().violations.is_empty());
}

#[test]
fn a_fabric_that_begins_anew_is_an_outage_until_somebody_reconciles() {
    let mut stand = stand(&H100);
    let one = stand.engine.activate("r1", count(4), "a").unwrap().partition;
    stand.sim.0.borrow_mut().active.clear();
    let error = stand.engine.activate("r2", count(2), "b").unwrap_err().to_string();
    assert!(error.contains("lost partitions [1]") && error.contains("stop those tenants, then reconcile"), "{error}");
    assert!(stand.active().is_empty());
    let mut stand = stand.restarted();
    assert!(stand.engine.activate("r2", count(2), "b").is_err(), "also after a restart");
    let wanted = [(one, "a".to_owned()), (5, "c".to_owned())];
    let steps = stand.engine.reconcile("q", &wanted).unwrap();
    assert_eq!(steps.len(), 2);
    assert_eq!((stand.active(), stand.held()), (BTreeSet::from([1, 5]), vec![1, 5]));
    assert!(stand.engine.reconcile("q2", &wanted).unwrap().is_empty(), "there is nothing left to do");
    assert_eq!(stand.engine.activate("r2", count(2), "b").unwrap().gpus.to_string(), "6,8");
}

#[test]
fn what_was_active_before_is_nobodys_until_it_is_named() {
    let mut stand = stand(&B200);
    stand.sim.0.borrow_mut().active.extend([2, 6]);
    let look = stand.engine.settle().unwrap();
    assert_eq!(look.foreign(stand.engine.state()), [2, 6]);
    assert!(matches!(stand.engine.deactivate("d", 2, "a"), Err(Refused::Foreign { partition: 2 })));
    assert_eq!(stand.engine.activate("r", count(2), "a").unwrap().partition, 7, "their GPUs are not given");
    let steps = stand.engine.steps(&[(2, "t".into()), (7, "a".into())]).unwrap();
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert_eq!(stand.active(), BTreeSet::from([2, 6, 7]), "to ask changes nothing");
    stand.engine.reconcile("q", &[(2, "t".into()), (7, "a".into())]).unwrap();
    assert_eq!(stand.active(), BTreeSet::from([2, 7]));
    assert_eq!(stand.engine.state().holdings[&2].owner, "t");
    assert!(stand.engine.deactivate("e", 2, "t").unwrap());
}

#[test]
fn a_list_that_cannot_be_is_not_acted_on() {
    let gpu = |physical_id| Gpu {
        physical_id,
        uuid: String::new(),
        pci: String::new(),
        links: 0,
        most_links: 0,
        line_rate: 0,
    };
    let one = |id, is_active, gpus: &[u32]| Partition { id, is_active, gpus: gpus.iter().map(|id| gpu(*id)).collect() };
    for (listed, said) in [
        (vec![one(1, true, &[1, 2]), one(2, true, &[2])], "both have GPUs 2; restart it"),
        (vec![one(1, false, &[1, 1])], "in partition 1 a GPU is listed twice"),
        (vec![one(1, false, &[64])], "64 is no module id"),
        (vec![one(1, false, &[])], "partition 1 has no GPU"),
        (vec![one(1, false, &[1]), one(1, false, &[2])], "partition 1 is in the table twice"),
    ] {
        let error = Look::of(&listed).unwrap_err().to_string();
        assert!(error.contains(said), "{said} in {error}");
    }
}

/// A tenant's day, and what its callers were told when the journal was how long.
#[derive(Default)]
struct Told(Vec<(u64, BTreeMap<PartitionId, Holding>)>);

impl Told {
    fn note(&mut self, stand: &Stand) {
        self.0.push((stand.engine.journal_end(), stand.engine.state().holdings.clone()));
    }
}

/// What is done in the crash matrix; each step's answer is noted.
fn day(stand: &mut Stand) -> Told {
    let mut told = Told::default();
    told.note(stand);
    stand.engine.activate("r1", count(2), "a").unwrap();
    told.note(stand);
    stand.fault(-5, true, false);
    stand.engine.activate("r2", count(4), "b").unwrap();
    told.note(stand);
    stand.fault(-10, false, false);
    assert!(stand.engine.activate("r3", count(1), "c").is_err());
    told.note(stand);
    stand.engine.activate("r3", count(1), "c").unwrap();
    told.note(stand);
    assert!(stand.engine.deactivate("d1", 3, "a").unwrap());
    told.note(stand);
    stand.engine.quarantine(1, "Xid 79").unwrap();
    let wanted = [(2, "b".to_owned()), (9, "d".to_owned())];
    stand.engine.reconcile("q", &wanted).unwrap();
    told.note(stand);
    told
}

/// The daemon is killed at every byte that it writes, before and after every
/// change of the fabric: what comes up again agrees with the fabric, keeps
/// what anybody was told, and the same requests lead to the same end.
#[test]
fn a_daemon_that_is_killed_at_any_step_comes_back_to_what_is_true() {
    let mut whole = stand(&H100);
    let told = day(&mut whole);
    let path = whole.dir.path().join("journal");
    let bytes = fs::read(&path).unwrap();
    let effects = whole.sim.0.borrow().effects.clone();
    assert!(effects.len() >= 6, "{effects:?}");
    let mut crashes = 0;
    for cut in 0..=bytes.len() {
        let length = cut as u64;
        // Effects at this very length may have come or not.
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
            // Whoever was told that it has a partition runs on it, until it asks for its end.
            let known =
                told.0.iter().rev().find(|(at, _)| *at <= length).map(|(_, held)| held.clone()).unwrap_or_default();
            let mut engine = begun(&sim, &path);
            let ending = engine.state().under_way.as_ref().and_then(|begun| match begun.change {
                Change::Deactivate { partition } => Some(partition),
                Change::Activate { .. } => None,
            });
            let still =
                known.keys().copied().filter(|id| engine.state().holdings.contains_key(id) && ending != Some(*id));
            sim.0.borrow_mut().tenants = still.collect();
            let look = engine.settle().unwrap();
            let held: BTreeSet<PartitionId> = engine.state().holdings.keys().copied().collect();
            assert_eq!(held, look.active, "cut at {cut} after {count} effects");
            assert_eq!(engine.state().under_way, None);
            assert_eq!(engine.state().outage, None);
            assert_eq!(sim.0.borrow().violations, [] as [String; 0], "cut at {cut}");
            // Nobody who was told so has lost it, but by a request that was under way.
            let next = told.0.iter().find(|(at, _)| *at > length).map(|(_, held)| held);
            for (id, holding) in &known {
                let may_go = next.is_some_and(|next| next.get(id) != Some(holding));
                assert!(may_go || engine.state().holdings.get(id) == Some(holding), "cut at {cut}: {id}");
            }
            // It goes on from there to the same end.
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

    /// Whatever happens in whatever order: no GPU is in two partitions, nobody
    /// loses a partition that runs, and what is held is what is active.
    #[test]
    fn no_order_of_events_gives_a_gpu_twice(acts in acts(), which in 0_usize..3) {
        let mut stand = stand([&H100, &B200, &A100_16][which]);
        let mut requests = 0;
        for act in acts {
            match act {
                Act::Activate(size, who) => {
                    requests += 1;
                    let owner = format!("t{who}");
                    if let Ok(given) = stand.engine.activate(&format!("r{requests}"), count(size), &owner) {
                        prop_assert!(stand.active().contains(&given.partition));
                        stand.sim.0.borrow_mut().tenants.insert(given.partition);
                    }
                }
                Act::Deactivate(at) => {
                    requests += 1;
                    let held: Vec<_> = stand.engine.state().holdings.iter().map(|(id, one)| (*id, one.owner.clone())).collect();
                    let Some((id, owner)) = held.get(at % held.len().max(1)) else { continue };
                    // The tenant ends first.
                    stand.sim.0.borrow_mut().tenants.remove(id);
                    if stand.engine.deactivate(&format!("r{requests}"), *id, owner).is_ok() {
                        prop_assert!(!stand.active().contains(id));
                    }
                }
                Act::Quarantine(gpu) => drop(stand.engine.quarantine(gpu, "x")),
                Act::Release(gpu) => drop(stand.engine.release(gpu)),
                Act::Fault(code, done, gone) => stand.fault(code, done, gone),
                Act::Restart => stand = stand.restarted(),
                Act::FmResumes => {
                    stand.mode(Mode::Waits);
                    if stand.engine.settle().is_err() {
                        // Nothing was ever changed: nobody runs.
                        stand.mode(Mode::Ready);
                    }
                }
                Act::FmAnew => {
                    // All tenants end, as they have to; somebody says so.
                    stand.mode(Mode::Ready);
                    stand.sim.0.borrow_mut().tenants.clear();
                    stand.sim.0.borrow_mut().faults.clear();
                    stand.sim.0.borrow_mut().active.clear();
                    stand.engine.reconcile("q", &[]).unwrap();
                }
            }
            let violations = stand.sim.0.borrow().violations.clone();
            prop_assert!(violations.is_empty(), "{:?}", violations);
        }
        stand.mode(Mode::Ready);
        stand.sim.0.borrow_mut().faults.clear();
        let look = stand.engine.settle().unwrap();
        let held: BTreeSet<_> = stand.held().into_iter().collect();
        prop_assert_eq!(&held, &look.active);
        let tenants = stand.sim.0.borrow().tenants.clone();
        prop_assert!(tenants.is_subset(&held), "{:?} {:?}", tenants, held);
        let violations = stand.sim.0.borrow().violations.clone();
        prop_assert!(violations.is_empty(), "{:?}", violations);
    }
}
