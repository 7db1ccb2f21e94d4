use super::*;
use crate::engine::tests::{Shared, Stand, stand};
use firstlight_partitions::known::H100;
use firstlight_pci::Address;
use proptest::prelude::*;
use std::path::PathBuf;

/// Module ids in the order of PCI addresses, on a server with H100.
const MODULES: [(&str, u32); 8] = [
    ("0000:0f:00.0", 5),
    ("0000:10:00.0", 7),
    ("0000:41:00.0", 6),
    ("0000:44:00.0", 8),
    ("0000:86:00.0", 1),
    ("0000:87:00.0", 3),
    ("0000:b8:00.0", 2),
    ("0000:bb:00.0", 4),
];

fn pci(text: &str) -> Address {
    text.parse().unwrap()
}

fn claims(of: &[u32]) -> Vec<Claim> {
    let rows = MODULES.iter().filter(|(_, module)| of.contains(module));
    rows.map(|(place, module)| Claim { module: *module, pci: pci(place), uuid: None, serial: None }).collect()
}

const ALL: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

fn said(of: &[u32], evidence: Evidence) -> Said {
    Said { serial: "S1".to_owned(), claims: claims(of), evidence, replace: false }
}

fn nvml() -> Evidence {
    Evidence::Nvml { when: 0, what: "guest\n".to_owned() }
}

fn path(stand: &Stand) -> PathBuf {
    stand.dir.path().join("module-map.json")
}

fn with(stand: Stand, make: impl FnOnce(Modules) -> Modules) -> Stand {
    let modules = make(Modules::open(&path(&stand)));
    let Stand { dir, sim, engine } = stand;
    let engine = engine.with(modules);
    Stand { dir, sim, engine }
}

fn strict() -> Stand {
    with(stand(&H100), |modules| modules)
}

fn refusal(engine: &mut Engine<Shared>, request: &str, ask: Ask) -> String {
    let planned = engine.plan(ask.clone()).unwrap_err().to_string();
    let refused = engine.activate(request, ask, "t").unwrap_err().to_string();
    assert_eq!(planned, refused);
    refused
}

#[test]
fn several_gpus_are_given_by_a_verified_map_only() {
    let mut stand = strict();
    let engine = &mut stand.engine;
    let refused = refusal(engine, "r1", Ask::Count(2));
    assert_eq!(
        refused,
        "partition 3 of GPUs 1,3 is not given while which GPU is which is not verified: there is no module map; run fmctl \
         inventory nvml FILE --serial SERIAL with what an inventory guest has measured, or fmctl inventory probe --gpus PCI,.. \
         --serial SERIAL --check COMMAND; --unverified-map overrides that for one request"
    );
    assert!(refusal(engine, "r1", Ask::Partition(0)).contains("partition 0 of GPUs 1,2,3,4,5,6,7,8 is not given"));
    // The probe needs them.
    assert_eq!(engine.activate("r2", Ask::Count(1), "t").unwrap().partition, 7);
    assert!(engine.deactivate("r3", 7, "t").unwrap());
    let places = Ask::Pci(vec![pci("0000:86:00.0")]);
    assert!(refusal(engine, "r4", places.clone()).contains("the module map has no GPU at 0000:86:00.0; it has none"));
    let noted = engine.set_map("m1", said(&ALL, Evidence::Operator)).unwrap();
    assert_eq!((noted.changed.count(), noted.standing.is_verified()), (8, false));
    let refused = refusal(engine, "r5", Ask::Count(2));
    assert!(refused.contains("has only an operator's word for GPUs 1,2,3,4,5,6,7,8; run"), "{refused}");
    assert!(refused.contains("--serial S1 with"), "{refused}");
    assert!(refusal(engine, "r6", places.clone()).contains("partition 7 of GPUs 1 is not given"));
    // For who says so, and only once.
    let wish = Wish { ask: Ask::Pci(vec![pci("0000:86:00.0"), pci("0000:87:00.0")]), unverified_map: true };
    let given = engine.activate("r7", wish.clone(), "t").unwrap();
    assert_eq!((given.partition, given.gpus.to_string().as_str()), (3, "1,3"));
    assert!(engine.activate("r7", wish.ask.clone(), "t").unwrap().again, "the same request is answered the same");
    assert!(engine.activate("r8", Ask::Count(2), "u").is_err());
    // What was measured need not be all at once.
    assert!(!engine.set_map("m2", said(&[1, 2, 3, 4, 5, 6, 7], nvml())).unwrap().standing.is_verified());
    assert!(refusal(engine, "r9", Ask::Count(4)).contains("only an operator's word for GPUs 8; run"));
    let probe = Evidence::Probe { when: 0, partition: 14 };
    let noted = engine.set_map("m3", said(&[8], probe)).unwrap();
    assert!(noted.standing.is_verified(), "{noted:?}");
    assert_eq!(engine.activate("r10", Ask::Count(4), "u").unwrap().partition, 2);
    let map = Modules::open(&path(&stand)).known().map.clone().unwrap();
    let engine = &mut stand.engine;
    assert_eq!(engine.modules().known().map, Some(map.clone()), "as it is on the disk");
    assert!(matches!(&map.entries[&1].evidence, Evidence::Nvml { what, when } if what == "guest" && *when > 0));
    assert!(engine.forget_map("m4").unwrap() && engine.forget_map("m4").unwrap());
    assert!(!engine.forget_map("m5").unwrap());
    assert!(engine.activate("r11", Ask::Gpus(Gpus::of([2, 4]).unwrap()), "v").is_err());
    assert_eq!(stand.active().len(), 2, "who has GPUs keeps them");
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let mut stand = strict();
    let engine = &mut stand.engine;
    engine.set_map("m1", said(&ALL, nvml())).unwrap();
    let before = engine.modules().known().clone();
    let place = |module, place| Claim { module, pci: pci(place), uuid: None, serial: None };
    let of = |claims, evidence| Said { claims, ..said(&[], evidence) };
    let probe = |partition| Evidence::Probe { when: 0, partition };
    for (wrong, text) in [
        (of(vec![place(9, "0000:c0:00.0")], nvml()), "the fabric manager lists no module 9"),
        (of(claims(&[1, 2]), Evidence::Operator), "it says nothing of module 3,4,5,6,7,8"),
        (
            of(vec![place(1, "0000:87:00.0")], nvml()),
            "the map has module 1 at 0000:86:00.0 (nvml (guest)), not at 0000:87:00.0",
        ),
        (Said { serial: "S2".to_owned(), ..said(&ALL, nvml()) }, "the map is of baseboard S1, not of S2"),
        (of(claims(&[1]), probe(8)), "partition 8 has GPUs 2"),
        (of(claims(&[1, 3]), probe(3)), "a probe is of one GPU"),
        (of(claims(&[1]), probe(77)), "there is no partition 77"),
    ] {
        let error = engine.set_map("m2", wrong).unwrap_err().to_string();
        assert!(error.contains(text), "{text} in {error}");
        assert_eq!(*engine.modules().known(), before);
    }
    let error = engine.set_map("m1", said(&[1], nvml())).unwrap_err().to_string();
    assert!(error.contains("request m1 was used before, to set 8 GPUs of S1 by nvml"), "{error}");
    assert!(engine.set_map("m1", said(&ALL, nvml())).unwrap().again);
    // One that is dead needs no place.
    engine.forget_map("f").unwrap();
    engine.quarantine(8, "dead").unwrap();
    assert!(engine.set_map("m3", said(&ALL[..7], nvml())).unwrap().standing.is_verified());
    assert_eq!(engine.activate("r1", Ask::Count(4), "t").unwrap().partition, 1);
    assert!(engine.release(8).unwrap());
    assert!(engine.activate("r2", Ask::Count(2), "t").unwrap_err().to_string().contains("says nothing of GPUs 8"));
}

#[test]
fn a_map_of_another_baseboard_or_none_that_can_be_read_counts_as_none() {
    let mut stand = strict();
    stand.engine.set_map("m1", said(&ALL, nvml())).unwrap();
    stand.engine.plan(Ask::Count(8)).unwrap();
    let mut stand = with(stand, |modules| modules.on(Some("S2".to_owned())));
    let refused = refusal(&mut stand.engine, "r1", Ask::Count(8));
    assert!(
        refused.contains("is of baseboard S1, and this is S2; run fmctl inventory nvml FILE --serial S2 --replace"),
        "{refused}"
    );
    let error = stand.engine.set_map("m2", said(&ALL, nvml())).unwrap_err().to_string();
    assert!(error.contains("said of baseboard S1, and the daemon runs on S2"), "{error}");
    let other = Said { serial: "S2".to_owned(), replace: true, ..said(&ALL, nvml()) };
    let noted = stand.engine.set_map("m3", other).unwrap();
    assert!(noted.standing.is_verified() && noted.replaced == ["the map is of baseboard S1, not of S2"], "{noted:?}");
    std::fs::write(path(&stand), "{").unwrap();
    let mut stand = with(stand, |modules| modules);
    let refused = refusal(&mut stand.engine, "r2", Ask::Count(8));
    assert!(refused.contains("module-map.json is not readable as a module map: at byte 1"), "{refused}");
    let mut stand = with(stand, |modules| modules.allowing(true));
    assert_eq!(stand.engine.plan(Ask::Count(8)).unwrap().partition.id, 0, "who says so has it");
}

#[derive(Debug, Clone)]
enum Act {
    Measure(Vec<u32>),
    Tell,
    Forget,
    Ask(u32),
    Bar(u32),
    Release(u32),
    Restart,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => prop::collection::vec(1_u32..9, 1..9).prop_map(Act::Measure),
        1 => Just(Act::Tell),
        1 => Just(Act::Forget),
        4 => prop::sample::select(vec![1_u32, 2, 4, 8]).prop_map(Act::Ask),
        1 => (1_u32..9).prop_map(Act::Bar),
        1 => (1_u32..9).prop_map(Act::Release),
        1 => Just(Act::Restart),
    ];
    prop::collection::vec(act, 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever happens in whatever order: nobody gets several GPUs while one that
    /// could be given was not measured.
    #[test]
    fn no_order_of_events_gives_several_gpus_by_a_map_that_is_not_verified(acts in acts()) {
        let mut stand = strict();
        let (mut measured, mut barred) = (Gpus::NONE, Gpus::NONE);
        for (at, act) in acts.into_iter().enumerate() {
            let request = format!("r{at}");
            match act {
                Act::Measure(of) => {
                    stand.engine.set_map(&request, said(&of, nvml())).unwrap();
                    measured = measured.with(Gpus::of(of).unwrap());
                }
                Act::Tell => drop(stand.engine.set_map(&request, said(&ALL, Evidence::Operator)).unwrap()),
                Act::Forget => {
                    stand.engine.forget_map(&request).unwrap();
                    measured = Gpus::NONE;
                }
                Act::Bar(gpu) => {
                    stand.engine.quarantine(gpu, "x").unwrap();
                    barred = barred.with(Gpus::one(gpu).unwrap());
                }
                Act::Release(gpu) => {
                    stand.engine.release(gpu).unwrap();
                    barred = barred.without(Gpus::one(gpu).unwrap());
                }
                Act::Restart => stand = with(stand, |modules| modules),
                Act::Ask(size) => {
                    let planned = stand.engine.plan(Ask::Count(size));
                    let is_verified = measured.with(barred).has(Gpus::of(ALL).unwrap());
                    match planned {
                        Ok(choice) => prop_assert!(choice.partition.gpus.count() == 1 || is_verified),
                        Err(Refused::Unverified { .. }) => prop_assert!(!is_verified && size > 1),
                        Err(_) => prop_assert!(!barred.is_empty()),
                    }
                }
            }
        }
    }
}
